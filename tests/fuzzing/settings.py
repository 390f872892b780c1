"""Strategies for commands, flags, settings files and rows to forget."""

from dataclasses import fields

import yaml
from hypothesis import strategies as st
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from fuzzing.inputs import CONTENT, NUMBERS, TEXT, VALUES, Input, words
from fuzzing.world import EASY, IMAGES, TEXTS
from hamu.core.methods import method_classes
from hamu.core.objectives import OBJECTIVES
from hamu.unlearning.jobs import options
from hamu.unlearning.trainer import UnlearnConfig

COMMANDS = st.sampled_from(["train", "unlearn", "assess", "evaluate"])
_SETS = "a.npz b.jsonl t.jsonl digits miniature"
_MODELS = "image text adapter"
_WHEN = "no steps epoch best"
_CHOICES = {
    "optim": " ".join(str(name.value) for name in OptimizerNames),
    "lr_scheduler_type": " ".join(str(name.value) for name in SchedulerType),
    "method": " ".join(method_classes()),
    "constraint_mode": "absolute relative",
    "distribution": "norm_product uniform",
    "on_infeasible": "stop clamp skip",
    "stopping": "aggregate any global off",
    "pairing": "sequential split",
    "blocks": "tensor module model",
    "shuffle": "epoch once",
    "forget_objective": " ".join(OBJECTIVES),
    "goal": "unseen retrained erased loss",
    "task": "image text",
    "loss_on": "answer all",
    "model_dtype": "float32 bfloat16 float16 auto",
    "metric_for_best_model": "joint_gain loss forget_loss",
    "lora_targets": "q_proj q_proj,v_proj q_proj,embed_tokens lm_head all-linear",
    "answer_column": "answer question",
    "lr_scheduler_kwargs": '{"num_cycles":2}',
}
_CHOICES |= dict.fromkeys(["eval_strategy", "save_strategy", "logging_strategy"], _WHEN)
_CHOICES |= dict.fromkeys(["forget_data", "test_data", "forget_perturbed", "world_facts"], _SETS)
_CHOICES |= dict.fromkeys(["model", "retain_model", "original_model", "base_model"], _MODELS)
_TYPES = (options.DataOptions, options.RunOptions, options.AssessOptions, options.EvaluateOptions)
_OPTIONS = {
    field.name: str(field.type)
    for cls in (*_TYPES, UnlearnConfig)
    for field in fields(cls)
    if field.init
    and not field.name.startswith("torch_compile")  # may take longer than the clock allows
    and field.name not in ("output_dir", "max_steps")  # which every command gets
}
_KEYS = st.sampled_from(sorted(_OPTIONS))
_ODD_OUTS = words("deep/er/out . a.npz image image/x ../beside ünï /dev/null/x t.jsonl/x done")
_OUTS = st.one_of(*[st.just("out")] * 3, st.sampled_from(["", "out\n2", "x" * 300]), _ODD_OUTS)
# end otherwise, or take long
_HELP = ("-h", "--help", "--help-all", "--debug", "--version", "demo")


def command(argv, out="out"):
    """A command that is over soon, with its output folder; its steps can be taken."""
    easy = EASY if argv[0] in ("unlearn", "assess") else []
    soon = ["--max_steps", "1"] if argv[0] in ("train", "unlearn", "assess") else []
    return (*argv, *easy, *soon, "--output_dir", out)


def _value_of(key):
    """Values for an option, more often right than wrong."""
    if key == "dataloader_num_workers":
        return words("-1 0 1")  # a machine would soon be full of processes
    kind = _OPTIONS[key]
    if key in _CHOICES:
        right = words(_CHOICES[key])
    elif "bool" in kind:
        right = words("true false")
    elif "int" in kind or "float" in kind:
        right = words("1 2 3 0" if "int" in kind else "1 2 3 0 0.5 0.1")
    else:
        right = TEXT
    return st.one_of(right, right, right, NUMBERS, TEXT)


@st.composite
def with_flags(draw):
    """Flags of every kind, known and unknown, with and without values, once and twice."""
    name = draw(COMMANDS)
    argv = draw(st.sampled_from([IMAGES, TEXTS])) if draw(st.integers(0, 5)) else []
    most = draw(st.sampled_from([1, 1, 2, 3, 8]))
    for key in draw(st.lists(_KEYS, max_size=most)):
        value, flag = draw(_value_of(key)), f"--{key}"
        others = [[f"{flag}={value}"], [flag], [f"--no_{key}"], [flag.replace("_", "-"), value]]
        argv = [*argv, *draw(st.sampled_from([[flag, value]] * 4 + others))]
    if not draw(st.integers(0, 5)):
        argv = [*argv, draw(TEXT)]
    out = draw(_OUTS)
    return Input("flags", command([name, *(w for w in argv if w not in _HELP)], out), out=out)


@st.composite
def with_config(draw):
    """A YAML file of any content, beside flags that are all right."""
    name = draw(COMMANDS)
    content = draw(CONTENT)
    if draw(st.integers(0, 3)):
        keys = st.one_of(_KEYS, _KEYS, _KEYS, TEXT, COMMANDS)
        wanted = draw(st.dictionaries(keys, VALUES, max_size=draw(st.sampled_from([1, 2, 6]))))
        wanted.pop("dataloader_num_workers", None)
        text = yaml.safe_dump(
            {name: wanted, "seed": 1} if draw(st.booleans()) else wanted,
            allow_unicode=draw(st.booleans()),
        )
        content = text.encode("utf-8", "surrogatepass")
    argv = [name, "--config", "run.yaml", *draw(st.sampled_from([IMAGES, TEXTS]))]
    return Input("config", command(argv), (("run.yaml", content),))


@st.composite
def with_rows(draw):
    """Choices of what to forget: lists, files and filters of any content."""
    valid = draw(st.sampled_from([IMAGES, TEXTS]))
    lines = st.lists(st.one_of(st.integers(-1, 12), TEXT, NUMBERS), max_size=4)
    listed = lines.map(lambda some: "\n".join(map(str, some)).encode())
    known = st.sampled_from([b"0\n1", b"[0, 1]", b"\xff", b"1" * 5000, "٣".encode()])
    rows = st.one_of(TEXT, st.lists(NUMBERS, max_size=4).map(",".join))
    filters = st.one_of(TEXT, TEXT.map("question~{}".format), TEXT.map("{}=1".format))
    ways = st.one_of(
        st.just(["--forget_rows", "rows.txt"]),
        rows.map(lambda rows: ["--forget_rows", rows]),
        filters.map(lambda text: ["--forget_filter", text]),
        st.tuples(TEXT, NUMBERS).map(lambda two: ["--forget_class", two[0], "--rho", two[1]]),
        st.just(["--forget_rows", "0", "--forget_data", "b.jsonl"]),
    )
    argv = command([draw(COMMANDS), *valid[:4], *draw(ways), "--max_length", "32"])
    return Input("rows", argv, (("rows.txt", draw(st.one_of(CONTENT, listed, known))),))


@st.composite
def with_words(draw):
    """Words of any kind in place of a command, and after one that takes none."""
    argv = [word for word in draw(st.lists(TEXT, min_size=1, max_size=3)) if word not in _HELP]
    return Input("words", ("methods", *argv) if draw(st.booleans()) or not argv else tuple(argv))
