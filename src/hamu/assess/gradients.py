"""An assessed model and the mean gradients of both its sides, in parts for the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from hamu.core.forward import evaluating, predict_logits, without_tf32
from hamu.core.gram import (
    WIDENED,
    Blocks,
    PairGram,
    combine_dtype,
    group_blocks,
    trainable_parameters,
)
from hamu.core.objectives import CrossEntropy, Scored
from hamu.errors import HamuError

FEWEST_PARTS = 8  # with fewer, a 95% interval covers some 80% of the truths
_MOST_PARTS = 16
FULL_BATCH = 128  # records; a larger batch costs hardly less for each of them


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Tensors (None for zero) as one vector, [P]."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t).flatten() for t, p in pairs])


def shaped(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The reverse of `flat`."""
    parts = torch.split(vector, [p.numel() for p in like])
    return [part.view(p.shape).to(p.dtype) for part, p in zip(parts, like, strict=True)]


def norm(tensors: Sequence[Tensor], order: float = 2.0) -> float:
    """The norm of all entries in float64, read from the device once; 0 of nothing."""
    if math.isfinite(order):  # float64 sums a piece at a time
        tensors = [piece for t in tensors for piece in torch.split(t.reshape(-1), WIDENED)]
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(tensors, order, dtype=torch.float64)
    together = torch.stack([n.to(norms[0].device) for n in norms])
    return float(torch.linalg.vector_norm(together, order).item())


@dataclass
class AssessedModel:
    """A model with the data to assess it on. Losses are cross-entropies, in evaluation mode.

    Args:
        model: the model before unlearning.
        retain, forget: the data sets.
        collate: makes a batch from records.
        batch_size: records per pass.
        blocks: see `group_blocks`.
        seed: seed of every draw.
        advance: receives the cost of each pass, in records of a forward and backward pass.

    Attributes:
        records: the number of records of each side.
        parameters: the trainable parameters.
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
    advance: Callable[[float], None] = lambda _: None
    records: dict[str, int] = field(init=False)
    parameters: list[Tensor] = field(init=False)
    block_names: list[str] = field(init=False)
    block_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.records = {side: len(self.data(side)) for side in ("retain", "forget")}  # type: ignore[arg-type]
        for side, count in self.records.items():
            if not count:
                raise HamuError(f"the {side} set is empty; there is nothing to assess")
        named = trainable_parameters(self.model)
        self.parameters = [p for _, p in named]
        self.block_names, self.block_of = group_blocks([name for name, _ in named], self.blocks)

    def data(self, side: str) -> Dataset[Any]:
        """The data of a side."""
        return self.retain if side == "retain" else self.forget

    def positions(self, side: str, most: int | None = None) -> Tensor:
        """The records of a side in random order, at most this many."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.records[side], generator=generator)[:most]

    def batches(
        self, side: str, positions: Tensor | None = None, size: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of a side, or of these records in this order, on the model's device."""
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
        """Evaluation mode without TF32; restores mode, gradients and the CPU's random state."""
        grads = [(p, p.grad) for p in self.model.parameters()]
        for parameter, _ in grads:
            parameter.grad = None
        try:
            with evaluating(self.model), without_tf32():
                yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad


@dataclass(frozen=True)
class PartedGradient:
    """The gradient of a side's mean loss as the sum of m parts, each of some random batches.

    Attributes:
        parts: [m] lists of a tensor (None for zero) per parameter; they sum to the mean gradient.
            Those of half precision parameters are float32.
        shares: each part's share of the predictions, [m] float64; they sum to 1.
    """

    parts: list[list[Tensor | None]]
    shares: Tensor

    def total(self) -> list[Tensor | None]:
        """The mean gradient."""
        summed: list[Tensor | None] = []
        for grads in zip(*self.parts, strict=True):
            present = [g for g in grads if g is not None]
            several = len(present) > 1
            summed.append(torch.stack(present).sum(0) if several else next(iter(present), None))
        return summed


def parted_gradient(
    assessed: AssessedModel, side: str, parts: int, most: int | None = None
) -> PartedGradient:
    """One forward and backward pass over a side, or over `most` random records of it.

    Raises:
        HamuError: if the gradient is zero or not finite, or no record has labels to score.
    """
    positions = assessed.positions(side, most)
    parameters = assessed.parameters
    kept: list[list[Tensor | None]] = []
    counts: list[int] = []
    for chunk in positions.tensor_split(min(parts, len(positions))):
        count = 0
        sums: list[Tensor | None] = [None] * len(parameters)
        batches = math.ceil(len(chunk) / assessed.batch_size)
        even = math.ceil(len(chunk) / batches)  # no batch is much smaller than the others
        for batch in assessed.batches(side, chunk, even):
            scored = assessed.score(batch)
            torch.autograd.backward(assessed.total(scored))
            sums = [_added(one, p) for one, p in zip(sums, parameters, strict=True)]
            count += len(scored.labels)
            assessed.advance(float(scored.records))
        pairs = zip(sums, parameters, strict=True)
        kept.append([p.grad if one is None else one for one, p in pairs])
        counts.append(count)
        for parameter in parameters:
            parameter.grad = None
    shares = torch.tensor(counts, dtype=torch.float64)
    if not shares.sum() > 0:
        raise HamuError(f"the {side} set has nothing that is scored; give records with an answer")
    for grads in kept:
        torch._foreach_div_([g for g in grads if g is not None], float(shares.sum()))
    extent = norm([g for grads in kept for g in grads if g is not None], math.inf)
    if not math.isfinite(extent):
        raise HamuError(
            f"the gradient of the {side} loss is not finite; look for broken records or weights"
        )
    if not extent > 0:
        raise HamuError(
            f"the gradient of the {side} loss is zero: it reaches no trainable parameter, "
            f"or the loss is stationary"
        )
    return PartedGradient(kept, shares / shares.sum())


def _added(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    """The float32 sum of half precision gradients, which would lose small ones; else None."""
    if parameter.grad is None or parameter.dtype not in (torch.bfloat16, torch.float16):
        return total
    one, parameter.grad = parameter.grad, None
    return one.float() if total is None else total.add_(one)


@dataclass(frozen=True)
class PartedGram:
    """Dot products of all parts of both sides per block: the Gram of any reweighting of the parts.

    Attributes:
        products: [L, m_r + m_f, m_r + m_f], float64.
        retain_shares, forget_shares: see `PartedGradient.shares`.
        eps: see `PairGram.eps`.
    """

    products: Tensor
    retain_shares: Tensor
    forget_shares: Tensor
    eps: float

    @classmethod
    def of(
        cls, assessed: AssessedModel, retain: PartedGradient, forget: PartedGradient
    ) -> PartedGram:
        """Measure it, a piece of a parameter at a time; reads each device once."""
        parts, parameters = [*retain.parts, *forget.parts], assessed.parameters
        rows, blocks = len(parts), len(assessed.block_names)
        step = max(1, min(WIDENED // rows, max(p.numel() for p in parameters)))
        sums: dict[torch.device, Tensor] = {}
        buffers: dict[torch.device, Tensor] = {}
        for device in dict.fromkeys(p.device for p in parameters):
            wide_like: dict[str, Any] = {"dtype": torch.float64, "device": device}
            sums[device] = torch.zeros(blocks, rows, rows, **wide_like)
            buffers[device] = torch.empty(rows * step, **wide_like)
        for index, (block, p) in enumerate(zip(assessed.block_of, parameters, strict=True)):
            grads = [part[index] for part in parts]
            flattened = [None if g is None else g.reshape(-1) for g in grads]
            for start in range(0, p.numel(), step):
                width = min(step, p.numel() - start)
                wide = buffers[p.device][: rows * width].view(rows, width)
                for row, g in zip(wide, flattened, strict=True):
                    if g is None:
                        row.zero_()
                    else:
                        row.copy_(g[start : start + width])
                sums[p.device][block] += wide @ wide.T
        products = torch.stack([found.cpu() for found in sums.values()]).sum(0)
        eps = max(torch.finfo(combine_dtype(p)).eps for p in parameters)
        return cls(products, retain.shares, forget.shares, eps)

    def gram(
        self, retain_counts: Tensor | None = None, forget_counts: Tensor | None = None
    ) -> PairGram:
        """The Gram of the mean gradients with each part this often ([m_r], [m_f]); default once."""
        r = _weights(self.retain_shares, retain_counts)
        f = _weights(self.forget_shares, forget_counts)
        split = len(r)
        retain = torch.einsum("i,lij,j->l", r, self.products[:, :split, :split], r)
        forget = torch.einsum("i,lij,j->l", f, self.products[:, split:, split:], f)
        dot = torch.einsum("i,lij,j->l", r, self.products[:, :split, split:], f)
        return PairGram(retain.clamp(min=0), forget.clamp(min=0), dot, self.eps)


def _weights(shares: Tensor, counts: Tensor | None) -> Tensor:
    if counts is None:
        return torch.ones_like(shares)
    counts = counts.to(shares)
    return counts / (counts * shares).sum()


def count_parts(records: int, batch_size: int, affordable: int) -> int:
    """Parts to keep apart: at most one per full batch, but as many as intervals need."""
    return min(affordable, max(FEWEST_PARTS, math.ceil(records / min(batch_size, FULL_BATCH))))


def affordable_parts(parameters: Sequence[Tensor], memory: float) -> int:
    """Parts of each side, at most 16, that fit into so many GB; 1 if too few for intervals."""
    size = sum(p.numel() * combine_dtype(p).itemsize for p in parameters)
    fitting = math.floor(memory * 1e9 / (2 * size))
    return min(_MOST_PARTS, fitting) if fitting >= FEWEST_PARTS else 1
