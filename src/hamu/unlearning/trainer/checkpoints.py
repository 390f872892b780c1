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
        ours = [(step, path) for step, path in self._found() if _is_ours(path)]
        ours.sort(key=lambda found: found[0] <= self._written)  # first those of an earlier run
        protected = {ours[-1][1].name, *([Path(best).name] if best else [])}
        removable = [path for _, path in ours if path.name not in protected]
        for path in removable[: max(0, len(ours) - most)]:
            remove_whole(path)

    def newest(self) -> tuple[Path | None, list[str]]:
        """Newest whole checkpoint, None if there is none; and the damage of each newer one."""

        def find() -> tuple[str | None, list[str]]:
            damages: list[str] = []
            for _, path in reversed(self._found()):
                damage = damage_of(path)
                if damage is None:
                    return str(path), damages
                damages.append(f"{path} is damaged: {damage}")
            return None, damages

        path, damages = from_main(find)
        return (None if path is None else Path(path)), damages

    def remove_after(self, path: Path | None) -> None:
        """Remove the checkpoints newer than this one, without one all; other programs' stay."""
        for _, newer in reversed(self._found()):
            if newer == path:
                return
            if _is_ours(newer):
                remove_whole(newer)

    def _found(self) -> list[tuple[int, Path]]:
        """Step and folder of each, oldest first."""
        folders = [path for path in self._folder.glob(f"{CHECKPOINT}*") if path.is_dir()]
        named = [(path.name.removeprefix(CHECKPOINT), path) for path in folders]
        return sorted((int(step), path) for step, path in named if step.isdecimal())


def _is_ours(path: Path) -> bool:
    """True for checkpoints of this module, damaged or not: others have files and no manifest."""
    return (path / MANIFEST).is_file() or not any(path.iterdir())


def damage_of(path: Path) -> str | None:
    """Damage of a checkpoint, None if it is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        listed = [(name, entry["size"], entry["sha256"]) for name, entry in manifest.items()]
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return f"its {MANIFEST} cannot be read"
    for name, size, digest in listed:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size or file_digest(file) != digest:
            return f"{name} is not as it was written"
    return None


@contextmanager
def restoring(checkpoint: str | Path) -> Iterator[None]:
    """Turn errors of reading into a HamuError: a whole file may be of another model or version."""
    try:
        yield
    except HamuError:
        raise
    except Exception as error:  # libraries raise many kinds for what they cannot read
        raise HamuError(
            f"the checkpoint {checkpoint} cannot be restored: {first_line(error)}; resume from an "
            f"older one"
        ) from error


def seal(folder: Path) -> None:
    """Write the manifest, and flush all files to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in files
    }
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        sync(path)
