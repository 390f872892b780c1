"""Output of a run in Python: a short line per logged step and evaluation, where transformers prints all figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import ProgressCallback, Trainer
from transformers.trainer_callback import PrinterCallback

_SETS = ("forget", "retain", "test")


def log_line(logs: Mapping[str, Any], step: int, steps: int) -> str:
    """Losses of a step or an evaluation in a line; logs of anything else as they are.

    In brackets it has by how much a step that was checked changed the loss of its own batches.

    Args:
        logs: the figures.
        step: the step that they are of.
        steps: of the run.
    """
    place = f"step {step:>{len(str(steps))}}/{steps}"
    if "train_runtime" in logs:
        return f"{place}  done in {logs['train_runtime']:.1f} s"
    prefix, words = ("", place) if "taken" in logs else ("eval_", f"{place}  evaluated")
    found = [name for name in _SETS if f"{prefix}{name}_loss" in logs]
    if not found:
        return str(dict(logs))
    shown = []
    for name in found:
        change = None if prefix else logs.get(f"realised_{name}_change")
        shown.append(
            f"{name} loss {logs[f'{prefix}{name}_loss']:8.4f}{'' if change is None else f' ({change:+.4f})'}"
        )
    if "cos" in logs:
        shown.append(f"cosθ {logs['cos']:+.2f}")
    if logs.get("taken") == 0:
        shown.append("not taken")
    return "  ".join([words, *shown])


class StepBar(ProgressCallback):
    """The progress bar of transformers, with a line in place of the figures."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line above the bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(log_line(logs, state.global_step, state.max_steps))


class StepPrinter(PrinterCallback):
    """The printer of transformers, with a line in place of the figures."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line."""
        if state.is_local_process_zero:
            print(log_line(logs, state.global_step, state.max_steps))


_INSTEAD = {ProgressCallback: StepBar, PrinterCallback: StepPrinter}


def print_lines(trainer: Trainer, given: Collection[Any]) -> None:
    """Replace the callback by which a trainer prints by one that prints a line per step.

    Args:
        trainer: made by now.
        given: the user's own callbacks, which stay as they are.
    """
    for one in list(trainer.callback_handler.callbacks):
        if type(one) in _INSTEAD and one not in given and type(one) not in given:
            trainer.remove_callback(one)
            trainer.add_callback(_INSTEAD[type(one)])
