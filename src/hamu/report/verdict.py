"""Verdict on a run: a headline, and a tone that repeats it as a colour."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from hamu.evaluation.gains import Gains, gains_of
from hamu.report.observations import ROLES
from hamu.report.run import Run
from hamu.unlearning.goal_report import has_share

_NO_CHANGE = 1e-3  # in nats, and as a share of records


class Verdict(NamedTuple):
    """Top of a report."""

    headline: str
    tone: Literal["good", "mixed", "bad", "open"]


def verdict(run: Run) -> Verdict:
    """Judge a run, finished or not.

    "It forgot" without more needs a goal that is reached and attacks that the model withstood.
    """
    if run.evaluation is None:
        if run.failed:
            return Verdict(f"It failed after step {run.last_step:,}", "bad")
        return Verdict(f"Not finished: step {run.last_step:,} so far", "open")
    gains, goal = gains_of(run.evaluation), run.goal
    if not all(map(math.isfinite, gains)):
        return Verdict("The model's losses are not finite", "bad")
    found = _forgotten(run, gains)
    if found.tone != "bad":
        found = _kept(run, gains, found)
    if found.tone == "bad":
        return found
    lasts = run.attack and run.attack["lasts"]
    if lasts is False:
        back = "fine-tuning on the retain data brings it back"
        return Verdict(f"It is hidden, not forgotten: {back}", "bad")
    headline, tone = f"{found.headline}; it lasts", found.tone
    if lasts is None:
        tested, said = "is open" if run.attack else "was not tested", found.headline
        tone = "mixed"
        headline = f"By its losses {said[0].lower()}{said[1:]}; whether it lasts {tested}"
    if goal and goal["budget"] is not None and not goal["reached"]:
        return Verdict(f"{headline}; its goal is not reached", "mixed")
    return Verdict(headline, tone)


def _forgotten(run: Run, gains: Gains) -> Verdict:
    """Judge by the records forgotten, without a goal by the rise of their loss."""
    if run.goal is None:
        if gains.forget <= 0:
            return Verdict("It did not forget: the loss on the forget set has not risen", "bad")
        if not _change(run, "forget", "loss"):
            chance = "the loss on the forget set rose by no more than chance would"
            return Verdict(f"It hardly forgot: {chance}", "bad")
        return Verdict("The forget loss rose", "open")
    before, after = (run.goal[role]["forgotten"] for role in ROLES)
    count = f"{after:,} of {run.goal['after']['records']:,} records"
    if has_share(run.goal):
        return Verdict("It forgot", "good")
    if after > before:
        return Verdict(f"It forgot in part, {count}", "mixed")
    return Verdict(f"It did not forget: {count} are forgotten", "bad")


def _kept(run: Run, gains: Gains, found: Verdict) -> Verdict:
    """Add the change on the retain set."""
    loss, accuracy = _change(run, "retain", "loss"), _change(run, "retain", "accuracy")
    if loss > 0 and -gains.retain >= gains.forget and found.tone != "good":
        return Verdict("It lost more on what is to stay than it forgot", "bad")
    if loss > 0 or accuracy < 0:
        return Verdict(f"{found.headline}, at a price on what is to stay", "mixed")
    stays = "the model does better on what is to stay" if loss < 0 else "what is to stay has stayed"
    return Verdict(f"{found.headline}, and {stays}", found.tone)


def _change(run: Run, side: str, figure: str) -> int:
    """Sign of a change beyond chance, else 0: its recorded paired interval does not hold 0."""
    before, after = ((run.evaluation or {})[role][side][figure] for role in ROLES)
    change = after - before
    recorded = (run.record or {}).get("figures", {}).get("change", {}).get(side, {})
    low, high = recorded.get(f"{figure}_interval") or (change, change)
    return 0 if abs(change) <= _NO_CHANGE or low <= 0 <= high else int(math.copysign(1, change))
