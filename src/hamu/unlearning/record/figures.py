"""Figures of a model as the record keeps them: means over whole sets, with intervals, and counts.

Of single records the ten worst losses alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamu.evaluation.reports import Ends, change_intervals, record_intervals

_SETS = ("retain", "forget", "test")
_FIGURES = ("loss", "accuracy", "probability")


def figures(
    report: Mapping[str, Any], predictions: Mapping[str, Any] | None = None, seed: int = 42
) -> dict[str, Any]:
    """Figures of a report on a classifier or a language model.

    Args:
        report: see `classifier_report` and `text_report`.
        predictions: what the report was made from; without them there are no intervals.
        seed: seed of the bootstrap.

    Returns:
        By set its `records`, `loss`, `accuracy` and `probability` (texts), with `..._interval`s;
        `membership_inference`, that of the retain model as `retain_model_membership_inference`, and
        `against_retain_model`, None where they were not measured.
    """
    sets = {}
    for name in (name for name in _SETS if name in report):
        found = report[name]
        sets[name] = {"records": found["samples"] if "samples" in found else found["records"]}
        sets[name] |= {key: found[key] for key in _FIGURES if key in found}
        if predictions is not None:
            sets[name] |= _named(record_intervals(predictions[name], seed=seed), found)
    retain_model = report.get("retain_model", {})
    # of images; it has a set more than the record
    against = report.get("against_retain_model") or _differences(sets, retain_model)
    return {
        "sets": sets,
        "membership_inference": report["membership_inference"],
        "retain_model_membership_inference": retain_model.get("membership_inference"),
        "against_retain_model": {name: against[name] for name in sets if name in against} or None,
    }


def _named(intervals: Ends, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}_interval": intervals.get(key) for key in _FIGURES if key in figures}


def _differences(sets: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our figures less those of the retain model."""
    return {
        name: {
            f"{key}_difference": ours[key] - theirs[name][key] for key in _FIGURES if key in ours
        }
        for name, ours in sets.items()
        if name in theirs
    }


def changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    predictions: tuple[Mapping[str, Any], Mapping[str, Any]],
    seed: int,
) -> dict[str, Any]:
    """Changes from one model to another, on the same records.

    Args:
        before, after: what `figures` gives of each.
        predictions: what they were made from, before and after.
        seed: seed of the bootstrap.

    Returns:
        By set the change of each figure, with its paired `..._interval`.
    """
    found = {}
    for name, now in after["sets"].items():
        was = before["sets"][name]
        intervals = change_intervals(*(one[name] for one in predictions), seed=seed)
        change = {key: now[key] - was[key] for key in _FIGURES if key in now}
        found[name] = change | _named(intervals, now)
    return found


def goal_figures(goal: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The goal of a run and the counts of its records, without positions in the forget set.

    Args:
        goal: of evaluation.json; None if nothing told what forgotten means.
    """
    if goal is None:
        return None
    found = {key: goal[key] for key in ("kind", "share", "loss", "budget", "reached", "lasting")}
    for role in ("before", "after"):
        counts = ("records", "forgotten", "too_high", "loss_quantiles")
        found[role] = {key: goal[role][key] for key in counts}
        found[role]["worst"] = [
            {key: one[key] for key in ("loss", "target")} for one in goal[role]["worst"]
        ]
    return found
