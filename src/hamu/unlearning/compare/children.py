"""Calls of `hamu` in processes of their own, so that one that crashes takes nothing with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import torch

_POLL = 0.1  # seconds
_INTERRUPTED = {
    128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}  # exit codes of `hamu`


@dataclass(frozen=True)
class Call:
    """A call of `hamu`.

    Attributes:
        name: what it is called here.
        argv: command and flags.
    """

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """How a call ended.

    Attributes:
        name: of the call.
        seconds: wall time, with the start of its process.
        reason: why it failed, in one line; "" if it did not.
        interrupted: whether it says by its exit code that a signal has ended it.
    """

    name: str
    seconds: float
    reason: str
    interrupted: bool


class Children:
    """Calls `hamu` again and again, some at a time; they share the processor's threads.

    Args:
        jobs: how many at a time.
        environment: of their processes.
        lock: a descriptor that they inherit, so that what is left of them when this process is killed keeps others
            out of the folder, see `hamu.folder_lock`.

    Attributes:
        asked_by: the signal that first asked to end, 0 if none has.
    """

    def __init__(self, jobs: int, environment: Mapping[str, str], lock: int | None) -> None:
        self._jobs, self._lock = jobs, lock
        self._environment = dict(environment)
        if jobs > 1:
            self._environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
        self._asked, self.asked_by = 0, 0

    def ask_to_end(self, number: int) -> None:
        """Make no more calls. Those under way are sent SIGTERM, upon which runs save and end; asked again, SIGKILL.

        Args:
            number: of the signal that asks.
        """
        self._asked += 1
        self.asked_by = self.asked_by or number

    def make(self, calls: Iterable[Call]) -> Iterator[Ended]:
        """Make these calls, all of them or until asked to end; in the order in which they end."""
        waiting, running, obeyed = deque(calls), list[_Child](), 0
        try:
            while running or (waiting and not self._asked):
                while waiting and len(running) < self._jobs and not self._asked:
                    running.append(_Child(waiting.popleft(), self._environment, self._lock))
                if self._asked > obeyed:
                    for child in running:
                        child.process.send_signal(
                            signal.SIGTERM if self._asked == 1 else signal.SIGKILL
                        )
                    obeyed = self._asked
                time.sleep(_POLL)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    yield child.ended()
        finally:
            for child in running:  # whoever takes what this yields has failed
                child.process.kill()
                child.process.wait()


class _Child:
    """A call under way."""

    def __init__(self, call: Call, environment: Mapping[str, str], lock: int | None) -> None:
        self._name, self._begin = call.name, time.monotonic()
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = start(call.argv, environment, self._said, lock)

    def ended(self) -> Ended:
        with self._said as said:
            said.seek(0)
            reason = _reason(said.read(), self.process.returncode)
        seconds = time.monotonic() - self._begin
        return Ended(self._name, seconds, reason, self.process.returncode in _INTERRUPTED)


def start(
    argv: Iterable[str], environment: Mapping[str, str], said: IO[str], lock: int | None
) -> subprocess.Popen[bytes]:
    """Start `hamu` in a session of its own: Ctrl-C is for this process, which ends the others in order."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "hamu",
            *argv,
        ],  # as `hamu`: no file of the current folder is taken for a library
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
    )


def _reason(said: str, code: int) -> str:
    """Why a call failed, by what it said on standard error; "" if it did not."""
    if not code:
        return ""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("hamu ")]
    last = (own or lines or [f"it ended with exit code {code}"])[-1]
    return last.split(": ", 1)[-1] if own else last
