"""The hardness of an unlearning problem with intervals, the price of each demand, the verdict."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hamu.assess.gradients import FEWEST_PARTS, PartedGram
from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.methods.base import ConstraintStatus, regime_at
from hamu.errors import percent

REGIMES = ("direct", "rectified", "unavoidable")
_EASY, _MODERATE = 2 / 3, 1 / 3  # shares of the feasible demand that are free
_AT_ONCE = 1 << 20  # numbers of the Grams' intermediate sums that are held at a time


@dataclass(frozen=True)
class Hardness:
    """Hardness of reconciling both objectives, at the model as it is (paper, Sec. 4)."""

    kappa: float  # g_r·g_f of the clipped gradients; the larger, the harder
    cos: float
    direct_threshold: float  # κ1 (κ3 for HAMU-U); up to it the objective's own gradient is enough
    stop_threshold: float  # κ2 (κ4); above it a step that meets the constraint must hurt
    regime: str  # "direct", "rectified" or "unavoidable" (Fig. 1)
    max_demand: float  # the largest constraint that the gradients allow

    @classmethod
    def at(cls, status: ConstraintStatus) -> Self:
        """Hardness of the whole model, from the `constraint_status` of the clipped gradients."""
        return cls(
            status.kappa.item(),
            status.gram.total().cos.item(),
            status.direct_threshold.item(),
            status.stop_threshold.item(),
            REGIMES[int(status.regime)],
            status.max_demand.item(),
        )


@dataclass(frozen=True)
class BlockHardness:
    """Hardness of each block for one variant, [L] each; `regime` is an index into `REGIMES`.

    κ1 (κ3 for HAMU-U) is -φ_i ‖g_r,i‖‖g_f,i‖, κ2 (κ4) is √(1-φ_i²) ‖g_r,i‖‖g_f,i‖.
    """

    kappa: Tensor
    cos: Tensor
    regime: Tensor
    direct_threshold: Tensor
    stop_threshold: Tensor

    @classmethod
    def at(cls, status: ConstraintStatus) -> Self:
        """Hardness of each block, from the `constraint_status` of the clipped gradients."""
        gram, phi = status.gram, status.fraction.clamp(max=1.0)
        norms = gram.retain_norm * gram.forget_norm
        direct, stop = -phi * norms, ((1.0 - phi) * (1.0 + phi)).sqrt() * norms
        return cls(gram.dot, gram.cos, regime_at(gram.dot, direct, stop), direct, stop)


def variants_of(method: HamuQ | HamuU) -> dict[str, HamuQ | HamuU]:
    """HAMU-Q and HAMU-U by name, with the same constraint, each on its own side."""
    shared = (method.constraint, method.constraint_mode, method.distribution, method.radius)
    return {cls.name: cls(*shared) for cls in (HamuQ, HamuU)}


def constraint_status(gram: PairGram, method: HamuQ | HamuU) -> ConstraintStatus:
    """Status of a HAMU method's constraint."""
    status = method.weigh(gram).constraint
    assert status is not None
    return status


@dataclass(frozen=True)
class VariantIntervals:
    """Low and high ends for HAMU-Q or HAMU-U; row 0 is the whole model, then each block."""

    direct_threshold: Tensor  # [1 + L, 2]
    stop_threshold: Tensor  # [1 + L, 2]
    regimes: Tensor  # share of the replicates in each of `REGIMES`, [1 + L, 3]


@dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals over the batches of both sides (Efron 1979), and each regime's frequency.

    The mean of the replicates is moved to the estimate, as resampled mean gradients are longer,
    which would pull every cosine towards 0; they spread by √(m/(m-1)) about it, as the parts are
    that much nearer to their mean than to the truth. Regimes compare a replicate's κ, so moved,
    with the thresholds of the estimate. Noise that a sample of the records adds to both norms is
    taken off; where all are measured nothing is, and cosθ is that of these very records.
    """

    level: float  # the share of replicates that lie inside
    replicates: int
    parts: int  # m, of the side that has fewer
    kappa: Tensor  # low and high end of the whole model (row 0) and of each block, [1 + L, 2]
    cos: Tensor
    variants: dict[str, VariantIntervals]

    def row(self, number: int) -> dict[str, Any]:
        """Intervals of the whole model (0) or of a block (from 1), as JSON holds them."""
        found: dict[str, Any] = {
            key: getattr(self, key)[number].tolist() for key in ("kappa", "cos")
        }
        for name, variant in self.variants.items():
            found[name] = {key: value[number].tolist() for key, value in vars(variant).items()}
            found[name]["regimes"] = dict(zip(REGIMES, found[name]["regimes"], strict=True))
        return found


def bootstrap(
    parted: PartedGram,
    method: HamuQ | HamuU,
    max_grad_norm: float | None,
    *,
    replicates: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> Intervals | None:
    """Resample the parts of each side with replacement; sums known dot products, reads no data.

    The method gives both variants their constraint. Fewer than 8 parts give no intervals.
    """
    sizes = [len(shares) for shares in parted.shares]
    parts = min(sizes)
    if parts < FEWEST_PARTS:
        return None
    variants = variants_of(method)

    def of_sample(*counts: Tensor) -> list[Tensor]:
        """κ, cosθ, and both thresholds of each variant; of the whole model and blocks, [1 + L]."""
        gram = parted.gram(*counts)
        gram = gram.scaled(*gram.clip_factors(max_grad_norm))
        total = gram.total()
        pairs = [(total.dot, gram.dot), (total.cos, gram.cos)]
        for variant in variants.values():
            status = constraint_status(gram, variant)
            blocks = BlockHardness.at(status)
            pairs.append((status.direct_threshold[None], blocks.direct_threshold))
            pairs.append((status.stop_threshold[None], blocks.stop_threshold))
        return [torch.cat(pair) for pair in pairs]

    generator = torch.Generator().manual_seed(seed)
    draws = [
        [torch.randint(m, (m,), generator=generator).bincount(minlength=m) for m in sizes]
        for _ in range(replicates)
    ]
    counts = (torch.stack(side).double() for side in zip(*draws, strict=True))
    rows = max(1, _AT_ONCE // (len(parted.products) * sum(sizes)))
    drawn = torch.func.vmap(of_sample, chunk_size=rows)(*counts)
    known, spread = of_sample(), math.sqrt(parts / (parts - 1))
    moved = [(v - v.mean(0)) * spread + at for v, at in zip(drawn, known, strict=True)]
    quantiles = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    # κ, |cosθ| ≤ 1, and of each variant κ1 or κ3 ≤ 0, κ2 or κ4 ≥ 0
    bounds = [(-math.inf, math.inf), (-1.0, 1.0), *[(-math.inf, 0.0), (0.0, math.inf)] * 2]
    kappa, cos, *thresholds = (
        torch.quantile(values, quantiles, dim=0).movedim(0, -1).clamp(*ends)
        for values, ends in zip(moved, bounds, strict=True)
    )
    by_variant = {}
    for place, name in enumerate(variants):
        direct, stop = known[2 + 2 * place : 4 + 2 * place]
        regime = regime_at(moved[0], direct, stop)
        shares = [(regime == number).double().mean(0) for number in range(len(REGIMES))]
        low, high = thresholds[2 * place : 2 + 2 * place]
        by_variant[name] = VariantIntervals(low, high, torch.stack(shares, dim=-1))
    return Intervals(level, replicates, parts, kappa, cos, by_variant)


CAN_IMPROVE, WILL_COST, MUST_HURT = 0, 3, 4
# the free share of the feasible demand below which no demand worth making is free
NEXT_TO_NOTHING = 0.05


@dataclass(frozen=True)
class Frontier:
    """Best attainable pairs of changes, per unit of learning rate.

    Up to the free limit a demand costs the other side nothing to first order; for one block that is
    n_r n_f sinθ where κ > 0, else all that is feasible (App. B.4).
    """

    demand: Tensor  # the constraint, Q/η or U/η, [P] from 0 to the feasible limit
    retain_change: Tensor  # [P]; negative is an improvement (F_r* of Theorem 4.1 for HAMU-Q)
    forget_change: Tensor  # [P]; positive is forgetting
    feasible_limit: float  # the largest demand that the gradients allow, Σ n_r,i n_f,i
    free_limit: float
    criterion_limit: float  # of the aggregate stopping criterion (App. C), Σ n_r,i n_f,i sinθ_i

    @property
    def free_share(self) -> float:
        """Free share of the feasible demand."""
        return self.free_limit / self.feasible_limit if self.feasible_limit > 0 else 0.0


def frontier(gram: PairGram, method: HamuQ | HamuU, points: int = 101) -> Frontier:
    """Trace the frontier of a pair of (clipped) gradients at demands up to the feasible limit.

    The method gives the constrained side, radius and distribution over blocks, not the constraint.
    """

    def at(share: float) -> tuple[Tensor, Tensor, ConstraintStatus]:
        asked = replace(method, constraint=share, constraint_mode="relative", stopping="aggregate")
        weights = asked.weigh(gram)
        assert weights.constraint is not None
        return *gram.changes(weights.retain, weights.forget), weights.constraint

    def is_free(share: float) -> bool:
        retain, forget, _ = at(share)
        return bool(retain <= 0 if method.constrained == "forget" else forget >= 0)

    even = torch.linspace(0.0, 1.0, points, dtype=torch.float64)
    shares = 1.0 - (1.0 - even).square()  # the price rises steeply towards the feasible limit
    # a demand of nothing is the limit of small ones: the objective's own best step without harm
    retain, forget, statuses = zip(*map(at, shares.clamp(min=1e-9).tolist()), strict=True)
    feasible = statuses[-1].max_demand.item()
    low, high = (1.0, 1.0) if is_free(1.0) else (0.0, 1.0)
    while high - low > 2.0**-50:  # the price never falls with the demand, so it turns only once
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_free(middle) else (low, middle)
    return Frontier(
        demand=torch.stack([status.demand for status in statuses]),
        retain_change=torch.stack(retain),
        forget_change=torch.stack(forget),
        feasible_limit=feasible,
        free_limit=low * feasible,
        criterion_limit=statuses[-1].free_limit.item(),
    )


@dataclass(frozen=True)
class Verdict:
    """Decision on whether to start, with a suggestion."""

    code: int  # 0 both objectives can improve, 3 it costs, 4 next to nothing is free, or no step
    answer: str  # how hard it will be and whether to start
    reason: str  # the figures behind it, in words
    constraint: float  # share of the feasible demand, for constraint_mode="relative"; 0 for none
    learning_rate: float | None  # keeps second order below a tenth of first; None if unknown
    suggestion: str  # both as options; empty for none


def judge(
    found: Frontier,
    method: HamuQ | HamuU,
    gram: PairGram,
    scales: tuple[float, float],
    trusted_rate: float | None,
) -> Verdict:
    """Judge the step of a method by its price, its frontier, and the rate that first order allows.

    `gram` is of the clipped gradients, `scales` are the reciprocals of the clip factors, so that
    changes are of the losses.
    """
    feasible, free, share = found.feasible_limit, found.free_limit, found.free_share
    weights, status = method.weigh(gram), constraint_status(gram, method)
    changes = gram.changes(weights.retain, weights.forget)
    retain, forget = (change.item() * scale for change, scale in zip(changes, scales, strict=True))
    price, gain = (retain, forget) if method.constrained == "forget" else (-forget, -retain)
    is_free = price <= 1e-9 * gain
    clamps = method.on_infeasible == "clamp" and not status.feasible
    suggested, rate = max(0.01, round(0.5 * share, 2)), None
    if trusted_rate is not None and math.isfinite(trusted_rate):
        digits = 1 - math.floor(math.log10(trusted_rate))  # two digits, rounded down
        rate = round(math.floor(trusted_rate * 10.0**digits + 1e-9) / 10.0**digits, digits)
    reason = (
        f"a demand up to {free:.4g} of at most {feasible:.4g} per unit of learning rate is free "
        f"({percent(share)}), and the demand is {status.demand.item():.4g}"
    ) + f", clamped to {status.clipped_demand.item():.4g}" * clamps
    stops, off = method.stopping_rule.criterion, ""
    if stops != "off" and status.criterion_met:  # the run would end
        off = f" with --stopping off (the criterion {stops} is met)"
    how = "easy" if share >= _EASY else "moderately hard" if share >= _MODERATE else "hard"
    less = replace(method, constraint=suggested, constraint_mode="relative")
    options = f"--constraint_mode relative --constraint {suggested:g}"
    if stops != "off" and constraint_status(gram, less).criterion_met:
        options += " --stopping off"
    smaller = f"{options}, which is free"
    if share < NEXT_TO_NOTHING and not (is_free and feasible):
        code, suggested = MUST_HURT, 0.0
        free_share = f"only {share:.1%} of what is possible" if share else "no demand"
        answer = f"It will be very hard, do not start: {free_share} is free"
    elif not (status.feasible or clamps):
        code, meets = MUST_HURT, "Do not start with this demand, which no step can meet"
        answer = f"{meets}: it will be {how} with {smaller}"
    elif is_free:
        code, answer = CAN_IMPROVE, f"It will be {how}, start{off}: a step can raise the forget "
        answer += "loss without raising the retain loss"
        reason += (
            f". To first order, a step of learning rate η changes the retain loss by "
            f"{retain:+.4g}·η and the forget loss by {forget:+.4g}·η"
        )
        if share < NEXT_TO_NOTHING:
            suggested = 0.0
            answer = "It will be very hard: this demand costs nothing, but it forgets next to "
            answer += "nothing; start only if little is enough"
    else:
        code = WILL_COST
        paid = f"will cost about {price / gain:.3g} retain loss per 1 of forget loss"
        if method.constrained == "retain":
            paid = f"will lower the forget loss by about {price / gain:.3g} per 1 of retain loss"
        answer = f"It will be {how}, and this demand has a price: it {paid}; accept that{off}, "
        answer += f"or start with {smaller}"
    options += "" if rate is None else f" --learning_rate {rate:g}"
    return Verdict(code, answer, f"{reason}.", suggested, rate, options * (suggested > 0))
