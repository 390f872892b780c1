"""How checkpoints carry what a run of unlearning remembers beyond weights, optimizer and random state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from hamu.files import TRAINER_STATE
from hamu.unlearning.trainer.checkpoints import restoring

if TYPE_CHECKING:
    from hamu.unlearning.trainer.trainer import UnlearnTrainer


class RunState(TrainerCallback, ExportableState):
    """Puts `RunMemory`, and the parts of a trainer that have a state, into checkpoints and takes them out again.

    Checkpoints have it under the name of this class, which is therefore part of their format.
    """

    def __init__(self, trainer: UnlearnTrainer | None = None, **saved: Any) -> None:
        self._trainer = trainer

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
        """State of the trainer's memory, pair, watch and goal, for a checkpoint."""
        trainer = self._trainer
        if trainer is None:
            return {"args": {}, "attributes": {}}
        parts = {name: part.state_dict() for name, part in _parts(trainer).items()}
        return {"args": {}, "attributes": trainer.memory.state_dict() | parts}


def _parts(trainer: UnlearnTrainer) -> dict[str, Any]:
    """What remembers something of its own, beside the trainer."""
    # the goal first: its controller has set the demand that the pair was saved with
    return {"goal": trainer.goal_run, "pair": trainer.pair, "watch": trainer.watch}


def steps_taken_in(checkpoint: Path) -> int:
    """How many steps the weights of a checkpoint have behind them."""
    saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).stateful_callbacks[
        RunState.__name__
    ]
    return int(saved["attributes"]["taken"])
