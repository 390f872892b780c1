"""Uses of files, the network and pickles by a piece of code, from Python's audit events."""

import os
import sys
import sysconfig
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_CHANGES = ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# byte code that Python keeps, semaphores, fonts that matplotlib has found: nothing of a command's own
_BESIDES = (*(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")), Path("/dev"), Path("/proc"))  # fmt: skip


class Watched:
    """Files changed, places connected to, and names that pickles asked for ("module.name")."""

    def __init__(self):
        self.changed, self.reached, self.unpickled = set(), [], []

    def outside(self, *folders):
        """Files that were changed and are neither in one of these folders nor on the way to one."""
        places = [Path(folder).resolve() for folder in folders]
        return sorted(
            str(path)
            for path in self.changed
            if not any(path.is_relative_to(place) or place.is_relative_to(path) for place in places)
        )


_watching: list[Watched] = []


@cache
def _hook_once():
    sys.addaudithook(_hook)  # stays for good


@contextmanager
def watched():
    _hook_once()
    _watching.append(Watched())
    try:
        yield _watching[0]
    finally:
        _watching.clear()


def _hook(event, args):
    if not _watching:
        return
    [seen] = _watching
    if event == "open" and (args[2] or 0) & _WRITING:
        _changed(seen, args[0])
    elif event in ("os.rename", "os.link"):
        _changed(seen, args[0], args[2])
        _changed(seen, args[1], args[3])
    elif event == "os.symlink":
        _changed(seen, args[1], args[2])
    elif event in _CHANGES:
        _changed(seen, args[0], args[-1] if event != "os.truncate" else -1)
    # between the processes of a data loader a socket is a file of this machine
    elif event in _NETWORK and (event != "socket.connect" or isinstance(args[1], tuple)):
        seen.reached.append(f"{event} {args[1:]}")
    elif event == "pickle.find_class":
        seen.unpickled.append(f"{args[0]}.{args[1]}")


def _changed(seen, path, folder=-1):
    """Note a path; it may be relative to an open folder."""
    if not isinstance(path, str | bytes | os.PathLike):
        return
    around = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
    found = Path(os.path.normpath(os.path.join(around, os.fsdecode(path))))
    is_own = "__pycache__" not in found.parts
    if is_own and not any(found.is_relative_to(place) for place in _BESIDES):
        seen.changed.add(found)
