"""Jobs in processes of their own, so that one that crashes takes nothing with it."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from types import ModuleType
from typing import Any

import torch

from hamu.errors import HamuError, Interrupted, first_line

Command = Callable[[str, Mapping[str, Any]], Any]  # of a module, which another process finds
_POLL = 0.1  # seconds
_LONGEST = 10_000  # characters of a reason: a pipe holds them until they are read
# Threads and devices do not survive a fork; without a device, a server that only imports does.
_START = "spawn" if torch.accelerator.is_available() else "forkserver"
_CONTEXT: Any = multiprocessing.get_context(_START)
_INTERRUPTED = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


@dataclass(frozen=True)
class Call:
    """A job and its options, by a name of one's own."""

    name: str
    job: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Ended:
    """End of a call: its wall time without the start, unless it was killed, and why it failed."""

    name: str
    seconds: float
    reason: str  # in one line; "" if it did not fail
    interrupted: bool  # by a signal, as its exit code shows


class Children:
    """Runs jobs by `command`, some at a time; `asked_by` is the signal that asked to end, or 0."""

    def __init__(self, jobs: int, environment: Mapping[str, str], command: Command) -> None:
        self._jobs, self._command = jobs, command
        self._environment = {**environment, "PYTHONSAFEPATH": "1"}  # no file here is a library
        self._threads = max(1, torch.get_num_threads() // jobs)
        _CONTEXT.set_forkserver_preload([command.__module__])  # each child begins with it loaded
        self._asked, self.asked_by = 0, 0

    def ask_to_end(self, number: int, frame: Any = None) -> None:
        """Make no more calls, as a signal asks. Runs save and end; asked again, they are killed."""
        self._asked += 1
        self.asked_by = self.asked_by or number

    def make(self, calls: Iterable[Call]) -> Iterator[Ended]:
        """Make these calls, all of them or until asked to end; in the order in which they end."""
        waiting, running, obeyed = deque(calls), list[_Child](), 0
        how = self._command, self._environment, self._threads
        try:
            while running or (waiting and not self._asked):
                while waiting and len(running) < self._jobs and not self._asked:
                    running.append(_Child(waiting.popleft(), *how))
                if self._asked > obeyed:
                    obeyed = self._asked
                    for child in running:
                        child.process.terminate() if obeyed == 1 else child.process.kill()
                connection.wait([child.process.sentinel for child in running], _POLL)
                for child in [child for child in running if not child.process.is_alive()]:
                    running.remove(child)
                    yield child.ended()
        finally:
            for child in running:  # whoever takes what this yields has failed
                child.process.kill()
                child.ended()


class _Child:
    """A call under way."""

    def __init__(
        self, call: Call, command: Command, environment: Mapping[str, str], threads: int
    ) -> None:
        self._name, self._begin = call.name, time.monotonic()
        self._said, says = _CONTEXT.Pipe(duplex=False)
        job = command, call, environment, threads, says
        self.process = _CONTEXT.Process(target=_run, args=job)
        with _start_in(environment):
            self.process.start()
        says.close()

    def ended(self) -> Ended:
        self.process.join()
        code, reason = self.process.exitcode, ""
        seconds = time.monotonic() - self._begin
        try:
            reason, seconds = self._said.recv()
        except EOFError:  # it could not say anything any more
            reason = f"it ended with exit code {code}" if code else ""
        self._said.close()
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
        return Ended(self._name, seconds, reason, code in _INTERRUPTED)


@contextmanager
def _start_in(environment: Mapping[str, str]) -> Iterator[None]:
    """Start a process in this environment, without the main module, which would run again there;
    Ctrl-C is held back until it has a session of its own.
    """
    before, main = dict(os.environ), sys.modules["__main__"]
    resource_tracker.ensure_running()  # which would let Ctrl-C through, started with the server
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run(
    command: Command, call: Call, environment: Mapping[str, str], threads: int, says: Any
) -> None:
    """Run a job here: Ctrl-C is for the parent, which ends the others in order."""
    begin = time.monotonic()
    os.setsid()
    os.environ.clear()  # that of the fork server is of the time when it started
    os.environ.update(environment)
    torch.set_num_threads(threads)
    gc.freeze()  # no collection goes through the libraries
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that was held back
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code, reason = 0, ""
    try:
        command(call.job, call.options)
    except Interrupted as end:
        code, reason = 128 + end.signal, str(end)
    except HamuError as error:
        code, reason = 2, str(error)
    except Exception as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        code, reason = 2, f"{type(error).__name__}: {first_line(error)}{notes}"
    says.send((" ".join(reason.split())[:_LONGEST], time.monotonic() - begin))
    sys.exit(code)


def _interrupt(number: int, frame: Any) -> None:
    raise Interrupted(f"interrupted by {signal.Signals(number).name}", number)


def _end_with_parent() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    parent: Any = multiprocessing.parent_process()
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
