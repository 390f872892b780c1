"""Strategies for commands, flags, settings files and rows to forget."""

from dataclasses import fields

import yaml
from hypothesis import strategies as st
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from fuzzing.inputs import Input
from fuzzing.values import CONTENT, NUMBERS, TEXT, VALUES
from fuzzing.world import EASY, IMAGES, TEXTS
from hamu.core.methods import method_classes
from hamu.unlearning.jobs import options
from hamu.unlearning.trainer import UnlearnConfig

COMMANDS = ("train", "unlearn", "assess", "evaluate")
_SETS = ("a.npz", "b.jsonl", "t.jsonl", "digits", "miniature")
_MODELS = ("image", "text", "adapter")
_WHEN = ("no", "steps", "epoch", "best")
_CHOICES = {
    "optim": [str(name.value) for name in OptimizerNames],
    "lr_scheduler_type": [str(name.value) for name in SchedulerType],
    "method": list(method_classes()), "eval_strategy": _WHEN, "save_strategy": _WHEN, "logging_strategy": _WHEN,
    "forget_data": _SETS, "test_data": _SETS, "model": _MODELS, "retain_model": _MODELS, "original_model": _MODELS,
    "base_model": _MODELS, "tokenizer": _MODELS, "forget_perturbed": _SETS, "real_authors": _SETS, "world_facts": _SETS,
    "constraint_mode": ["absolute", "relative"], "distribution": ["norm_product", "uniform"],
    "on_infeasible": ["stop", "clamp", "skip"], "stopping": ["aggregate", "any", "global", "off"],
    "pairing": ["sequential", "split"], "correct_steps": [False, True], "blocks": ["tensor", "module", "model"],
    "shuffle": ["epoch", "once"], "forget_objective": ["cross_entropy", "kl_to_original", "npo", "simnpo", "bounded"],
    "goal": ["unseen", "retrained", "erased", "loss"],
    "task": ["image", "text"], "loss_on": ["answer", "all"], "model_dtype": ["float32", "bfloat16", "float16", "auto"],
    "metric_for_best_model": ["joint_gain", "loss", "forget_loss"],
    "lora_targets": ["q_proj", "q_proj,v_proj", "q_proj,embed_tokens", "lm_head", "all-linear"],
    "prompt_column": ["question"], "answer_column": ["answer", "question"], "optim_args": ["betas=(0.9,0.9)", "eps=1"],
    "gradient_checkpointing_kwargs": ['{"use_reentrant": false}'], "lr_scheduler_kwargs": ['{"num_cycles": 2}'],
}  # fmt: skip
_TYPES = (options.DataOptions, options.RunOptions, options.AssessOptions, options.EvaluateOptions,
          UnlearnConfig, options.ResumeOptions)  # fmt: skip
_OPTIONS = {f.name: str(f.type) for cls in _TYPES for f in fields(cls) if f.init}
for _name in [name for name in _OPTIONS if name.startswith("torch_compile")]:
    del _OPTIONS[_name]  # compiling may take longer than the clock allows
for _name in ("output_dir", "max_steps"):  # which every command gets
    del _OPTIONS[_name]
_KEYS = sorted(_OPTIONS)
_OUTS = [
    *["out"] * 20, "deep/er/out", "", ".", "a.npz", "image", "image/x", "../beside", "ünï", "out\n2", "/dev/null/x",
    "t.jsonl/x", "done", "x" * 300,
]  # fmt: skip
_HELP = (
    "-h",
    "--help",
    "--help-all",
    "--debug",
    "--version",
    "demo",
)  # end otherwise, or take long


def command(argv, out="out"):
    """A command that is over soon, with its output folder."""
    soon = ["--max_steps", "1"] if argv[0] in ("train", "unlearn", "assess") else []
    return (*argv, *soon, "--output_dir", out)


def easy(name):
    """What makes a step of any gradients."""
    return EASY if name in ("unlearn", "assess") else []


def _value_of(key):
    """Values for an option, more often right than wrong."""
    if key == "dataloader_num_workers":
        return st.sampled_from(["-1", "0", "1"])  # a machine would soon be full of processes
    kind = _OPTIONS[key]
    if key in _CHOICES:
        right = st.sampled_from(_CHOICES[key])
    elif "bool" in kind:
        right = st.sampled_from(["true", "false"])
    elif "int" in kind or "float" in kind:
        right = st.sampled_from(["1", "2", "3", "0", *([] if "int" in kind else ["0.5", "0.1"])])
    else:
        right = TEXT
    return st.one_of(right, right, right, NUMBERS, TEXT)


@st.composite
def with_flags(draw):
    """Flags of every kind, known and unknown, with and without values, once and twice."""
    name = draw(st.sampled_from(COMMANDS))
    words = []
    if draw(st.integers(0, 5)):
        words = [*draw(st.sampled_from([IMAGES, TEXTS])), *easy(name)]
    most = draw(st.sampled_from([1, 1, 2, 3, 8]))
    for key in draw(st.lists(st.sampled_from(_KEYS), max_size=most)):
        value, flag = draw(_value_of(key)), f"--{key}"
        others = [[f"{flag}={value}"], [flag], [f"--no_{key}"], [flag.replace("_", "-"), value]]
        words += draw(st.sampled_from([[flag, value]] * 4 + others))
    if not draw(st.integers(0, 5)):
        words.insert(draw(st.integers(0, len(words))), draw(TEXT))
    out = draw(st.sampled_from(_OUTS))
    words = [word for word in words if word not in _HELP]
    return Input("flags", command([name, *words], out), out=out)


@st.composite
def with_config(draw):
    """A YAML file of any content, beside flags that are all right."""
    name = draw(st.sampled_from(COMMANDS))
    content = draw(CONTENT)
    if draw(st.integers(0, 3)):
        known = st.sampled_from(_KEYS)
        keys = st.one_of(known, known, known, TEXT, st.sampled_from(COMMANDS))
        wanted = draw(st.dictionaries(keys, VALUES, max_size=draw(st.sampled_from([1, 2, 6]))))
        wanted = {key: value for key, value in wanted.items() if key != "dataloader_num_workers"}
        if draw(st.booleans()):
            wanted = {name: wanted, "seed": 1}
        text = yaml.safe_dump(wanted, allow_unicode=draw(st.booleans()))
        content = text.encode("utf-8", "surrogatepass")
    valid = draw(st.sampled_from([IMAGES, TEXTS]))
    argv = command([name, "--config", "run.yaml", *valid, *easy(name)])
    return Input("config", argv, (("run.yaml", content),))


@st.composite
def with_rows(draw):
    """What to forget: lists, files and filters of any content."""
    name = draw(st.sampled_from(COMMANDS))
    valid = draw(st.sampled_from([IMAGES, TEXTS]))
    lines = st.lists(st.one_of(st.integers(-1, 12), TEXT, NUMBERS), max_size=4)
    listed = lines.map(lambda some: "\n".join(map(str, some)).encode())
    known = st.sampled_from([b"0\n1", b"[0, 1]", b"\xff", b"1" * 5000, "٣".encode()])
    content = draw(st.one_of(CONTENT, listed, known))
    row_list = st.one_of(TEXT, st.lists(NUMBERS, max_size=4).map(",".join))
    filters = st.one_of(TEXT, TEXT.map("question~{}".format), TEXT.map("{}=1".format))
    words = draw(
        st.one_of(
            st.just(["--forget_rows", "rows.txt"]),
            row_list.map(lambda rows: ["--forget_rows", rows]),
            filters.map(lambda text: ["--forget_filter", text]),
            st.tuples(TEXT, NUMBERS).map(lambda two: ["--forget_class", two[0], "--rho", two[1]]),
            st.just(["--forget_rows", "0", "--forget_data", "b.jsonl"]),
        )
    )
    argv = command([name, *valid[:4], *words, *easy(name), "--max_length", "32"])
    return Input("rows", argv, (("rows.txt", content),))


@st.composite
def with_words(draw):
    """Words of any kind in place of a command, and after one that takes none."""
    words = [word for word in draw(st.lists(TEXT, min_size=1, max_size=3)) if word not in _HELP]
    return Input("words", ("methods", *words) if draw(st.booleans()) or not words else tuple(words))
