"""Strategies for models, checkpoints and records: files missing, broken, exchanged or changed."""

import json
from functools import partial

from hypothesis import strategies as st

from fuzzing.inputs import (
    CONTENT,
    DAMAGE,
    POISON,
    VALUES,
    Input,
    change_keys,
    damage,
    link,
    remove,
    seal_again,
    words,
)
from fuzzing.settings import COMMANDS, command
from fuzzing.world import IMAGES, TEXTS

_TOKENIZER = "tokenizer.json tokenizer_config.json"
_FILES = {
    "image": "config.json model.safetensors",
    "text": f"config.json model.safetensors {_TOKENIZER} generation_config.json",
    "adapter": f"adapter_config.json adapter_model.safetensors {_TOKENIZER}",
}
_PICKLES = {
    "model.safetensors": "pytorch_model.bin",
    "adapter_model.safetensors": "adapter_model.bin",
}
_KEYS = words(
    "model_type architectures num_labels id2label hidden_size num_hidden_layers vocab_size depth "
    "num_channels width image_mean image_std auto_map dtype torch_dtype quantization_config "
    "attn_implementation max_position_embeddings num_attention_heads rope_parameters rope_theta "
    "tie_word_embeddings pad_token_id eos_token_id peft_type task_type r lora_alpha head_dim "
    "target_modules base_model_name_or_path modules_to_save tokenizer_class model_max_length "
    "pad_token eos_token chat_template use_cache hidden_act layer_types sliding_window max_length "
    "do_sample temperature num_beams initializer_range rms_norm_eps"
)
_JSON = st.one_of(
    VALUES.map(lambda value: json.loads(json.dumps(value, default=str))),
    words(
        "llama small_resnet bert vit no-such LORA IA3 LlamaTokenizer PreTrainedTokenizerFast gptq "
        "bitsandbytes kernels-community/flash-attn float16 text image .."
    ),
    st.dictionaries(words("AutoModelForCausalLM quant_method 0"), words("x--y.Z bitsandbytes [/]")),
)


@st.composite
def _spoiled(draw, folder, name, keys):
    """Changes of one file."""
    place = f"{folder}/{name}"
    ways = ["gone", "damage", "other", "folder", "link", "poison"]
    how = draw(st.sampled_from(ways + ["keys"] * 4 * name.endswith(".json")))
    if how == "folder":
        return [(place, remove), (f"{place}/x", b"")]
    if how == "poison":
        return [(place, remove), (f"{folder}/{_PICKLES.get(name, name)}", POISON)]
    changed = st.dictionaries(keys, _JSON, min_size=1, max_size=3)
    contents = {
        "gone": st.just(remove),
        "damage": DAMAGE.map(lambda how: partial(damage, **how)),
        "other": CONTENT,
        "link": words(f"nowhere {name} ../a.npz").map(lambda to: partial(link, to=to)),
        "keys": changed.map(lambda values: partial(change_keys, values=values)),
    }
    return [(place, draw(contents[how]))]


@st.composite
def with_model(draw):
    """Models in every role."""
    kind, name = draw(words("image text adapter")), draw(COMMANDS)
    many = draw(st.sampled_from([1, 1, 2]))
    files = draw(st.lists(words(_FILES[kind]), min_size=1, max_size=many, unique=True))
    changes = [change for file in files for change in draw(_spoiled(kind, file, _KEYS))]
    last = "original_model" if name == "evaluate" else "model"
    role = draw(words(f"model model retain_model base_model tokenizer {last}"))
    argv = [name, *(IMAGES if kind == "image" else TEXTS), f"--{role}", kind]
    return Input("model", command(argv), tuple(changes))


_CHECKPOINT = words(
    "manifest.json model.safetensors optimizer.pt scheduler.pt rng_state.pth trainer_state.json "
    "run.pt config.json"
)
_STATE = words(
    "global_step epoch max_steps log_history stateful_callbacks best_metric best_model_checkpoint "
    "train_batch_size num_train_epochs no_such model.safetensors ../../a.npz"
)
_LINES = st.sampled_from([b"3\n", b"{}\n", b'{"step": "x"}\n', b"[]\n", b'{"step": 1}\n'])
_MORE = st.sampled_from([[], [], [], ["--seed", "3"], ["--per_device_train_batch_size", "3"]])


@st.composite
def with_checkpoint(draw):
    """An interrupted run whose settings, log or checkpoint were changed, sealed again or not."""
    run = draw(words("run run run-text"))
    folder = f"{run}/checkpoint-1"
    if draw(st.integers(0, 3)):
        name = draw(_CHECKPOINT)
        changes = draw(_spoiled(folder, name, _STATE))
        if name not in ("manifest.json", "trainer_state.json") and draw(st.integers(0, 2)):
            changes.append((folder, seal_again))
    else:
        name = draw(words("config.yaml inputs.json steps.jsonl"))
        lines = _LINES.map(lambda line: [(f"{run}/{name}", line)])
        changes = draw(st.one_of(_spoiled(run, name, _STATE), lines))
    argv = ("unlearn", "--resume", *draw(_MORE), "--output_dir", run)
    return Input("checkpoint", argv, tuple(changes), run)


_RECORD = words("steps figures models files hardness before after promise settings seed ended")
_RUN = words(
    "record.json record.json config.yaml inputs.json steps.jsonl evaluation.json record.md "
    "model/model.safetensors model/config.json"
)
_ASKED = st.sampled_from([["--no_models"], ["--no_models"], [], ["--hub", "hub:a/b"], ["--magic"]])


@st.composite
def with_record(draw):
    """A finished run of which something was changed, to be verified."""
    run = draw(words("done done-text"))
    folder, _, name = f"{run}/{draw(_RUN)}".rpartition("/")
    where = draw(st.sampled_from([*[run] * 8, "nowhere", "", "a.npz", "[/]"]))
    changes = tuple(draw(_spoiled(folder, name, _RECORD)))
    return Input("record", ("verify", where, *draw(_ASKED)), changes)
