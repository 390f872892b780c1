"""Language models and adapters: what is loaded, saved and merged, and what is refused."""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from peft import AdaptionPromptConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hamu import HamuError
from hamu.data import encode, read_text
from hamu.models.language import (
    AdapterSettings,
    check_reads,
    default_dtype,
    load_language_model,
    load_tokenizer,
    longest_text,
    new_tokenizer,
    with_adapter,
)
from hamu.models.storage import _names_of_adapter, load_tensors, merged, save_model
from hamu.unlearning.jobs.plan import activations, frozen_bytes, meta_model

WEIGHTS = "adapter_model.safetensors"
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
OF_GPT = {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2}
OF_GPT |= {"bos_token_id": 0, "eos_token_id": 0}
IDS = torch.arange(40, 60)[None]


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer((record.prompt for record in read_text("miniature").records[:3]), 300)


@pytest.fixture(scope="module")
def data(tokenizer):
    return encode(read_text("miniature").select(range(3)), tokenizer)


def llama(**settings):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings))


def of_kind(kind):
    """A Llama, or a GPT-2, whose layers are Conv1D."""
    is_gpt = kind == "gpt"
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**OF_GPT)) if is_gpt else llama()


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with a small model, `base`, and an adapter of it, `adapter`."""
    monkeypatch.chdir(tmp_path)
    model = llama()
    model.save_pretrained("base")
    adapted = with_adapter(model, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = "base"
    Path("adapter").mkdir()
    save_model(adapted, Path("adapter"))


def test_a_model_with_experts_has_an_adapter_by_default():
    settings = SIZES | {"num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    adapted = with_adapter(model, AdapterSettings(rank=2))
    ids = torch.arange(8)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    moved = [name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()]
    assert all(any(part in name for name in moved) for part in ("q_proj", "o_proj", "experts"))
    assert all("lora_B" in name for name in moved)


def test_layers_that_an_adapter_does_not_reach_are_warned_of(caplog):
    experts = SIZES | {"num_key_value_heads": 2, "num_experts": 2, "moe_intermediate_size": 32}
    qwen = transformers.Qwen2MoeConfig(**experts, shared_expert_intermediate_size=16)
    mamba = transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1)
    for config, bare in ((qwen, "model.layers.*.mlp.experts.gate_up_proj"), (mamba, "out_proj")):
        with_adapter(transformers.AutoModelForCausalLM.from_config(config), AdapterSettings())
        assert "the adapter does not reach " in caplog.messages[-1]
        assert bare in caplog.messages[-1]
    with pytest.raises(HamuError, match="'out_proj' is incompatible with Mamba"):
        with_adapter(transformers.MambaForCausalLM(mamba), AdapterSettings(targets="out_proj"))
    caplog.clear()
    for model in (llama(), of_kind("gpt")):
        with_adapter(model, AdapterSettings())
    assert not caplog.messages


@pytest.mark.parametrize("used", [True, False])
def test_a_model_is_saved_with_its_own_use_of_a_cache(used, tmp_path):
    llama(use_cache=used).save_pretrained(tmp_path / "own")
    model = load_language_model(str(tmp_path / "own"))
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is used
    assert not model.config.use_cache, "training needs none"


@pytest.mark.parametrize(
    ("source", "changed", "message"),
    [
        ("base", {"intermediate_size": 48}, r"base has another shape of .*down_proj\.weig"),
        ("adapter", {"r": 3}, "cannot be loaded: .*size mismatch for .*lora_A.*; if token"),
        ("adapter", {"base_model_name_or_path": "a/b"}, "base model 'a/b', which is not"),
        ("adapter", {"peft_type": "PREFIX_TUNING"}, "is of type PREFIX_TUNING, which leav"),
        ("adapter", None, r"adapter lacks .*lora_A\S+; start from a whole copy"),
        *(("adapter", size, "adapter is damaged: .*; start from a whole") for size in (500, 0)),
    ],
)
@pytest.mark.usefixtures("saved")
def test_what_cannot_be_loaded_is_named(source, changed, message):
    if changed is None:
        tensors = load_file(f"adapter/{WEIGHTS}")
        del tensors[min(tensors)]
        save_file(tensors, f"adapter/{WEIGHTS}", {"format": "pt"})
    elif isinstance(changed, int):
        os.truncate(f"adapter/{WEIGHTS}", changed)
    else:
        path = Path(source, {"base": "config.json", "adapter": "adapter_config.json"}[source])
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(HamuError, match=message):
        load_language_model(source)


@pytest.mark.usefixtures("saved")
def test_an_adapter_beside_another_is_named(caplog):
    shutil.copytree("adapter", "adapter/user7", ignore=shutil.ignore_patterns("user7"))
    load_language_model("adapter")
    expected = f"the adapter in {Path('adapter/user7').resolve()} is not used; name that folder for"
    assert caplog.messages[-1].startswith(expected)


def test_an_adapter_of_a_base_of_the_hub_names_it_as_the_hub_does(saved, monkeypatch):
    monkeypatch.setattr(
        "hamu.models.language.from_pretrained",
        lambda kind, source, **_: kind.from_pretrained(source[-4:]),
    )
    model = load_language_model("adapter", base_model="hub:owner/base")
    assert model.peft_config["default"].base_model_name_or_path == "owner/base"


def test_the_tokenizer_of_an_adapter_lies_beside_it_or_beside_its_base(monkeypatch, tokenizer):
    base, known = {"base_model_name_or_path": "owner/base"}, {"owner/base": tokenizer}
    load = Mock(side_effect=lambda name, **settings: known[name])
    monkeypatch.setattr("hamu.models.language.saved_adapter", lambda source: base)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    known["owner/adapter"] = tokenizer
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    asked = [call.args[0] for call in load.call_args_list]
    assert asked == ["owner/adapter", "owner/base", "owner/adapter"]
    known.clear()
    with pytest.raises(HamuError, match=r"of hub:owner/base cannot be loaded: .*; --tokenizer ta"):
        load_tokenizer("hub:owner/adapter")


@pytest.mark.parametrize("kind", ["GPT2Config", "Qwen2Config", "GemmaConfig"])
def test_a_model_without_tokenizer_is_named(kind, tmp_path):
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(HamuError, match=r"tokenizer of .* cannot be loaded: .*--tokenizer takes"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_of_an_adapter_is_not_replaced(monkeypatch, tmp_path, tokenizer):
    adapter, base = (str(tmp_path / name) for name in ("adapter", "base"))
    tokenizer.save_pretrained(base)
    Path(adapter).mkdir()
    Path(base, "config.json").write_text("{}")
    known = {adapter: {"base_model_name_or_path": base}}
    monkeypatch.setattr("hamu.models.language.saved_adapter", known.get)
    assert load_tokenizer(adapter)
    Path(adapter, "tokenizer.json").write_text("{")
    with pytest.raises(HamuError, match=r"the tokenizer of .*adapter cannot be loaded"):
        load_tokenizer(adapter)


def test_a_model_that_cannot_read_the_records(data):
    small, broken = llama(), llama()
    small.resize_token_embeddings(30)
    broken.model.layers = None
    for model, message in (
        (small, r"the tokenizer has token \d+, the model 30 embeddings; use its own tok"),
        (llama(max_position_embeddings=9), r"miniature has \d+ tokens, the model reads 9; give -"),
        (broken, "the model cannot read the records of miniature: "),
    ):
        with pytest.raises(HamuError, match=message):
            check_reads(model, data)


INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
OF_GPT_NEO = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
OF_GPT_NEO |= {"attention_types": [[["global"], 1]], "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("architecture", "settings", "older"),
    [
        ("Llama", SIZES | {"tie_word_embeddings": True}, [INV_FREQ]),
        ("GPT2", OF_GPT, ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("GPTNeo", OF_GPT_NEO, ["transformer.h.0.attn.attention.masked_bias"]),
    ],
)
def test_masks_of_older_versions_are_no_obstacle(architecture, settings, older, data, tmp_path):
    config = getattr(transformers, f"{architecture}Config")(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with_tensors(tmp_path, *older)
    model = load_language_model(str(tmp_path))
    check_reads(model, data)
    check_reads(with_adapter(model, AdapterSettings(rank=2, targets="all-linear")), data)


def with_tensors(folder, *names):
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(2) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_model_for_images_and_text_has_the_shape_of_its_language_model(tmp_path):
    text = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 96}
    images = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    both = {"text_config": text, "vision_config": images, "mm_tokens_per_image": 4}
    transformers.Gemma3Config(**both).save_pretrained(tmp_path)
    model = meta_model(str(tmp_path), None)
    kept = {"activations": 1 * 34 * 16 * 7, "logits": 10 * 300 * 7}
    assert activations(model, 7, checkpointing=False) == kept
    assert longest_text(model) == 96


def test_a_model_that_would_lose_a_head_a_weight_or_its_encoder_is_refused(tmp_path):
    gpt = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**OF_GPT))
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=300, **sizes))
    for name, model in (("gpt", gpt), ("llama", llama()), ("t5", t5)):
        model.save_pretrained(tmp_path / name)
    with_tensors(tmp_path / "llama", "v_head.summary.weight", INV_FREQ)
    for name, message in (
        ("gpt", r"has, though a GPT2LMHeadModel has no place for it, score\.weight"),
        ("llama", r"has, though a .* no place for it, v_head\.summary\.weight"),
        ("t5", "is of type t5 and would lose its encoder; give a causal"),
    ):
        with pytest.raises(HamuError, match=message):
            load_language_model(str(tmp_path / name))
    with pytest.raises(HamuError, match=message):  # a plan, which reads no weights
        meta_model(str(tmp_path / "t5"), None)


@pytest.mark.parametrize(("tied", "embeddings"), [(True, True), (False, True), (True, False)])
def test_an_adapter_that_was_saved_with_embeddings_is_saved_with_them(tied, embeddings, tmp_path):
    torch.manual_seed(0)
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    adapted = load_language_model(str(tmp_path / "base"), adapter=AdapterSettings(rank=2))
    with torch.no_grad():
        if embeddings:
            adapted.get_input_embeddings().weight.normal_()  # as an earlier training has left them
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=embeddings)
    names = load_file(tmp_path / "adapter" / WEIGHTS).keys()
    loaded = load_language_model(str(tmp_path / "adapter"))
    (tmp_path / "again").mkdir()
    save_model(loaded, tmp_path / "again")
    again = load_language_model(str(tmp_path / "again"))
    expected = adapted(input_ids=IDS).logits
    for model in (loaded, again):
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == names
    own = _names_of_adapter(loaded, embeddings)
    whole = {name: value for name, value in loaded.state_dict().items() if name in own}
    of_state = tmp_path / "of state"  # as of a sharded one
    loaded.save_pretrained(of_state, state_dict=whole, save_embedding_layers=embeddings)
    assert load_file(of_state / WEIGHTS).keys() == names


def test_tensors_of_another_model_are_not_put_into_this_one(tmp_path):
    save_model(torch.nn.Linear(2, 3), tmp_path)
    for model in (torch.nn.Linear(1, 4), torch.nn.Sequential(torch.nn.Linear(1, 4))):
        with pytest.raises(HamuError, match=r"has no .*weight of the shape \(4, 1\); resume with"):
            load_tensors(model, tmp_path)


def lora(model, **settings):
    config = LoraConfig(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"]} | settings)
    return get_peft_model(model, config)


def test_what_cannot_be_merged_is_named():
    prompts = AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    for adapted in (lora(llama(), lora_bias=True), get_peft_model(llama(), prompts)):
        with pytest.raises(HamuError, match="the adapter cannot be merged into its model"):
            merged(adapted)


@torch.no_grad()
def moved(model):
    """Draw an adapter's weights anew, and return what the model predicts with them."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.normal_()
    return predicted(model)


@torch.no_grad()
def predicted(model):
    return model(input_ids=IDS.to(model.device)).logits.cpu().float()


EMBED, HEAD = "embed_tokens", "lm_head"


@pytest.mark.parametrize(
    ("settings", "is_tied"),
    [
        ({}, True),
        ({"target_modules": [HEAD]}, False),
        ({"target_modules": [EMBED]}, False),
        ({"target_modules": ["q_proj", EMBED, HEAD]}, False),
        ({"modules_to_save": [HEAD]}, False),
        ({"modules_to_save": [HEAD], "ensure_weight_tying": True}, True),
    ],
)
def test_merged_on_disk_is_the_model_with_its_adapter(settings, is_tied, tmp_path):
    torch.manual_seed(0)
    model = lora(llama(tie_word_embeddings=True), **settings).eval()
    separate = moved(model)
    save_model(merged(model), tmp_path)
    whole = load_language_model(str(tmp_path)).eval()
    torch.testing.assert_close(whole(input_ids=IDS).logits, separate, rtol=1e-4, atol=1e-4)
    assert whole.config.tie_word_embeddings == is_tied


@pytest.mark.parametrize("is_saved_so", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.filterwarnings("error:.*(base_model_name_or_path|fan_in_fan_out)")
def test_an_adapter_on_a_base_in_4_bits_is_merged_exactly_and_silently(kind, is_saved_so, tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    of_kind(kind).save_pretrained(tmp_path / "base")
    adapter, base = AdapterSettings(rank=2), str(tmp_path / "base")
    if is_saved_so:
        packed = load_language_model(base, dtype="4bit")
        base = str(tmp_path / "packed")
        packed.save_pretrained(base)
    model = load_language_model(base, adapter=adapter, dtype="4bit").eval()
    before, separate = predicted(model), moved(model)
    save_model(merged(model), tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.allclose(before, separate, atol=1e-3)
    off = 1e-4 if model.device.type == "cpu" else 0.05  # on a GPU 4 bits are multiplied in bfloat16
    torch.testing.assert_close(predicted(whole), separate, rtol=off, atol=off)
    assert {p.dtype for p in whole.parameters()} == {torch.float32}


def test_what_would_not_load_again_is_not_merged():
    model = lora(llama())
    model.get_base_model().model.norm.weight = torch.nn.Parameter(torch.ones(17))
    with pytest.raises(HamuError, match=r"merged into .*model\.norm\.weight \(1[67],\) does not"):
        merged(model)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_a_base_in_4_bits_takes_an_eighth_of_the_memory_and_needs_its_library(
    kind, tmp_path, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    of_kind(kind).save_pretrained("base")
    adapter = AdapterSettings(rank=2)
    model = load_language_model("base", adapter=adapter, dtype="4bit")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    scales = sum(p.quant_state.absmax.nbytes for p in frozen if hasattr(p, "quant_state"))
    planned = frozen_bytes(meta_model("base", adapter), "4bit")
    assert planned == sum(p.nbytes for p in frozen) + scales
    with pytest.raises(HamuError, match="model_dtype 'int3' is unknown; choose one of float32, "):
        frozen_bytes(model, "int3")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(HamuError, match=r"weights need bitsandbytes: .*; pip install 'hamu"):
        load_language_model("base", adapter=adapter, dtype="4bit")


@pytest.mark.parametrize("has_it", [True, False])
def test_a_base_is_loaded_in_bfloat16_where_a_gpu_has_it_and_does_not_emulate_it(
    monkeypatch, has_it
):
    def is_supported(including_emulation=True):
        return has_it or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert default_dtype(has_adapter=True) == ("bfloat16" if has_it else "float32")
    assert default_dtype(has_adapter=False) == "float32"
