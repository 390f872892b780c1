"""Outputs of a run: step and layer logs, lines and bars on the screen, trackers."""

import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import datasets
from rich import progress as bars
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.table import Column
from transformers import IntervalStrategy, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from hamu.core.distributed import is_main
from hamu.errors import percent
from hamu.files import LAYERS, STEPS, plain, sync
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.config import TRACKERS, own_options

_logger = logging.getLogger(__name__)
_MOST_LINES, _FEWEST_LINES = 512, 16  # of layers.jsonl
_MOST_FIGURES = 400_000  # over all its lines; each takes some eight bytes
_PRINTERS = (ProgressCallback, PrinterCallback)
# W&B sends these by itself unless the variables have other values
_KEPT_BACK = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}
_SECONDS_PER_LINE = 30.0
_LOSSES = {"loss": "loss", "retain_loss": "retain", "forget_loss": "forget"}


class StepLog(TrainerCallback):
    """Begin the folder of a run with its first step, then write a line per step into two logs.

    layers.jsonl begins with the blocks, {"step": 0, "blocks": [...]}; then lines at even steps have
    cosθ and ‖Δw‖ of each block, null where unknown.
    """

    trainer: Any  # the `UnlearnTrainer` of these steps; to be set before the run begins

    def __init__(self, folder: RunFolder, begin: Callable[[], object], resume: bool) -> None:
        self._folder, self._begin_folder, self._resume = folder, begin, resume
        self._begun = self._names_blocks = False
        self._lines: list[tuple[str, dict[str, Any]]] = []  # and the log of each

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the lines of steps after the checkpoint: a resumed run takes them once more."""
        self._every = layer_interval(args, state, len(self.trainer.pair.block_names))
        if not (self._resume and is_main()):
            return
        step, logged = state.global_step, [e["step"] for e in state.log_history if "taken" in e]
        if args.logging_strategy == IntervalStrategy.STEPS:  # the history forgets the first
            every = int(state.logging_steps)
            logged = [*range(every, step + 1, every)]
        in_layers = bool(logged) + sum(one % self._every == 0 for one in logged)
        for log, wanted in ((STEPS, len(logged)), (LAYERS, in_layers)):
            kept = self._folder.keep_lines(log, step)
            if len(kept) < wanted:
                place, few = self._folder.path / log, f"{len(kept)} of its {wanted}"
                lost = f"{place} has {few} lines up to step {step}"
                _logger.warning("%s; the log of this run will lack the others", lost)
            if log == LAYERS:
                self._names_blocks = bool(kept) and "blocks" in kept[0]
                if kept and not self._names_blocks:
                    self._folder.remove(LAYERS)  # they are of blocks unknown

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the folder once a step was taken, or where an earlier run is in it, once a
        checkpoint or the model is there to take its place.
        """
        if self._begun or (self.trainer.has_begun and not self._folder.replaces):
            self.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append the figures of a step; JSON holds those that are not finite as null."""
        if "taken" in logs:
            step = {"step": state.global_step}
            self._lines.append((STEPS, step | plain(logs)))
            if not self._names_blocks:
                self._lines.append((LAYERS, {"step": 0, "blocks": self.trainer.pair.block_names}))
                self._names_blocks = True
            if is_main() and state.global_step % self._every == 0:
                figures = self.trainer.watch.block_figures().items()
                # four digits are enough for a picture
                short = {k: v and [float(f"{x:.4g}") for x in v] for k, v in figures}
                self._lines.append((LAYERS, step | plain(short)))
        self.on_step_end(args, state, control)

    def save(self) -> None:
        """Begin, and flush the logs to the disk: a checkpoint counts on their lines."""
        self.begin()
        for log in (STEPS, LAYERS) if is_main() else ():
            if self._folder.has(log):
                sync(self._folder.path / log)

    def begin(self) -> None:
        """Begin the folder, then write all lines."""
        if not self._begun:
            self._begin_folder()
            self._begun = True
        for log, line in self._lines:
            self._folder.append_line(log, line)
        self._lines.clear()


def layer_interval(args: Any, state: Any, blocks: int) -> int:
    """Steps between two lines of layers.jsonl, which bound the log of a whole run."""
    most = max(_FEWEST_LINES, min(_MOST_LINES, _MOST_FIGURES // (2 * blocks)))
    if args.logging_strategy != IntervalStrategy.STEPS:
        return 1
    logged: int = state.logging_steps
    return int(logged * math.ceil(state.max_steps / logged / most))


def silence(trainer: Trainer) -> None:
    """Remove progress bar and printed figures from a trainer; a user's own subclasses stay."""
    trainer.args.disable_tqdm = True
    for one in list(trainer.callback_handler.callbacks):
        if type(one) in _PRINTERS:
            trainer.remove_callback(one)


def silent() -> Console:
    """A console that shows nothing; the bars of libraries go too."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return Console(quiet=True)


def figures_line(logs: Mapping[str, Any]) -> str:
    """The losses of a step and how hard it was: κ/κ₂ (κ₄ for HAMU-U), without a threshold cosθ.

    In conflict q/q₀ follows, the demand over the most that is free. A run by goal shows its latest
    measurement in place of the losses.
    """
    shown = [f"{name} {logs[key]:<8.3g}" for key, name in _LOSSES.items() if key in logs]
    if "forgotten_share" in logs:
        share, rise = percent(logs["forgotten_share"]), logs["retain_rise"]
        shown = [f"forgotten {share:<5}", f"retain {rise:+.4f}"]
    if logs.get("stop_threshold", 0.0) > 0:
        shown.append(f"κ/κ₂ {logs['kappa'] / logs['stop_threshold']:.2f}")
        if logs.get("headroom", 0.0) > 0:
            shown.append(f"q/q₀ {1 / logs['headroom']:.2f}")
        elif logs["kappa"] > 0 and "clipped_demand" in logs and logs["free_limit"] > 0:
            shown.append(f"q/q₀ {logs['clipped_demand'] / logs['free_limit']:.2f}")
    elif "cos" in logs:
        shown.append(f"cosθ {logs['cos']:.2f}")
    return " ".join(shown).rstrip()


def task_bar(console: Console, *columns: ProgressColumn, shown: bool = True) -> Progress:
    """A bar of one line with the time to come, in the end that taken; none without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        bars.BarColumn(30),  # narrower where the rest needs the place
        bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        bars.TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        *columns,
        console=console,
        disable=not (console.is_terminal and shown),
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


class Tracker(TrainerCallback):
    """Stand between the Trainer and one tracker, which gets only what docs/runs.md lists.

    The Trainer itself would pass paths, the model's config with the names of its classes, and the
    data loaders. Nothing is sent before the first step was taken; earlier figures follow.
    """

    def __init__(self, tracker: Any, trainer: Any) -> None:
        self._tracker, self._trainer = tracker, trainer
        values = {n: getattr(v, "value", v) for n, v in trainer.args.to_dict().items()}
        # numbers, switches and named choices, no path and no token
        is_plain = {n for n, v in values.items() if isinstance(v, bool | int | float | None)}
        choices = own_options(type(trainer.args))
        shown = {n: v for n, v in values.items() if n in is_plain or n in choices}
        self._settings: Any = copy.copy(trainer.args)
        self._settings.to_dict = lambda: dict(shown)
        self._settings.to_json_string = lambda: json.dumps(shown, indent=2)
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self._model = {"model": SimpleNamespace(num_parameters=lambda: parameters)}
        self._waiting: list[tuple[Any, dict[str, Any]]] = []  # state and figures of a log entry
        self._has_begun = self.is_kept_open = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Pass figures on, once a first step was taken."""
        self._waiting.append((copy.copy(state), dict(logs)))
        if not self._has_begun and self._trainer.has_begun:
            self._begin(state, control)
        if self._has_begun:
            for then, figures in self._waiting:
                self._tracker.on_log(self._settings, then, control, logs=figures, **self._model)
            self._waiting.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the tracker finish, unless it is kept open."""
        if self._has_begun and not self.is_kept_open:
            self._has_begun = False
            self._tracker.on_train_end(self._settings, state, control, **self._model)

    def _begin(self, state: Any, control: Any) -> None:
        self._has_begun = True
        for variable, value in _KEPT_BACK.items():
            os.environ.setdefault(variable, value)
        tracker = self._tracker
        if isinstance(tracker, integration_utils.TensorBoardCallback) and not tracker.logging_dir:
            if self._trainer.before_saving is not None:
                self._trainer.before_saving()  # an earlier run in the same folder gives way
            # by itself it would take a name with the host's in it
            tracker.logging_dir = str(Path(str(self._trainer.args.output_dir)) / "tensorboard")
        tracker.on_train_begin(self._settings, state, control, **self._model)


@contextmanager
def kept_open(trainer: Trainer) -> Iterator[None]:
    """Let trackers finish when this ends, not with training: later figures belong to the run."""
    trackers = [one for one in trainer.callback_handler.callbacks if isinstance(one, Tracker)]
    for tracker in trackers:
        tracker.is_kept_open = True
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.is_kept_open = False
            tracker.on_train_end(trainer.args, trainer.state, trainer.control)


def stand_between(trainer: Trainer, own: Collection[TrainerCallback]) -> None:
    """Put a `Tracker` before each tracker of a trainer; a user's own callbacks stay."""
    kinds = tuple(integration_utils.INTEGRATION_TO_CALLBACK[name] for name in TRACKERS)
    callbacks: list[Any] = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if isinstance(callback, kinds) and callback not in own:
            callbacks[place] = Tracker(callback, trainer)
