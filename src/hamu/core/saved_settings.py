"""Settings as a checkpoint holds them, and whether a resumed run has the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hamu.errors import HamuError


def check_same_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compare the settings now with those of a saved state.

    Raises:
        HamuError: if any differ; the message names them.
    """
    differing = sorted(
        key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
    )
    if differing:
        changes = ", ".join(
            f"{key} {theirs.get(key)!r} (now {ours.get(key)!r})" for key in differing
        )
        raise HamuError(f"the state was saved with other settings: {changes}; resume with the same")


def plain_settings(value: Any) -> Any:
    """As it comes back from a file of JSON; what that cannot hold as its name, or in words without an address."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain_settings(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_settings(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_settings(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def short_digest(value: object) -> str:
    """Tells values apart by what they print, in 8 letters."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
