"""What a run of unlearning remembers beyond weights, optimizer and random state, and how checkpoints carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from hamu.ends import End
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.run_files import TRAINER_STATE
from hamu.training.checkpoints import restoring

if TYPE_CHECKING:
    from hamu.training.steering import Steering
    from hamu.training.trainer import UnlearnTrainer

_START, _STEERING = "start.safetensors", "steering.safetensors"
_AnyPredictions = Predictions | TokenPredictions


@dataclass
class RunMemory:
    """What a run has counted and found so far.

    Attributes:
        taken: steps in which the weights were updated.
        skipped: steps that could not be taken, or that the trust region undid.
        skips_in_a_row: those since the last that was taken.
        start: figures of the first evaluation by name, to which changes are relative; empty before it.
        evaluated: the step after which the last evaluation was, -1 before the first.
        end: why the run ended before its last epoch, None if it did not.
    """

    taken: int = 0
    skipped: int = 0
    skips_in_a_row: int = 0
    start: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    end: End | None = None

    def take(self) -> None:
        """Count a step that is taken."""
        self.taken += 1
        self.skips_in_a_row = 0

    def skip(self) -> None:
        """Count a step that is not taken."""
        self.skipped += 1
        self.skips_in_a_row += 1

    def undo(self) -> None:
        """Count a step that was counted as taken as one that was not: it was undone."""
        self.taken -= 1
        self.skipped += 1

    @property
    def diverged(self) -> bool:
        """Whether it was the retain loss that ended the run."""
        return self.end is not None and self.end.kind == "retain loss"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "start": self.start,
            "end": None if self.end is None else vars(self.end),
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.taken, self.skipped = state["taken"], state["skipped"]
        self.skips_in_a_row, self.start = state["skips_in_a_row"], state["start"]
        self.end = None if state["end"] is None else End(**state["end"])
        self.evaluated = state["evaluated"]


class RunState(TrainerCallback, ExportableState):
    """Tells the trainer of the parts of a step, and carries its memory through checkpoints."""

    def __init__(self, trainer: UnlearnTrainer | None = None, **saved: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the trainer that a step begins, of which nothing is summed yet."""
        if self._trainer is not None:
            self._trainer.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trainer look at the weights before the optimizer moves them."""
        if self._trainer is not None:
            self._trainer.begin_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trainer look at the weights after the optimizer has moved them."""
        if self._trainer is not None:
            self._trainer.end_optimizer_step()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the checkpoint keeps; a run that had come to its end before it was saved stays there."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        trainer = self._trainer
        if not saved or trainer is None:
            return
        with restoring(trainer.resumed_from):
            found = saved["attributes"]
            for name, part in _parts(trainer).items():
                part.load_state_dict(found[name])
            trainer.memory.load_state_dict(found)
        trainer.skip_first_evaluation = args.eval_on_start
        control.should_training_stop = trainer.memory.end is not None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the trainer's memory, pair, watch and steering."""
        trainer = self._trainer
        if trainer is None:
            return {"args": {}, "attributes": {}}
        parts = {name: part.state_dict() for name, part in _parts(trainer).items()}
        return {"args": {}, "attributes": {"steering": None} | trainer.memory.state_dict() | parts}


def _parts(trainer: UnlearnTrainer) -> dict[str, Any]:
    """What remembers something of its own, beside the trainer."""
    parts: dict[str, Any] = {"pair": trainer.pair, "watch": trainer.watch}
    return parts if trainer.steering is None else {"steering": trainer.steering} | parts


def steps_taken_in(checkpoint: Path) -> int:
    """How many steps the weights of a checkpoint have behind them."""
    saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).stateful_callbacks[RunState.__name__]
    return int(saved["attributes"]["taken"])


def save_tensors(folder: Path, start: Mapping[str, _AnyPredictions], steering: Steering | None) -> None:
    """Write what the start model predicted, and the state that a run by goal would go back to."""
    found = {
        f"{kind}/{type(predictions).__name__}/{one.name}": torch.as_tensor(getattr(predictions, one.name))
        for kind, predictions in start.items()
        for one in fields(predictions)
    }
    if found:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / _START)
    if steering is not None:
        save_file(steering.tensors(), folder / _STEERING)


def load_start(folder: Path, order: Sequence[str]) -> dict[str, _AnyPredictions]:
    """What the start model predicted, by set in this order; nothing if it was not measured."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, tensor in load_file(folder / _START).items() if (folder / _START).is_file() else ():
        kind, cls, part = name.split("/")
        found.setdefault((kind, cls), {})[part] = tensor
    return {
        kind: _predictions(cls, values)
        for (kind, cls), values in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    }


def load_steering(folder: Path, steering: Steering) -> None:
    """Restore the state that a run by goal would go back to."""
    if (folder / _STEERING).is_file():
        steering.load_tensors(load_file(folder / _STEERING))


def _predictions(cls: str, values: dict[str, Tensor]) -> _AnyPredictions:
    if cls == Predictions.__name__:
        return Predictions(**values)
    return TokenPredictions(**{**values, "records": int(values["records"])})
