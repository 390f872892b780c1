"""How sure the hardness is: what it would have been with other batches from the same source (bootstrap)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.assess.gradients import FEWEST_PARTS, PartedGram
from hamu.assess.hardness import REGIMES, BlockHardness, Hardness, clipped, constraint_status
from hamu.methods import Method


@dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals over the batches of both sides (Efron 1979), and how often each regime came up.

    An interval lies between quantiles of the replicates after their mean is moved to the estimate: a resampled mean
    gradient is longer than the mean gradient, which would pull every cosine towards 0. And the replicates are spread by
    √(m/(m-1)) about it, as the parts themselves are that much nearer to their mean than to the truth. Regimes are told
    likewise.

    Attributes:
        level: the share of replicates that lie inside.
        replicates: how many there were.
        parts: m, of the side that has fewer.
        kappa, cos: (low, high) of the whole model.
        regimes: share of the replicates in each regime of the whole model.
        block_kappa, block_cos: [L, 2].
    """

    level: float
    replicates: int
    parts: int
    kappa: tuple[float, float]
    cos: tuple[float, float]
    regimes: dict[str, float]
    block_kappa: Tensor
    block_cos: Tensor


def bootstrap(
    parted: PartedGram,
    method: Method,
    max_grad_norm: float | None,
    *,
    replicates: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> Intervals | None:
    """Resample the parts of each side with replacement; no pass over data, only sums of known dot products.

    Args:
        parted: the dot products of all parts.
        method: the HAMU method whose regime is asked for.
        max_grad_norm: the clipping of the run to come.
        replicates, level: see `Intervals`.
        seed: seed of the resampling.

    Returns:
        The intervals; None if a side has fewer parts than tell anything.
    """
    sizes = (len(parted.retain_shares), len(parted.forget_shares))
    if min(sizes) < FEWEST_PARTS:
        return None
    generator = torch.Generator().manual_seed(seed)
    wholes, blocks = [], []
    for _ in range(replicates):
        counts = [torch.randint(m, (m,), generator=generator).bincount(minlength=m) for m in sizes]
        status = constraint_status(clipped(parted.gram(*counts), max_grad_norm), method)
        wholes.append(Hardness.at(status))
        blocks.append(BlockHardness.at(status))
    gram = clipped(parted.gram(), max_grad_norm)
    whole, block = Hardness.of(gram, method), BlockHardness.of(gram, method)
    parts = min(sizes)

    def moved(values: Tensor, estimate: Tensor | float) -> Tensor:
        return (values - values.mean(0)) * math.sqrt(parts / (parts - 1)) + estimate

    kappas = moved(torch.tensor([h.kappa for h in wholes], dtype=torch.float64), whole.kappa)
    cosines = moved(torch.tensor([h.cos for h in wholes], dtype=torch.float64), whole.cos)
    return Intervals(
        level,
        replicates,
        parts,
        _pair(_interval(kappas, level)),
        _pair(_interval(cosines, level).clamp(-1.0, 1.0)),
        _regimes(kappas, whole),
        _interval(moved(torch.stack([b.kappa for b in blocks]), block.kappa), level),
        _interval(moved(torch.stack([b.cos for b in blocks]), block.cos), level).clamp(-1.0, 1.0),
    )


def _regimes(kappas: Tensor, whole: Hardness) -> dict[str, float]:
    """Shares of the replicates, moved as for the intervals, against the thresholds of the estimate."""
    found = (kappas > whole.direct_threshold).long() + (kappas > whole.stop_threshold).long()
    return {regime: float((found == number).double().mean()) for number, regime in enumerate(REGIMES)}


def _interval(values: Tensor, level: float) -> Tensor:
    """[..., 2] from replicates [B, ...]."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)
    return torch.quantile(values, ends, dim=0).movedim(0, -1)


def _pair(ends: Tensor) -> tuple[float, float]:
    low, high = ends.tolist()
    return low, high
