"""The record for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_SETS = ("retain", "forget", "test")


def markdown(record: Mapping[str, Any]) -> str:
    """record.md, from what record.json holds."""
    environment = Environment(
        loader=PackageLoader("hamu.unlearning.record", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "interval": _interval, "setting": _setting}
    sets = [name for name in _SETS if name in record["figures"]["after"]["sets"]]
    return environment.get_template("record.md.j2").render(record, sets=sets)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(ends: list[float | None] | None) -> str:
    return "" if ends is None or None in ends else f" [{ends[0]:.4g}, {ends[1]:.4g}]"


def _setting(value: Any) -> str:
    """As JSON, in one line of a table."""
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")
