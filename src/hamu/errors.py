"""`HamuError`, the exception for every foreseen failure, helpers for its messages, and signals."""

import difflib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


class HamuError(ValueError):
    """An error that the caller can correct; the message names value, expectation and way out."""


def first_line(error: BaseException) -> str:
    """First line of a library's error message, and the next if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


@contextmanager
def reading(failure: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception of a library into a HamuError: failure, its first line, remedy."""
    try:
        yield
    except HamuError:
        raise
    except Exception as error:  # libraries raise many kinds; the cause is kept
        raise HamuError(f"{failure}: {first_line(error)}{remedy}") from error


def closest(word: str, known: Iterable[str]) -> str | None:
    """Known name most similar to a mistyped one, None if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


def unknown(what: str, name: object, known: Iterable[str]) -> HamuError:
    """Error for an unknown name of a kind, such as "method": suggests the closest, or lists all."""
    names = list(known)
    close = closest(str(name), names)
    hint = f"choose one of {', '.join(names)}" if close is None else f"did you mean {close}?"
    return HamuError(f"{what} {name!r} is unknown; {hint}")


def one_line(text: str) -> str:
    """Text with line breaks and terminal control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def percent(share: float) -> str:
    """A measured share, which is 0% or 100% only if it is exactly that."""
    if share in (0.0, 1.0) or 0.005 < share < 0.995:
        return f"{share:.0%}"
    return f"{min(0.999, max(0.001, share)):.1%}"


def counted(count: int, nouns: str) -> str:
    """Write a count with its noun, singular for one."""
    return f"{count:,} {nouns}" if count != 1 else f"1 {nouns.removesuffix('s')}"


class Interrupted(BaseException):  # no Exception: only the command line catches it
    """A signal, by its number, ended a command."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a function handle the signals that end a command; not SIGHUP under `nohup`."""
    earlier = {}
    if threading.current_thread() is threading.main_thread():  # no other may handle signals
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                earlier[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)
