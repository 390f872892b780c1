"""Standard output of commands: where nobody reads it, or it is full, a command loses nothing."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich.console import Console


class Screen(Console):
    """The console of a command, which falls silent once its output cannot be written.

    Names of files are shown as they are, whatever brackets are in them. `failure` is the reason of
    its silence, None if its reader has left, as `head` does.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=quiet)
        self.failure: OSError | None = None

    def on_broken_pipe(self) -> None:
        """Fall silent in place of ending the program, as rich does."""
        self.quiet = True
        _drain(self.file)

    def __exit__(self, *error: Any) -> None:
        """Write the output, and fall silent if that fails."""
        try:
            super().__exit__(*error)
        except BrokenPipeError:  # of a rich that does not know `on_broken_pipe`
            self.on_broken_pipe()
        except OSError as failure:
            self.failure = failure
            self.on_broken_pipe()


def say(text: str) -> None:
    """Print the whole output of a command at once; it is no error if its reader has left."""
    try:
        print(text, flush=True)
    except OSError as error:
        _drain(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise


def write_any_character() -> None:
    """Let standard output and error escape characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drain(stream: Any) -> None:
    """Let a stream lead nowhere: Python writes its buffer once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
