"""Trainers that print nothing by themselves: what is shown of a run is its caller's business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from hamu.data import UnlearningData
from hamu.unlearning.trainer.config import UnlearnConfig
from hamu.unlearning.trainer.step_lines import StepBar, StepPrinter
from hamu.unlearning.trainer.trainer import UnlearnTrainer


def silence(trainer: Trainer) -> None:
    """Take from a trainer what transformers gives every one: a progress bar, or in its place printed figures."""
    trainer.args.disable_tqdm = True
    for one in list(trainer.callback_handler.callbacks):
        if type(one) in (
            DEFAULT_PROGRESS_CALLBACK,
            PrinterCallback,
            StepBar,
            StepPrinter,
        ):  # not one's own, made after them
            trainer.remove_callback(one)


def quiet_trainer(
    model: Any,
    problem: UnlearningData[Any],
    args: UnlearnConfig,
    callbacks: list[TrainerCallback],
    collator: Callable[[Any], Mapping[str, Any]],
    retain_predictions: Any = None,
) -> UnlearnTrainer:
    """A silenced trainer for this problem."""
    trainer = UnlearnTrainer(
        model,
        args,
        retain_dataset=problem.retain,
        forget_dataset=problem.forget,
        test_dataset=problem.test,
        data_collator=collator,
        callbacks=callbacks,
        retain_predictions=retain_predictions,
    )
    silence(trainer)
    return trainer
