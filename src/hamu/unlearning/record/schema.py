"""Checks of JSON against a schema: as much of JSON Schema (draft 2020-12) as schema.json uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def schema() -> dict[str, Any]:
    """The schema of record.json."""
    path = resources.files("hamu.unlearning.record") / "schema.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def violations(value: Any, against: Mapping[str, Any], name: str = "record") -> Iterator[str]:
    """Parts of a JSON value that do not fit a schema, each with its place, which `name` begins."""
    return _violations(value, against, against.get("$defs", {}), name)


def _violations(
    value: Any, part: Mapping[str, Any], shared: Mapping[str, Any], at: str
) -> Iterator[str]:
    while "$ref" in part:  # what stands beside a reference takes the place of what it has
        own = {key: one for key, one in part.items() if key != "$ref"}
        part = {**shared[part["$ref"].removeprefix("#/$defs/")], **own}
    kinds = part.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        yield f"{at} is not of type {' or '.join(kinds)}"
    elif "enum" in part and value not in part["enum"]:
        yield f"{at} is not one of {part['enum']}"
    elif isinstance(value, str) and not re.search(part.get("pattern", ""), value):
        yield f"{at} does not match {part['pattern']}"
    elif isinstance(value, int | float) and value < part.get("minimum", value):
        yield f"{at} is below {part['minimum']}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _violations(one, part.get("items", {}), shared, f"{at}[{number}]")
    elif isinstance(value, dict):
        yield from (f"{at} has no {key}" for key in part.get("required", ()) if key not in value)
        for key, one in value.items():
            others = part.get("additionalProperties", True)
            inner = part.get("properties", {}).get(key, others)
            if inner is False:
                yield f"{at} has the unknown key {key}"
            elif inner is not True:
                yield from _violations(one, inner, shared, f"{at}.{key}")


def _is(value: Any, kind: str) -> bool:
    """JSON's types; a truth value is no number."""
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
