"""Strategies for models, checkpoints and records: files missing, broken, exchanged, with other settings or shapes."""

import json
from pathlib import Path

from hypothesis import strategies as st

from fuzzing.inputs import GONE, POISON, Changed, Input, Link, Sealed
from fuzzing.settings import COMMANDS, command, easy
from fuzzing.values import CONTENT, DAMAGE, VALUES
from fuzzing.world import IMAGES, TEXTS

_MODEL, _TOKENIZER = (
    ("config.json", "model.safetensors"),
    ("tokenizer.json", "tokenizer_config.json"),
)
_FILES = {
    "image": _MODEL,
    "text": (*_MODEL, *_TOKENIZER, "generation_config.json"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors", *_TOKENIZER),
}
_PICKLES = {
    "model.safetensors": "pytorch_model.bin",
    "adapter_model.safetensors": "adapter_model.bin",
}
_KEYS = (
    "model_type", "architectures", "num_labels", "id2label", "hidden_size", "num_hidden_layers", "vocab_size", "depth",
    "num_channels", "width", "image_mean", "image_std", "auto_map", "dtype", "torch_dtype", "quantization_config",
    "attn_implementation", "max_position_embeddings", "num_attention_heads", "rope_parameters", "rope_theta",
    "tie_word_embeddings", "pad_token_id", "eos_token_id", "peft_type", "task_type", "r", "lora_alpha", "head_dim",
    "target_modules", "base_model_name_or_path", "modules_to_save", "tokenizer_class", "model_max_length", "pad_token",
    "eos_token", "chat_template", "use_cache", "hidden_act", "layer_types", "sliding_window", "max_length", "do_sample",
    "temperature", "num_beams", "initializer_range", "rms_norm_eps",
)  # fmt: skip
_JSON = st.one_of(
    VALUES.map(lambda value: json.loads(json.dumps(value, default=str))),
    st.sampled_from([
        "llama", "small_resnet", "bert", "vit", "no-such", "LORA", "IA3", "LlamaTokenizer", "PreTrainedTokenizerFast",
        "gptq", "bitsandbytes", "kernels-community/flash-attn", "float16", "text", "image", "..", {"0": "[/]"},
        {"AutoModelForCausalLM": "x--y.Z"}, {"AutoConfig": "code.Config"}, {"quant_method": "bitsandbytes"},
    ]),
)  # fmt: skip
_TENSOR = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "F16", "I64", "BOOL", "X"]),
    "shape": st.lists(st.sampled_from([0, 1, 2, 3, 9, 2**40, -1]), max_size=4),
    "data_offsets": st.sampled_from([[0, 4], [0, 0], [4, 0], [0, 72], [0, 2**40]]),
})  # fmt: skip
_TENSORS = st.sampled_from(
    ["conv.weight", "classifier.weight", "lm_head.weight", "model.embed_tokens.weight", "[/]"]
)


def _changed(keys):
    values = st.dictionaries(st.sampled_from(keys), _JSON, min_size=1, max_size=3)
    return values.map(lambda found: Changed(tuple(found.items())))


@st.composite
def _weights(draw):
    """Safetensors of any head."""
    head = json.dumps(draw(st.dictionaries(_TENSORS, _TENSOR, max_size=3))).encode()
    size = draw(st.sampled_from([len(head), len(head), 2**40, 0]))
    return size.to_bytes(8, "little") + head + bytes(draw(st.sampled_from([0, 4, 72])))


@st.composite
def _spoiled(draw, folder, name, keys):
    """What becomes of one file."""
    place = f"{folder}/{name}"
    ways = ["gone", "damage", "other", "folder", "link", "poison"]
    ways += {".json": ["keys"] * 4, ".safetensors": ["weights"] * 2}.get(Path(name).suffix, [])
    how = draw(st.sampled_from(ways))
    if how == "folder":
        return [(place, GONE), (f"{place}/x", b"")]
    if how == "poison":
        return [(place, GONE), (f"{folder}/{_PICKLES.get(name, name)}", POISON)]
    links = st.sampled_from(["nowhere", name, "../a.npz"]).map(Link)
    contents = {"gone": st.just(GONE), "damage": DAMAGE, "other": CONTENT, "link": links}
    contents |= {"keys": _changed(keys), "weights": _weights()}
    return [(place, draw(contents[how]))]


@st.composite
def with_model(draw):
    """Models in every role."""
    kind, name = draw(st.sampled_from(list(_FILES))), draw(st.sampled_from(COMMANDS))
    many = draw(st.sampled_from([1, 1, 2]))
    files = draw(st.lists(st.sampled_from(_FILES[kind]), min_size=1, max_size=many, unique=True))
    changes = [change for file in files for change in draw(_spoiled(kind, file, _KEYS))]
    roles = ["model", "model", "retain_model", "base_model", "tokenizer"]
    role = draw(st.sampled_from([*roles, "original_model"] if name == "evaluate" else roles))
    words = [*(IMAGES if kind == "image" else TEXTS), f"--{role}", kind]
    return Input("model", command([name, *words, *easy(name)]), tuple(changes))


_CHECKPOINT = (
    "manifest.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "start.pt", "config.json",
)  # fmt: skip
_STATE = (
    "global_step", "epoch", "max_steps", "log_history", "stateful_callbacks", "best_metric", "best_model_checkpoint",
    "train_batch_size", "num_train_epochs", "no_such", "model.safetensors", "../../a.npz",
)  # fmt: skip
_LINES = st.sampled_from([b"3\n", b"{}\n", b'{"step": "x"}\n', b"[]\n", b'{"step": 1}\n'])
_MORE = st.sampled_from(
    [[], [], [], ["--seed", "3"], ["--save_steps", "x"], ["--per_device_train_batch_size", "3"]]
)


@st.composite
def with_checkpoint(draw):
    """An interrupted run whose settings, log or checkpoint are not what they were, sealed again or not."""
    run = draw(st.sampled_from(["run", "run", "run-text"]))
    folder = f"{run}/checkpoint-1"
    if draw(st.integers(0, 3)):
        name = draw(st.sampled_from(_CHECKPOINT))
        changes = draw(_spoiled(folder, name, _STATE))
        if name not in ("manifest.json", "trainer_state.json") and draw(st.integers(0, 2)):
            changes.append((folder, Sealed()))
    else:
        name = draw(st.sampled_from(["config.yaml", "inputs.json", "steps.jsonl"]))
        changes = [(f"{run}/{name}", draw(st.one_of(CONTENT, DAMAGE, st.just(GONE), _LINES)))]
    argv = ("unlearn", "--resume", *draw(_MORE), "--output_dir", run)
    return Input("checkpoint", argv, tuple(changes), run)


_RECORD = (
    "steps", "figures", "models", "files", "hardness", "before", "after", "promise", "settings", "seed", "ended",
)  # fmt: skip
_RUN = (
    "record.json", "record.json", "config.yaml", "inputs.json", "steps.jsonl", "evaluation.json", "evaluation.json",
    "record.md", "model/model.safetensors", "model/config.json",
)  # fmt: skip
_ASKED = st.sampled_from([["--no_models"], ["--no_models"], [], ["--hub", "hub:a/b"], ["--magic"]])


@st.composite
def with_record(draw):
    """A finished run of which something was changed, to be verified."""
    run = draw(st.sampled_from(["done", "done-text"]))
    folder, _, name = f"{run}/{draw(st.sampled_from(_RUN))}".rpartition("/")
    where = draw(st.sampled_from([*[run] * 8, "nowhere", "", "a.npz", "[/]"]))
    changes = tuple(draw(_spoiled(folder, name, _RECORD)))
    return Input("record", ("verify", where, *draw(_ASKED)), changes)
