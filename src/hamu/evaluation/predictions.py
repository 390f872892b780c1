"""A model's predictions over a data set: what every figure about a classifier is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hamu.objectives import predict_logits


@dataclass(frozen=True)
class Predictions:
    """Logits and labels of N samples, on the CPU.

    Attributes:
        logits: [N, K], float32.
        labels: [N], int64.
    """

    logits: Tensor
    labels: Tensor

    @cached_property
    def losses(self) -> Tensor:
        """Cross-entropy of each sample, [N] float64."""
        return nn.functional.cross_entropy(self.logits.double(), self.labels, reduction="none")

    @cached_property
    def correct(self) -> Tensor:
        """Whether the most likely class is the label, [N] bool."""
        return self.logits.argmax(-1) == self.labels

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log p, [N, K] float64."""
        return self.logits.double().log_softmax(-1)


@torch.no_grad()
def predict(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Callable[[Any], Mapping[str, Tensor]],
) -> Predictions:
    """Predict every record of a data set, in evaluation mode; the model's mode is restored.

    Args:
        model: a classifier; see `predict_logits`.
        data: items, or batches through `__getitems__`, with labels.
        batch_size: records per forward pass.
        collate: makes a batch from what the data set gives.

    Returns:
        The predictions, in the data's order.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    logits, labels = [], []
    try:
        for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
            moved = {key: value.to(device) for key, value in batch.items()}
            logits.append(predict_logits(model, moved).float().cpu())
            labels.append(batch["labels"])
    finally:
        for module, training in modes:
            module.training = training
    return Predictions(torch.cat(logits), torch.cat(labels))
