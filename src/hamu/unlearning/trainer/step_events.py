"""The points of a step at which transformers lets others in, told to the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from hamu.unlearning.trainer.trainer import UnlearnTrainer


class StepEvents(TrainerCallback):
    """Tells the trainer where a step begins, and where its optimizer steps.

    transformers offers these points to callbacks alone: its Trainer has no methods for them that could be overridden.
    """

    def __init__(self, trainer: UnlearnTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the trainer that a step begins, of which nothing is summed yet."""
        self._trainer.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trainer look at the weights before the optimizer moves them."""
        self._trainer.begin_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trainer look at the weights after the optimizer has moved them."""
        self._trainer.end_optimizer_step()
