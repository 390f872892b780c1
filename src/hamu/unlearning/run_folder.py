"""The folder of a run. Logs grow line by line, other files appear whole or not at all.

A hidden file marks a folder that HAMU has written; nothing is removed from any other. Of several
processes the main one writes.
"""

import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout

from hamu import files
from hamu.core.distributed import from_main, is_main
from hamu.errors import HamuError, first_line
from hamu.files import CHECKPOINT, CONFIG, EVALUATION, INPUTS, MODEL, RECORD
from hamu.models.storage import save_model

# A run that can be resumed is identified by what it reads, and finished with its last file.
READS = {"train": "training set", "unlearn": "forget set"}
_LAST = {"train": EVALUATION, "unlearn": RECORD}
MARK = ".hamu"
_OTHER = "choose another --output_dir"
_LOCK = ".hamu.lock"  # stays only where its process was killed
_OF_COMPARISONS = (files.COMPARISON, *files.COMPARISON_TABLES, files.COMPARISON_PICTURE)
_OF_RUNS = (
    *(MODEL, files.MERGED, CONFIG, INPUTS, files.STEPS, files.LAYERS, EVALUATION),
    *(RECORD, files.READABLE_RECORD, files.REPORT, files.ANSWERS_PAGE, files.ANSWERS),
    *(files.SUMMARY, files.TRAJECTORIES, files.ASSESSMENT, files.FRONTIER, files.OPEN_UNLEARNING),
    *(files.ATTACK, files.ATTACK_PICTURE, files.ATTACK_FOLDER),
    "tensorboard",
)
# Files that an interrupted write or removal has left, see `hamu.files`.
_NAMES = "|".join(map(re.escape, (*_OF_RUNS, *_OF_COMPARISONS)))
_LEFT = re.compile(rf"\.(({_NAMES})\.([a-z0-9_]{{8}}|removed|tmp)|{CHECKPOINT}[a-z0-9_.]+)")


class RunFolder:
    """An output folder, checked at once and marked when the first file is written.

    As a context it is for one run alone, and leaves no folder behind in which nothing was written.
    `overwrite` replaces an earlier run, once there is a file to put in its place; `resume` goes on
    with it. A HamuError says that the folder is in use, cannot be written, or overlaps one of the
    `sources` that the run reads.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        sources: tuple[str, ...] = (),
    ) -> None:
        self.path, self._overwrite, self._resume = Path(path), overwrite, resume
        self._lock: FileLock | None = None
        self._prepared, self._staged = False, ""  # the name of what is being saved
        resolved = Path(os.path.realpath(path))  # resolve() fails on a link to itself
        for source in sources:
            origin = Path(os.path.realpath(source))
            overlaps = resolved.is_relative_to(origin) or origin.is_relative_to(resolved)
            if origin.exists() and overlaps:
                both = f"the output folder {path} and the source {source} overlap"
                raise HamuError(f"{both}; {_OTHER}")
        self._made = [one for one in (self.path, *self.path.parents) if not os.path.exists(one)]
        if is_main():  # an error later would cost a run
            try:
                self._acquire()
            except OSError as error:
                why, way = f"made: {error.strerror or error}", _OTHER
                if os.path.isdir(self.path):
                    why, way = f"written: {first_line(error)}", f"allow it, or {_OTHER}"
                cannot = f"the output folder {self.path} cannot be {why}; {way}"
                raise HamuError(cannot) from error
            finally:
                self._release()
        self._stale()

    def __enter__(self) -> Self:
        if is_main():  # from the start: what finds another run in its place at its end is lost
            self._acquire()
            for path in self.path.iterdir():
                if self.has(MARK) and _LEFT.fullmatch(path.name):
                    files.remove_whole(path)
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / _LOCK, blocking=False)
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            who = f"another run, or a process that a run left behind, is using {self.path}"
            raise HamuError(f"{who}; wait until it has ended, or {_OTHER}") from None
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK):  # no locks: nothing is kept out
                raise

    def _release(self) -> None:
        """Let others have the folder, and remove what was made for nothing."""
        if self._prepared and [path.name for path in self._files()] == [MARK]:
            (self.path / MARK).unlink()
        self._prepared = False
        if self._lock is not None:
            # while it is held, so that nobody else's goes
            (self.path / _LOCK).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None
        for made in self._made if is_main() else ():
            with suppress(OSError):  # something is in it
                made.rmdir()

    def check_room(self, size: int) -> None:
        """Check that there is room for so many bytes, beside an earlier run."""

        def room() -> float:
            here = next(one for one in (self.path, *self.path.parents) if one.exists())
            disk = shutil.disk_usage(here)
            return disk.free if disk.total else math.inf  # some file systems say nothing

        free = from_main(room)
        if free < size:
            stays = ", while the earlier run stays" if self.replaces else ""
            raise HamuError(
                f"the output folder {self.path} has room for {free / 1e9:.3g} GB, what is saved at "
                f"the end takes {size / 1e9:.3g} GB{stays}; make room, or {_OTHER}"
            )

    def prepare(self) -> Path:
        """Make the folder, and clear an earlier run out of it; refuses one that came first."""
        if not self._prepared and is_main():
            self._acquire()
            stale = self._stale()  # as it is now: another run may have come and gone
            with files.finding_room(f"{self.path} cannot be written"):
                (self.path / MARK).touch()
                # the settings first, as they promise a run to resume
                for path in sorted(stale, key=lambda path: path.name != CONFIG):
                    files.remove_whole(path)
            self._prepared = True
        return self.path

    def _files(self) -> list[Path]:
        found = self.path.iterdir() if self.path.is_dir() else ()
        own = _LOCK, files.STAGED, self._staged
        return sorted(path for path in found if path.name not in own)

    def _stale(self) -> list[Path]:
        """Files to remove: of an earlier run, or of an interrupted write of this one.

        Refuses a folder with others, which must stay.
        """
        found = [path for path in self._files() if path.name != MARK]
        left = [path for path in found if self.has(MARK) and _LEFT.fullmatch(path.name)]
        if self.has(MARK) and [path.name for path in found if path not in left] == [INPUTS]:
            left = found  # of a run that was killed before it wrote its settings, see `begin`
        if self._resume or left == found:
            return left
        in_use = f"the output folder {self.path} is in use: it holds"
        for path in found:
            if path not in left and not (self.has(MARK) and _is_of_a_run(path)):
                why = "which is not of a run; --overwrite only replaces runs, so"
                raise HamuError(f"{in_use} {path.name}, {why} {_OTHER}")
        if not self._overwrite:
            inputs = files.read_json(self.path / INPUTS, self.path) if self.has(INPUTS) else {}
            what = "a run; "
            for command, reads in READS.items():
                if reads in inputs and self.has(CONFIG) and not self.has(_LAST[command]):
                    place = shlex.quote(str(self.path))
                    resume = f"hamu {command} --resume --output_dir {place}"
                    what = f"an unfinished run; go on with it by {resume}, "
            raise HamuError(f"{in_use} {what}{_OTHER}, or replace it with --overwrite")
        return found

    def has(self, name: str) -> bool:
        """True if a file is there; the last file of a run shows that the run came to its end."""
        return (self.path / name).is_file()

    def remove(self, *names: str) -> None:
        """Remove files that are no longer true, as far as they are there."""
        for name in names if is_main() else ():
            (self.prepare() / name).unlink(missing_ok=True)

    def keep_lines(self, name: str, step: int) -> list[str]:
        """Leave of a log only the undamaged lines of steps up to this one; return them."""
        if not is_main() or not self.has(name):
            return []
        kept: list[str] = []
        for line in (self.path / name).read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                kept += [line.decode() + "\n"] if json.loads(line)["step"] <= step else []
        self.write_text(name, "".join(kept))
        return kept

    @property
    def _remedy(self) -> str:
        begun = self.has(INPUTS) and self.has(CONFIG)  # of a run that can be resumed
        return "then go on with --resume" if begun else "and give the same command again"

    @property
    def replaces(self) -> bool:
        """True if an earlier run is there, and is to give way."""
        return self._overwrite and not self._prepared and self.has(MARK)

    def append_line(self, name: str, content: Mapping[str, Any]) -> None:
        """Append one JSON line and flush it, so that the log can be read while it grows."""
        if is_main():
            path = self.prepare() / name
            room = files.finding_room(f"{path} cannot be written", self._remedy)
            with room, open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(content)) + "\n")

    def write_text(self, name: str, text: str, *, private: bool = False) -> Path:
        """Write one file whole; a private one is for its owner alone."""
        target = self.prepare() / name
        if is_main():
            with files.finding_room(f"{target} cannot be written", self._remedy):
                files.write_whole(target, text, private=private)
        return target

    def write_json(self, name: str, content: Any) -> Path:
        """Write a file of strict JSON; see `plain`."""
        return self.write_text(name, json.dumps(files.plain(content), indent=2) + "\n")

    def begin(self, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write a run's inputs and settings; the settings last, as they promise a run to resume."""
        self.write_json(INPUTS, inputs)
        self.write_config(settings)

    def write_config(self, content: Mapping[str, Any]) -> Path:
        """Write the settings of a run as YAML, for --config; a filter may name a person."""
        text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
        return self.write_text(CONFIG, text, private="forget_filter" in content)

    def save_model(
        self,
        model: Any,
        *beside_it: Any,
        name: str = MODEL,
        begin: Callable[[], object] = lambda: None,
    ) -> Path:
        """Save a model, and what belongs to it, by their `save_pretrained`, whole or not at all.

        Functions beside it write one more file into the folder. An earlier run is cleared, and this
        one may `begin`, once the model is written.
        """
        target = self.path / name
        if not is_main():
            save_model(model, self.path)
            begin()
            return target
        failure = f"the model cannot be written into {self.path}"
        is_begun = self._prepared or self._resume  # else the checkpoints are of an earlier run
        again = "then run it anew with --resume" if is_begun else "and give the same command again"
        remedy = f"{again}; --save_strategy steps would keep checkpoints"
        if is_begun and any(self.path.glob(f"{CHECKPOINT}*/{files.MANIFEST}")):
            remedy = "then go on with --resume"
        if name == files.MERGED:
            remedy = "and merge in another run; what else this one leaves is complete"
        self._acquire()
        with files.finding_room(failure, remedy), ExitStack() as stack:
            staging = TemporaryDirectory(dir=self.path, prefix=f".{name}.")
            beside = Path(stack.enter_context(staging), name)
            self._staged = beside.parent.name
            beside.mkdir()
            save_model(model, beside)
            for other in beside_it:
                getattr(other, "save_pretrained", other)(beside)
            for one in (*beside.rglob("*"), beside):
                files.sync(one)
            self.prepare()
            files.replace_folder(beside, target)
            files.sync(self.path)
            begin()
        return target


def _is_of_a_run(path: Path) -> bool:
    """True for a name that runs give; a checkpoint must also have a manifest."""
    is_checkpoint = re.fullmatch(rf"{CHECKPOINT}\d+", path.name)
    return path.name in _OF_RUNS or bool(is_checkpoint and (path / files.MANIFEST).is_file())
