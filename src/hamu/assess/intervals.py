"""How sure the hardness is: what it would have been with other batches from the same source (bootstrap)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.assess.gradients import FEWEST_PARTS, PartedGram
from hamu.assess.hardness import REGIMES, BlockHardness, clipped, constraint_status, variants_of
from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.methods.base import regime_at

_AT_ONCE = 1 << 20  # numbers of the Grams' intermediate sums that are held at a time


@dataclass(frozen=True)
class VariantIntervals:
    """The intervals of what depends on the variant, HAMU-Q or HAMU-U; see `Intervals`.

    Attributes:
        direct_threshold: (low, high) of κ1 (κ3 for HAMU-U) of the whole model.
        stop_threshold: (low, high) of κ2 (κ4), likewise.
        regimes: share of the replicates in each regime of the whole model.
        block_direct_threshold, block_stop_threshold: of each block, [L, 2].
        block_regimes: share of the replicates in each of `REGIMES`, [L, 3].
    """

    direct_threshold: tuple[float, float]
    stop_threshold: tuple[float, float]
    regimes: dict[str, float]
    block_direct_threshold: Tensor
    block_stop_threshold: Tensor
    block_regimes: Tensor


@dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals over the batches of both sides (Efron 1979), and how often each regime came up.

    An interval lies between quantiles of the replicates after their mean is moved to the estimate: a resampled mean
    gradient is longer than the mean gradient, which would pull every cosine towards 0. And the replicates are spread by
    √(m/(m-1)) about it, as the parts themselves are that much nearer to their mean than to the truth. Regimes are told
    likewise: a replicate's κ, so moved, against the thresholds of the estimate.

    Attributes:
        level: the share of replicates that lie inside.
        replicates: how many there were.
        parts: m, of the side that has fewer.
        kappa, cos: (low, high) of the whole model.
        regimes: those of the variant that was asked for.
        block_kappa, block_cos: [L, 2].
        variants: by the name of the variant.
    """

    level: float
    replicates: int
    parts: int
    kappa: tuple[float, float]
    cos: tuple[float, float]
    regimes: dict[str, float]
    block_kappa: Tensor
    block_cos: Tensor
    variants: dict[str, VariantIntervals]


def bootstrap(
    parted: PartedGram,
    method: HamuQ | HamuU,
    max_grad_norm: float | None,
    *,
    replicates: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> Intervals | None:
    """Resample the parts of each side with replacement; no pass over data, only sums of known dot products.

    Args:
        parted: the dot products of all parts.
        method: the HAMU method whose regime is asked for; its constraint is what both variants are asked for.
        max_grad_norm: the clipping of the run to come.
        replicates, level: see `Intervals`.
        seed: seed of the resampling.

    Returns:
        The intervals; None if a side has fewer parts than tell anything.
    """
    sizes = (len(parted.retain_shares), len(parted.forget_shares))
    parts = min(sizes)
    if parts < FEWEST_PARTS:
        return None
    variants = variants_of(method)

    def of_sample(*counts: Tensor) -> dict[str, Tensor]:
        """The figures of the sample in which each part is there so many times."""
        return _figures(clipped(parted.gram(*counts), max_grad_norm), variants)

    rows = max(1, _AT_ONCE // (len(parted.products) * sum(sizes)))
    drawn = torch.func.vmap(of_sample, chunk_size=rows)(*_drawn(sizes, replicates, seed))
    known = of_sample(*(torch.ones(m) for m in sizes))
    spread = math.sqrt(parts / (parts - 1))
    moved = {
        name: (values - values.mean(0)) * spread + known[name] for name, values in drawn.items()
    }
    ends = {name: _possible(name, _interval(values, level)) for name, values in moved.items()}
    by_variant = {name: _of_variant(name, moved, known, ends) for name in variants}
    return Intervals(
        level,
        replicates,
        parts,
        _pair(ends["kappa"]),
        _pair(ends["cos"]),
        by_variant[method.name].regimes,
        ends["block_kappa"],
        ends["block_cos"],
        by_variant,
    )


def _figures(gram: PairGram, variants: Mapping[str, HamuQ | HamuU]) -> dict[str, Tensor]:
    """What intervals are taken of, by name; what depends on the variant begins with the variant's."""
    figures = {
        "kappa": gram.dot.sum(),
        "cos": gram.total().cos[0],
        "block_kappa": gram.dot,
        "block_cos": gram.cos,
    }
    for name, variant in variants.items():
        status = constraint_status(gram, variant)
        blocks = BlockHardness.at(status)
        figures |= {
            f"{name} direct": status.direct_threshold,
            f"{name} stop": status.stop_threshold,
            f"{name} block direct": blocks.direct_threshold,
            f"{name} block stop": blocks.stop_threshold,
        }
    return figures


def _of_variant(
    name: str, moved: Mapping[str, Tensor], known: Mapping[str, Tensor], ends: Mapping[str, Tensor]
) -> VariantIntervals:
    """From the figures of the moved replicates and of the estimate, and the intervals' ends."""

    def shares(kappa: str, of: str) -> Tensor:
        regime = regime_at(moved[kappa], known[f"{name} {of}direct"], known[f"{name} {of}stop"])
        return torch.stack(
            [(regime == number).double().mean(0) for number in range(len(REGIMES))], dim=-1
        )

    return VariantIntervals(
        _pair(ends[f"{name} direct"]),
        _pair(ends[f"{name} stop"]),
        dict(zip(REGIMES, shares("kappa", "").tolist(), strict=True)),
        ends[f"{name} block direct"],
        ends[f"{name} block stop"],
        shares("block_kappa", "block "),
    )


def _possible(name: str, ends: Tensor) -> Tensor:
    """Of an interval what can be: a cosine is within ±1, κ1 and κ3 are not above 0, κ2 and κ4 not below."""
    if name.endswith("cos"):
        return ends.clamp(-1.0, 1.0)
    if name.endswith("direct"):
        return ends.clamp(max=0.0)
    return ends.clamp(min=0.0) if name.endswith("stop") else ends


def _drawn(sizes: tuple[int, int], replicates: int, seed: int) -> tuple[Tensor, Tensor]:
    """How many times each part is there in each sample, [replicates, m] by side."""
    generator = torch.Generator().manual_seed(seed)
    draws = [
        [torch.randint(m, (m,), generator=generator).bincount(minlength=m) for m in sizes]
        for _ in range(replicates)
    ]
    retain, forget = (torch.stack(side).double() for side in zip(*draws, strict=True))
    return retain, forget


def _interval(values: Tensor, level: float) -> Tensor:
    """[..., 2] from replicates [B, ...]."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)
    return torch.quantile(values, ends, dim=0).movedim(0, -1)


def _pair(ends: Tensor) -> tuple[float, float]:
    low, high = ends.tolist()
    return low, high
