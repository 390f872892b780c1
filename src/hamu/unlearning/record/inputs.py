"""Inputs and settings of a run, by SHA-256 digests that anybody can recompute (docs/record.md).

Written when the run begins: a resumed one goes on with the same. Digests of sets and models do not
depend on layout: weights may be in one file or many, records in any order.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import date, time
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from hamu.data import ImageData, TextData, TextRecords
from hamu.data.images import normal
from hamu.errors import HamuError, first_line, reading
from hamu.files import INPUTS, is_of_hub, parse_json
from hamu.models.storage import CONFIGS, folder_of, open_tensors, weight_files

Inputs = Mapping[str, Any]  # "forget set", "original model" and so on: the entry of each, or None
_SETTINGS = "settings"
_ORDER, _TOKENS, _CONFIGURATION = "order of the ", "tokenization of the ", "configuration of the "
_CHOICES = ("forget_class", "forget_rows", "forget_filter")
_PLACES = (
    *("data", "test_data", "data_dir", "forget_data", "tokenizer"),
    *("model", "base_model", "retain_model"),
)
_NO_SETTINGS = ("output_dir", "overwrite", "dry_run")


def text_digest(text: str) -> str:
    """Digest of a text in normal form."""
    return _sha256(_normal(text).encode())


def weights_digest(folder: Path) -> str | None:
    """Digest of the weights of a saved model or adapter; None without safetensors."""
    found = hashlib.sha256()
    with reading(f"the weights in {folder} cannot be read"):
        files = weight_files(folder)
        holder = open_tensors(files)
        for name in sorted(holder):
            values = holder[name].get_tensor(name).contiguous()
            head = [name, str(values.dtype).removeprefix("torch."), list(values.shape)]
            found.update(json.dumps(head, separators=(",", ":")).encode() + b"\n")
            found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest() if files else None


def order_digest(rows: Iterable[str]) -> str:
    """Digest of a set by the digests of its records, in their order."""
    return _sha256("".join(f"{row}\n" for row in rows).encode())


def row_digests(data: ImageData | TextRecords | TextData) -> list[str]:
    """Digest of each record: of all fields of a text, of pixels and class of an image."""
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
        return normal(value)
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(key)): _normal(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(one) for one in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _json(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def set_entries(name: str, data: ImageData | TextData | TextRecords | None) -> Inputs:
    """Entries of a set and of the order of its records, which decides what is in a batch."""
    if data is None:
        return {f"{name} set": None, f"{_ORDER}{name} set": None}
    source = data.texts.source if isinstance(data, TextData) else data.source
    rows = row_digests(data)
    found = {"source": short_name(source), "records": len(data)}
    found |= {"sha256": order_digest(sorted(rows))}
    return {f"{name} set": found, f"{_ORDER}{name} set": {"sha256": order_digest(rows)}}


def reading_entries(sets: Mapping[str, Any], model: str | None, base: str | None) -> Inputs:
    """Entries of what a model is given of texts, token by token, and of its configuration.

    Digests of sets and models leave out the tokenizer, and spaces around a text.
    """
    found: dict[str, Any] = {}
    for name, data in sets.items():
        parts = [data, data.alternatives] if isinstance(data, TextData) else []
        rows = [_tokens_digest(one) for one in parts if one is not None]
        found[f"{_TOKENS}{name} set"] = {"sha256": order_digest(rows)} if rows else None
    folders = [folder_of(source) for source in (model, base) if source is not None]
    places = [folder / name for folder in folders for name in CONFIGS]
    configs = [parse_json(place) for place in places if place.is_file()]
    entry = {"sha256": _sha256(_json(configs))} if configs else None
    return found | {f"{_CONFIGURATION}original model": entry}


def _tokens_digest(data: TextData) -> str:
    found = hashlib.sha256()
    for ids, start in zip(data.tokens, data.scored_from, strict=True):
        found.update(f"{len(ids)} {start}\n".encode() + ids.numpy().tobytes())
    return found.hexdigest()


def as_recorded(inputs: Inputs) -> Inputs:
    """The sets and models alone; the other entries are for a run to be resumed."""
    others = (_ORDER, _TOKENS, _CONFIGURATION)
    return {name: entry for name, entry in inputs.items() if not name.startswith(others)}


def saved_model_entry(source: str, base: str | None = None) -> dict[str, Any]:
    """Entry of a saved model, here or in the hub's cache; `base` is that of an adapter."""
    own = weights_digest(folder_of(source))
    if base is None:
        return {"name": short_name(source), "weights": own, "adapter": None}
    return {"name": short_name(source), "weights": weights_digest(folder_of(base)), "adapter": own}


def with_settings(inputs: Inputs, settings: Mapping[str, Any]) -> Inputs:
    """Content of inputs.json: with a digest of each setting, as config.yaml may be edited."""
    return {**inputs, _SETTINGS: _setting_digests(settings)}


def edited(run: Path, settings: Mapping[str, Any]) -> set[str]:
    """Names of the settings that were added, changed or removed since a run began."""
    began, now = _read(run).get(_SETTINGS) or {}, _setting_digests(settings)
    return {key for key in began.keys() | now.keys() if began.get(key) != now.get(key)}


def _setting_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: text_digest(json.dumps(value)) for key, value in settings.items()}


def read_inputs(run: Path) -> Inputs:
    """Inputs that a run has begun with; a HamuError if its file is missing or damaged."""
    return {name: entry for name, entry in _read(run).items() if name != _SETTINGS}


def of_texts(run: Path) -> bool:
    """True if what a run has read are texts, which have tokens; a HamuError as `read_inputs`."""
    return any(entry for name, entry in read_inputs(run).items() if name.startswith(_TOKENS))


def _read(run: Path) -> Inputs:
    wrong = "it holds something else"
    try:
        found: dict[str, Any] = parse_json(run / INPUTS)
        if isinstance(found, dict) and all(isinstance(e, dict | None) for e in found.values()):
            return found
    except (OSError, ValueError) as error:
        wrong = first_line(error)
    raise HamuError(f"{run / INPUTS} does not say what that run has read: {wrong}; start a new run")


def differing(was: Inputs, now: Inputs) -> str | None:
    """Name of the first input known now that had another digest, None without."""
    return next((n for n, one in now.items() if digests_in(one) != digests_in(was.get(n))), None)


def check_same(run: Path, now: Inputs) -> None:
    """Check that a run goes on with what it began with."""
    name = differing(read_inputs(run), now)
    if name is not None:
        began = f"the run in {run} began with another {name} than there is now"
        raise HamuError(f"{began}; put back what it was, or start a new run elsewhere")


def digests_in(entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """An entry without what it is called, which may be a place."""
    names = ("source", "name")
    return entry and {key: value for key, value in entry.items() if key not in names}


def recorded(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, as JSON holds them; of HAMU's own those that have a value.

    Of a class, rows or a filter only the digest is kept, as it may name a person; of files and
    folders only their name; of other options only numbers, as texts may be places or passwords.
    """
    kept = {name: _of(name, value) for name, value in settings.items() if value is not None}
    kept |= {name: value for name, value in others.items() if isinstance(value, bool | int | float)}
    return {name: value for name, value in sorted(kept.items()) if name not in _NO_SETTINGS}


def short_name(source: str) -> str:
    """A file or folder without the folders that it is in; a name of the hub as it is."""
    return source if is_of_hub(source) else Path(source).name or source


def _of(name: str, value: Any) -> Any:
    if name in _PLACES:
        return short_name(value)
    if name in _CHOICES:
        return {"sha256": text_digest(value)}
    if isinstance(value, list | tuple):
        return [_of("", one) for one in value]
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, bool | int | float | str) else str(value)
