"""What commands say on standard output. Whoever stops reading it, or cannot hold it, costs a command nothing."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich.console import Console


class Screen(Console):
    """The console of a command, which falls silent once what it says cannot be written.

    Names of files and classes are shown as they are, whatever brackets and colons are in them.

    Args:
        quiet: say nothing at all.

    Attributes:
        failure: why it has fallen silent; None while it has not, and if its reader has merely left, as `head` does.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=quiet)
        self.failure: OSError | None = None

    def on_broken_pipe(self) -> None:
        """Fall silent in place of ending the program, as rich does; the command goes on."""
        self.quiet = True
        _drain(self.file)

    def __exit__(self, *error: Any) -> None:
        """Write what was said, and fall silent if that fails."""
        try:
            super().__exit__(*error)
        except BrokenPipeError:  # of a rich that does not know `on_broken_pipe`
            self.on_broken_pipe()
        except OSError as failure:
            self.failure = failure
            self.quiet = True
            _drain(self.file)


def say(text: str) -> None:
    """Print a text that is all that a command does, at once.

    Raises:
        OSError: if it cannot be written; not if its reader has left.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drain(sys.stdout)
    except OSError:
        _drain(sys.stdout)
        raise


def write_any_character() -> None:
    """Let standard output and error have what their encoding lacks as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drain(stream: Any) -> None:
    """Let a stream lead nowhere: what it holds back is written once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
