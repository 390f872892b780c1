"""What a person sees while a run is under way: one progress bar with the figures that matter."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

_FIGURES = {"loss": "loss", "retain_loss": "retain", "forget_loss": "forget", "kappa": "κ", "stop_threshold": "κ stop"}


class ProgressBar(TrainerCallback):
    """A rich progress bar for a Trainer; it stays silent where the output is not a terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        self._task = self._bar.add_task(self._title, total=state.max_steps, figures="")
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Show the last figures."""
        shown = [f"{name} {logs[key]:.4g}" for key, name in _FIGURES.items() if key in logs]
        if shown:
            self._bar.update(self._task, figures="  ".join(shown))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it is."""
        self._bar.stop()
