"""What a run reads, by its digests. It is written when the run begins: one that is resumed goes on with the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hamu.data import ImageData, TextData, TextRecords
from hamu.errors import HamuError, first_line
from hamu.models.loading import folder_of
from hamu.record.digests import row_digests, set_digest, weights_digest
from hamu.record.settings import short_name

INPUTS = "inputs.json"
Inputs = Mapping[str, Any]  # "forget set", "original model" and so on: the entry of each, None for what there is not
_ONLY_NAMES = ("source", "name")


def set_entry(data: ImageData | TextData | TextRecords) -> dict[str, Any]:
    """A set by its digest."""
    source = data.texts.source if isinstance(data, TextData) else data.source
    return {"source": short_name(source), "records": len(data), "sha256": set_digest(row_digests(data))}


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
    return model_entry(source, folder_of(base or source), None if base is None else folder_of(source))


def read_inputs(run: Path) -> Inputs:
    """What a run has begun with.

    Raises:
        HamuError: if the file is missing or damaged.
    """
    path = run / INPUTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(entry is None or isinstance(entry, dict) for entry in found.values()):
            return found
        wrong = "it holds something else"
    except FileNotFoundError:
        wrong = "it is missing"
    except (OSError, ValueError, RecursionError) as error:
        wrong = first_line(error)
    raise HamuError(f"{path} does not say what that run has read: {wrong}; start a new run")


def differing(was: Inputs, now: Inputs) -> str | None:
    """The first of the inputs known now that had another digest; None if there is none. Names do not count."""
    return next((name for name, entry in now.items() if _digests(entry) != _digests(was.get(name))), None)


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
    return None if entry is None else {key: value for key, value in entry.items() if key not in _ONLY_NAMES}
