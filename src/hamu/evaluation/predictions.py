"""A model's predictions over a data set: what every figure about it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hamu.core.forward import evaluating, predict_logits
from hamu.core.objectives import Scored
from hamu.errors import HamuError


@dataclass(frozen=True)
class Predictions:
    """A classifier's logits and the labels of N samples, on the CPU.

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
        """Whether the most likely class is the label, [N] bool; where a logit is NaN, no class is."""
        return _most_likely(self.logits) == self.labels

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log p, [N, K] float64."""
        return self.logits.double().log_softmax(-1)


@dataclass(frozen=True)
class TokenPredictions:
    """What a language model thinks of the N scored tokens of some records, in the records' order, on the CPU.

    Attributes:
        losses: -log p of each token, [N] float64.
        correct: [N] bool, whether it is the most likely one.
        expected: Σ_v p_v·log p_v over the vocabulary at each token, [N] float64 (for Min-K%++).
        spread: the standard deviation of log p_v under p at each token, [N] float64 (for Min-K%++).
        record: the record of each token, [N] int64.
        records: the number of records.
    """

    losses: Tensor
    correct: Tensor
    expected: Tensor
    spread: Tensor
    record: Tensor
    records: int

    @cached_property
    def lengths(self) -> Tensor:
        """The number of scored tokens of each record, [records]."""
        return torch.bincount(self.record, minlength=self.records)

    @cached_property
    def record_losses(self) -> Tensor:
        """Mean -log p per token of each record, [records] float64."""
        sums = self.losses.new_zeros(self.records).index_add_(0, self.record, self.losses)
        return sums / self.lengths

    def each(self, values: Tensor) -> tuple[Tensor, ...]:
        """Values of the tokens, [N], record by record."""
        return values.split(self.lengths.tolist())


@torch.no_grad()
def predict(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Callable[[Any], Mapping[str, Tensor]],
) -> Predictions:
    """Predict every record of a data set of images, in evaluation mode; the model's mode is restored.

    Args:
        model: a classifier; see `predict_logits`.
        data: items, or batches through `__getitems__`, with labels.
        batch_size: records per forward pass.
        collate: makes a batch from what the data set gives.

    Returns:
        The predictions, in the data's order.

    Raises:
        HamuError: if the data set is empty.
    """
    logits, labels = [], []
    for batch, moved in _batches(
        model, DataLoader(data, batch_size=batch_size, collate_fn=collate)
    ):
        logits.append(predict_logits(model, moved).float().cpu())
        labels.append(batch["labels"])
    return Predictions(torch.cat(logits), torch.cat(labels))


@torch.no_grad()
def predict_tokens(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Callable[[Any], Mapping[str, Tensor]],
) -> TokenPredictions:
    """Predict the scored tokens of every record of a data set of texts, in evaluation mode.

    Records of like length are taken together, so that little is padded.

    Args:
        model: a language model.
        data: items with input_ids and labels, e.g. `TextData`.
        batch_size: records per forward pass.
        collate: pads a list of items, e.g. `TextCollator`.

    Returns:
        The predictions, in the data's order.

    Raises:
        HamuError: if the data set is empty.
    """
    items = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    order = sorted(range(len(items)), key=lambda i: -len(items[i]["input_ids"]))
    loader = DataLoader([items[i] for i in order], batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
    columns: list[list[Tensor]] = [[], [], [], [], []]
    done = 0
    for _, moved in _batches(model, loader):
        scored = Scored.of(predict_logits(model, moved), moved["labels"])
        log_p = scored.logits.float().log_softmax(-1)
        expected, spread = _moments(log_p)
        of_label = log_p.gather(1, scored.labels[:, None])[:, 0]
        record = torch.tensor(order[done : done + scored.records])[scored.record.cpu()]
        done += scored.records
        correct = _most_likely(scored.logits) == scored.labels
        found = (-of_label.double(), correct, expected.double(), spread.double())
        for column, values in zip(columns, (*found, record), strict=True):
            column.append(values.cpu())
    losses, correct, expected, spread, record = (torch.cat(column) for column in columns)
    back = record.argsort(stable=True)
    return TokenPredictions(
        losses[back], correct[back], expected[back], spread[back], record[back], len(items)
    )


def _most_likely(logits: Tensor) -> Tensor:
    """The class of the highest logit, [N]; -1 where one is NaN, which argmax would take for the highest."""
    return logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)


def _moments(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of log p under p, [N] each; what has no probability (a masked token) adds nothing."""
    p = log_p.exp()
    known = log_p.masked_fill(p == 0, 0.0)
    expected = (p * known).sum(-1)
    return expected, (p * (known - expected[:, None]).square()).sum(-1).sqrt()


def _batches(
    model: nn.Module, loader: DataLoader[Any]
) -> Iterator[tuple[Mapping[str, Tensor], dict[str, Tensor]]]:
    """Each batch as it is and on the model's device, the model in evaluation mode meanwhile."""
    device, any_batch = next(model.parameters()).device, False
    with evaluating(model):
        for batch in loader:
            any_batch = True
            yield batch, {key: value.to(device) for key, value in batch.items()}
    if not any_batch:
        raise HamuError("the data set is empty: it has no record to predict")
