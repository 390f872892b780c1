"""The exception that a user of HAMU is meant to read.

Every foreseen failure (a missing file, an empty forget set, an infeasible constraint) is raised as a
`HamuError` whose message says what was given, what was expected and what to do. The command line prints
the message alone and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HamuError(ValueError):
    """Something that the caller can put right; the message says how."""


def first_line(error: BaseException) -> str:
    """What an error of a library says first; if that only announces the next line, by a colon, that too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely stands for, None if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


def unknown(what: str, name: object, known: Iterable[str]) -> HamuError:
    """The error for a name that does not exist: with the closest known one, else with all of them.

    Args:
        what: the kind of thing that it names.
        name: as given.
        known: the names that exist.
    """
    names = list(known)
    close = closest(str(name), names)
    hint = f"choose one of {', '.join(names)}" if close is None else f"did you mean {close}?"
    return HamuError(f"{what} {name!r} is unknown; {hint}")


def one_line(text: str) -> str:
    """A text on one line: whatever would break it, or speak to the terminal, is written as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


class Interrupted(BaseException):  # not an Exception: nothing but the command line is to catch it
    """A signal has ended a command.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
