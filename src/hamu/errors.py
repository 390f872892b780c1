"""The exception that a user of HAMU is meant to read.

Every foreseen failure (a missing file, an empty forget set, an infeasible constraint) is raised as a
`HamuError` whose message says what was given, what was expected and what to do. The command line prints
the message alone and exits with code 2.
"""


class HamuError(ValueError):
    """Something that the caller can put right; the message says how."""


def first_line(error: BaseException) -> str:
    """What an error of a library says first; if that only announces the next line, by a colon, that too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def one_line(text: str) -> str:
    """A text on one line: whatever would break it, or speak to the terminal, is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Interrupted(BaseException):  # not an Exception: nothing but the command line is to catch it
    """A signal has ended a command.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
