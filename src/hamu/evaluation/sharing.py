"""Predictions of a data set that several processes have shared among them: each reads its part, all get the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from hamu.core.distributed import rank, world_size
from hamu.evaluation.predictions import Predictions, TokenPredictions, predict, predict_tokens

Collate = Callable[[Any], Mapping[str, Tensor]]


def predict_shared(
    model: nn.Module, data: Dataset[Any], batch_size: int, collate: Collate, *, is_text: bool
) -> Predictions | TokenPredictions:
    """What `predict`, or `predict_tokens` for texts, says of all records; all processes must ask for it.

    Process r of W takes records r, r+W, r+2W, ... Where they do not come out even the last ones take a record of
    another once more, so that all make the same number of passes, as a sharded model needs; it is left out again.

    Args:
        model: the same on all processes, or sharded over them.
        data: all records.
        batch_size: records per forward pass.
        collate: makes a batch.
        is_text: whether they are texts.
    """
    world = world_size()
    measure = predict_tokens if is_text else predict
    if world == 1:
        return measure(model, data, batch_size, collate)
    length: int = len(data)  # type: ignore[arg-type]
    each = -(-length // world)
    mine = [(rank() + turn * world) % length for turn in range(each)]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, measure(model, Subset(data, mine), batch_size, collate))
    return _tokens_of_all(found, length) if is_text else _all(found, length)


def _all(found: list[Predictions], length: int) -> Predictions:
    """In the data's order: the first of each process, then the second of each, and so on."""
    logits = torch.stack([one.logits for one in found], dim=1).flatten(0, 1)
    labels = torch.stack([one.labels for one in found], dim=1).flatten()
    return Predictions(logits[:length], labels[:length])


def _tokens_of_all(found: list[TokenPredictions], length: int) -> TokenPredictions:
    record = torch.cat([one.record * len(found) + place for place, one in enumerate(found)])
    order = record.argsort(stable=True)
    order = order[record[order] < length]
    columns = (
        torch.cat([getattr(one, name) for one in found])[order]
        for name in ("losses", "correct", "expected", "spread")
    )
    return TokenPredictions(*columns, record[order], length)
