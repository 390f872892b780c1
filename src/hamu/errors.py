"""The exception that a user of HAMU is meant to read.

Every foreseen failure (a missing file, an empty forget set, an infeasible constraint) is raised as a
`HamuError` whose message says what was given, what was expected and what to do. The command line prints
the message alone and exits with code 2.
"""


class HamuError(ValueError):
    """Something that the caller can put right; the message says how."""


class Interrupted(BaseException):  # not an Exception: nothing but the command line is to catch it
    """A signal has ended a command.

    Attributes:
        signal: its number.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
