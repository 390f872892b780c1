"""Errors of writing files, by whichever library."""

from __future__ import annotations

from safetensors import SafetensorError


def is_of_disk(error: BaseException) -> bool:
    """Whether a file could not be written; torch.save says so in words only."""
    return isinstance(error, OSError | SafetensorError) or (
        isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error)
    )
