"""The mean gradients of both sides, in parts that tell how much they would change with other data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.assess.assessed_model import AssessedModel
from hamu.assess.vectors import largest
from hamu.core.gram import WIDENED, PairGram, combine_dtype
from hamu.errors import HamuError

FEWEST_PARTS = 8  # with fewer, a 95% interval covers some 80% of the truths
_MOST_PARTS = 16
FULL_BATCH = 128  # records; a larger batch costs hardly less for each of them


@dataclass(frozen=True)
class PartedGradient:
    """The gradient of a side's mean loss as the sum of m parts, each of some randomly chosen batches.

    Attributes:
        parts: [m] lists of a tensor (None for zero) per parameter; they sum to the mean gradient. Those of half
            precision parameters are float32.
        shares: each part's share of the predictions, [m] float64; they sum to 1.
    """

    parts: list[list[Tensor | None]]
    shares: Tensor

    def total(self) -> list[Tensor | None]:
        """The mean gradient."""
        summed: list[Tensor | None] = []
        for grads in zip(*self.parts, strict=True):
            present = [g for g in grads if g is not None]
            summed.append(
                torch.stack(present).sum(0) if len(present) > 1 else present[0] if present else None
            )
        return summed


def parted_gradient(
    assessed: AssessedModel, side: str, parts: int, most: int | None = None
) -> PartedGradient:
    """One forward and backward pass over a side.

    Args:
        assessed: the model and its data.
        side: "retain" or "forget".
        parts: how many parts to keep apart; fewer if there are fewer records.
        most: use at most this many records, drawn at random.

    Raises:
        HamuError: if a gradient is not finite.
    """
    positions = assessed.positions(side, most)
    parts = min(parts, len(positions))
    kept: list[list[Tensor | None]] = []
    counts: list[int] = []
    for chunk in positions.tensor_split(parts):
        count = 0
        batches = math.ceil(len(chunk) / assessed.batch_size)
        sums: list[Tensor | None] = [None] * len(assessed.parameters)
        for batch in assessed.batches(
            side, chunk, math.ceil(len(chunk) / batches)
        ):  # none that is much smaller
            scored = assessed.score(batch)
            assessed.total(scored).backward()
            sums = [_added(one, p) for one, p in zip(sums, assessed.parameters, strict=True)]
            count += len(scored.labels)
            assessed.advance(float(scored.records))
        kept.append(
            [
                p.grad if one is None else one
                for one, p in zip(sums, assessed.parameters, strict=True)
            ]
        )
        counts.append(count)
        for parameter in assessed.parameters:
            parameter.grad = None
    shares = torch.tensor(counts, dtype=torch.float64)
    if not shares.sum() > 0:
        raise HamuError(f"the {side} set has nothing that is scored; give records with an answer")
    for grads in kept:
        torch._foreach_div_([g for g in grads if g is not None], float(shares.sum()))
    extent = largest([g for grads in kept for g in grads if g is not None])
    if not math.isfinite(extent):
        raise HamuError(
            f"the gradient of the {side} loss is not finite; look for broken records or weights"
        )
    if not extent > 0:
        raise HamuError(
            f"the gradient of the {side} loss is zero: it reaches no trainable parameter, or the loss has nowhere to go"
        )
    return PartedGradient(kept, shares / shares.sum())


def _added(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A batch's gradient of half precision, summed in float32: in its own what is small would be lost. Else None."""
    if parameter.grad is None or parameter.dtype not in (torch.bfloat16, torch.float16):
        return total
    one, parameter.grad = parameter.grad, None
    return one.float() if total is None else total.add_(one)


@dataclass(frozen=True)
class PartedGram:
    """The dot products of all parts of both sides, block by block: the Gram of any reweighting of the parts.

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
        """Measure it, a piece of a parameter at a time; each device is read once."""
        rows = len(retain.parts) + len(forget.parts)
        step = max(1, min(WIDENED // rows, max(p.numel() for p in assessed.parameters)))
        sums = {
            device: torch.zeros(
                len(assessed.block_names), rows, rows, dtype=torch.float64, device=device
            )
            for device in dict.fromkeys(p.device for p in assessed.parameters)
        }
        buffers = {
            device: torch.empty(rows * step, dtype=torch.float64, device=device) for device in sums
        }
        for index, (block, parameter) in enumerate(
            zip(assessed.block_of, assessed.parameters, strict=True)
        ):
            grads = [part[index] for part in (*retain.parts, *forget.parts)]
            flat = [None if g is None else g.reshape(-1) for g in grads]
            for start in range(0, parameter.numel(), step):
                width = min(step, parameter.numel() - start)
                wide = buffers[parameter.device][: rows * width].view(rows, width)
                for row, g in zip(wide, flat, strict=True):
                    if g is None:
                        row.zero_()
                    else:
                        row.copy_(g[start : start + width])
                sums[parameter.device][block] += wide @ wide.T
        products = torch.stack([found.cpu() for found in sums.values()]).sum(0)
        eps = max(torch.finfo(combine_dtype(p)).eps for p in assessed.parameters)
        return cls(products, retain.shares, forget.shares, eps)

    def gram(
        self, retain_counts: Tensor | None = None, forget_counts: Tensor | None = None
    ) -> PairGram:
        """The Gram of the mean gradients when each part is there so many times ([m_r] and [m_f]; by default once)."""
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
    """How many parts to keep apart of so many records, given how many there is memory for.

    No more than there are full batches, as passes over smaller ones cost more for each record; but at least as many as
    intervals need.
    """
    return min(affordable, max(FEWEST_PARTS, math.ceil(records / min(batch_size, FULL_BATCH))))


def affordable_parts(parameters: Sequence[Tensor], memory: float) -> int:
    """How many parts of each side, at most 16, fit into so many GB beside the gradients; 1 if too few to tell."""
    size = sum(p.numel() * combine_dtype(p).itemsize for p in parameters)
    fitting = math.floor(memory * 1e9 / (2 * size))
    return min(_MOST_PARTS, fitting) if fitting >= FEWEST_PARTS else 1
