"""Sources of data and models: bundled, local files and folders, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hamu.errors import HamuError, first_line

HUB = "hub:"  # only a name that begins so may use the network
DIGITS = "digits"  # images that come with scikit-learn
MINIATURE = "miniature"  # texts that come with this package


def is_of_hub(source: str) -> bool:
    """Return whether it is a data set or model of the Hugging Face hub."""
    return source.startswith(HUB)


def is_local(source: str, bundled: str) -> bool:
    """Return whether it is a path; `bundled` is `DIGITS` for images, `MINIATURE` for texts."""
    return source != bundled and not is_of_hub(source)


def located(source: str, data_dir: str | Path | None, bundled: str) -> str:
    """Put a local source into `data_dir`, if that is given; `bundled` as in `is_local`."""
    if data_dir is None or not is_local(source, bundled):
        return source
    return str(Path(data_dir) / source)


def existing(source: str) -> Path:
    """Return the path of a local data set.

    Raises:
        HamuError: if nothing is there.
    """
    path = Path(source)
    if not path.exists():
        raise HamuError(
            f"{source} is neither a file nor a folder; check the path (--data_dir sets its folder)"
            f", or write hub:OWNER/NAME for a data set of the Hugging Face hub"
        )
    return path


def load_from_hub(source: str, split: str) -> Any:
    """Load a split of a data set of the hub with `datasets`.

    Args:
        source: "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG", either with "@SPLIT" at its end.
        split: taken where the source names none.

    Raises:
        HamuError: if that fails: offline, unknown name, no such split.
    """
    import datasets

    name, _, own_split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    split = own_split or split
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub's libraries raise many kinds; the cause is kept
        raise HamuError(
            f"{source} ({split}) cannot be loaded: {first_line(error)}; without network, name a "
            f"local file or folder"
        ) from error


def parts_of(folder: Path, split: str) -> list[Path]:
    """List the parquet files of a split in parts, in order, as the hub names them.

    They are train-00000-of-00002.parquet and so on, in the folder or in "data" below it; an empty
    list if there are none.

    Raises:
        HamuError: if there are not as many as their names say.
    """
    name = re.compile(rf"{re.escape(split)}-(\d+)-of-(\d+)(-\w+)?\.parquet")
    for place in (folder, folder / "data"):
        files = sorted(place.iterdir()) if place.is_dir() else []
        found = {file: match for file in files if (match := name.fullmatch(file.name))}
        if found:
            most = max(int(match[2]) for match in found.values())
            if len(found) != most or len({int(match[1]) for match in found.values()}) != most:
                raise HamuError(
                    f"{place} has {len(found)} files of {split}, by their names there are {most}; "
                    f"get those that are missing, or leave one set of them"
                )
            return list(found)
    return []


def parquet_table(files: Sequence[Path]) -> Any:
    """Read parquet files with the same columns as one pyarrow table.

    Raises:
        HamuError: if they would fill the memory.
        Exception: what pyarrow raises if they cannot be read.
    """
    from pyarrow import concat_tables, parquet

    size = 0
    for path in files:
        about = parquet.read_metadata(path)
        size += sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
        check_unpacked(path, size)
    return concat_tables([parquet.read_table(path) for path in files])


def check_unpacked(path: Path, size: int) -> None:
    """Reject a compressed file whose `size` bytes, which stand twice in memory, do not fit.

    Raises:
        HamuError: if twice its size is more than the machine's memory.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * size > memory:
        raise HamuError(
            f"{path} takes {size / 1e9:.1f} GB unpacked, too much for a machine with "
            f"{memory / 1e9:.1f} GB of memory; give a part of it"
        )
