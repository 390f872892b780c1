"""Packed files: none is unpacked that would fill the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hamu.errors import HamuError


def check_unpacked(path: Path, size: int) -> None:
    """Check that a packed file can be read into memory, where it stands twice while it is taken apart.

    Args:
        path: the file.
        size: its size unpacked, in bytes.

    Raises:
        HamuError: if it takes more than the machine has.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * size > memory:
        raise HamuError(
            f"{path} takes {size / 1e9:.1f} GB unpacked, too much for a machine with {memory / 1e9:.1f} GB of memory; "
            f"give a part of it"
        )


def parquet_table(files: Sequence[Path]) -> Any:
    """Parquet files with the same columns as one pyarrow table.

    Raises:
        HamuError: if they take too much memory.
        Exception: what pyarrow raises if they cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    size = 0
    for path in files:
        about = parquet.read_metadata(path)
        size += sum(
            about.row_group(number).total_byte_size for number in range(about.num_row_groups)
        )
        check_unpacked(path, size)
    return pyarrow.concat_tables([parquet.read_table(path) for path in files])


def text_columns(path: Path) -> list[str]:
    """The names of a parquet file's columns; none if one has bytes, alone or within a struct as images are, or if it
    cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return []
    inner = [field.type for kind in schema.types if pyarrow.types.is_struct(kind) for field in kind]
    has_bytes = any(
        pyarrow.types.is_binary(one) or pyarrow.types.is_large_binary(one)
        for one in [*schema.types, *inner]
    )
    return [] if has_bytes else list(schema.names)
