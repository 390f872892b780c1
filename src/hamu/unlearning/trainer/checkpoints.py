"""Checkpoints on disk: each is whole or not there.

    checkpoint-12/
        config.json model.safetensors ...   from `save_pretrained`, so that it opens as a model
        rest.safetensors                    tensors that those files lack, if any
        run.json start.pt ...               state of the run beyond model and optimizer
        optimizer.pt scheduler.pt ...       tensors and plain values, read with weights_only
        trainer_state.json
        manifest.json                       size and SHA-256 of every file

transformers writes into a staging folder; this module adds the manifest and renames. Several
processes, sharded or not, write what one writes, so a run resumes in any number and any layout.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hamu.core.distributed import barrier, from_main, is_main
from hamu.errors import HamuError, first_line
from hamu.files import (
    CHECKPOINT,
    MANIFEST,
    file_digest,
    is_of_disk,
    remove_whole,
    replace_folder,
    sync,
)


class Checkpoints:
    """Checkpoints in the folder of one run."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._written = 0  # step of the last one

    def path(self, step: int) -> Path:
        """Place of the checkpoint of a step."""
        return self._folder / f"{CHECKPOINT}{step}"

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Folder to write into, the checkpoint of this step once all processes have written."""
        staged: Path | None = None
        try:
            staged = Path(from_main(self._stage))
            inside = staged / f"{CHECKPOINT}{step}"  # the name that transformers gives it
            inside.mkdir(exist_ok=True)
            yield inside
            barrier()
            if is_main():
                seal(inside)
                replace_folder(inside, self.path(step))
                sync(self._folder)
        except BaseException as error:
            if is_of_disk(error):
                raise HamuError(
                    f"the checkpoint of step {step} cannot be written into {self._folder}: "
                    f"{first_line(error)}; make room, and go on from the one before with --resume"
                ) from error
            raise
        finally:
            if is_main() and staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
        self._written = step
        barrier()

    def _stage(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f".{CHECKPOINT}*"):  # of an interrupted write
            shutil.rmtree(left)
        return tempfile.mkdtemp(dir=self._folder, prefix=f".{CHECKPOINT}")

    def limit(self, most: int | None, best: str | None) -> None:
        """Remove the oldest beyond `save_total_limit`; the newest and the best stay, and count."""
        if not most or most < 0 or not is_main():
            return
        ours = [(step <= self._written, step, path) for step, path in self._found(ours=True)]
        names = [path.name for *_, path in sorted(ours)]  # first those of an earlier run
        protected = {names[-1], Path(best or "").name}
        removable = [name for name in names if name not in protected]
        for name in removable[: max(0, len(names) - most)]:
            remove_whole(self._folder / name)

    def newest(self) -> tuple[Path | None, list[str]]:
        """Newest whole checkpoint, None if there is none; and the damage of each newer one."""

        def find() -> tuple[Path | None, list[str]]:
            damages: list[str] = []
            for _, path in reversed(self._found()):
                damage = damage_of(path)
                if damage is None:
                    return path, damages
                damages.append(f"{path} is damaged: {damage}")
            return None, damages

        return from_main(find)

    def remove_after(self, path: Path | None) -> None:
        """Remove the checkpoints newer than this one, without one all; other programs' stay."""
        step = -1 if path is None else int(path.name.removeprefix(CHECKPOINT))
        for newer, found in self._found(ours=True):
            if newer > step:
                remove_whole(found)

    def _found(self, *, ours: bool = False) -> list[tuple[int, Path]]:
        """Step and folder of each, oldest first; of other programs have files and no manifest."""
        return sorted(
            (int(step), path)
            for path in self._folder.glob(f"{CHECKPOINT}*")
            if path.is_dir() and (step := path.name.removeprefix(CHECKPOINT)).isdecimal()
            if not ours or (path / MANIFEST).is_file() or not any(path.iterdir())
        )


def damage_of(path: Path) -> str | None:
    """Damage of a checkpoint, None if it is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        damaged = [name for name, entry in manifest.items() if entry != _entry(path / name)]
    except (ValueError, AttributeError, RecursionError):
        return f"its {MANIFEST} cannot be read"
    except OSError as error:
        return f"{Path(error.filename).name} is missing"
    return f"{damaged[0]} is not as it was written" if damaged else None


def seal(folder: Path) -> None:
    """Write the manifest, and flush all files to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {str(path.relative_to(folder)): _entry(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        sync(path)


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_digest(path)}
