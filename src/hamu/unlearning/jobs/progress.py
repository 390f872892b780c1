"""Progress bar of a run, and the signals that end it."""

from __future__ import annotations

import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import datasets
import torch
from rich import progress as bars
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.table import Column
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hamu.errors import Interrupted
from hamu.unlearning.trainer.resumable import ResumableTrainer

_SECONDS_PER_LINE = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOSSES = {"loss": "loss", "retain_loss": "retain", "forget_loss": "forget"}


def silent() -> Console:
    """A console that shows nothing; the bars of libraries go too."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return Console(quiet=True)


def peak_memory(device: torch.device) -> str:
    """The peak memory of this process: on the GPU if its run is on one, else resident."""
    if device.type == "cuda":
        return f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the device"
    unit = 1024 if sys.platform == "linux" else 1  # macOS counts in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"peak memory {peak / 1e9:.2f} GB"


def figures_line(logs: Mapping[str, Any]) -> str:
    """The losses of a step and how hard it was: κ/κ₂ (κ₄ for HAMU-U) of the whole model.

    In conflict q/q₀ follows, the demand over the most that is free, for the expected gradients
    where they are known; without a threshold, cosθ.
    """
    shown = [f"{name} {logs[key]:<8.3g}" for key, name in _LOSSES.items() if key in logs]
    if logs.get("stop_threshold", 0.0) > 0:
        shown.append(f"κ/κ₂ {logs['kappa'] / logs['stop_threshold']:.2f}")
        if logs.get("headroom", 0.0) > 0:
            shown.append(f"q/q₀ {1 / logs['headroom']:.2f}")
        elif logs["kappa"] > 0 and "clipped_demand" in logs and logs["free_limit"] > 0:
            shown.append(f"q/q₀ {logs['clipped_demand'] / logs['free_limit']:.2f}")
    elif "cos" in logs:
        shown.append(f"cosθ {logs['cos']:.2f}")
    return " ".join(shown).rstrip()


def task_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A bar of one line with the time to come, in the end that taken; none without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        bars.BarColumn(30),  # narrower where the rest needs the place
        bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        bars.TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        *columns,
        console=console,
        disable=not console.is_terminal,
    )


class ProgressBar(TrainerCallback):
    """A bar for a Trainer with its last figures; in a log file, a line every half minute."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title, self._figures = console, title, ""
        self._next_line = time.monotonic() + _SECONDS_PER_LINE
        self._bar = task_bar(console, TextColumn("{task.fields[figures]}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar, and where a resumed run goes on."""
        if state.global_step:
            self._console.print(
                f"{self._title}: going on after step {state.global_step} of {state.max_steps}"
            )
        self._task = self._bar.add_task(self._title, total=state.max_steps, figures="")
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar on; without a terminal, print a line now and then."""
        self._bar.update(self._task, completed=state.global_step)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_PER_LINE
            steps = f"step {state.global_step} of {state.max_steps}"
            self._console.print(f"{self._title}: {steps}  {self._figures}")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the last figures beside the bar."""
        self._figures = figures_line(kwargs["logs"]) or self._figures
        self._bar.update(self._task, figures=self._figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the bar and leave it as it is."""
        self._bar.stop()


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a function handle the signals that end a command; not SIGHUP under `nohup`."""
    earlier = {}
    if threading.current_thread() is threading.main_thread():  # no other may handle signals
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                earlier[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)


@contextmanager
def leaving_in_order(command: str, trainer: ResumableTrainer) -> Iterator[None]:
    """End training after its current step on the first signal, at once on a second one."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise Interrupted(
                "interrupted again; what was done since the last checkpoint is lost", number
            )
        received.append(number)
        trainer.interrupted_by = signal.Signals(number).name
        if not trainer.has_begun:
            raise Interrupted("interrupted before a step was taken", number)

    with handling(note):
        yield
    if not trainer.was_interrupted:  # a signal after the last step is too late to matter
        return
    number = received[0] if received else signal.SIGTERM
    if not trainer.has_begun:  # the step that it came in was taken back
        raise Interrupted("interrupted before a step was taken", number)
    step, folder = trainer.state.global_step, shlex.quote(str(trainer.args.output_dir))
    raise Interrupted(
        f"interrupted by {trainer.interrupted_by}; step {step} is saved in "
        f"{trainer.checkpoints.path(step)}; go on with: hamu {command} --resume --output_dir "
        f"{folder}",
        number,
    )
