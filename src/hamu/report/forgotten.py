"""Forgotten records: their count, their losses beside those of records never trained on, the worst ten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hamu.evaluation.membership import auc_of
from hamu.report.elements import (
    AFTER,
    BEFORE,
    TEST,
    Chart,
    Section,
    Table,
    extremes,
    number,
    shorts,
)
from hamu.report.observations import Observations
from hamu.report.run import Run
from hamu.unlearning.goal_report import forgotten_words, goal_name, has_share, meaning
from hamu.unlearning.goals import record_losses

NO_GOAL = (
    "Nothing told when a record counts as forgotten: it takes test data, a retain model, or the loss that each record "
    "must have (target_forget_loss)."
)
_QUANTILES = {
    "min": "lowest loss",
    "q25": "25%",
    "median": "median",
    "q75": "75%",
    "max": "highest loss",
}
_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
_LEAST = 1e-6  # lower losses are drawn as this: an axis of powers has no 0


def goal_of(run: Run) -> Mapping[str, Any] | None:
    """The goal of a finished run with its counts, None where nothing told."""
    return None if run.evaluation is None else run.evaluation.get("goal")


def counted_forgotten(run: Run) -> str:
    """Count of forgotten records of all, "" where nothing told."""
    goal = goal_of(run)
    return "" if goal is None else f"{goal['after']['forgotten']:,} of {goal['after']['records']:,}"


def goal_sentence(goal: Mapping[str, Any]) -> str:
    """The count, and what it is a count of."""
    name = "" if has_share(goal) else f"; it asks for {goal['share']:.0%} of them"
    before = goal["before"]["forgotten"]
    return f"{forgotten_words(goal)} ({meaning(goal)}){name}. Before the run, {before:,} were."


def retain_model_auc(run: Run) -> float | None:
    """The retain model's AUC of membership inference, None without one."""
    return auc_of(((run.evaluation or {}).get("after") or {}).get("retain_model") or {})


def forgotten_section(run: Run, observed: Observations | None) -> Section:
    """Show how the records of the forget set stand, and the distribution of their losses."""
    goal = goal_of(run)
    chart = None if observed is None else _distribution(observed)
    if goal is None:
        missing = [NO_GOAL[0].lower() + NO_GOAL[1:].rstrip(".")] if run.is_finished else []
        return Section("Record by record", charts=[chart] if chart else [], missing=missing)
    tables = [_quantiles(goal, observed)]
    if goal["after"]["worst"]:
        tables.append(_worst(goal))
    return Section("Record by record", f"{goal_sentence(goal)}", [chart] if chart else [], tables)


def _quantiles(goal: Mapping[str, Any], observed: Observations | None) -> Table:
    rows = []
    for role in ("before", "after"):
        one = goal[role]
        losses = [number(one["loss_quantiles"][name]) for name in _QUANTILES]
        rows.append([f"forget, {role}", f"{one['forgotten']:,} of {one['records']:,}", *losses])
    caption = f"Forgotten by the goal {goal_name(goal)}, and the quantiles of the losses of single records."
    if observed is not None and "test" in observed.predictions["before"]:
        unseen = record_losses(observed.predictions["before"]["test"]).numpy()
        rows.append(
            ["test, before", "-", *(number(float(value)) for value in np.quantile(unseen, _LEVELS))]
        )
        caption += " The test records were never trained on."
    return Table(["records", "forgotten", *_QUANTILES.values()], rows, caption)


def _worst(goal: Mapping[str, Any]) -> Table:
    worst = goal["after"]["worst"]
    rows = [
        [f"{place}", number(one["loss"]), number(one["target"])]
        for place, one in enumerate(worst, 1)
    ]
    return Table(
        ["furthest from being forgotten", "loss", "needed"], rows, "At most ten records are listed."
    )


def _distribution(observed: Observations) -> Chart:
    """The share of the records with at most each loss."""
    found = {
        "forget, before": (BEFORE, observed.predictions["before"]["forget"]),
        "forget, after": (AFTER, observed.predictions["after"]["forget"]),
    }
    if "test" in observed.predictions["before"]:
        found["test, before: never trained on"] = (TEST, observed.predictions["before"]["test"])
    series, says = [], []
    for name, (color, predictions) in found.items():
        losses = np.sort(record_losses(predictions).numpy())
        losses = losses[np.isfinite(losses)]
        share = np.arange(1, len(losses) + 1) / max(1, len(losses))
        kept = extremes(share)
        x = shorts(np.maximum(losses[kept], _LEAST))
        series.append(
            {"name": name, "color": color, "x": x, "y": shorts(share[kept]), "mode": "steps"}
        )
        if len(losses):
            low, mid, high = np.quantile(losses, (0.25, 0.5, 0.75))
            says.append(
                f"{name}: a quarter below {low:.3g}, half below {mid:.3g}, three quarters below {high:.3g}"
            )
    return Chart(
        "Losses, record by record",
        f"The share of the records, upwards, whose loss is at most that to the right (below {_LEAST:g}: drawn "
        f"there). {'; '.join(says)}.",
        {
            "kind": "xy",
            "x": {"label": "loss of a record, nats", "log": 1},
            "y": {"label": "share of the records", "limits": [0, 1]},
            "series": series,
        },
        wide=True,
    )
