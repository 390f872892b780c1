"""What is assessed: a model, both data sets, and how a loss is taken of a batch. Nothing of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hamu.blocks import Blocks, group_blocks, trainable_parameters
from hamu.errors import HamuError
from hamu.forward import predict_logits
from hamu.modes import evaluating, without_tf32
from hamu.objectives import CrossEntropy, Scored

Advance = Callable[[float], None]  # told after each batch what it cost, in records of a forward and backward pass


def _silent(_: float) -> None:
    return


@dataclass
class Problem:
    """A model and its data, as `assess` sees them. Losses are cross-entropies per prediction, in evaluation mode.

    Args:
        model: the model before unlearning.
        retain, forget: the data sets.
        collate: makes a batch of what a data set gives.
        batch_size: records per pass.
        blocks: what a block is; see `group_blocks`.
        seed: seed of every draw.
        advance: told what was done, for a progress bar.

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
    advance: Advance = _silent
    parameters: list[Tensor] = field(init=False)
    block_names: list[str] = field(init=False)
    block_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        for side in ("retain", "forget"):
            if not len(self.data(side)):  # type: ignore[arg-type]
                raise HamuError(f"the {side} set is empty; there is nothing to assess")
        named = trainable_parameters(self.model)
        self.parameters = [p for _, p in named]
        self.block_names, self.block_of = group_blocks([name for name, _ in named], self.blocks)

    def data(self, side: str) -> Dataset[Any]:
        """The data of a side."""
        return self.retain if side == "retain" else self.forget

    def positions(self, side: str, most: int | None = None) -> Tensor:
        """The records of a side in random order, at most so many."""
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
