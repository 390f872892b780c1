"""JSON that an earlier command has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hamu.errors import HamuError


def read_json(path: Path, remove: Path | None = None) -> Any:
    """What a file holds.

    Args:
        path: the file.
        remove: what to remove if it is damaged, so that the same command makes it anew; None for the file itself.

    Raises:
        HamuError: if it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HamuError(
            f"{path} is damaged: {error}; remove {remove or path} and give the same command again"
        ) from error
