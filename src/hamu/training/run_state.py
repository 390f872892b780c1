"""What a run of unlearning remembers beyond weights, optimizer and random state, and how checkpoints carry it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.training.checkpoints import STATE, restoring

if TYPE_CHECKING:
    from hamu.training.trainer import UnlearnTrainer

_START, _STEERING = "start.safetensors", "steering.safetensors"


class RunState(TrainerCallback, ExportableState):
    """Empties the loss sums after each step, and carries the trainer's memory through checkpoints."""

    def __init__(self, trainer: UnlearnTrainer | None = None, **saved: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing is summed yet."""
        if self._trainer is not None:
            self._trainer._losses.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer looks at the step before,"""
        if self._trainer is not None:
            self._trainer._begin_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """And after."""
        if self._trainer is not None:
            self._trainer._end_optimizer_step()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore; a run that had come to its end before it was saved stays there."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        trainer = self._trainer
        if not saved or trainer is None:
            return
        with restoring(trainer.resumed_from):
            _restore(trainer, saved["attributes"])
        trainer._starts = args.eval_on_start
        control.should_training_stop = bool(trainer.stop_reason)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        trainer = self._trainer
        if trainer is None:
            return {"args": {}, "attributes": {}}
        return {
            "args": {},
            "attributes": {
                "pair": trainer.pair.state_dict(),
                "taken": trainer.steps_taken,
                "skipped": trainer.steps_skipped,
                "skips_in_a_row": trainer._skips_in_a_row,
                "start": trainer._start,
                "watch": trainer._watch.state_dict(),
                "diverged": trainer._early_ends.diverged,
                "stop_reason": trainer.stop_reason,
                "evaluated": trainer.evaluated_step,
                "steering": None if trainer.steering is None else trainer.steering.state_dict(),
            },
        }


def _restore(trainer: UnlearnTrainer, memory: dict[str, Any]) -> None:
    """What `RunState.state` has kept."""
    if trainer.steering is not None:
        trainer.steering.load_state_dict(memory["steering"])
    trainer.pair.load_state_dict(memory["pair"])
    trainer.steps_taken, trainer.steps_skipped = memory["taken"], memory["skipped"]
    trainer._skips_in_a_row, trainer._start = memory["skips_in_a_row"], memory["start"]
    trainer._watch.load_state_dict(memory["watch"])
    trainer._early_ends.diverged = memory["diverged"]
    trainer.stop_reason, trainer.evaluated_step = memory["stop_reason"], memory["evaluated"]


def steps_taken_in(checkpoint: Path) -> int:
    """How many steps the weights of a checkpoint have behind them."""
    saved = TrainerState.load_from_json(str(checkpoint / STATE)).stateful_callbacks[RunState.__name__]
    return int(saved["attributes"]["taken"])


def save_tensors(trainer: UnlearnTrainer, folder: Path) -> None:
    """What the start model predicted, and the state that a run by goal would go back to."""
    found = {
        f"{kind}/{type(predictions).__name__}/{field.name}": torch.as_tensor(getattr(predictions, field.name))
        for kind, predictions in trainer.start_predictions.items()
        for field in fields(predictions)
    }
    if found:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / _START)
    if trainer.steering is not None:
        save_file(trainer.steering.tensors(), folder / _STEERING)


def load_saved_tensors(trainer: UnlearnTrainer, folder: Path) -> None:
    """Restore what `save_tensors` has written."""
    if (folder / _START).is_file():
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for name, tensor in load_file(folder / _START).items():
            kind, cls, field = name.split("/")
            found.setdefault((kind, cls), {})[field] = tensor
        order = list(trainer._eval_sets)
        trainer.start_predictions = {
            kind: _predictions(cls, values)
            for (kind, cls), values in sorted(found.items(), key=lambda item: order.index(item[0][0]))
        }
    if trainer.steering is not None and (folder / _STEERING).is_file():
        trainer.steering.load_tensors(load_file(folder / _STEERING))


def _predictions(cls: str, values: dict[str, Tensor]) -> Predictions | TokenPredictions:
    if cls == Predictions.__name__:
        return Predictions(**values)
    return TokenPredictions(**{**values, "records": int(values["records"])})
