"""The folder that a run leaves behind. Logs grow line by line, every other file appears whole or not at all.

Nothing else is touched. Of several processes the main one writes.

config.yaml  inputs.json  hardness.json  steps.jsonl  layers.jsonl  model/  evaluation.json  record.json  record.md
report.html
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import yaml

from hamu.core.distributed import is_main
from hamu.disk import is_of_disk
from hamu.errors import HamuError, first_line
from hamu.folder_lock import lock
from hamu.models.saving import save_model
from hamu.unlearning.run_files import (
    CONFIG,
    INPUTS,
    MODEL,
    holds_a_run,
    interrupted_command,
    is_finished,
    is_left,
    is_of_a_run,
    shows_a_run,
)
from hamu.whole_files import remove_whole, replace_folder, write_whole


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
        self.lock: int | None = None  # a descriptor, see `hamu.folder_lock`
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
        if is_main():
            self._try()
        self._stale()

    def _check_place(self, resolved: Path) -> None:
        """Check what is at the place of the folder, and above it."""
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

    def _try(self) -> None:
        """Make the folder, see that nobody else uses it, and leave all as it was: an error later would cost a run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            os.close(lock(self.path))
        except OSError as error:
            self._cannot_be_made(f"{error.strerror or error}; choose another")
        finally:
            self._remove_made()

    def _cannot_be_made(self, why: str) -> NoReturn:
        raise HamuError(f"the output folder {self.path} cannot be made: {why} --output_dir")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        if is_main():
            self._remove_made()

    def _remove_made(self) -> None:
        """Remove the folders that were not there before and are empty."""
        for made in self._absent:
            if os.path.isdir(made):
                if any(made.iterdir()):
                    return
                made.rmdir()

    def prepare(self) -> Path:
        """Make the folder, and clear an earlier run out of it.

        Raises:
            HamuError: if another run came first.
        """
        if self.lock is not None or not is_main():
            return self.path
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.path)
        stale = self._stale()  # as it is now: another run may have come and gone
        # first what says that there is one to resume; last what shows that all of this may go
        for left in sorted(stale, key=lambda path: (path.name != CONFIG, shows_a_run(path))):
            remove_whole(left)
        return self.path

    def _stale(self) -> list[Path]:
        """What an earlier run, or an interrupted write of this one, has left and is to go.

        Raises:
            HamuError: if there is what must not go.
        """
        found = list(self.path.iterdir()) if self.path.is_dir() else []
        left = [path for path in found if is_left(path)]
        if self._resume or left == found:
            return left
        foreign = sorted(path.name for path in found if not is_of_a_run(path))
        if not foreign and not holds_a_run(self.path):
            foreign = sorted(path.name for path in found if path not in left)
        if not self._overwrite:
            raise HamuError(f"the output folder {self.path} {self._use(foreign)}")
        if foreign:
            raise HamuError(
                f"the output folder {self.path} holds {foreign[0]}, which is not of a run; --overwrite only replaces "
                f"runs, so choose another --output_dir"
            )
        return found

    def _use(self, foreign: Sequence[str]) -> str:
        """Use of the folder, and the way out."""
        if foreign:
            return f"is in use: it holds {foreign[0]}, which is not of a run; choose another --output_dir"
        other = "choose another --output_dir, or replace it with --overwrite"
        command = interrupted_command(self.path)
        if command is not None:
            return f"holds an interrupted run; go on with it by hamu {command} --resume --output_dir {self.path}, {other}"
        if is_finished(self.path):
            return f"holds a finished run; {other}"
        return f"holds what is left of a run that cannot go on; {other}"

    def has(self, name: str) -> bool:
        """Whether a file is there; the last that a run writes tells that it has come to its end."""
        return (self.path / name).is_file()

    def remove(self, *names: str) -> None:
        """Remove files that are no longer true, those of them that are there."""
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
        for number, line in enumerate(
            file.read_bytes().split(b"\n")[:-1], start=1
        ):  # the last was broken off, or is ""
            try:
                kept += [line.decode() + "\n"] if belongs(json.loads(line)) else []
            except (ValueError, TypeError, KeyError, RecursionError):
                raise HamuError(
                    f"line {number} of {file} is not of a step; take it out, or start a new run"
                ) from None
        self.write_text(name, "".join(kept))

    def count_lines(self, name: str) -> int:
        """How many lines a log has, 0 where there is none."""
        if not self.has(name):
            return 0
        with open(self.path / name, "rb") as file:
            return sum(1 for _ in file)

    def write_text(self, name: str, text: str, *, private: bool = False) -> Path:
        """Write one file whole: beside its place first, then renamed; a private one is for its owner alone."""
        target = self.prepare() / name
        if is_main():
            write_whole(target, text, private=private)
        return target

    def write_json(self, name: str, content: Any) -> Path:
        """Write a JSON file."""
        return self.write_text(name, json.dumps(content, indent=2, allow_nan=True) + "\n")

    def begin(self, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write what a run was asked and what it reads; the settings last, as they say that there is one to resume."""
        self.write_json(INPUTS, inputs)
        self.write_config(settings)

    def write_config(self, content: Mapping[str, Any]) -> Path:
        """Write the settings of a run as YAML, in a form that --config reads."""
        text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
        return self.write_text(
            CONFIG, text, private="forget_filter" in content
        )  # it may name a person

    def save_model(self, model: Any, *beside_it: Any, name: str = MODEL) -> Path:
        """Save a model, and what belongs to it, with their own `save_pretrained`, whole or not at all.

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
                other.save_pretrained(beside)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if is_of_disk(error):
                raise HamuError(
                    f"the model cannot be written into {self.path}: {first_line(error)}; where it is full "
                    f"make room, then go on with --resume"
                ) from error
            raise
        replace_folder(beside, target)
        return target

    def append_line(self, name: str, content: Mapping[str, Any]) -> None:
        """Append one JSON line and flush it, so that the log can be read while it grows."""
        if not is_main():
            return
        with open(self.prepare() / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(content)) + "\n")
