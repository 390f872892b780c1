"""Why a run left no record, in a word; why a finished one ended is what it says itself, see `hamu.ends`."""

from __future__ import annotations

FAILED, _INTERRUPTED = "failed", "interrupted"


def failed_by(reason: str) -> str:
    """Whether a run failed, or was interrupted."""
    return _INTERRUPTED if reason.startswith(_INTERRUPTED) else FAILED
