"""Verdict on a run: a headline, and a tone that repeats it as a colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hamu.evaluation.gains import gains_of
from hamu.report.observations import ROLES
from hamu.report.run import Run
from hamu.unlearning.goal_report import has_share

Tone = Literal["good", "mixed", "bad", "open"]
_NO_CHANGE = 1e-3  # in nats, and as a share of records


@dataclass(frozen=True)
class Verdict:
    """Top of a report."""

    headline: str
    tone: Tone


def verdict(run: Run) -> Verdict:
    """Judge a run, finished or not.

    "It forgot" without more needs a goal that is reached and attacks that the model withstood.
    """
    if run.evaluation is None:
        if run.failed:
            return Verdict(f"It failed after step {run.last_step:,}", "bad")
        return Verdict(f"Not finished: step {run.last_step:,} so far", "open")
    gains = gains_of(run.evaluation)
    if not all(map(math.isfinite, gains)):
        return Verdict("The model's losses are not finite", "bad")
    found = _by_losses(run, gains.forget, -gains.retain)
    if found.tone == "bad":
        return found
    found, goal = _lasting(run, found), run.goal
    if found.tone != "bad" and goal and goal["budget"] is not None and not goal["reached"]:
        return Verdict(f"{found.headline}; its goal is not reached", "mixed")
    return found


def _by_losses(run: Run, forget: float, retain: float) -> Verdict:
    """Judge by the records forgotten, without a goal by the rises of the losses alone."""
    said, goal = "The forget loss rose", run.goal
    best: Tone = "open"
    if goal is None:
        if forget <= 0:
            return Verdict("It did not forget: the loss on the forget set has not risen", "bad")
        if not _change(run, "forget", "loss"):
            chance = "the loss on the forget set rose by no more than chance would"
            return Verdict(f"It hardly forgot: {chance}", "bad")
    else:
        after = goal["after"]
        count = f"{after['forgotten']:,} of {after['records']:,} records"
        if has_share(goal):
            said, best = "It forgot", "good"
        elif after["forgotten"] > goal["before"]["forgotten"]:
            said, best = f"It forgot in part, {count}", "mixed"
        else:
            return Verdict(f"It did not forget: {count} are forgotten", "bad")
    loss, accuracy = _change(run, "retain", "loss"), _change(run, "retain", "accuracy")
    if loss > 0 and retain >= forget and best != "good":
        return Verdict("It lost more on what is to stay than it forgot", "bad")
    if loss > 0 or accuracy < 0:
        return Verdict(f"{said}, at a price on what is to stay", "mixed")
    stays = "what is to stay has stayed"
    if loss < 0:
        stays = f"{'the model ' if goal is None else ''}does better on what is to stay"
    return Verdict(f"{said}, and {stays}", best)


def _lasting(run: Run, found: Verdict) -> Verdict:
    """Add the outcome of the attacks."""
    lasts = None if run.attack is None else run.attack["lasts"]
    if lasts is None:
        tested = "was not tested" if run.attack is None else "is open"
        by_losses = f"By its losses {found.headline[0].lower()}{found.headline[1:]}"
        return Verdict(f"{by_losses}; whether it lasts {tested}", "mixed")
    if not lasts:
        back = "fine-tuning on the retain data brings it back"
        return Verdict(f"It is hidden, not forgotten: {back}", "bad")
    return Verdict(f"{found.headline}; it lasts", found.tone)


def _change(run: Run, side: str, figure: str) -> int:
    """Sign of a change beyond chance, else 0.

    The record has an interval of the paired change; one that holds 0 is chance.
    """
    before, after = ((run.evaluation or {})[role][side][figure] for role in ROLES)
    change = after - before
    recorded = (run.record or {}).get("figures", {}).get("change", {}).get(side, {})
    low, high = recorded.get(f"{figure}_interval") or (change, change)
    return 0 if abs(change) <= _NO_CHANGE or low <= 0 <= high else int(math.copysign(1, change))
