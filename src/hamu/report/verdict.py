"""Verdict on a run: a headline, a few sentences and the figures that matter most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hamu.evaluation.gains import gains_of
from hamu.evaluation.membership import auc_of
from hamu.report.charts import counted, number
from hamu.report.records import NO_GOAL, ROLES, goal_sentence
from hamu.report.run import Run
from hamu.unlearning.goal_report import goal_name, has_share
from hamu.unlearning.trainer.promise import kept_in_words

Tone = Literal["good", "mixed", "bad", "open"]
_NO_CHANGE = 1e-3  # in nats, and as a share of records


@dataclass(frozen=True)
class Tile:
    """A figure before and after, as text, with the records behind it or a reading aid."""

    name: str
    before: str
    after: str
    hint: str = ""


@dataclass(frozen=True)
class RunVerdict:
    """Top of a report: the tone repeats the headline as a colour."""

    headline: str
    tone: Tone
    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...] = ()


def verdict(run: Run) -> RunVerdict:
    """Judge a run, finished or not."""
    if run.evaluation is None:
        return _of_unfinished(run)
    gains = gains_of(run.evaluation)
    forget, retain = gains.forget, 0.0 - gains.retain  # rises of the losses; 0 - x is never -0
    headline: str
    tone: Tone
    headline, tone = "The model's losses are not finite", "bad"
    if math.isfinite(forget) and math.isfinite(retain):
        headline, tone = _headline(run, forget, retain)
        if tone != "bad":
            headline, tone = _lasting(run, headline, tone)
        goal = run.goal
        if tone != "bad" and goal and goal["budget"] is not None and not goal["reached"]:
            headline, tone = f"{headline}; its goal is not reached", "mixed"
    return RunVerdict(headline, tone, tuple(_sentences(run, forget, retain)), tuple(_tiles(run)))


def _of_unfinished(run: Run) -> RunVerdict:
    why = run.failed or "it is under way, was broken off, or the file is damaged"
    sentences = [f"The run has left no evaluation.json that can be read: {why}."]
    if run.last_step and run.gains is not None:
        sentences.append(
            "At the last evaluation that is known the forget loss had changed by "
            f"{run.gains.forget:+.3g} (on "
            f"{run.measured_on('forget')}), the retain loss by {-run.gains.retain:+.3g} (on "
            f"{run.measured_on('retain')})."
        )
    else:
        sentences.append("No evaluation of it is known yet.")
    if run.failed:
        return RunVerdict(f"It failed after step {run.last_step:,}", "bad", tuple(sentences))
    return RunVerdict(f"Not finished: step {run.last_step:,} so far", "open", tuple(sentences))


def _headline(run: Run, forget: float, retain: float) -> tuple[str, Tone]:
    """Judge by the records forgotten, without a goal by the losses alone."""
    said: str
    best: Tone
    goal = run.goal
    if goal is None:
        said, best = "The forget loss rose", "open"
        if forget <= 0:
            return "It did not forget: the loss on the forget set has not risen", "bad"
        if not _change(run, "forget", "loss"):
            chance = "the loss on the forget set rose by no more than chance would"
            return f"It hardly forgot: {chance}", "bad"
    elif has_share(goal):
        said, best = "It forgot", "good"
    elif goal["after"]["forgotten"] > goal["before"]["forgotten"]:
        said, best = f"It forgot in part, {run.forgotten} records", "mixed"
    else:
        return f"It did not forget: {run.forgotten} records are forgotten", "bad"
    loss, accuracy = _change(run, "retain", "loss"), _change(run, "retain", "accuracy")
    if loss > 0 and retain >= forget and best != "good":
        return "It lost more on what is to stay than it forgot", "bad"
    if loss > 0 or accuracy < 0:
        return f"{said}, at a price on what is to stay", "mixed"
    if loss < 0:
        who = "the model " if goal is None else ""
        return f"{said}, and {who}does better on what is to stay", best
    return f"{said}, and what is to stay has stayed", best


def _lasting(run: Run, headline: str, tone: Tone) -> tuple[str, Tone]:
    """Headline with the outcome of the attacks."""
    lasts = None if run.attack is None else run.attack["lasts"]
    if lasts is None:
        tested = "was not tested" if run.attack is None else "is open"
        by_losses = f"By its losses {headline[0].lower()}{headline[1:]}"
        return f"{by_losses}; whether it lasts {tested}", "mixed"
    if not lasts:
        return "It is hidden, not forgotten: fine-tuning on the retain data brings it back", "bad"
    return f"{headline}; it lasts", tone


def _change(run: Run, side: str, figure: str) -> int:
    """Sign of a change beyond chance, else 0.

    The record has an interval of the paired change; one that holds 0 is chance.
    """
    assert run.evaluation is not None
    before, after = (run.evaluation[role][side][figure] for role in ROLES)
    change = after - before
    recorded = (run.record or {}).get("figures", {}).get("change", {}).get(side, {})
    low, high = recorded.get(f"{figure}_interval") or (change, change)
    return 0 if abs(change) <= _NO_CHANGE or low <= 0 <= high else int(math.copysign(1, change))


def _sentences(run: Run, forget: float, retain: float) -> list[str]:
    evaluation = run.evaluation
    assert evaluation is not None
    taken, skipped = evaluation.get("steps_taken", 0), evaluation.get("steps_skipped", 0)
    right = [number(evaluation[role]["retain"]["accuracy"], ".1%") for role in ROLES]
    found = [
        f"The loss on the forget set ({run.measured_on('forget')}) changed by {forget:+.4g}, that "
        "on the retain set "
        f"({run.measured_on('retain')}) by {retain:+.4g} (in nats); the accuracy on the same "
        "retain records went from "
        f"{right[0]} to {right[1]}.",
        f"It ended at step {run.last_step:,} because "
        f"{run.ended or 'of a reason that is not recorded'}"
        f"{run.end_measured_on}; {counted(taken, 'steps')} taken, {skipped:,} not taken.",
    ]
    if run.attack is not None:
        found.append(run.attack["verdict"])
    if run.earlier_state:
        found.append(f"The model saved is {run.earlier_state}.")
    promise = evaluation.get("promise")
    if promise and promise.get("kept") is not None:
        words = kept_in_words(promise)
        found.append(f"{words[0].upper()}{words[1:]}, each on its own batches.")
    goal = run.goal
    if goal is not None:
        found.insert(0, goal_sentence(goal))
    else:
        found.append(NO_GOAL)
    if auc_of(evaluation["after"]) is None:
        found.append(
            "Membership inference was not measured: nothing is known about whether it can still be "
            "told."
        )
    return found


def _tiles(run: Run) -> list[Tile]:
    assert run.evaluation is not None
    before, after = (run.evaluation[role] for role in ROLES)
    goal, theirs, tiles = run.goal, run.retain_model_auc, []
    if goal is not None:
        was, now = (f"{goal[role]['forgotten']:,} of {goal[role]['records']:,}" for role in ROLES)
        tiles.append(Tile("records forgotten", was, now, f"by the goal {goal_name(goal)}"))
    for side in ("forget", "retain", "test"):
        if side in after and side in before:
            for figure, form in (("loss", ".4g"), ("accuracy", ".1%"), ("probability", ".3f")):
                if figure in after[side] and (side != "test" or figure == "accuracy"):
                    was, now = (number(one[side].get(figure), form) for one in (before, after))
                    tiles.append(Tile(f"{side} {figure}", was, now, run.measured_on(side)))
    aucs = [auc_of(one) for one in (before, after)]
    if aucs[1] is not None:
        hint = "0.5 is ideal" if theirs is None else f"retain model {theirs:.3f}"
        tiles.append(Tile("membership AUC", number(aucs[0], ".3f"), number(aucs[1], ".3f"), hint))
    return tiles
