"""Sources of data and models: bundled, local files and folders, or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hamu.errors import HamuError, first_line

HUB = "hub:"  # only a name that begins so may use the network
DIGITS = "digits"  # images that come with scikit-learn
MINIATURE = "miniature"  # texts that come with this package


@contextmanager
def reading(failure: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception of a library into a HamuError: failure, its first line, remedy."""
    try:
        yield
    except HamuError:
        raise
    except Exception as error:  # libraries raise many kinds; the cause is kept
        raise HamuError(f"{failure}: {first_line(error)}{remedy}") from error


def is_of_hub(source: str) -> bool:
    """Return True for a data set or model of the Hugging Face hub."""
    return source.startswith(HUB)


def is_local(source: str, bundled: str) -> bool:
    """Return True for a path; `bundled` is `DIGITS` for images, `MINIATURE` for texts."""
    return source != bundled and not is_of_hub(source)


def located(source: str, data_dir: str | Path | None, bundled: str) -> str:
    """Put a local source into `data_dir`, if that is given; `bundled` as in `is_local`."""
    if data_dir is None or not is_local(source, bundled):
        return source
    return str(Path(data_dir) / source)


def files_of(source: str | Path, split: str, suffixes: Sequence[str]) -> list[Path]:
    """List the files of a local data set: itself, or in a folder those of a split, if any.

    A split is one file or all its parquet parts, train-00000-of-00002.parquet and so on, in the
    folder or in "data" below.
    """
    path = Path(source)
    if not path.is_dir():
        if not path.exists():
            raise HamuError(
                f"{source} is neither a file nor a folder; check the path (--data_dir sets its "
                f"folder) or write hub:OWNER/NAME for a data set of the hub"
            )
        if path.suffix.lower() not in suffixes:
            raise HamuError(
                f"{path} is not a data set that can be read; give texts as .jsonl, .json, .csv or "
                f".parquet, images as .parquet, .npz or a folder per class"
            )
        return [path]
    whole = [file for suffix in suffixes if (file := path / f"{split}{suffix}").is_file()]
    name = f"{split}-?????-of-?????*.parquet"
    parts = sorted(path.glob(name)) or sorted(path.glob(f"data/{name}"))
    if whole or not parts:
        return whole[:1]
    number = int(parts[0].name.partition("-of-")[2][:5])
    if len(parts) != number:
        raise HamuError(
            f"{parts[0].parent} has {len(parts)} files of {split}, by their names there are "
            f"{number}; get all of one set of them"
        )
    return parts


def parquet_table(files: Sequence[Path]) -> Any:
    """Read parquet files with the same columns as one pyarrow table, without a cache."""
    import pyarrow
    from pyarrow import parquet

    with reading(f"{files[0]} cannot be read as parquet"):
        return pyarrow.concat_tables([parquet.read_table(file) for file in files])


def load_from_hub(source: str, split: str) -> Any:
    """Load a split of "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG", which "@SPLIT" may follow."""
    import datasets

    name, _, own_split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    split = own_split or split
    remedy = "; without network, name a local file or folder"
    with reading(f"{source} ({split}) cannot be loaded", remedy):
        return datasets.load_dataset(name, config or None, split=split)
