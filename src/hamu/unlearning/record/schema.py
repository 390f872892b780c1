"""Checking a record against schema.json: as much of JSON Schema (draft 2020-12) as that file uses, and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from hamu.errors import HamuError

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_ANNOTATIONS = {"$schema", "$id", "$defs", "title", "description"}
_KEYWORDS = {
    "$ref", "type", "enum", "required", "properties", "additionalProperties", "items", "pattern", "minimum",
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The schema of record.json."""
    found: dict[str, Any] = json.loads(
        (resources.files("hamu.unlearning.record") / "schema.json").read_text("utf-8")
    )
    return found


def violations(value: Any, against: Mapping[str, Any], name: str = "record") -> Iterator[str]:
    """What in a JSON value does not fit a schema, with the place; nothing if all does.

    Args:
        value: the value.
        against: the schema.
        name: of the value, with which its places begin.

    Raises:
        HamuError: if the schema has a keyword that is not known here, or a reference to elsewhere.
    """
    return _violations(value, against, against, name)


def _violations(
    value: Any, part: Mapping[str, Any], whole: Mapping[str, Any], at: str
) -> Iterator[str]:
    unknown = part.keys() - _KEYWORDS - _ANNOTATIONS
    if unknown:
        raise HamuError(f"the schema has the keyword {min(unknown)!r}, which is not supported")
    if "$ref" in part:
        yield from _violations(value, _referred(part["$ref"], whole), whole, at)
    types = part.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(_is(value, name) for name in types):
        yield f"{at} is not of type {' or '.join(types)}"
        return
    if "enum" in part and value not in part["enum"]:
        yield f"{at} is not one of {part['enum']}"
    if isinstance(value, str) and not re.search(part.get("pattern", ""), value):
        yield f"{at} does not match {part['pattern']}"
    if _is(value, "number") and value < part.get("minimum", value):
        yield f"{at} is below {part['minimum']}"
    if isinstance(value, list) and "items" in part:
        for number, one in enumerate(value):
            yield from _violations(one, part["items"], whole, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from _of_object(value, part, whole, at)


def _of_object(
    value: dict[str, Any], part: Mapping[str, Any], whole: Mapping[str, Any], at: str
) -> Iterator[str]:
    properties, others = part.get("properties", {}), part.get("additionalProperties", True)
    for name in part.get("required", ()):
        if name not in value:
            yield f"{at} has no {name}"
    for name, one in value.items():
        if name in properties:
            yield from _violations(one, properties[name], whole, f"{at}.{name}")
        elif others is False:
            yield f"{at} has the unknown key {name}"
        elif others is not True:
            yield from _violations(one, others, whole, f"{at}.{name}")


def _is(value: Any, name: str) -> bool:
    """JSON's types; a truth value is no number."""
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _referred(reference: str, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    name = reference.removeprefix("#/$defs/")
    if name not in whole.get("$defs", {}):
        raise HamuError(f"the schema refers to {reference}, which is not in its $defs")
    found: Mapping[str, Any] = whole["$defs"][name]
    return found
