"""Checkpoints on disk: each is whole or not there.

    checkpoint-12/
        config.json model.safetensors ...   what `save_pretrained` writes, so that it can be used as a model
        rest.safetensors                    tensors that those files lack, if any
        optimizer.pt scheduler.pt ...       tensors and plain values, read with weights_only
        trainer_state.json
        manifest.json                       size and SHA-256 of every file

They are gathered saves: what several processes write, sharded or not, is what one process writes. So a run resumes in
any number of processes and any layout, and a checkpoint can be used without HAMU. What it costs is that the main
process holds one whole copy in its own memory while it writes.
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
    """The checkpoints of one run.

    Args:
        folder: of the run.
        keep: the most that stay, None for all; the best one stays beyond that.
    """

    def __init__(self, folder: str | Path, keep: int | None = None) -> None:
        self._folder, self._keep = Path(folder), keep
        self._written = 0  # the step of the last one

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._folder / f"{CHECKPOINT}{step}"

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write into, which becomes the checkpoint of this step once all processes have written."""
        staged: Path | None = None
        try:
            staged = Path(from_main(self._stage))
            yield staged
            barrier()
            if is_main():
                seal(staged)
                replace_folder(staged, self.path(step))
                sync(self._folder)
        except BaseException as error:
            if is_main() and staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
            if is_of_disk(error):
                raise HamuError(
                    f"the checkpoint of step {step} cannot be written into {self._folder}: {first_line(error)}; make "
                    f"room, and go on from the one before with --resume"
                ) from error
            raise
        self._written = step
        barrier()

    def _stage(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.clear()
        return tempfile.mkdtemp(dir=self._folder, prefix=f".{CHECKPOINT}")

    def clear(self) -> None:
        """Remove what an interrupted write has left."""
        for left in self._folder.glob(f".{CHECKPOINT}*"):
            shutil.rmtree(left)

    def limit(self, best: str | None) -> None:
        """Remove the oldest beyond what is kept, but not the best; first those of later steps, left by another run."""
        if self._keep is None or not is_main():
            return
        spared = Path(best).name if best else None
        found = sorted(
            (one for one in self._found() if _is_ours(one[1])),
            key=lambda one: one[0] <= self._written,
        )
        for _, old in found[: -self._keep]:
            if old.name != spared:
                remove_whole(old)

    def remove_after(self, path: Path | None) -> None:
        """Remove what is newer than the checkpoint that a run goes on from (all, without one): it is damaged.

        What another program has written stays.
        """
        for _, newer in reversed(self._found()):
            if newer == path:
                return
            if _is_ours(newer):
                remove_whole(newer)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, None if there is none; and of each newer one what is wrong with it."""
        path, damages = from_main(self._newest)
        return (None if path is None else Path(path)), damages

    def _newest(self) -> tuple[str | None, list[str]]:
        damages = []
        for _, path in reversed(self._found()):
            damage = damage_of(path)
            if damage is None:
                return str(path), damages
            damages.append(f"{path} is damaged: {damage}")
        return None, damages

    def _found(self) -> list[tuple[int, Path]]:
        """Step and folder of each, oldest first."""
        named = [
            (p.name.removeprefix(CHECKPOINT), p)
            for p in self._folder.glob(f"{CHECKPOINT}*")
            if p.is_dir()
        ]
        return sorted((int(step), path) for step, path in named if step.isdecimal())


def _is_ours(path: Path) -> bool:
    """Whether a checkpoint, whole or damaged, was written here: others have files and no manifest."""
    return (path / MANIFEST).is_file() or not any(path.iterdir())


def check_whole(path: str | Path) -> None:
    """Check that a checkpoint is as it was written.

    Raises:
        HamuError: if it is not; the message says what is wrong.
    """
    damage = from_main(lambda: damage_of(Path(path)))
    if damage is not None:
        raise HamuError(f"the checkpoint {path} is damaged: {damage}; resume from an older one")


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is as it was written."""
    try:
        listed = [
            (n, e["size"], e["sha256"])
            for n, e in json.loads((path / MANIFEST).read_text("utf-8")).items()
        ]
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
    """For whatever reads a checkpoint.

    Raises:
        HamuError: if that fails: a file can be as it was written, and yet not be what a run would have written.
    """
    try:
        yield
    except HamuError:
        raise
    except (
        Exception
    ) as error:  # libraries raise many kinds for what they cannot read; the cause is kept
        raise HamuError(
            f"the checkpoint {checkpoint} cannot be restored: {first_line(error)}; resume from an older one"
        ) from error


def seal(folder: Path) -> None:
    """Write the manifest, and see that all is on the disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    listed = {
        str(p.relative_to(folder)): {"size": p.stat().st_size, "sha256": file_digest(p)}
        for p in files
    }
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        sync(path)
