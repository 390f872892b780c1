"""Ctrl-C, SIGTERM, a terminal that is closed: a run saves where it is and leaves with a line on how to go on."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from hamu.errors import Interrupted
from hamu.unlearning.trainer.resumable import ResumableTrainer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTHING_TAKEN = "interrupted before a step was taken"
_Handler = Callable[[int, FrameType | None], None]


def leaving_in_order(command: str) -> Callable[[ResumableTrainer], AbstractContextManager[None]]:
    """For the training of one command: the first signal ends it after the step that it is at, a second one at once.

    Raises:
        Interrupted: once the checkpoint is written, or before a step was taken, when there is nothing to save.
    """

    @contextmanager
    def around(trainer: ResumableTrainer) -> Iterator[None]:
        received: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            if received:
                raise Interrupted(
                    "interrupted again; what was done since the last checkpoint is lost", number
                )
            if not trainer.has_begun:
                raise Interrupted(_NOTHING_TAKEN, number)
            received.append(number)
            trainer.interrupted_by = signal.Signals(number).name

        with handling(note):
            yield
        if (
            trainer.was_interrupted and not trainer.has_begun
        ):  # the step that it came in was taken back
            raise Interrupted(_NOTHING_TAKEN, received[0] if received else signal.SIGTERM)
        if (
            trainer.was_interrupted
        ):  # a signal that came when all steps were done is too late to matter
            folder = str(trainer.args.output_dir)
            step = trainer.state.global_step
            raise Interrupted(
                f"interrupted by {trainer.interrupted_by}; step {step} is saved in {trainer.checkpoints.path(step)}; "
                f"go on with: hamu {command} --resume --output_dir {shlex.quote(folder)}",
                received[0] if received else signal.SIGTERM,
            )

    return around


@contextmanager
def handling(handler: _Handler) -> Iterator[None]:
    """Let a function handle these signals for a while; not SIGHUP where it is to be ignored, as `nohup` has it."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    earlier = {
        number: signal.signal(number, handler)
        for number in _SIGNALS
        if is_main and number not in ignored
    }
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)


def at_once(number: int, frame: FrameType | None) -> None:
    """Outside of training: leave, whatever was under way; nothing that is half written is ever taken for whole."""
    raise Interrupted("interrupted", number)
