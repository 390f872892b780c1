"""Inputs and settings of a run, by digests. Written when the run begins: a resumed one goes on with the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hamu.data import ImageData, TextData, TextRecords
from hamu.data.sources import is_of_hub
from hamu.errors import HamuError, first_line
from hamu.files import INPUTS
from hamu.models.loading import folder_of
from hamu.unlearning.record.digests import (
    order_digest,
    row_digests,
    set_digest,
    text_digest,
    weights_digest,
)

Inputs = Mapping[
    str, Any
]  # "forget set", "original model" and so on: the entry of each, None for what there is not
_SETTINGS = "settings"
_ORDER = "order of the "
_ONLY_NAMES = ("source", "name")
_CHOICES = ("forget_class", "forget_rows", "forget_filter")
_PLACES = (
    "data", "test_data", "data_dir", "forget_data", "model", "base_model", "retain_model", "tokenizer",
)  # fmt: skip
_NO_SETTINGS = ("output_dir", "overwrite", "dry_run")


def set_entries(name: str, data: ImageData | TextData | TextRecords | None) -> Inputs:
    """A set by its digest, and the order of its records, which decides what is in a batch, by another.

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
    """The sets and models alone: what a record has of them."""
    return {name: entry for name, entry in inputs.items() if not name.startswith(_ORDER)}


def digests_of(inputs: Inputs) -> dict[str, Any]:
    """The sets and models that there are, without what they are called, which may be a place."""
    return {
        name: _digests(entry) for name, entry in without_order(inputs).items() if entry is not None
    }


def model_entry(name: str, weights: Path, adapter: Path | None = None) -> dict[str, Any]:
    """A model by its digests.

    Args:
        name: what the user called it.
        weights: the folder of the whole model, or of an adapter's base model.
        adapter: the folder of the adapter.
    """
    return {
        "name": short_name(name),
        "weights": weights_digest(weights),
        "adapter": None if adapter is None else weights_digest(adapter),
    }


def saved_model_entry(source: str, base: str | None) -> dict[str, Any]:
    """A saved model by its digests; see `model_entry`.

    Args:
        source: a folder, or hub:OWNER/NAME in the hub's cache.
        base: the base model if it is an adapter, likewise; None for a whole model.
    """
    return model_entry(
        source, folder_of(base or source), None if base is None else folder_of(source)
    )


def with_settings(inputs: Inputs, settings: Mapping[str, Any]) -> Inputs:
    """What inputs.json holds: the inputs, and a digest of each setting in config.yaml, which may be edited later."""
    return {**inputs, _SETTINGS: {key: _setting_digest(value) for key, value in settings.items()}}


def edited(run: Path, settings: Mapping[str, Any]) -> set[str]:
    """The names of the settings that have another value than when a run began, or had none then, or have none now.

    Raises:
        HamuError: as `read_inputs`.
    """
    began = _read(run).get(_SETTINGS) or {}
    now = {key: _setting_digest(value) for key, value in settings.items()}
    return {key for key in began.keys() | now.keys() if began.get(key) != now.get(key)}


def _setting_digest(value: Any) -> str:
    return text_digest(json.dumps(value))


def read_inputs(run: Path) -> Inputs:
    """What a run has begun with.

    Raises:
        HamuError: if the file is missing or damaged.
    """
    return {name: entry for name, entry in _read(run).items() if name != _SETTINGS}


def _read(run: Path) -> Inputs:
    path = run / INPUTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(
            entry is None or isinstance(entry, dict) for entry in found.values()
        ):
            return found
        wrong = "it holds something else"
    except FileNotFoundError:
        wrong = "it is missing"
    except (OSError, ValueError, RecursionError) as error:
        wrong = first_line(error)
    raise HamuError(f"{path} does not say what that run has read: {wrong}; start a new run")


def differing(was: Inputs, now: Inputs) -> str | None:
    """The first of the inputs known now that had another digest; None if there is none. Names do not count."""
    return next(
        (name for name, entry in now.items() if _digests(entry) != _digests(was.get(name))), None
    )


def check_same(run: Path, now: Inputs) -> None:
    """Check that a run goes on with what it began with.

    Raises:
        HamuError: if not, or if that cannot be told.
    """
    name = differing(read_inputs(run), now)
    if name is not None:
        raise HamuError(
            f"the run in {run} began with another {name} than there is now; put back what it was, or start a new run "
            f"in another --output_dir"
        )


def _digests(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return (
        None
        if entry is None
        else {key: value for key, value in entry.items() if key not in _ONLY_NAMES}
    )


def recorded(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, as JSON holds them.

    Of a class, rows or a filter only the digest is kept (`text_digest`): it may name a person. Of files and folders
    only their name is kept.

    Args:
        settings: HAMU's own options; those without a value are left out.
        others: further options that were given; of these only numbers stay: texts may be places, names or passwords.
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
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple):
        return [_of("", one) for one in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
