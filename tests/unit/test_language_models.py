"""Language models and adapters that cannot be loaded, or do not go with tokenizer, data or checkpoint."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hamu import HamuError
from hamu.data import encode, read_text
from hamu.models.language import (
    AdapterSettings,
    check_reads,
    load_language_model,
    load_tokenizer,
    new_language_model,
    new_tokenizer,
    with_adapter,
)
from hamu.models.loading import _without_place
from hamu.models.saving import _names_of_adapter, load_tensors, save_model
from hamu.models.shapes import model_shape

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def texts():
    return read_text("miniature").select(range(3))


@pytest.fixture(scope="module")
def tokenizer(texts):
    return new_tokenizer((record.prompt for record in texts.records), 300)


@pytest.fixture
def saved(tokenizer, tmp_path, monkeypatch):
    """A folder with a small model, `base`, and an adapter of it, `adapter`."""
    monkeypatch.chdir(tmp_path)
    model = new_language_model(tokenizer, hidden=16, layers=1, max_length=64)
    model.save_pretrained("base")
    adapted = with_adapter(model, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = "base"
    Path("adapter").mkdir()
    save_model(adapted, Path("adapter"))


@pytest.mark.usefixtures("saved")
def test_what_cannot_be_loaded_is_named():
    with pytest.raises(
        HamuError,
        match=r"nowhere is not a saved model: it has no config\.json or adapter_config\.json",
    ):
        load_language_model("nowhere")
    with pytest.raises(
        HamuError,
        match="model_dtype 'int3' is unknown; choose one of float32, bfloat16, float16, auto",
    ):
        model_shape("base", None, "int3")
    tensors = load_file(f"adapter/{WEIGHTS}")
    save_file(
        {name: tensors[name] for name in sorted(tensors)[1:]},
        f"adapter/{WEIGHTS}",
        {"format": "pt"},
    )
    with pytest.raises(
        HamuError, match=rf"the adapter adapter lacks {min(tensors)}; start from a whole copy"
    ):
        load_language_model("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "owner/gone"})
    )
    with pytest.raises(
        HamuError,
        match="made for the base model 'owner/gone', which is not a folder here; name it with",
    ):
        load_language_model("adapter")


def test_a_new_adapter_names_its_base_by_the_whole_path(saved, tmp_path):
    adapted = load_language_model("base", adapter=AdapterSettings(rank=2))
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_the_tokenizer_of_an_adapter_of_the_hub_lies_beside_it_or_beside_its_base(
    monkeypatch, tokenizer
):
    has, asked = set(), []

    class Loader:
        @staticmethod
        def from_pretrained(name, **settings):
            asked.append(name)
            if name not in has:
                raise OSError("no tokenizer.json here")
            return tokenizer

    base = {"base_model_name_or_path": "owner/base"}
    monkeypatch.setattr(
        "hamu.models.language.saved_adapter", lambda source: base if "adapter" in source else None
    )
    monkeypatch.setattr("hamu.models.language.AutoTokenizer", Loader)
    has.add("owner/base")
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    assert asked == ["owner/adapter", "owner/base"]
    has.add("owner/adapter")
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    assert asked[2:] == ["owner/adapter"]
    has.clear()
    with pytest.raises(
        HamuError, match=r"of hub:owner/base cannot be loaded: no tokenizer\.json here; --"
    ):
        load_tokenizer("hub:owner/adapter")


class Unable(torch.nn.Module):
    """Has embeddings, and no more."""

    def __init__(self, tokens):
        super().__init__()
        self.embeddings = torch.nn.Embedding(tokens, 2)

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, input_ids):
        raise RuntimeError("no attention")


def test_a_model_that_cannot_read_the_records(texts, tokenizer):
    data = encode(texts, tokenizer)
    with pytest.raises(
        HamuError,
        match=r"the tokenizer has token \d+, the model only 30 embeddings; use the model's own",
    ):
        check_reads(Unable(30), data)
    with pytest.raises(
        HamuError,
        match=r"a record of miniature has \d+ tokens, the model reads 9; give --max_length 9",
    ):
        check_reads(new_language_model(tokenizer, hidden=16, layers=1, max_length=9), data)
    with pytest.raises(
        HamuError, match="the model cannot read the records of miniature: no attention"
    ):
        check_reads(Unable(300), data)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
OF_GPT = {
    "vocab_size": 300,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.parametrize(("architecture", "settings", "older"), [
    ("Llama", SIZES | {"tie_word_embeddings": True}, ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ("Llama", SIZES, []),
    ("Mistral", SIZES | {"num_key_value_heads": 1}, ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ("Qwen2", SIZES | {"num_key_value_heads": 1}, []),
    ("Phi", SIZES, []),
    ("OPT", SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16}, []),
    ("GPT2", OF_GPT, ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    ("GPTNeoX", SIZES, ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
    ("GPTNeo", {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
                "attention_types": [[["global"], 1]], "max_position_embeddings": 128},
     ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"]),
])  # fmt: skip
def test_causal_language_models_are_taken_with_the_masks_of_older_versions(
    architecture, settings, older, texts, tokenizer, tmp_path
):
    config = getattr(transformers, f"{architecture}Config")(**settings)
    getattr(
        transformers, f"{architecture}ForCausalLM" if architecture != "GPT2" else "GPT2LMHeadModel"
    )(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(2) for name in older}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_language_model(str(tmp_path))
    data = encode(texts, tokenizer)
    check_reads(model, data)
    check_reads(with_adapter(model, AdapterSettings(rank=2, targets="all-linear")), data)


def test_a_model_for_images_and_text_has_the_shape_of_its_language_model(tmp_path):
    text = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 96}
    images = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=images, mm_tokens_per_image=4
    )
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path), None, "float32")
    assert (shape.layers, shape.hidden, shape.vocabulary, shape.longest) == (1, 16, 300, 96)


def test_a_model_that_sees_what_it_is_to_predict_is_refused(texts, tokenizer, tmp_path):
    data = encode(texts, tokenizer)
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(
        HamuError,
        match="a model of type bert is not a causal language model: its predictions change",
    ):
        check_reads(load_language_model(str(tmp_path)), data)
    check_reads(
        transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)), data
    )


@pytest.mark.parametrize("kind", ["GPT2ForSequenceClassification", "GPT2DoubleHeadsModel"])
def test_a_model_whose_head_would_be_lost_is_refused(kind, tmp_path):
    getattr(transformers, kind)(transformers.GPT2Config(**OF_GPT)).save_pretrained(tmp_path)
    with pytest.raises(
        HamuError, match=r"has (score|multiple_choice).*, for which a GPT2LMHeadModel has no place"
    ):
        load_language_model(str(tmp_path))


def with_tensors(folder, *names):
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(2) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "v_head.summary.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.more",
    ],
)
def test_a_model_with_a_weight_that_its_class_has_no_place_for_is_refused(name, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with_tensors(tmp_path, name, "model.layers.0.self_attn.rotary_emb.inv_freq")
    message = rf"has {re.escape(name)}, for which a LlamaForCausalLM has no place, and which would be lost; it is of an"
    with pytest.raises(HamuError, match=message):
        load_language_model(str(tmp_path))


def test_of_a_quantised_model_scales_may_be_left_but_no_layer(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    layers = {
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.up_proj.output_scale",
        "model.layers.1.up.scale",
    }
    assert _without_place(model, str(tmp_path), layers) == layers
    model.config.quantization_config = {"quant_method": "fp8"}
    assert _without_place(model, str(tmp_path), layers) == {"model.layers.1.up.scale"}


def test_what_sees_is_not_left_out_though_transformers_does_not_say_so(tmp_path):
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    }
    config = transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=8,
        num_key_value_heads=1,
        layer_types=["full_attention"],
        rope_parameters=rope,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    with_tensors(tmp_path, "mtp.fc.weight")  # predicts a further token
    load_language_model(str(tmp_path))
    with_tensors(tmp_path, "model.visual.patch_embed.proj.weight")
    with pytest.raises(
        HamuError, match=r"has model\.visual\.patch_embed\.proj\.weight, for which a Qwen3_5For"
    ):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_whose_encoder_would_be_lost_is_refused(tied, tmp_path):
    config = transformers.BartConfig(
        vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_attention_heads=2, decoder_ffn_dim=32, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    refused = "is of type bart, a decoder with an encoder, which would be lost; give a causal language model"
    with pytest.raises(HamuError, match=refused):
        load_language_model(str(tmp_path))
    with pytest.raises(HamuError, match=refused):  # a plan, which reads no weights
        model_shape(str(tmp_path), None, "float32")


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_that_was_saved_with_embeddings_is_saved_with_them(tied, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    adapted = load_language_model(str(tmp_path / "base"), adapter=AdapterSettings(rank=2))
    with torch.no_grad():
        adapted.get_input_embeddings().weight.normal_()  # as an earlier training has left them
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    names = load_file(tmp_path / "adapter" / WEIGHTS).keys()
    loaded, ids = load_language_model(str(tmp_path / "adapter")), torch.arange(40, 60)[None]
    (tmp_path / "again").mkdir()
    save_model(loaded, tmp_path / "again")
    again = load_language_model(str(tmp_path / "again"))
    for model in (loaded, again):
        torch.testing.assert_close(
            model(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=0, atol=0
        )
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == names
    whole = {
        name: value
        for name, value in loaded.state_dict().items()
        if name in _names_of_adapter(loaded, True)
    }
    loaded.save_pretrained(
        tmp_path / "of state", state_dict=whole, save_embedding_layers=True
    )  # as of a sharded one
    assert load_file(tmp_path / "of state" / WEIGHTS).keys() == names


@pytest.mark.usefixtures("saved")
def test_an_adapter_that_was_saved_without_embeddings_is_saved_without_them(tmp_path):
    (tmp_path / "again").mkdir()
    save_model(load_language_model("adapter"), tmp_path / "again")
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == load_file(f"adapter/{WEIGHTS}").keys()


@pytest.mark.usefixtures("saved")
def test_an_adapter_on_a_base_of_the_hub_names_that(monkeypatch):
    monkeypatch.setattr(
        "hamu.models.language.from_pretrained",
        lambda kind, source, **_: kind.from_pretrained(source[-4:]),
    )
    model = load_language_model("adapter", base_model="hub:owner/base")
    assert model.peft_config["default"].base_model_name_or_path == "owner/base"


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_an_adapter_of_a_larger_vocabulary_says_to_resize_its_base(kind, tmp_path):
    config = (
        transformers.LlamaConfig(**SIZES) if kind == "Llama" else transformers.GPT2Config(**OF_GPT)
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(302)
    adapted = with_adapter(model, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    with pytest.raises(
        HamuError,
        match=r"was saved with a vocabulary of another size than its base .*: tokens were",
    ):
        load_language_model(str(tmp_path / "adapter"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(302)
    model.save_pretrained(tmp_path / "resized")
    load_language_model(str(tmp_path / "adapter"), base_model=str(tmp_path / "resized"))


@pytest.mark.usefixtures("saved")
def test_an_adapter_on_a_base_of_another_width_is_named_with_both_shapes(tokenizer):
    new_language_model(tokenizer, hidden=32, layers=1, max_length=64).save_pretrained("wide")
    with pytest.raises(HamuError, match=r"the adapter adapter cannot be loaded: Error\(s\) in loading state_dict .*: "
                                        r"size mismatch for .*lora_A.*\[2, 16\].*\[2, 32\]"):  # fmt: skip
        load_language_model("adapter", base_model="wide")


@pytest.mark.usefixtures("saved")
def test_a_config_that_does_not_fit_the_weights_is_named_with_both_shapes():
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(HamuError, match=r"base has model\.layers\.0\.mlp\.down_proj\.weight as \(16, 44\), by its "
                                        r"config\.json it is \(16, 48\); put back"):  # fmt: skip
        load_language_model("base")


def test_tensors_of_another_model_are_not_put_into_this_one(tmp_path):
    save_model(torch.nn.Linear(2, 3), tmp_path)
    with pytest.raises(
        HamuError,
        match=r"has bias as \(3,\), the model as \(4,\); resume with the model that the run was",
    ):
        load_tensors(torch.nn.Linear(1, 4), tmp_path)
    with pytest.raises(
        HamuError, match=r"lacks 0\.bias; resume with the model that the run was started with"
    ):
        load_tensors(torch.nn.Sequential(torch.nn.Linear(2, 3)), tmp_path)
