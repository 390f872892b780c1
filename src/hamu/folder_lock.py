"""A lock on a folder, so that two runs do not write into one."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hamu.errors import HamuError

_WITHOUT = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.ENOLCK,
)  # file systems that have no locks: there nothing is kept out


def lock(folder: Path) -> int:
    """Keep others out of a folder.

    Args:
        folder: it exists; nothing is written into it.

    Returns:
        A descriptor. The lock lasts as long as any process has it open, also one that inherited it.

    Raises:
        HamuError: if another has the folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT:
            return handle
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise HamuError(
                f"another run, or a process that a run left behind, is using {folder}; wait until it has ended, or "
                f"choose another --output_dir"
            ) from None
        raise
    return handle
