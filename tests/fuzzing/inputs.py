"""What an input is: a command, and the files of the world that were changed before it."""

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

from hamu.unlearning.trainer.checkpoints import seal

GONE = None


@dataclass(frozen=True)
class Link:
    """A symbolic link in place of a file."""

    to: str


@dataclass(frozen=True)
class Damage:
    """A file of the world from which something was cut, and into which something was put."""

    at: float
    cut: int
    put: bytes

    def apply(self, content):
        """The damaged bytes."""
        begin = int(self.at * len(content))
        return content[:begin] + self.put + content[begin + self.cut :]


@dataclass(frozen=True)
class Changed:
    """A JSON object of the world with other values."""

    values: tuple

    def apply(self, content):
        """The changed object."""
        return json.dumps(json.loads(content) | dict(self.values)).encode()


@dataclass(frozen=True)
class Sealed:
    """The checkpoint in this folder gets a manifest that fits its files as they are."""


@dataclass(frozen=True)
class Input:
    """A command with the files that it meets.

    Attributes:
        kind: what was made up.
        argv: the command.
        changes: what is done to the world first: by path bytes, a Link, a Damage, a Changed, a Sealed, or GONE.
        out: the output folder, where alone the command may write.
    """

    kind: str
    argv: tuple[str, ...]
    changes: tuple[tuple[str, object], ...] = ()
    out: str = "out"

    def prepare(self):
        """Change the files in the working folder."""
        for name, content in self.changes:
            path = Path(name)
            if isinstance(content, Sealed):
                (path / "manifest.json").unlink()
                seal(path)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Damage | Changed):
                content = content.apply(path.read_bytes())
            _put(path, content)


def _put(path, content):
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    if isinstance(content, Link):
        os.symlink(content.to, path)
    elif content is not GONE:
        path.write_bytes(content)


class _Poison:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


POISON = pickle.dumps(_Poison(), protocol=2)  # unpickled, it leaves a folder behind
