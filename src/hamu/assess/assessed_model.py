"""A model and both data sets as an assessment reads them: positions, batches, losses. Nothing of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hamu.core.forward import evaluating, predict_logits, without_tf32
from hamu.core.gram import Blocks, group_blocks, trainable_parameters
from hamu.core.objectives import CrossEntropy, Scored
from hamu.errors import HamuError


def _silent(_: float) -> None:
    return


def count_records(retain: Dataset[Any], forget: Dataset[Any]) -> dict[str, int]:
    """The number of records of each side.

    Raises:
        HamuError: if a set is empty.
    """
    records = {"retain": len(retain), "forget": len(forget)}  # type: ignore[arg-type]
    for side, count in records.items():
        if not count:
            raise HamuError(f"the {side} set is empty; there is nothing to assess")
    return records


@dataclass
class AssessedModel:
    """A model with the data that it is assessed on. Losses are cross-entropies per prediction, in evaluation mode.

    Args:
        model: the model before unlearning.
        retain, forget: the data sets.
        collate: makes a batch of what a data set gives.
        batch_size: records per pass.
        blocks: what a block is; see `group_blocks`.
        seed: seed of every draw.
        advance: told after each pass what it cost, in records of a forward and backward pass.

    Attributes:
        records: the number of records of each side.
        parameters: those that are trainable.
        block_names: of each block.
        block_of: the block of each parameter, an index into `block_names`.

    Raises:
        HamuError: if a set is empty or nothing is trainable.
    """

    model: nn.Module
    retain: Dataset[Any]
    forget: Dataset[Any]
    collate: Callable[[Any], Mapping[str, Tensor]]
    batch_size: int = 500
    blocks: Blocks = "tensor"
    seed: int = 42
    advance: Callable[[float], None] = _silent
    records: dict[str, int] = field(init=False)
    parameters: list[Tensor] = field(init=False)
    block_names: list[str] = field(init=False)
    block_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.records = count_records(self.retain, self.forget)
        named = trainable_parameters(self.model)
        self.parameters = [p for _, p in named]
        self.block_names, self.block_of = group_blocks([name for name, _ in named], self.blocks)

    def data(self, side: str) -> Dataset[Any]:
        """The data of a side."""
        return self.retain if side == "retain" else self.forget

    def positions(self, side: str, most: int | None = None) -> Tensor:
        """The records of a side in random order, at most this many."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(len(self.data(side)), generator=generator)[:most]  # type: ignore[arg-type]

    def batches(
        self, side: str, positions: Tensor | None = None, size: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of a side on the model's device; of these records only, in this order, if they are given."""
        device = self.parameters[0].device
        data = self.data(side) if positions is None else Subset(self.data(side), positions.tolist())
        for batch in DataLoader(data, batch_size=size or self.batch_size, collate_fn=self.collate):
            yield {key: value.to(device) for key, value in batch.items()}

    def score(self, batch: Mapping[str, Tensor]) -> Scored:
        """The model's predictions for a batch."""
        return Scored.of(predict_logits(self.model, batch), batch["labels"])

    def total(self, scored: Scored) -> Tensor:
        """Their loss, summed."""
        return CrossEntropy().total(scored, None)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Evaluation mode, without TF32; all that, gradients and the CPU's random state are as before afterwards."""
        grads = [(p, p.grad) for p in self.model.parameters()]
        for parameter, _ in grads:
            parameter.grad = None
        try:
            with evaluating(self.model), without_tf32():
                yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
