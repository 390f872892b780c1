"""What a person sees while a run is under way: one progress bar with the figures that matter."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from transformers import TrainerCallback

_SECONDS_PER_LINE = 30.0
_LOSSES = {"loss": "loss", "retain_loss": "retain", "forget_loss": "forget"}


def peak_memory(device: torch.device) -> str:
    """The most memory that this process has held so far: on the GPU if its run is on one, else resident."""
    if device.type == "cuda":
        return f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the device"
    if sys.platform != "linux":  # others count in other units, or not at all
        return "peak memory is told on Linux and GPUs"
    import resource

    return f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f} GB"


def figures_line(logs: Mapping[str, Any]) -> str:
    """The figures of a step in a few characters: its losses and how hard it was.

    That is κ/κ₂ of the whole model where the method has a threshold (κ₄ for HAMU-U) and, while the gradients are in
    conflict, q/q₀: what is demanded, as far as it is possible, over the most that costs nothing by the stopping
    criterion, above 1 where it is met. Else it is the cosine of the two gradients.
    """
    shown = [
        f"{name} {logs[key]:<8.3g}" for key, name in _LOSSES.items() if key in logs
    ]  # in their places, always
    if logs.get("stop_threshold", 0.0) > 0:
        shown.append(f"κ/κ₂ {logs['kappa'] / logs['stop_threshold']:.2f}")
        if logs["kappa"] > 0 and "clipped_demand" in logs and logs["free_limit"] > 0:
            shown.append(f"q/q₀ {logs['clipped_demand'] / logs['free_limit']:.2f}")
    elif "cos" in logs:
        shown.append(f"cosθ {logs['cos']:.2f}")
    return " ".join(shown).rstrip()


def task_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A progress bar of one line, with the time to come and in the end the time taken; silent without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(30),  # narrower where the rest needs the place
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        *columns,
        console=console,
        disable=not console.is_terminal,
    )


class ProgressBar(TrainerCallback):
    """A progress bar for a Trainer, with its last figures; in a log file, a line every half minute.

    As a context it gives the screen back however training ends.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._figures = ""
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
        """Move the bar on; without a terminal, say so in a line now and then."""
        self._bar.update(self._task, completed=state.global_step)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_PER_LINE
            self._console.print(
                f"{self._title}: step {state.global_step} of {state.max_steps}  {self._figures}"
            )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Show the last figures beside the bar."""
        self._figures = figures_line(logs) or self._figures
        self._bar.update(self._task, figures=self._figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the bar and leave it as it is."""
        self._bar.stop()
