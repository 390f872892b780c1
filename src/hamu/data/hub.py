"""Data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hamu.errors import HamuError, first_line


@contextmanager
def loading(source: str, split: str) -> Iterator[None]:
    """For whatever loads a split of a data set.

    Raises:
        HamuError: if that fails; it names source and split.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # offline, unknown name, no such split: the hub's own words say which
        raise HamuError(
            f"{source} ({split}) cannot be loaded: {first_line(error)}; without network, name a local file or folder"
        ) from error
