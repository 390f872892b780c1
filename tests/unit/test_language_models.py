"""Language models and adapters that cannot be loaded, or do not go with tokenizer, data or checkpoint."""

import json
from pathlib import Path

import pytest
import torch
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
from hamu.models.saving import load_tensors, save_model
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
        HamuError, match=r"nowhere is not a saved model: it has neither config\.json nor adapter_config"
    ):
        load_language_model("nowhere")
    with pytest.raises(
        HamuError, match="model_dtype 'int3' is unknown; choose one of float32, bfloat16, float16, auto"
    ):
        model_shape("base", None, "int3")
    tensors = load_file(f"adapter/{WEIGHTS}")
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, f"adapter/{WEIGHTS}", {"format": "pt"})
    with pytest.raises(HamuError, match=rf"the adapter adapter lacks {min(tensors)}; start from a whole copy"):
        load_language_model("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "owner/gone"}))
    with pytest.raises(
        HamuError, match="made for the base model 'owner/gone', which is not a folder here; name it with"
    ):
        load_language_model("adapter")


def test_a_new_adapter_names_its_base_by_the_whole_path(saved, tmp_path):
    adapted = load_language_model("base", adapter=AdapterSettings(rank=2))
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_the_tokenizer_of_an_adapter_of_the_hub_lies_beside_it_or_beside_its_base(monkeypatch, tokenizer):
    has, asked = set(), []

    class Loader:
        @staticmethod
        def from_pretrained(name, **settings):
            asked.append(name)
            if name not in has:
                raise OSError("no tokenizer.json here")
            return tokenizer

    base = {"base_model_name_or_path": "owner/base"}
    monkeypatch.setattr("hamu.models.language.saved_adapter", lambda source: base if "adapter" in source else None)
    monkeypatch.setattr("hamu.models.language.AutoTokenizer", Loader)
    has.add("owner/base")
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    assert asked == ["owner/adapter", "owner/base"]
    has.add("owner/adapter")
    assert load_tokenizer("hub:owner/adapter") is tokenizer
    assert asked[2:] == ["owner/adapter"]
    has.clear()
    with pytest.raises(HamuError, match=r"of hub:owner/base cannot be loaded: no tokenizer\.json here; --"):
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
        HamuError, match=r"the tokenizer has token \d+, the model only 30 embeddings; use the model's own"
    ):
        check_reads(Unable(30), data)
    with pytest.raises(
        HamuError, match=r"a record of miniature has \d+ tokens, the model reads 9; give --max_length 9"
    ):
        check_reads(new_language_model(tokenizer, hidden=16, layers=1, max_length=9), data)
    with pytest.raises(HamuError, match="the model cannot read the records of miniature: no attention"):
        check_reads(Unable(300), data)


def test_trying_a_record_leaves_each_module_in_its_mode(texts, tokenizer):
    model = new_language_model(tokenizer, hidden=16, layers=2, max_length=64).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    check_reads(model, encode(texts, tokenizer, 64))
    assert [module.training for module in model.modules()] == modes


def test_tensors_of_another_model_are_not_put_into_this_one(tmp_path):
    save_model(torch.nn.Linear(2, 3), tmp_path)
    with pytest.raises(
        HamuError, match=r"has bias as \(3,\), the model as \(4,\); resume with the model that the run was"
    ):
        load_tensors(torch.nn.Linear(1, 4), tmp_path)
    with pytest.raises(HamuError, match=r"lacks 0\.bias; resume with the model that the run was started with"):
        load_tensors(torch.nn.Sequential(torch.nn.Linear(2, 3)), tmp_path)
