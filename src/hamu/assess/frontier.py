"""The first-order price of each demand (paper, Theorem 4.1) and the verdict on the run's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.methods.base import ConstraintStatus

CAN_IMPROVE, WILL_COST, MUST_HURT = 0, 3, 4
# the free share of the feasible demand below which no demand worth making is free
NEXT_TO_NOTHING = 0.05


@dataclass(frozen=True)
class Frontier:
    """The best attainable pairs of changes, per unit of learning rate.

    Up to the free limit a demand costs the other side nothing to first order; for one block that is
    n_r n_f sinθ where κ > 0, else all that is feasible (App. B.4). The criterion limit meets the
    aggregate stopping criterion (App. C); several blocks may have it on either side of the free.
    """

    demand: Tensor  # the constraint, Q/η or U/η, [P] from 0 to the feasible limit
    retain_change: Tensor  # [P]; negative is an improvement (F_r* of Theorem 4.1 for HAMU-Q)
    forget_change: Tensor  # [P]; positive is forgetting
    feasible_limit: float  # the largest demand that the gradients allow, Σ n_r,i n_f,i
    free_limit: float
    criterion_limit: float  # Σ n_r,i n_f,i sinθ_i

    @property
    def free_share(self) -> float:
        """The free share of the feasible demand."""
        return self.free_limit / self.feasible_limit if self.feasible_limit > 0 else 0.0

    def at(self, demand: float) -> tuple[float, float]:
        """(retain_change, forget_change) of a demand, interpolated."""
        retain, forget = (
            float(np.interp(demand, self.demand.numpy(), change.numpy()))
            for change in (self.retain_change, self.forget_change)
        )
        return retain, forget


def frontier(gram: PairGram, method: HamuQ | HamuU, points: int = 101) -> Frontier:
    """The frontier of one pair of (clipped) gradients, block by block.

    Args:
        gram: their Gram.
        method: gives the constrained side, radius and distribution over blocks, not the constraint.
        points: number of demands, denser towards the feasible limit.
    """

    def at(share: float) -> tuple[Tensor, Tensor, ConstraintStatus]:
        """The changes of both losses, and the constraint, at this share of the feasible demand."""
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
    """The decision on whether to start, with a suggestion.

    `code`, the exit code of `hamu assess`, is 0 if both objectives can improve, 3 if it costs, 4 if
    next to nothing is free or no step is possible.
    """

    code: int
    headline: str
    reason: str  # the figures behind it, in words
    constraint: float  # share of the feasible demand, for constraint_mode="relative"; 0 for none
    learning_rate: float | None  # keeps second order below a tenth of first; None if unknown


def judge(
    found: Frontier, method: HamuQ | HamuU, scales: tuple[float, float], trusted_rate: float | None
) -> Verdict:
    """Judge a method's constraint by its frontier.

    Args:
        found: the method's frontier.
        method: the HAMU method of the run to come.
        scales: the reciprocals of the retain and forget clip factors, so that changes are of the
            losses.
        trusted_rate: the learning rate that first order allows, infinite or None if there is no
            bound.
    """
    feasible, free, share = found.feasible_limit, found.free_limit, found.free_share
    asked = method.constraint * (feasible if method.constraint_mode == "relative" else 1.0)
    if method.on_infeasible == "clamp":
        asked = min(asked, feasible)
    retain, forget = (change * scale for change, scale in zip(found.at(asked), scales, strict=True))
    suggested, rate = max(0.01, round(0.5 * share, 2)), None
    if trusted_rate is not None and math.isfinite(trusted_rate):
        digits = 1 - math.floor(math.log10(trusted_rate))  # two digits, rounded down
        rate = round(math.floor(trusted_rate * 10.0**digits + 1e-9) / 10.0**digits, digits)
    reason = (
        f"a demand up to {free:.4g} of at most {feasible:.4g} per unit of learning rate is free "
        f"({share:.0%}), and the demand is {asked:.4g}"
    )
    if share < NEXT_TO_NOTHING and asked > free:
        code, suggested = MUST_HURT, 0.0
        headline = f"stop: {'next to nothing is free' if free > 0 else 'every step must hurt'}"
    elif asked > feasible * (1 + 1e-12):
        code, headline = MUST_HURT, "stop: the constraint cannot be met"
    elif asked <= free * (1 + 1e-9):
        code, headline = CAN_IMPROVE, "can improve both"
        reason += (
            f". To first order, a step of learning rate η changes the retain loss by "
            f"{retain:+.4g}·η and the forget loss by {forget:+.4g}·η"
        )
        if share < NEXT_TO_NOTHING:
            suggested, headline = 0.0, f"{headline}, by next to nothing"
    elif method.constrained == "forget":
        price = f"{abs(retain / forget):.3g} retain loss per 1 of forget loss"
        code, headline = WILL_COST, f"will cost about {price}"
    else:
        price = f"{abs(forget / retain):.3g} per 1 of retain loss"
        code, headline = WILL_COST, f"will lower the forget loss by about {price}"
    return Verdict(code, headline, f"{reason}.", suggested, rate)
