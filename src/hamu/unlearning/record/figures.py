"""The figures of a model as the record keeps them: means over whole sets, with intervals, and how many records are
forgotten; of single records the ten worst losses alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamu.evaluation.reports import change_intervals, record_intervals

_SETS = ("retain", "forget", "test")
_FIGURES = ("loss", "accuracy", "probability")


def figures(
    report: Mapping[str, Any], predictions: Mapping[str, Any] | None = None, seed: int = 42
) -> dict[str, Any]:
    """From a report on a classifier or a language model.

    Args:
        report: see `classifier_report` and `text_report`.
        predictions: what the report was made from; without them there are no intervals.
        seed: seed of the bootstrap.

    Returns:
        By set its `records`, `loss`, `accuracy` and `probability` (texts), each with `..._interval`;
        `membership_inference`, that of the retain model as `retain_model_membership_inference`, and
        `against_retain_model`, None where they were not measured.
    """
    sets = {}
    for name in _SETS:
        if name in report:
            sets[name] = _of_set(report[name])
            if predictions is not None:
                found = record_intervals(predictions[name], seed=seed)
                sets[name] |= {
                    f"{key}_interval": found.get(key) for key in _FIGURES if key in sets[name]
                }
    against = report.get("against_retain_model")  # of images; it has a set more than the record
    return {
        "sets": sets,
        "membership_inference": report["membership_inference"],
        "retain_model_membership_inference": report.get("retain_model", {}).get(
            "membership_inference"
        ),
        "against_retain_model": {name: row for name, row in against.items() if name in _SETS}
        if against
        else _differences(sets, report.get("retain_model")),
    }


def changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    predictions: tuple[Mapping[str, Any], Mapping[str, Any]],
    seed: int,
) -> dict[str, Any]:
    """What has changed from one model to another, on the same records.

    Args:
        before, after: what `figures` gives of each.
        predictions: what they were made from, before and after.
        seed: seed of the bootstrap.

    Returns:
        By set the change of `loss`, `accuracy` and `probability` (texts), each with `..._interval`, which is paired.
    """
    found = {}
    for name, now in after["sets"].items():
        was, ends = (
            before["sets"][name],
            change_intervals(*(one[name] for one in predictions), seed=seed),
        )
        keys = [key for key in _FIGURES if key in now]
        found[name] = {key: now[key] - was[key] for key in keys} | {
            f"{key}_interval": ends.get(key) for key in keys
        }
    return found


def goal_figures(goal: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The goal of a run and the counts of its records, without positions in the forget set.

    Args:
        goal: of evaluation.json; None if nothing told what forgotten means.
    """
    if goal is None:
        return None
    found = {key: goal[key] for key in ("kind", "share", "loss", "budget", "reached", "lasting")}
    return found | {role: _of_records(goal[role]) for role in ("before", "after")}


def _of_records(standing: Mapping[str, Any]) -> dict[str, Any]:
    worst = [{key: one[key] for key in ("loss", "target")} for one in standing["worst"]]
    return {
        key: standing[key] for key in ("records", "forgotten", "too_high", "loss_quantiles")
    } | {"worst": worst}


def without_intervals(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `figures` gives without predictions."""
    sets = {
        name: {key: value for key, value in one.items() if not key.endswith("_interval")}
        for name, one in found["sets"].items()
    }
    return {**found, "sets": sets}


def _of_set(report: Mapping[str, Any]) -> dict[str, Any]:
    records = {"records": report["samples"] if "samples" in report else report["records"]}
    return records | {key: report[key] for key in _FIGURES if key in report}


def _differences(
    sets: Mapping[str, Any], reference: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Ours less those of the retain model."""
    if reference is None:
        return None
    return {
        name: {
            f"{key}_difference": ours[key] - reference[name][key] for key in _FIGURES if key in ours
        }
        for name, ours in sets.items()
    }
