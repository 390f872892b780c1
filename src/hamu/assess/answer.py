"""One sentence that answers how hard unlearning will be, and whether to start, before any table."""

from __future__ import annotations

from hamu.assess.assessment import Assessment
from hamu.assess.verdict import CAN_IMPROVE, ERROR_RATIO, NEXT_TO_NOTHING, WILL_COST

_EASY, _MODERATE = 2 / 3, 1 / 3  # shares of the feasible demand that are free
_SURE = 0.9  # of the resamples


def plain_answer(found: Assessment) -> str:
    """Answer in one sentence, with what it rests on and what makes it doubtful."""
    counts = found.measured_records
    basis = (
        f"measured on {counts['retain']:,} retain and {counts['forget']:,} forget records before any step, to first "
        f"order"
    )
    return f"{_answer(found)} ({'; '.join([basis, *_doubts(found)])})."


def _answer(found: Assessment) -> str:
    verdict, frontier = found.verdict, found.frontiers[found.method.name]
    feasible, free = frontier.feasible_limit, frontier.free_limit
    share = free / feasible if feasible > 0 else 0.0
    if feasible <= 0:
        return "Do not start: the gradients allow no change of the loss that the demand is made of"
    if share < NEXT_TO_NOTHING and verdict.code == CAN_IMPROVE:
        return (
            "It will be very hard: this demand costs nothing, but it forgets next to nothing; start only if little is "
            "enough"
        )
    if share < NEXT_TO_NOTHING:
        much = "no demand is" if free == 0 else f"only {share:.1%} of what the gradients allow is"
        return f"It will be very hard, do not start: {much} free, and more than that hurts"
    how = "easy" if share >= _EASY else "moderately hard" if share >= _MODERATE else "hard"
    smaller = f"--constraint_mode relative --constraint {verdict.constraint:g}"
    if verdict.code == CAN_IMPROVE:
        return f"It will be {how}, start: a step can raise the forget loss without raising the retain loss"
    if verdict.code == WILL_COST:
        return (
            f"It will be {how}, and this demand has a price: it {verdict.headline}; accept that, or start with "
            f"{smaller}, which is free"
        )
    return f"Do not start with this demand, which no step can meet: it will be {how} with {smaller}, which is free"


def _doubts(found: Assessment) -> list[str]:
    doubts = []
    sure, ratio = found.intervals, found.error_ratio
    if sure is not None and sure.regimes[found.hardness.regime] < _SURE:
        doubts.append(
            f"other records may say otherwise: {sure.regimes[found.hardness.regime]:.0%} of resamples agree"
        )
    if ratio is not None and ratio > ERROR_RATIO:
        doubts.append(
            f"at learning rate {found.learning_rate:g} second order may be {ratio:.0%} of it"
        )
    return doubts
