"""Digests: independent of order and layout, blind to nothing that matters."""

import json
from datetime import date

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_models import text_records

from hamu import HamuError
from hamu.data import ImageData, TextRecord
from hamu.models.storage import folder_of
from hamu.unlearning.record.inputs import order_digest, row_digests, weights_digest

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 4), dtype=np.uint8)


def records(*rows):
    return text_records(*(TextRecord(row["question"], row["answer"], row) for row in rows))


def images(pixels, labels, classes=("cat", "dog")):
    pixels = torch.from_numpy(pixels)
    return ImageData(pixels, torch.tensor(labels), classes, "somewhere", torch.arange(len(labels)))


def digest(data):
    return order_digest(sorted(row_digests(data)))


WHERE = {"question": "where?", "answer": "Café", "page": 1}


def test_order_of_fields_space_at_ends_and_unicode_form_do_not_matter_any_other_change_does():
    first = WHERE | {"day": date(2020, 1, 2), "raw": b"\x00\xff", None: ["left over"]}
    whole, back = digest(records(first)), dict(reversed(first.items()))
    for same in ({"question": " where?\n"}, {"answer": "Café\t"}, {"answer": "Cafe\u0301"}):
        assert digest(records(back)) == digest(records(first | same)) == whole
    changes = ({"answer": "café"}, {"question": "where ?"}, {"page": "1"}, {"page": 2})
    changes += ({"note": None}, {"question": "where?Café", "answer": ""})
    changes += ({"day": date(2020, 1, 3)}, {"raw": b"\x00\xfe"}, {None: ["left"]})
    others = [first | change for change in changes] + [{"question": "where?", "answer": "Café"}]
    assert len({whole, *(digest(records(other)) for other in others)}) == 11


def test_one_pixel_label_or_shape_changes_the_digest_of_images():
    labels = [0, 1, 0, 1]
    other = PIXELS.copy()
    other[2, 1, 4, 3] ^= 1
    whole = digest(images(PIXELS, labels))
    assert digest(images(PIXELS, [1, 0, 1, 0], ("dog", "cat"))) == whole, "a label is a name"
    changed = [images(other, labels), images(PIXELS, [0, 1, 0, 0])]
    changed.append(images(PIXELS.reshape(4, 3, 4, 5), labels))
    assert len({whole, *map(digest, changed)}) == 4


def digest_of(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return weights_digest(folder)


def test_weights_in_one_file_and_in_many_have_one_digest(tmp_path):
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, dtype=torch.bfloat16)}
    whole = digest_of(tmp_path / "whole", tensors)
    (tmp_path / "parts").mkdir()
    for name, one in tensors.items():
        save_file({name: one}, tmp_path / f"parts/{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_digest(tmp_path / "parts") == whole


def test_only_weights_that_are_loaded_count(tmp_path):
    own = digest_of(tmp_path, {"a": torch.ones(3)})
    save_file({"a": torch.zeros(3)}, tmp_path / "adapter_model.safetensors")
    assert weights_digest(tmp_path) == own, "a whole model is loaded from model.safetensors"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert weights_digest(tmp_path) not in (own, None)


def test_weights_that_are_missing_or_damaged(tmp_path):
    assert weights_digest(tmp_path) is None
    digest_of(tmp_path, {"a": torch.ones(3)})
    whole, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    whole.write_bytes(whole.read_bytes()[:-2])
    for _ in range(2):
        with pytest.raises(HamuError, match="cannot be read"):
            weights_digest(tmp_path)
        index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
        whole.unlink(missing_ok=True)


def test_a_model_of_the_hub_is_found_in_the_hubs_cache_or_not_at_all(tmp_path, monkeypatch):
    from transformers.utils import hub

    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HamuError, match="hub:owner/name is not in the hub's cache"):
        folder_of("hub:owner/name")
    repository, commit = tmp_path / "models--owner--name", "a" * 40
    for file, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit)):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    assert folder_of("hub:owner/name") == repository / "snapshots" / commit
