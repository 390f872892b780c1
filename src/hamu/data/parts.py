"""A split in several parquet files, as data sets of the Hugging Face hub have it: data/train-00000-of-00002.parquet."""

from __future__ import annotations

import re
from pathlib import Path

from hamu.errors import HamuError


def parts_of(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder, or in the folder "data" in it, in order; none if it is not there in parts.

    Raises:
        HamuError: if there are not as many as their names say.
    """
    name = re.compile(rf"{re.escape(split)}-(\d+)-of-(\d+)(-\w+)?\.parquet")
    for place in (folder, folder / "data"):
        files = sorted(place.iterdir()) if place.is_dir() else []
        found = [(file, match) for file in files if (match := name.fullmatch(file.name))]
        if found:
            most = max(int(match[2]) for _, match in found)
            if len(found) != most or len({int(match[1]) for _, match in found}) != most:
                raise HamuError(
                    f"{place} has {len(found)} files of {split}, by their names there are {most}; get those that are "
                    f"missing, or leave one set of them"
                )
            return [file for file, _ in found]
    return []
