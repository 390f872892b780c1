"""Training of the original model (on everything) or of the retain model (without the forget set)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, default_data_collator
from transformers.trainer_callback import PrinterCallback

from hamu.errors import HamuError
from hamu.training.config import TrainConfig


def train_classifier(
    model: PreTrainedModel, data: Dataset[Any], args: TrainConfig, callbacks: list[TrainerCallback] | None = None
) -> PreTrainedModel:
    """Train a classifier by cross-entropy, in place.

    Args:
        model: the classifier; its forward returns a loss when given labels.
        data: items with pixel_values and labels, e.g. `ImageData`.
        args: the settings.
        callbacks: transformers callbacks.

    Returns:
        The same model, in evaluation mode.

    Raises:
        HamuError: if training ended with weights that are not finite.
    """
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    trainer = Trainer(model, args, data_collator=collate, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise HamuError(f"training diverged: the weights are not finite; lower --learning_rate {args.learning_rate}")
    return model.eval()


def collate(items: Any) -> Mapping[str, torch.Tensor]:
    """A batch that was fetched whole stays as it is; a list of items is stacked."""
    return items if isinstance(items, Mapping) else default_data_collator(items)
