"""Files that the tests of commands give and find."""

import json
import os
import pickle
import resource
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from hamu.cli import main


class _Poison:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


POISON = pickle.dumps(_Poison(), protocol=2)  # unpickled, it leaves a folder behind


def run(line):
    """The exit code of a command line."""
    return main(shlex.split(line))


def report_in(folder, name="evaluation.json"):
    return read(Path(folder, name))


def read(path):
    return json.loads(Path(path).read_text())


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def quota(size):
    """Lets no file become larger than so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier, sys.dont_write_bytecode = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, earlier)
        sys.dont_write_bytecode = False  # of a module first imported here it would be cut off


def contents(folder="."):
    """All files with their bytes, and folders."""
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}
