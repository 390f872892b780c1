"""What came of a run, in a headline, a few sentences and the figures that matter most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hamu.evaluation.membership import auc_of
from hamu.report.elements import counted, number
from hamu.report.forgotten import (
    NO_GOAL,
    counted_forgotten,
    goal_of,
    goal_sentence,
    retain_model_auc,
)
from hamu.report.run import Run
from hamu.report.samples import end_measured_on, measured_on
from hamu.report.trajectories import gains_of
from hamu.unlearning.goal_report import goal_name, has_share
from hamu.unlearning.trainer.promise import kept_in_words

Tone = Literal["good", "mixed", "bad", "open"]
_NO_CHANGE = 1e-3  # in nats, and as a share of records: what changed by less has not changed


@dataclass(frozen=True)
class Tile:
    """A figure before and after.

    Attributes:
        name: what it is.
        before, after: as text.
        hint: the records it is of, or how to read it.
    """

    name: str
    before: str
    after: str
    hint: str = ""


@dataclass(frozen=True)
class RunVerdict:
    """The top of a report.

    Attributes:
        headline: in a few words.
        tone: for its colour; the words say the same.
        sentences: what led to it.
        tiles: the figures.
    """

    headline: str
    tone: Tone
    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...] = ()


def verdict(run: Run) -> RunVerdict:
    """Judge a run, finished or not."""
    if run.evaluation is None:
        return _of_unfinished(run)
    before, after = run.evaluation["before"], run.evaluation["after"]
    gains = gains_of(run.evaluation)
    forget, retain = (
        gains.forget,
        0.0 - gains.retain,
    )  # by how much each loss has risen; 0 is not written as -0
    if math.isfinite(forget) and math.isfinite(retain):
        headline, tone = _headline(run, forget, retain)
        if tone != "bad":
            headline, tone = _lasting(run, headline, tone)
        if tone != "bad" and _misses_its_goal(run):
            headline, tone = f"{headline}; its goal is not reached", "mixed"
    else:
        headline, tone = "The model's losses are not finite", "bad"
    return RunVerdict(
        headline, tone, tuple(_sentences(run, forget, retain)), tuple(_tiles(run, before, after))
    )


def _of_unfinished(run: Run) -> RunVerdict:
    points = run.points
    if run.last_step and len(points) > 1:
        gains = points[-1]
        sentences = [
            f"At the last evaluation that is known the forget loss had changed by {gains.forget:+.3g} (on "
            f"{measured_on(run, 'forget')}), the retain loss by {-gains.retain:+.3g} (on {measured_on(run, 'retain')})."
        ]
    else:
        sentences = ["No evaluation of it is known yet."]
    why = run.failed or "it is under way, was broken off, or the file is damaged"
    sentences.insert(0, f"The run has left no evaluation.json that can be read: {why}.")
    if run.failed:
        return RunVerdict(f"It failed after step {run.last_step:,}", "bad", tuple(sentences))
    return RunVerdict(f"Not finished: step {run.last_step:,} so far", "open", tuple(sentences))


def _headline(run: Run, forget: float, retain: float) -> tuple[str, Tone]:
    """By the records that are forgotten, where a goal counts them; else by the losses alone."""
    said: str
    best: Tone
    goal = goal_of(run)
    if goal is None:
        said, best = "The forget loss rose", "open"
        if forget <= 0:
            return "It did not forget: the loss on the forget set has not risen", "bad"
        if not _told(run, "forget", "loss"):
            return (
                "It hardly forgot: the loss on the forget set rose by no more than chance would",
                "bad",
            )
    elif has_share(goal):
        said, best = "It forgot", "good"
    elif goal["after"]["forgotten"] > goal["before"]["forgotten"]:
        said, best = f"It forgot in part, {counted_forgotten(run)} records", "mixed"
    else:
        return f"It did not forget: {counted_forgotten(run)} records are forgotten", "bad"
    loss, accuracy = _told(run, "retain", "loss"), _told(run, "retain", "accuracy")
    if loss > 0 and retain >= forget and best != "good":
        return "It lost more on what is to stay than it forgot", "bad"
    if loss > 0 or accuracy < 0:
        return f"{said}, at a price on what is to stay", "mixed"
    if loss < 0:
        who = "the model " if goal is None else ""
        return f"{said}, and {who}does better on what is to stay", best
    return f"{said}, and what is to stay has stayed", best


def _lasting(run: Run, headline: str, tone: Tone) -> tuple[str, Tone]:
    """The headline with what the attacks found: what comes back is not forgotten."""
    lasts = None if run.attack is None else run.attack["lasts"]
    if lasts is None:
        tested = "was not tested" if run.attack is None else "is open"
        by_losses = f"By its losses {headline[0].lower()}{headline[1:]}"
        return f"{by_losses}; whether it lasts {tested}", "mixed"
    if not lasts:
        return "It is hidden, not forgotten: fine-tuning on the retain data brings it back", "bad"
    return f"{headline}; it lasts", tone


def _misses_its_goal(run: Run) -> bool:
    """True if a run by goal ended without it."""
    goal = goal_of(run)
    return goal is not None and goal["budget"] is not None and not goal["reached"]


def _told(run: Run, side: str, figure: str) -> int:
    """The sign of a change that is more than nothing and more than chance, else 0.

    It is more than chance if its interval in the record (of the same records before and after) does not hold 0.
    """
    assert run.evaluation is not None
    before, after = (run.evaluation[role][side][figure] for role in ("before", "after"))
    change = after - before
    recorded = (run.record or {}).get("figures", {}).get("change", {}).get(side, {})
    low, high = recorded.get(f"{figure}_interval") or (change, change)
    return 0 if abs(change) <= _NO_CHANGE or low <= 0 <= high else int(math.copysign(1, change))


def _sentences(run: Run, forget: float, retain: float) -> list[str]:
    evaluation = run.evaluation
    assert evaluation is not None
    taken, skipped = evaluation.get("steps_taken", 0), evaluation.get("steps_skipped", 0)
    right = [number(evaluation[role]["retain"]["accuracy"], ".1%") for role in ("before", "after")]
    found = [
        f"The loss on the forget set ({measured_on(run, 'forget')}) changed by {forget:+.4g}, that on the retain set "
        f"({measured_on(run, 'retain')}) by {retain:+.4g} (in nats); the accuracy on the same retain records went from "
        f"{right[0]} to {right[1]}.",
        f"It ended at step {run.last_step:,} because {run.ended or 'of a reason that is not recorded'}"
        f"{end_measured_on(run)}; {counted(taken, 'steps')} taken, {skipped:,} not taken.",
    ]
    if run.attack is not None:
        found.append(run.attack["verdict"])
    if run.earlier_state:
        found.append(f"The model saved is {run.earlier_state}.")
    promise = evaluation.get("promise")
    if promise and promise.get("kept") is not None:
        words = kept_in_words(promise)
        found.append(f"{words[0].upper()}{words[1:]}, each on its own batches.")
    goal = goal_of(run)
    if goal is not None:
        found.insert(0, goal_sentence(goal))
    else:
        found.append(NO_GOAL)
    if auc_of(evaluation["after"]) is None:
        found.append(
            "Membership inference was not measured: nothing is known about whether it can still be told."
        )
    return found


def _records_forgotten(goal: Mapping[str, Any]) -> Tile:
    counts = (
        f"{goal[role]['forgotten']:,} of {goal[role]['records']:,}" for role in ("before", "after")
    )
    return Tile("records forgotten", *counts, f"by the goal {goal_name(goal)}")


def _tiles(run: Run, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Tile]:
    goal, theirs = goal_of(run), retain_model_auc(run)
    tiles = [] if goal is None else [_records_forgotten(goal)]
    for side in ("forget", "retain", "test"):
        if side in after and side in before:
            for figure, form in (("loss", ".4g"), ("accuracy", ".1%"), ("probability", ".3f")):
                if figure in after[side] and (side != "test" or figure == "accuracy"):
                    values = (number(one[side].get(figure), form) for one in (before, after))
                    tiles.append(Tile(f"{side} {figure}", *values, measured_on(run, side)))
    aucs = [auc_of(one) for one in (before, after)]
    if aucs[1] is not None:
        hint = "0.5 is ideal" if theirs is None else f"retain model {theirs:.3f}"
        tiles.append(Tile("membership AUC", number(aucs[0], ".3f"), number(aucs[1], ".3f"), hint))
    return tiles
