"""Digests: independent of order and layout, blind to nothing that matters."""

import json
from datetime import date

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hamu import HamuError
from hamu.data import ImageData, TextRecord, TextRecords, read_text
from hamu.models.language import new_language_model, new_tokenizer
from hamu.models.loading import folder_of
from hamu.unlearning.record.inputs import row_digests, set_digest, tensors_digest, weights_digest

LINES = [
    {"question": f"number {i}?", "answer": f"It is {i}.", "tags": ["a", "b"], "page": i}
    for i in range(6)
]


def records(*rows):
    texts = tuple(TextRecord(row["question"], row["answer"], row) for row in rows)
    return TextRecords(texts, "somewhere", torch.arange(len(rows)))


def images(pixels, labels, classes=("cat", "dog")):
    pixels = torch.from_numpy(pixels)
    return ImageData(pixels, torch.tensor(labels), classes, "somewhere", torch.arange(len(labels)))


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 4), dtype=np.uint8)


def digest(data):
    return set_digest(row_digests(data))


@pytest.mark.parametrize(
    "data", [records(*LINES), images(PIXELS, [0, 1, 0, 1])], ids=["text", "images"]
)
def test_the_order_of_records_does_not_matter_but_their_number_does(data):
    back = list(range(len(data)))[::-1]
    assert digest(data.select(back)) == digest(data)
    assert digest(data.select([*back, 0])) != digest(data), (
        "a record that is there twice counts twice"
    )
    assert digest(data.select(back[1:])) != digest(data)


@pytest.mark.parametrize(
    "same",
    [
        {"page": 1, "answer": "Café", "question": "where?"},
        {"question": " where?\n", "answer": "Café\t", "page": 1},
        {"question": "where?", "answer": "Cafe\u0301", "page": 1},
    ],
)
def test_order_of_fields_space_at_ends_and_unicode_form_do_not_matter(same):
    assert digest(records(same)) == digest(
        records({"question": "where?", "answer": "Café", "page": 1})
    )


@pytest.mark.parametrize(
    "other",
    [
        {"question": "where?", "answer": "cafe", "page": 1},
        {"question": "where ?", "answer": "Cafe", "page": 1},
        {"question": "where?", "answer": "Cafe", "page": "1"},
        {"question": "where?", "answer": "Cafe", "page": 2},
        {"question": "where?", "answer": "Cafe"},
        {"question": "where?", "answer": "Cafe", "page": 1, "note": None},
        {"question": "where?Cafe", "answer": "", "page": 1},
    ],
)
def test_any_other_character_or_field_does(other):
    assert digest(records(other)) != digest(
        records({"question": "where?", "answer": "Cafe", "page": 1})
    )


def test_columns_that_are_not_json_have_a_digest_too():
    first = {
        "question": "a",
        "answer": "b",
        "day": date(2020, 1, 2),
        "raw": b"\x00\xff",
        None: ["left over"],
    }
    changed = [
        first | {"day": date(2020, 1, 3)},
        first | {"raw": b"\x00\xfe"},
        first | {None: ["left"]},
    ]
    assert len({digest(records(row)) for row in (first, *changed)}) == 4


def test_one_pixel_label_or_shape_changes_the_digest_of_images():
    labels = [0, 1, 0, 1]
    whole = digest(images(PIXELS, labels))
    other = PIXELS.copy()
    other[2, 1, 4, 3] ^= 1
    assert digest(images(other, labels)) != whole
    assert digest(images(PIXELS, [0, 1, 0, 0])) != whole
    assert digest(images(PIXELS.reshape(4, 3, 4, 5), labels)) != whole
    assert digest(images(PIXELS, [1, 0, 1, 0], ("dog", "cat"))) == whole, (
        "a label is the name of its class"
    )


def test_who_holds_the_row_digests_can_prove_that_a_record_was_in_the_set():
    kept = row_digests(records(*LINES))
    assert set_digest(reversed(kept)) == digest(records(*LINES))
    [shown] = row_digests(records(LINES[3]))
    assert shown in kept
    [foreign] = row_digests(records(LINES[3] | {"page": 99}))
    assert foreign not in kept


@pytest.fixture(scope="module")
def parts():
    texts = read_text("miniature").select(range(20))
    tokenizer = new_tokenizer((r.prompt + r.answer for r in texts.records), 300)
    return new_language_model(tokenizer, hidden=64, layers=2)


def test_weights_in_one_file_and_in_many_have_one_digest(parts, tmp_path):
    parts.save_pretrained(tmp_path / "whole")
    parts.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert weights_digest(tmp_path / "parts") == weights_digest(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole/model.safetensors")
    assert tensors_digest(tensors, tensors.__getitem__) == weights_digest(tmp_path / "whole")
    backwards = dict(reversed(tensors.items()))
    assert tensors_digest(backwards, backwards.__getitem__) == tensors_digest(
        tensors, tensors.__getitem__
    )


def test_one_bit_name_type_or_shape_changes_the_digest_of_weights():
    first = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones((), dtype=torch.bfloat16),
        "c": torch.tensor([True]),
    }
    flipped = first["a"].clone().view(torch.int32)
    flipped[1, 2] ^= 1
    variants = [
        first,
        first | {"a": flipped.view(torch.float32)},
        first | {"a": first["a"].view(3, 2)},
        first | {"a": first["a"].view(torch.int32)},
        first | {"b": torch.ones((), dtype=torch.float16)},
        {"A": first["a"], "b": first["b"], "c": first["c"]},
        {"a": first["a"], "b": first["b"]},
    ]
    assert len({tensors_digest(one, one.__getitem__) for one in variants}) == len(variants)
    strided = first | {"a": first["a"].t().contiguous().t()}
    assert tensors_digest(strided, strided.__getitem__) == tensors_digest(first, first.__getitem__)


def test_weights_that_are_missing_or_damaged(tmp_path):
    assert weights_digest(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    with pytest.raises(HamuError, match="cannot be read"):
        weights_digest(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-2])
    with pytest.raises(HamuError, match="cannot be read"):
        weights_digest(tmp_path)


def test_a_model_of_the_hub_is_found_in_the_hubs_cache_or_not_at_all(tmp_path, monkeypatch):
    from transformers.utils import hub

    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HamuError, match="hub:owner/name is not in the hub's cache"):
        folder_of("hub:owner/name")
    repository = tmp_path / "models--owner--name"
    commit = "a" * 40
    for file, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit)):
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    assert folder_of("hub:owner/name") == repository / "snapshots" / commit
