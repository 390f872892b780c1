"""Whether to start, in words: what the frontier says about the constraint that was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hamu.assess.frontier import Frontier
from hamu.core.methods import HamuQ, HamuU

CAN_IMPROVE, WILL_COST, MUST_HURT = 0, 3, 4
NEXT_TO_NOTHING = (
    0.05  # the free share of what is feasible below which no demand worth making is free
)
ERROR_RATIO = 0.1


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        code: 0 both objectives can improve, 3 it costs, 4 next to nothing is free or no step is possible: the
            exit code of `hamu assess`.
        headline: in a few words.
        reason: the figures behind it, in words.
        constraint: a suggested share of what is possible, for constraint_mode="relative"; 0 for none at all.
        learning_rate: a suggested rate, at which second order is at most a tenth of first order; None if unknown.
    """

    code: int
    headline: str
    reason: str
    constraint: float
    learning_rate: float | None


def judge(
    found: Frontier, method: HamuQ | HamuU, scales: tuple[float, float], trusted_rate: float | None
) -> Verdict:
    """Judge a constraint.

    Args:
        found: the method's frontier.
        method: the HAMU method that will be run.
        scales: by what the clipping divided the retain and the forget gradient, so that changes are of the losses.
        trusted_rate: the learning rate that first order allows, infinite or None if there is no bound.
    """
    forgets = method.constrained == "forget"
    feasible, free = found.feasible_limit, found.free_limit
    share = free / feasible if feasible > 0 else 0.0
    suggested = max(0.01, round(0.5 * share, 2))
    rate = None if trusted_rate is None or math.isinf(trusted_rate) else _two_digits(trusted_rate)
    asked = method.constraint * (feasible if method.constraint_mode == "relative" else 1.0)
    if method.on_infeasible == "clamp":
        asked = min(asked, feasible)
    limits = f"a demand up to {free:.4g} of at most {feasible:.4g} per unit of learning rate is free ({share:.0%})"
    if share < NEXT_TO_NOTHING and asked > free:
        if free > 0:
            headline = "stop: next to nothing is free"
            reason = f"the gradients of both losses point nearly the same way; {limits}, and the demand is {asked:.4g}."
        else:
            headline = "stop: every step must hurt"
            reason = (
                f"the gradients of both losses point the same way; no demand is free, of at most {feasible:.4g} per "
                f"unit of learning rate."
            )
        return Verdict(MUST_HURT, headline, reason, 0.0, rate)
    if asked > feasible * (1 + 1e-12):
        reason = (
            f"the demand {asked:.4g} is more than the gradients allow, {feasible:.4g} per unit of learning rate, so no "
            f"step can be taken; {limits}."
        )
        return Verdict(MUST_HURT, "stop: the constraint cannot be met", reason, suggested, rate)
    retain, forget = found.at(asked)
    retain, forget = retain * scales[0], forget * scales[1]
    if asked <= free * (1 + 1e-9):
        reason = (
            f"{limits}, and the demand is {asked:.4g}. To first order, a step of learning rate η changes the retain "
            f"loss by {retain:+.4g}·η and the forget loss by {forget:+.4g}·η."
        )
        if share < NEXT_TO_NOTHING:
            reason += " That is next to nothing of what the gradients allow; a demand that does more will cost."
            return Verdict(CAN_IMPROVE, "can improve both, by next to nothing", reason, 0.0, rate)
        return Verdict(CAN_IMPROVE, "can improve both", reason, suggested, rate)
    price = abs(retain / forget) if forgets else abs(forget / retain)
    headline = (
        f"will cost about {price:.3g} retain loss per 1 of forget loss"
        if forgets
        else f"will lower the forget loss by about {price:.3g} per 1 of retain loss"
    )
    reason = f"{limits}, but the demand is {asked:.4g}."
    return Verdict(WILL_COST, headline, reason, suggested, rate)


def _two_digits(value: float) -> float:
    """Rounded down to two digits."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / scale + 1e-9) * scale:.2g}")
