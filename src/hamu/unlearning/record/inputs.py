"""Inputs and settings of a run, by SHA-256 digests that anybody can recompute (docs/record.md).

Written when the run begins: a resumed one goes on with the same. None but `order_digest` depends on
layout: weights may be in one file or many, records in any order.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hamu.data import ImageData, TextData, TextRecords
from hamu.data.sources import is_of_hub
from hamu.errors import HamuError, first_line
from hamu.files import INPUTS, parse_json
from hamu.models.storage import folder_of, weight_files

Inputs = Mapping[str, Any]  # "forget set", "original model" and so on: the entry of each, or None
_SETTINGS = "settings"
_ORDER = "order of the "
_ONLY_NAMES = ("source", "name")
_CHOICES = ("forget_class", "forget_rows", "forget_filter")
_PLACES = ("data", "test_data", "data_dir", "forget_data", "tokenizer")
_MODELS = ("model", "base_model", "retain_model")
_NO_SETTINGS = ("output_dir", "overwrite", "dry_run")


def text_digest(text: str) -> str:
    """Digest of a text in normal form, UTF-8."""
    return _sha256(_normal(text).encode())


def weights_digest(folder: Path) -> str | None:
    r"""Digest of the weights that `save_pretrained` put into a folder: of a model or an adapter.

    Of each tensor, in the order of their names: a line of JSON `[name, dtype, shape]`, compact
    ASCII that ends with "\n", with torch's name of the dtype; then the values' bytes,
    little-endian, row by row.

    Returns:
        None if there are no safetensors in the folder.

    Raises:
        HamuError: if a file is missing or damaged.
    """
    found = hashlib.sha256()
    try:
        files = weight_files(folder)
        if not files:
            return None
        with ExitStack() as opened:
            parts = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
            holder = {name: part for part in parts for name in part.keys()}  # noqa: SIM118
            for name in sorted(holder):
                values = holder[name].get_tensor(name).contiguous()
                head = [name, str(values.dtype).removeprefix("torch."), list(values.shape)]
                found.update(json.dumps(head, separators=(",", ":")).encode() + b"\n")
                found.update(values.reshape(-1).view(torch.uint8).numpy().data)
            return found.hexdigest()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise HamuError(f"the weights in {folder} cannot be read: {error}") from error


def set_digest(rows: Iterable[str]) -> str:
    """Digest of a set in any order: of the sorted row digests in hexadecimal, one a line."""
    return order_digest(sorted(rows))


def order_digest(rows: Iterable[str]) -> str:
    """Digest of a set in its order: of the row digests in hexadecimal, one a line."""
    return _sha256("".join(f"{row}\n" for row in rows).encode())


def row_digests(data: ImageData | TextRecords | TextData) -> list[str]:
    r"""Digest of each record, in normal form.

    A text is the JSON of all its fields: keys sorted, compact, UTF-8, every string in Unicode NFC
    and without white space at its ends. An image is a line of JSON like
    `{"dtype":"uint8","label":"cat","shape":[3,32,32]}`, which ends with "\n", and the pixels'
    bytes, channel by channel, row by row; the label is the name of its class, in normal form too.
    """
    if isinstance(data, ImageData):
        pixels, shape = data.pixels.numpy(), list(data.pixels.shape[1:])
        heads = [
            _json({"dtype": str(pixels.dtype), "label": _normal(name), "shape": shape}) + b"\n"
            for name in data.classes
        ]
        images = zip(data.labels.tolist(), pixels, strict=True)
        return [_sha256(heads[label] + image.tobytes()) for label, image in images]
    texts = data.texts if isinstance(data, TextData) else data
    return [_sha256(_json(_normal(record.fields))) for record in texts.records]


def _normal(value: Any) -> Any:
    """Make JSON of a value: dates in ISO 8601, bytes in hexadecimal, others as printed."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(key)): _normal(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def set_entries(name: str, data: ImageData | TextData | TextRecords | None) -> Inputs:
    """Entries of a set and of the order of its records, which decides what is in a batch.

    Args:
        name: "forget", "retain" and so on.
        data: None where there is none.
    """
    found = order = None
    if data is not None:
        source = data.texts.source if isinstance(data, TextData) else data.source
        rows = row_digests(data)
        found = {"source": short_name(source), "records": len(data), "sha256": set_digest(rows)}
        order = {"sha256": order_digest(rows)}
    return {f"{name} set": found, f"{_ORDER}{name} set": order}


def without_order(inputs: Inputs) -> Inputs:
    """The sets and models alone, as a record has them."""
    return {name: entry for name, entry in inputs.items() if not name.startswith(_ORDER)}


def model_entry(name: str, weights: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Entry of a model.

    Args:
        name: as the user called it.
        weights: the folder of the whole model, or of an adapter's base model.
        adapter: the folder of the adapter.
    """
    of_adapter = None if adapter is None else weights_digest(adapter)
    return {"name": short_name(name), "weights": weights_digest(weights), "adapter": of_adapter}


def saved_model_entry(source: str, base: str | None) -> dict[str, Any]:
    """Entry of a saved model; see `model_entry`.

    Args:
        source: a folder, or hub:OWNER/NAME in the hub's cache.
        base: the base model if it is an adapter, likewise; None for a whole model.
    """
    if base is None:
        return model_entry(source, folder_of(source))
    return model_entry(source, folder_of(base), folder_of(source))


def with_settings(inputs: Inputs, settings: Mapping[str, Any]) -> Inputs:
    """Content of inputs.json: with a digest of each setting, as config.yaml may be edited."""
    return {**inputs, _SETTINGS: _setting_digests(settings)}


def edited(run: Path, settings: Mapping[str, Any]) -> set[str]:
    """Names of the settings that were added, changed or removed since a run began.

    Raises:
        HamuError: as `read_inputs`.
    """
    began, now = _read(run).get(_SETTINGS) or {}, _setting_digests(settings)
    return {key for key in began.keys() | now.keys() if began.get(key) != now.get(key)}


def _setting_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: text_digest(json.dumps(value)) for key, value in settings.items()}


def read_inputs(run: Path) -> Inputs:
    """Inputs that a run has begun with.

    Raises:
        HamuError: if the file is missing or damaged.
    """
    return {name: entry for name, entry in _read(run).items() if name != _SETTINGS}


def _read(run: Path) -> Inputs:
    path = run / INPUTS
    try:
        found: dict[str, Any] = parse_json(path)
        if isinstance(found, dict) and all(isinstance(e, dict | None) for e in found.values()):
            return found
        wrong = "it holds something else"
    except FileNotFoundError:
        wrong = "it is missing"
    except (OSError, ValueError) as error:
        wrong = first_line(error)
    raise HamuError(f"{path} does not say what that run has read: {wrong}; start a new run")


def differing(was: Inputs, now: Inputs) -> str | None:
    """Name of the first input known now that had another digest, None without."""
    for name, entry in now.items():
        if digests_in(entry) != digests_in(was.get(name)):
            return name
    return None


def check_same(run: Path, now: Inputs) -> None:
    """Check that a run goes on with what it began with.

    Raises:
        HamuError: if not, or if that cannot be told.
    """
    name = differing(read_inputs(run), now)
    if name is not None:
        raise HamuError(
            f"the run in {run} began with another {name} than there is now; put back what it was, "
            f"or start a new run in another --output_dir"
        )


def digests_in(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An entry without what it is called, which may be a place."""
    if entry is None:
        return None
    return {key: value for key, value in entry.items() if key not in _ONLY_NAMES}


def recorded(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, as JSON holds them.

    Of a class, rows or a filter only the digest is kept (`text_digest`): it may name a person. Of
    files and folders only their name is kept.

    Args:
        settings: HAMU's own options; those without a value are left out.
        others: further options that were given; of these only numbers stay: texts may be places,
            names or passwords.
    """
    kept = {name: _of(name, value) for name, value in settings.items() if value is not None}
    kept |= {name: value for name, value in others.items() if isinstance(value, bool | int | float)}
    return {name: value for name, value in sorted(kept.items()) if name not in _NO_SETTINGS}


def short_name(source: str) -> str:
    """A file or folder without the folders that it is in; a name of the hub as it is."""
    return source if is_of_hub(source) else Path(source).name or source


def _of(name: str, value: Any) -> Any:
    if name in (*_PLACES, *_MODELS):
        return short_name(value)
    if name in _CHOICES:
        return {"sha256": text_digest(value)}
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple):
        return [_of("", one) for one in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
