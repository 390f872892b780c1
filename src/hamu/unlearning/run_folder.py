"""The folder that a run leaves behind. Logs grow line by line, every other file appears whole or not at all.

Nothing else in the folder is touched. Of several processes the main one writes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import yaml
from filelock import FileLock, Timeout

from hamu import files
from hamu.core.distributed import is_main
from hamu.errors import HamuError, first_line
from hamu.files import CHECKPOINT, CONFIG, EVALUATION, INPUTS, MODEL, RECORD
from hamu.models.saving import save_model

# A run of a command that can be resumed is identified by what it reads, and finished with its last file.
READS = {"train": "training set", "unlearn": "forget set"}
_LAST = {"train": EVALUATION, "unlearn": RECORD}
_OF_COMPARISONS = (files.COMPARISON, *files.COMPARISON_TABLES, files.COMPARISON_PICTURE)
_OF_RUNS = (
    *(MODEL, files.MERGED, CONFIG, INPUTS, files.HARDNESS, files.STEPS, files.LAYERS, EVALUATION),
    *(RECORD, files.READABLE_RECORD, files.REPORT, files.ANSWERS_PAGE, files.ANSWERS),
    *(files.SUMMARY, files.TRAJECTORIES, files.ASSESSMENT, files.FRONTIER),
    *(files.ATTACK, files.ATTACK_PICTURE, files.ATTACK_FOLDER),
    *("runs", "tensorboard"),  # of tensorboard, as transformers names it
)
_LEFT = (f".{CHECKPOINT}", *(f".{name}." for name in (*_OF_RUNS, *_OF_COMPARISONS)))
_LOCK = ".lock"  # stays only where its process was killed
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK)  # file systems without locks: there nothing is kept out
# Files whose content only a command of HAMU gives them: for each, alternatives of the keys that it must have.
_FORMS: dict[str, tuple[set[str], ...]] = {
    INPUTS: tuple({name} for name in READS.values()),
    files.HARDNESS: ({"measured_at", "kappa", "stop_threshold"},),
    EVALUATION: (
        {"retain", "forget"},
        {"before", "after", "trajectory"},
        {"seconds", "train_loss"},
    ),
    RECORD: ({"format"},),
    files.ASSESSMENT: ({"hamu-q", "hamu-u", "verdict"},),
    files.ATTACK: ({"format"},),
    files.SUMMARY: ({"task", "hardness", "methods"},),
}
_FORMATS = {RECORD: "hamu-unlearning-record", files.ATTACK: "hamu-attack"}


class RunFolder:
    """An output folder, checked at once and made when the first file is written.

    As a context it is for one run alone from that file on, and leaves no folder behind in which nothing was written.

    Args:
        path: the folder; it may exist if it is empty.
        overwrite: replace an earlier run that is in it.
        resume: go on with the run that is in it.
        sources: folders and files that the run reads from, which it must not write into.

    Raises:
        HamuError: if the folder is in use, cannot be written, or lies in (or around) a source.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        sources: tuple[str, ...] = (),
    ) -> None:
        self.path = Path(path)
        self._lock: FileLock | None = None
        self._prepared = False
        self._overwrite, self._resume = overwrite, resume
        resolved = self.path.resolve()
        for source in sources:
            origin = Path(source).resolve()
            if origin.exists() and (
                resolved.is_relative_to(origin) or origin.is_relative_to(resolved)
            ):
                raise HamuError(
                    f"the output folder {path} and the source {source} overlap; choose another --output_dir"
                )
        self._check_place(resolved)
        self._absent = [p for p in (self.path, *self.path.parents) if not os.path.exists(p)]
        if is_main():  # an error later would cost a run
            try:
                self._acquire()
            except OSError as error:
                self._cannot_be_made(f"{error.strerror or error}; choose another")
            finally:
                self._release()
        self._stale()

    def _check_place(self, resolved: Path) -> None:
        """Check the place of the folder, and the folders above it."""
        if os.path.exists(self.path) and not self.path.is_dir():
            raise HamuError(f"the output folder {self.path} is a file; choose another --output_dir")
        for above in (self.path, *self.path.parents):
            if os.path.islink(above) and not os.path.exists(above):
                self._cannot_be_made(
                    f"{above} is a link to {os.readlink(above)}, which is not there; make that, or choose another"
                )
        existing = next(p for p in (resolved, *resolved.parents) if os.path.exists(p))
        if not existing.is_dir():
            self._cannot_be_made(f"{existing} is a file; choose another")
        if not os.access(existing, os.W_OK):
            self._cannot_be_made(f"{existing} is not writable; choose another")

    def _cannot_be_made(self, why: str) -> NoReturn:
        raise HamuError(f"the output folder {self.path} cannot be made: {why} --output_dir")

    def _acquire(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / _LOCK, blocking=False)
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            raise HamuError(
                f"another run, or a process that a run left behind, is using {self.path}; wait until it has ended, or "
                f"choose another --output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _release(self) -> None:
        """Let others have the folder, and remove what was made for nothing."""
        self._prepared = False
        if self._lock is not None:
            (self.path / _LOCK).unlink(
                missing_ok=True
            )  # while it is held, so that nobody else's goes
            self._lock.release()
            self._lock = None
        for made in self._absent if is_main() else ():
            if os.path.isdir(made):
                if any(made.iterdir()):
                    return
                made.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def prepare(self) -> Path:
        """Make the folder, and clear an earlier run out of it.

        Raises:
            HamuError: if another run came first.
        """
        if self._prepared or not is_main():
            return self.path
        self._acquire()
        stale = self._stale()  # as it is now: another run may have come and gone
        # first the settings, which promise a run to resume; last the files that show that all of this may go
        for left in sorted(stale, key=lambda path: (path.name != CONFIG, _shows_a_run(path))):
            files.remove_whole(left)
        self._prepared = True
        return self.path

    def _stale(self) -> list[Path]:
        """Files to remove: of an earlier run, or of an interrupted write of this one.

        Raises:
            HamuError: if there are others, which must stay.
        """
        found = list(self.path.iterdir()) if self.path.is_dir() else []
        found = [path for path in found if path.name != _LOCK]
        left = [path for path in found if path.name.startswith(_LEFT)]
        if self._resume or left == found:
            return left
        foreign = sorted(path.name for path in found if not _is_of_a_run(path))
        if not foreign and not _holds_a_run(self.path):
            foreign = sorted(path.name for path in found if path not in left)
        if not self._overwrite:
            raise HamuError(f"the output folder {self.path} {self._use(foreign)}")
        if foreign:
            raise HamuError(
                f"the output folder {self.path} holds {foreign[0]}, which is not of a run; --overwrite only replaces "
                f"runs, so choose another --output_dir"
            )
        return found

    def _use(self, foreign: list[str]) -> str:
        """Use of the folder, and the way out."""
        if foreign:
            return f"is in use: it holds {foreign[0]}, which is not of a run; choose another --output_dir"
        other = "choose another --output_dir, or replace it with --overwrite"
        inputs = _mapping(self.path / INPUTS)
        command = next((name for name, reads in READS.items() if reads in inputs), None)
        if command and self.has(CONFIG) and not self.has(_LAST[command]):
            return f"holds an interrupted run; go on with it by hamu {command} --resume --output_dir {self.path}, {other}"
        if is_finished(self.path):
            return f"holds a finished run; {other}"
        return f"holds what is left of a run that cannot go on; {other}"

    def has(self, name: str) -> bool:
        """True if a file is there; the last file of a run shows that the run came to its end."""
        return (self.path / name).is_file()

    def remove(self, *names: str) -> None:
        """Remove files that are no longer true, as far as they are there."""
        for name in names if is_main() else ():
            (self.prepare() / name).unlink(missing_ok=True)

    def keep_lines(self, name: str, belongs: Callable[[dict[str, Any]], bool]) -> None:
        """Leave of a log only the whole lines that belong to a run that is resumed.

        Raises:
            HamuError: if there is a line that no run has written.
        """
        file = self.path / name
        if not is_main() or not file.is_file():
            return
        kept = []
        lines = file.read_bytes().split(b"\n")[:-1]  # the last was broken off, or is ""
        for number, line in enumerate(lines, start=1):
            try:
                kept += [line.decode() + "\n"] if belongs(json.loads(line)) else []
            except (ValueError, TypeError, KeyError, RecursionError):
                raise HamuError(
                    f"line {number} of {file} is not of a step; take it out, or start a new run"
                ) from None
        self.write_text(name, "".join(kept))

    def count_lines(self, name: str) -> int:
        """Number of lines of a log, 0 where there is none."""
        if not self.has(name):
            return 0
        with open(self.path / name, "rb") as file:
            return sum(1 for _ in file)

    def write_text(self, name: str, text: str, *, private: bool = False) -> Path:
        """Write one file whole; a private one is for its owner alone."""
        target = self.prepare() / name
        if is_main():
            files.write_whole(target, text, private=private)
        return target

    def write_json(self, name: str, content: Any) -> Path:
        """Write a JSON file."""
        return self.write_text(name, json.dumps(content, indent=2, allow_nan=True) + "\n")

    def begin(self, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write a run's inputs and settings; the settings last, as they promise a run to resume."""
        self.write_json(INPUTS, inputs)
        self.write_config(settings)

    def write_config(self, content: Mapping[str, Any]) -> Path:
        """Write the settings of a run as YAML, in a form that --config reads."""
        text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
        names_a_person = "forget_filter" in content
        return self.write_text(CONFIG, text, private=names_a_person)

    def save_model(self, model: Any, *beside_it: Any, name: str = MODEL) -> Path:
        """Save a model, and what belongs to it, with their own `save_pretrained`, whole or not at all.

        Args:
            model: the model.
            beside_it: tokenizers, processors, and functions of the folder that write one more file.
            name: of the folder.

        Raises:
            HamuError: if it cannot be written.
        """
        target = self.prepare() / name
        if not is_main():
            save_model(model, self.path)
            return target
        beside = Path(tempfile.mkdtemp(dir=self.path, prefix=f".{name}."))
        try:
            save_model(model, beside)
            for other in beside_it:
                getattr(other, "save_pretrained", other)(beside)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if files.is_of_disk(error):
                raise HamuError(
                    f"the model cannot be written into {self.path}: {first_line(error)}; where it is full "
                    f"make room, then go on with --resume"
                ) from error
            raise
        files.replace_folder(beside, target)
        return target

    def append_line(self, name: str, content: Mapping[str, Any]) -> None:
        """Append one JSON line and flush it, so that the log can be read while it grows."""
        if is_main():
            with open(self.prepare() / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(content)) + "\n")


def is_finished(folder: Path) -> bool:
    """True if a run, or another command with a folder of its own, came to its end in a folder."""
    if READS["unlearn"] in _mapping(folder / INPUTS):
        return _shows_a_run(folder / RECORD)
    alone = (EVALUATION, files.ASSESSMENT, files.ATTACK, files.SUMMARY)
    return any(_shows_a_run(folder / name) for name in alone)


def holds_a_comparison(folder: Path) -> bool:
    """True if a folder is that of `hamu compare`, whose own file may be damaged: only times are lost with it."""
    if not (folder / files.COMPARISON).is_file():
        return False
    found = _mapping(folder / files.COMPARISON)
    if isinstance(found.get("runs"), list) and isinstance(found.get("seconds"), dict):
        return True
    return any(_holds_a_run(path.parent) for path in folder.glob(f"*/{CONFIG}"))


def _is_of_a_run(path: Path) -> bool:
    """True for a name that runs give; a checkpoint must also have a manifest."""
    if path.name.startswith(CHECKPOINT):
        entries = _mapping(path / files.MANIFEST).values()
        sealed = all(isinstance(entry, dict) and "sha256" in entry for entry in entries)
        return path.name.removeprefix(CHECKPOINT).isdecimal() and bool(entries) and sealed
    return path.name in _OF_RUNS or path.name.startswith(_LEFT)


def _shows_a_run(path: Path) -> bool:
    """True if a file has a form that only a run gives it; others have files of these names too."""
    found = _mapping(path)
    fits = any(found.keys() >= keys for keys in _FORMS.get(path.name, ()))
    return fits and found.get("format") == _FORMATS.get(path.name, found.get("format"))


def _holds_a_run(folder: Path) -> bool:
    checkpoints = (path for path in folder.glob(f"{CHECKPOINT}*") if _is_of_a_run(path))
    return any(_shows_a_run(folder / name) for name in _FORMS) or any(checkpoints)


def _mapping(path: Path) -> dict[str, Any]:
    """Content of a JSON file, {} where that is no mapping."""
    try:
        found = files.parse_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
