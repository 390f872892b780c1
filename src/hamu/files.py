"""Files that commands read and leave: sources, here or on the Hugging Face hub; names, JSON,
digests, and writing that is whole or not there, beside its place with a dot before the name.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hamu.errors import HamuError, first_line, reading

# The files of a run of unlearning; the record is the last one written.
CONFIG, INPUTS = "config.yaml", "inputs.json"
STEPS, LAYERS, EVALUATION = "steps.jsonl", "layers.jsonl", "evaluation.json"
READABLE_RECORD, RECORD = "record.md", "record.json"
MODEL, MERGED = "model", "merged"  # folders
REPORT, TRAJECTORIES = "report.html", "trajectories.png"
ANSWERS_PAGE, ANSWERS, OPEN_UNLEARNING = "answers.html", "answers.jsonl", "open-unlearning.json"
ASSESSMENT, FRONTIER, SUMMARY = "assess.json", "frontier.png", "summary.json"
ATTACK, ATTACK_PICTURE, ATTACK_FOLDER = "attack.json", "attack.png", "attack"
COMPARISON, COMPARISON_PICTURE = "comparison.json", "comparison.png"
COMPARISON_TABLES = ("comparison.csv", "comparison.md", "comparison.tex")
# The folder of a run is followed by STATE and a step where the run is repeated up to a level.
STATE = "-at-"
# The folder of a step's checkpoint is CHECKPOINT and the step.
CHECKPOINT, MANIFEST, TRAINER_STATE = "checkpoint-", "manifest.json", "trainer_state.json"
STAGED = f".{CHECKPOINT}staged"  # a checkpoint that is being written
_OF_TORCH_SAVE = re.compile("PytorchStreamWriter|inline_container")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HUB = "hub:"  # only a name that begins so may use the network
DIGITS = "digits"  # images that come with scikit-learn
MINIATURE = "miniature"  # texts that come with this package


def is_of_hub(source: str) -> bool:
    """Return True for a data set or model of the Hugging Face hub."""
    return source.startswith(HUB)


def check_is_not_here(name: str, source: str) -> None:
    """Check that a name of the hub is no path here: libraries would read that, into their cache."""
    if Path(name).exists():
        raise HamuError(
            f"{source} names {name}, which is here too and would be read in place of the hub's; "
            f"leave out {HUB} to read it, or go to another folder"
        )


def is_local(source: str) -> bool:
    """Return True for a path: neither bundled, nor of the hub."""
    return source not in (DIGITS, MINIATURE) and not is_of_hub(source)


def located(source: str, data_dir: str | Path | None) -> str:
    """Put a local source into `data_dir`, if that is given."""
    if data_dir is None or not is_local(source):
        return source
    return str(Path(data_dir) / source)


def existing(source: str | Path) -> Path:
    """Path of a local data set; a HamuError if there is none."""
    path = Path(source)
    if not path.exists():
        raise HamuError(
            f"{source} is neither a file nor a folder; check the path (--data_dir sets its "
            f"folder; a run is resumed where it was started) or write hub:OWNER/NAME for a data "
            f"set of the hub"
        )
    return path


def files_of(source: str | Path, split: str, suffixes: Sequence[str]) -> list[Path]:
    """List the files of a local data set: itself, or in a folder those of a split, if any: one, or
    all parquet parts, train-00000-of-00002.parquet and so on, there or in "data" below.
    """
    path = existing(source)
    if not path.is_dir():
        if path.suffix.lower() not in suffixes:
            raise HamuError(
                f"{path} is not a data set that can be read; give texts as .jsonl, .json, .csv or "
                f".parquet, images as .parquet, .npz, .csv or a folder per class"
            )
        return [path]
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        raise HamuError(
            f"{path} was written by save_to_disk, which is not read; write the data set with its "
            f"to_parquet, as train.parquet (and test.parquet) in a folder"
        )
    whole = [file for suffix in suffixes if (file := path / f"{split}{suffix}").is_file()]
    name = f"{split}-?????-of-{'[0-9]' * 5}*.parquet"
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


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by the names in its header, all texts."""
    import pandas

    how: Any = {"header": None, "dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"}
    try:
        cells = pandas.read_csv(path, **how)
    except pandas.errors.EmptyDataError:
        return []
    header, *rows = cells.fillna("").to_numpy().tolist()
    for number, name in enumerate(header, 1):
        first = header.index(name) + 1
        if name and first < number:  # without its name, which may be a record's
            raise HamuError(f"{path}: columns {first} and {number} have the same name; rename one")
    return [dict(zip(header, row, strict=True)) for row in rows]


def load_from_hub(source: str, split: str) -> Any:
    """Load a split of "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG", which "@SPLIT" may follow."""
    import datasets

    name, _, own_split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    check_is_not_here(name, source)
    split, remedy = own_split or split, "; without network, name a local file or folder"
    with reading(f"{source} ({split}) cannot be loaded", remedy):
        return datasets.load_dataset(name, config or None, split=split)


def parse_json(path: Path) -> Any:
    """Content of a JSON file; a ValueError for one that is none."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_json(path: Path, remove: Path | None = None) -> Any:
    """Content of a JSON file; a HamuError, to remove it or `remove`, if it is damaged."""
    try:
        return parse_json(path)
    except ValueError as error:
        raise HamuError(
            f"{path} is damaged: {error}; remove {remove or path} and give the same command again"
        ) from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def finding_room(failure: str, remedy: str = "and give the same command again") -> Iterator[None]:
    """Say what cannot be written, and the way out; torch.save tells of a full disk in words."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OF_TORCH_SAVE.search(str(error)):
            raise
        has_room = isinstance(error, OSError) and error.errno not in _NO_ROOM
        first = "mend that" if has_room else "make room"
        raise HamuError(f"{failure}: {first_line(error)}; {first}, {remedy}") from error


def write_whole(target: Path, text: str, *, private: bool = False) -> None:
    """Write one file into a folder that is there; a private one is for its owner alone."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as staged:
        beside = Path(staged, target.name)
        beside.touch(0o600 if private else 0o666)
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        os.replace(beside, target)


def plain(value: Any) -> Any:
    """A value in strict JSON: lists in place of tuples, null in place of what is not finite."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_folder(beside: Path, target: Path) -> None:
    """Move a folder that was written beside its place into it."""
    if os.path.lexists(target):
        remove_whole(target)
    os.replace(beside, target)


def remove_whole(path: Path) -> None:
    """Remove a file or a folder so that no reader finds a part of it; of a link the link alone."""
    if path.is_symlink() or not path.is_dir():
        return path.unlink(missing_ok=True)
    beside = path
    if not path.name.startswith("."):
        beside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(beside, ignore_errors=True)
        os.replace(path, beside)
    return shutil.rmtree(beside)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
