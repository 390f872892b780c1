"""JSON that an earlier command has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hamu.errors import HamuError


def parse_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ValueError: if it is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, remove: Path | None = None) -> Any:
    """What a file holds that a command has left and would make anew.

    Args:
        path: the file.
        remove: what to remove if it is damaged, so that the same command makes it anew; None for the file itself.

    Raises:
        HamuError: if it is not JSON.
    """
    try:
        return parse_json(path)
    except ValueError as error:
        raise HamuError(
            f"{path} is damaged: {error}; remove {remove or path} and give the same command again"
        ) from error
