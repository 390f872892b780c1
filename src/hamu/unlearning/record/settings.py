"""Which settings of a run the record holds, and in which form: none may say who or what was forgotten, or where."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hamu.data.sources import is_of_hub
from hamu.unlearning.record.digests import text_digest

_CHOICES = ("forget_class", "forget_rows", "forget_filter")
_PLACES = (
    "data", "test_data", "data_dir", "forget_data", "model", "base_model", "retain_model", "tokenizer",
)  # fmt: skip
_NO_SETTINGS = ("output_dir", "overwrite", "dry_run")


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
