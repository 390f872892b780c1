"""Files and folders that are whole or not there: written beside their place, then renamed.

What lies beside has the name of the place with a dot before it, so that `hamu.unlearning.run_files.is_left` knows it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hamu.unlearning.run_files import is_left


def write_whole(target: Path, text: str, *, private: bool = False) -> None:
    """Write one file into a folder that is there.

    Args:
        target: the file; what is there is replaced.
        text: what it will hold.
        private: whether it is for its owner alone; else the process's mask decides.
    """
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o666 & ~umask() if not private else 0o600)
    os.replace(file.name, target)


def replace_folder(beside: Path, target: Path) -> None:
    """Put a folder that was written beside its place into it, the process's mask deciding who may read it.

    What is there is removed.
    """
    os.chmod(beside, 0o777 & ~umask())
    if os.path.lexists(target):
        remove_whole(target)
    os.replace(beside, target)


def remove_whole(path: Path) -> None:
    """Remove a file or a folder, so that it is never seen in part; of a link that alone."""
    if path.is_dir() and not path.is_symlink():
        beside = path if is_left(path) else path.with_name(f".{path.name}.removed")
        if beside != path:
            shutil.rmtree(beside, ignore_errors=True)
            os.replace(path, beside)
        shutil.rmtree(beside)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """See that a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
