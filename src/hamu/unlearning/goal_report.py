"""Counts of forgotten records, as evaluation.json holds them and as a reader sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamu.unlearning.goals import Found, Goal

_MEANINGS = {
    "unseen": "their losses are distributed as those of records never trained on, as far as "
    "chance (5 %) lets that be told",
    "retrained": "each has at least the loss that it has under the retain model, to 0.1 in "
    "log-odds",
    "erased": "each is taken for another class than its own",
    "loss": "each has at least this loss",
}
_COMPARED = {
    "unseen by original model": ", compared with the original model's losses on the test data",
    "unseen by this model": ", compared with its own losses on the test data (--original_model: "
    "with the original's)",
    "retrained by retain model": ", compared with the retain model's losses on them",
}


def goal_report(
    goal: Goal, predictions: Found, *, original: Found | None, retain_model: Found | None
) -> dict[str, Any]:
    """Standing of a model, in the shape of a run's goal in evaluation.json, with one standing.

    Without the original model's predictions of "test" it compares with the model's own.
    """
    standing = goal.against(original or predictions, retain_model).standing(predictions["forget"])
    unseen = "this model" if original is None else "original model"
    by = {"unseen": unseen, "retrained": "retain model"}
    return {
        "kind": goal.kind,
        "share": goal.share,
        "loss": goal.loss,
        "budget": None,
        "reached": standing.share >= goal.share,
        "lasting": None,
        "reference": by.get(goal.kind),
        "after": standing.figures(),
    }


def goal_name(goal: Mapping[str, Any]) -> str:
    """Name of a goal: "unseen", or "a loss of 2"."""
    return f"a loss of {goal['loss']:g}" if goal["kind"] == "loss" else str(goal["kind"])


def meaning(goal: Mapping[str, Any]) -> str:
    """Condition that the forgotten records meet."""
    return _MEANINGS[goal["kind"]]


def forgotten_words(goal: Mapping[str, Any], role: str = "after") -> str:
    """Count in a few words: "19 of 20 records are forgotten by the goal unseen"."""
    count, records = goal[role]["forgotten"], goal[role]["records"]
    are = "is" if count == 1 else "are"
    return f"{count:,} of {records:,} records {are} forgotten by the goal {goal_name(goal)}"


def has_share(goal: Mapping[str, Any]) -> bool:
    """True if as many records are forgotten after the run as the goal asks for."""
    after = goal["after"]
    return bool(after["forgotten"] >= goal["share"] * after["records"])


def goal_lines(goal: Mapping[str, Any]) -> list[str]:
    """Sentences for the screen: count, quantiles of the losses, records furthest from the goal."""
    after, compared = goal["after"], _COMPARED.get(f"{goal['kind']} by {goal['reference']}", "")
    reached = "reached" if goal["reached"] else "not reached"
    names = {"min": "lowest", "q25": "25 %", "median": "median", "q75": "75 %", "max": "highest"}
    losses = [f"{word} {after['loss_quantiles'][name]:.3g}" for name, word in names.items()]
    lines = [
        f"{standing_line(after)}, by the goal {goal_name(goal)}{compared}; {goal['share']:.0%} "
        f"wanted: {reached}",
        f"losses of the forget records: {', '.join(losses)}",
    ]
    if after["worst"]:
        worst = ", ".join(f"{one['loss']:.3g} of {one['target']:.3g}" for one in after["worst"])
        lines.append(f"furthest from being forgotten (loss of what is needed): {worst}")
    return lines


def standing_line(standing: Mapping[str, Any]) -> str:
    """Sentence about `Standing.figures`."""
    low, mid, high = (standing["loss_quantiles"][name] for name in ("min", "median", "max"))
    return (
        f"{standing['forgotten']} of {standing['records']} records are forgotten "
        f"(losses {low:.3g} to {high:.3g}, median {mid:.3g})"
    )
