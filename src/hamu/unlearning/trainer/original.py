"""Training of the original model (on everything) or of the retain model (without the forget set)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import Dataset
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback

from hamu.data.images import collate
from hamu.errors import HamuError
from hamu.models import first_not_finite
from hamu.unlearning.trainer.config import TrainConfig, checkpoints_activations
from hamu.unlearning.trainer.measuring import check_is_measured
from hamu.unlearning.trainer.preparation import let_gradients_through, to_channels_last
from hamu.unlearning.trainer.quiet import silence
from hamu.unlearning.trainer.resumable import ResumableTrainer


def train_original(
    model: PreTrainedModel,
    data: Dataset[Any],
    args: TrainConfig,
    collator: Callable[[Any], Mapping[str, Any]] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    eval_data: Dataset[Any] | None = None,
    *,
    resume: bool = False,
    around: Callable[[ResumableTrainer], AbstractContextManager[None]] = nullcontext,
) -> PreTrainedModel:
    """Train a classifier or a language model by cross-entropy, in place.

    Args:
        model: its forward returns a loss when given labels.
        data: items with labels, e.g. `ImageData` or `TextData`.
        args: the settings; with disable_tqdm no figures are printed in place of the progress bar.
        collator: makes a batch of items; by default what images need.
        callbacks: transformers callbacks.
        eval_data: what --eval_strategy evaluates on, by loss (and accuracy, for a classifier).
        resume: go on from the newest checkpoint in the output folder, if there is one.
        around: makes of the trainer what the training is to run in.

    Returns:
        The same model, in evaluation mode.

    Raises:
        HamuError: if an evaluation is asked for without data, or training ended with weights that are not finite.
    """
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if evaluates and eval_data is None:
        raise HamuError(
            "an evaluation needs test data; give --test_data, or leave out --eval_strategy and --eval_on_start"
        )
    if args.channels_last:
        to_channels_last(model)
    if checkpoints_activations(args):
        let_gradients_through(model)
    is_text = "input_ids" in data[0]
    if evaluates and args.metric_for_best_model is not None:
        check_is_measured(args.metric_for_best_model, ["loss"] if is_text else ["loss", "accuracy"])
    args.prediction_loss_only = (
        is_text  # the logits of every token of a data set would not fit in memory
    )
    trainer = ResumableTrainer(
        model,
        args,
        data_collator=collator or collate,
        train_dataset=data,
        eval_dataset=eval_data,
        compute_metrics=None if is_text else _accuracy,
        callbacks=callbacks,
    )
    if args.disable_tqdm:
        silence(trainer)
    with around(trainer):
        trainer.train(resume_from_checkpoint="newest" if resume else None)
    broken = first_not_finite(model)
    if broken is not None:
        raise HamuError(
            f"training diverged: {broken} is not finite; lower --learning_rate {args.learning_rate}"
        )
    return model.eval()


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
