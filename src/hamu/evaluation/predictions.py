"""Predictions of a model over a data set, the source of every figure in this room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hamu.core.distributed import rank, world_size
from hamu.core.forward import evaluating, predict_logits
from hamu.core.objectives import Scored
from hamu.errors import HamuError

Collate = Callable[[Any], Mapping[str, Tensor]]
_CHUNK = 1024  # tokens whose [chunk, V] intermediates are in memory at once


@dataclass(frozen=True)
class Predictions:
    """Logits of a classifier and labels of N samples, on the CPU.

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
        """True where the most likely class is the label, [N] bool; False where a logit is NaN."""
        return _most_likely(self.logits) == self.labels

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log p, [N, K] float64."""
        return self.logits.double().log_softmax(-1)


@dataclass(frozen=True)
class TokenPredictions:
    """Predictions of a language model for the N scored tokens of some records, on the CPU.

    Attributes:
        losses: -log p of each token, [N] float64.
        correct: [N] bool, True where the token is the most likely one.
        expected: Σ_v p_v·log p_v over the vocabulary at each token, [N] float64 (for Min-K%++).
        spread: the standard deviation of log p_v under p at each token, [N] float64 (for Min-K%++).
        record: the record of each token, [N] int64, ascending.
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
        """Number of scored tokens of each record, [records]."""
        return torch.bincount(self.record, minlength=self.records)

    @cached_property
    def record_losses(self) -> Tensor:
        """Mean -log p per token of each record (NLL), [records] float64."""
        sums = self.losses.new_zeros(self.records).index_add_(0, self.record, self.losses)
        return sums / self.lengths

    def each(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split token values, [N], into one tensor per record."""
        return torch.split(values, self.lengths.tolist())


def probabilities(predictions: TokenPredictions) -> Tensor:
    """exp(-NLL) of each record, [records] float64, with NLL the mean -log p per scored token.

    This is the probability of its answer, to the power 1/length (TOFU, Maini et al. 2024).
    """
    return torch.exp(-predictions.record_losses)


@torch.no_grad()
def predict(model: nn.Module, data: Dataset[Any], batch_size: int, collate: Collate) -> Predictions:
    """Predict every image of a data set in evaluation mode; restores the model's mode.

    Args:
        model: a classifier; see `predict_logits`.
        data: items, or batches through `__getitems__`, with labels.
        batch_size: records per forward pass.
        collate: makes a batch from the data set's items.

    Returns:
        The predictions, in the data's order.

    Raises:
        HamuError: if the data set is empty.
    """
    logits, labels = [], []
    for batch, moved in _batches(model, data, batch_size, collate):
        logits.append(predict_logits(model, moved).float().cpu())
        labels.append(batch["labels"])
    return Predictions(torch.cat(logits), torch.cat(labels))


@torch.no_grad()
def predict_tokens(
    model: nn.Module, data: Dataset[Any], batch_size: int, collate: Collate
) -> TokenPredictions:
    """Predict the scored tokens of every text of a data set in evaluation mode.

    Records of similar length share a batch, which saves padding.

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
    found: list[tuple[Tensor, ...]] = []
    done = 0
    for _, moved in _batches(model, [items[i] for i in order], batch_size, collate):
        scored = Scored.of(predict_logits(model, moved), moved["labels"])
        record = torch.tensor(order[done : done + scored.records])[scored.record.cpu()]
        done += scored.records
        parts = (torch.split(of, _CHUNK) for of in (scored.logits, scored.labels))
        figures = [_token_figures(*part) for part in zip(*parts, strict=True)]
        found.append((*map(torch.cat, zip(*figures, strict=True)), record))
    losses, correct, expected, spread, record = map(torch.cat, zip(*found, strict=True))
    back = record.argsort(stable=True)
    return TokenPredictions(
        losses[back], correct[back], expected[back], spread[back], record[back], len(items)
    )


def predict_shared(
    model: nn.Module, data: Dataset[Any], batch_size: int, collate: Collate, *, is_text: bool
) -> Predictions | TokenPredictions:
    """Run `predict` (for texts `predict_tokens`) shared among all processes; each must call it.

    Process r of W takes records r, r+W, r+2W, ... Where W does not divide the number of records,
    the last processes repeat a record, because a sharded model needs the same number of passes on
    each; the result drops the repetitions.

    Args:
        model: the same on all processes, or sharded over them.
        data, batch_size, collate: see `predict`.
        is_text: True if the records are texts.
    """
    measure: Callable[..., Any] = predict_tokens if is_text else predict
    world, length = world_size(), len(data)  # type: ignore[arg-type]
    if world == 1:
        return measure(model, data, batch_size, collate)  # type: ignore[no-any-return]
    mine = [(rank() + turn * world) % length for turn in range(-(-length // world))]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, measure(model, Subset(data, mine), batch_size, collate))
    if not is_text:
        logits = torch.stack([one.logits for one in found], dim=1).flatten(0, 1)
        labels = torch.stack([one.labels for one in found], dim=1).flatten()
        return Predictions(logits[:length], labels[:length])
    record = torch.cat([one.record * world + place for place, one in enumerate(found)])
    order = record.argsort(stable=True)
    order = order[record[order] < length]
    names = ("losses", "correct", "expected", "spread")
    columns = {name: torch.cat([getattr(one, name) for one in found])[order] for name in names}
    return TokenPredictions(record=record[order], records=length, **columns)


@torch.no_grad()
def embed(model: nn.Module, data: Dataset[Any], batch_size: int, collate: Collate) -> Tensor:
    """Input of the classifier's last linear layer, [N, D] float32 on the CPU, in evaluation mode.

    Args:
        model, data, batch_size, collate: see `predict`.

    Raises:
        HamuError: if the model has no linear layer, or the input of the last one is more than a
            vector per image, or not finite.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise HamuError("the model has no linear layer whose input could be shown")
    found: list[Tensor] = []
    handle = layers[-1].register_forward_pre_hook(
        lambda _, given: found.append(given[0].float().cpu())
    )
    try:
        for _, moved in _batches(model, data, batch_size, collate):
            predict_logits(model, moved)
    finally:
        handle.remove()
    vectors = torch.cat(found)
    if vectors.ndim != 2 or len(vectors) != len(data):  # type: ignore[arg-type]
        raise HamuError("the model's last linear layer takes more than one vector per image")
    if not vectors.isfinite().all():
        raise HamuError("what goes into the model's last linear layer is not finite")
    return vectors


def principal_axes(vectors: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Project groups of vectors, [N_i, D] each, onto their two common principal components.

    Returns:
        Each group on the two axes of largest variance, [N_i, 2], and their share of the variance. A
        missing axis (one vector, one dimension) is 0.
    """
    both = torch.cat(list(vectors)).double()
    centred = both - both.mean(0)
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
    share = float(spread[:2].square().sum() / spread.square().sum().clamp(min=1e-300))
    shown = centred @ axes[:2].T
    shown = nn.functional.pad(shown, (0, 2 - shown.shape[1]))
    return list(torch.split(shown, [len(group) for group in vectors])), share


def _most_likely(logits: Tensor) -> Tensor:
    """Class of the highest logit, [N]; -1 where a logit is NaN, which argmax calls the highest."""
    return logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)


def _token_figures(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Losses, correct, expected and spread of `TokenPredictions`."""
    log_p = logits.float().log_softmax(-1)
    p = log_p.exp()
    known = log_p.masked_fill(p == 0, 0.0)  # a masked token adds nothing to the moments
    expected = (p * known).sum(-1)
    spread = (p * (known - expected[:, None]).square()).sum(-1).sqrt()
    losses = -log_p.gather(1, labels[:, None])[:, 0]
    correct = _most_likely(logits) == labels
    return losses.double().cpu(), correct.cpu(), expected.double().cpu(), spread.double().cpu()


def _batches(
    model: nn.Module, data: Any, batch_size: int, collate: Collate
) -> Iterator[tuple[Mapping[str, Tensor], dict[str, Tensor]]]:
    """Each batch, and the same on the model's device; the model is in evaluation mode meanwhile."""
    if not len(data):
        raise HamuError("the data set is empty: it has no record to predict")
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
            yield batch, {key: value.to(device) for key, value in batch.items()}
