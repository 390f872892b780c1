"""Charts of the course of a run: where it went, loss by loss, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hamu.report.elements import (
    BUCKETS,
    COLOR_OF_SET,
    FORGET,
    Chart,
    Section,
    counted,
    course,
    extremes,
    line,
    shorts,
    were,
)
from hamu.report.looks import Look
from hamu.report.objectives import is_loss, name_of, objective_of
from hamu.report.run import Run
from hamu.report.samples import measured_on
from hamu.report.trajectories import drawn_entries, label_of, limits_of
from hamu.unlearning.stop_reason import ALL_DONE

_DIRECT, _RECTIFIED = "#009E73", "#E69F00"
_DASHED = "6 4"


def trajectories(runs: Sequence[Run], looks: Sequence[Look]) -> Chart | None:
    """ΔL_f against -ΔL_r with a marker per evaluation (paper, Fig. 4); None if no run has two evaluations."""
    drawn = [(run, look) for run, look in zip(runs, looks, strict=True) if len(run.points) > 1]
    if not drawn:
        return None
    limits = limits_of([run.points for run, _ in drawn])
    series, ends = [], []
    for run, look in drawn:
        xs, ys = np.array(run.points).T
        steps = ["start", *(e.get("at", f"step {e['step']:,}") for e in drawn_entries(run.entries))]
        name = run.name if len(runs) > 1 else run.method
        end = run.gains or run.points[-1]
        more: dict[str, Any] = {"hints": steps, "dash": look.dash}
        if run.method.startswith("hamu"):
            more["width"] = 3
        if run.earlier_state:
            more["ring"] = shorts(end)
        series.append(line(label_of(name, end, limits), look.color, xs, ys, mode="both", **more))
        ends.append(f"{run.name} ends at ({end.retain:+.3g}, {end.forget:+.3g})")
        if run.earlier_state:
            ends[-1] += f", ringed: the model saved is {run.earlier_state}"
    return Chart(
        "Trajectory",
        f"Gain on the retain set, -ΔL_r, to the right, and on the forget set, ΔL_f, upwards, with a marker per "
        f"evaluation; both losses change alike on the dotted line. Up and to the right is better. {'; '.join(ends)}.",
        {
            "kind": "xy",
            "x": {"label": "retain utility gained, -ΔL_r", "limits": limits[0]},
            "y": {"label": "forget quality gained, ΔL_f", "limits": limits[1]},
            "series": series,
            "diagonal": -1,
            "zero": True,
            "nearest": True,
        },
    )


def steps_section(run: Run) -> Section:
    """Charts of losses, hardness, demand and branches, and of what was promised against what was realised."""
    charts = [
        _losses(run),
        *(_objective(run, side) for side in ("forget", "retain")),
        _hardness(run),
        _demand(run),
        _branches(run),
        *(_promise(run, side) for side in ("forget", "retain")),
    ]
    logged = len(run.steps.get("step", ()))
    intro = f"From {counted(logged, 'logged steps')}."
    if logged > 2 * BUCKETS:
        intro += f" The lines show the lowest and the highest value of each of {BUCKETS} stretches, so no peak is lost."
    missing = [] if logged else ["there is no logged step"]
    return Section(
        "Step by step",
        intro if logged else "",
        [c for c in charts if c is not None],
        missing=missing,
    )


def _losses(run: Run) -> Chart | None:
    """A chart of the losses of the steps' batches, where they are logged, and of the evaluations."""
    series, says = [], []
    for side in ("forget", "retain"):
        found = [
            (e["step"], e[f"eval_{side}_loss"]) for e in run.entries if f"eval_{side}_loss" in e
        ]
        if f"{side}_loss" not in run.steps:
            continue
        if is_loss(run, side):
            steps, losses = run.steps["step"], run.steps[f"{side}_loss"]
            series.append(line(f"{side}, batches", COLOR_OF_SET[side], steps, losses))
            says.append(course(f"The {side} loss of the steps' batches", steps, losses))
        if found:
            xs, ys = np.array(found, dtype=float).T
            series.append(line(f"{side}, evaluations", COLOR_OF_SET[side], xs, ys, mode="points"))
            says.append(course(f"The {side} loss on {measured_on(run, side)}", xs, ys))
    if not series:
        return None
    return Chart(
        "Losses", " ".join([*says, _stop_in_words(run)]), over_steps(series, "loss, nats", run)
    )


def _objective(run: Run, side: str) -> Chart | None:
    """A chart of what the steps log of a side whose objective is not the loss."""
    if f"{side}_loss" not in run.steps or is_loss(run, side):
        return None
    steps, values = run.steps["step"], run.steps[f"{side}_loss"]
    name = objective_of(run, side)
    meaning = (
        f"The passes over the {side} data are not of the loss, but of {name}, with a scale of its own."
        if name
        else f"Of what the passes over the {side} data are is not known here: the method {run.method} is not "
        f"installed, or its settings cannot be read."
    )
    return Chart(
        f"Objective of the method: {side}",
        f"{meaning} {course(f'The {side} objective', steps, values)}",
        over_steps(
            [line(f"{side} objective, batches", COLOR_OF_SET[side], steps, values)],
            "objective",
            run,
        ),
    )


def _hardness(run: Run) -> Chart | None:
    """A chart of κ, and of the thresholds between which it lies where the method has a constraint."""
    names = {
        "kappa": "κ",
        "direct_threshold": "direct up to (κ1, κ3)",
        "stop_threshold": "costs from (κ2, κ4)",
    }
    styles = {"kappa": ("#0072B2", {}), "direct_threshold": (_DIRECT, {"dash": _DASHED}),
              "stop_threshold": (FORGET, {"dash": _DASHED})}  # fmt: skip
    title, says = "Hardness κ", "Below 0 what helps one side helps the other; above 0 it costs it."
    if "stop_threshold" in run.steps:
        title += " and its thresholds"
        says = (
            "Of the model as one block: below the lower threshold the step for one side alone does enough for the "
            "other; between both the step is bent; above the upper one every step that does what is demanded must "
            "hurt. Layer by layer the next figure tells that."
        )
    return _lines(run, title, names, styles, "g_r · g_f", says)


def _demand(run: Run) -> Chart | None:
    names = {
        "demand": "demanded",
        "free_limit": "possible without harm",
        "max_demand": "possible at all",
    }
    styles = {
        "demand": (FORGET, {}),
        "free_limit": (_DIRECT, {}),
        "max_demand": ("#7F7F7F", {"dash": _DASHED}),
    }
    return _lines(
        run, "Demand of the steps", names, styles, "change per learning rate",
        "The run is to stop where more is demanded than is possible without harm.",
    )  # fmt: skip


def _lines(
    run: Run,
    title: str,
    names: Mapping[str, str],
    styles: Mapping[str, tuple[str, Mapping[str, Any]]],
    unit: str,
    meaning: str,
) -> Chart | None:
    there = [key for key in names if key in run.steps]
    if not there:
        return None
    steps = run.steps["step"]
    series = [
        line(names[key], styles[key][0], steps, run.steps[key], **styles[key][1]) for key in there
    ]
    says = " ".join(course(names[key], steps, run.steps[key]) for key in there)
    return Chart(title, f"{meaning} {says}", over_steps(series, unit, run))


def _branches(run: Run) -> Chart | None:
    if "direct_share" not in run.steps:
        return None
    steps, share = run.steps["step"], run.steps["direct_share"]
    series = [
        line("direct", _DIRECT, steps, share, mode="area", base=0),
        line("rectified", _RECTIFIED, steps, share, mode="area", base=1),
    ]
    spec = over_steps(series, "share of blocks", run)
    spec["y"] |= {"limits": [0, 1], "percent": True}
    return Chart(
        "Branches: direct and rectified blocks",
        f"Direct blocks take the objective's own gradient, which meets the demand already; rectified ones bend it. "
        f"{course('The share of direct blocks', steps, share)}",
        spec,
    )


def _promise(run: Run, side: str) -> Chart | None:
    """A chart of what each checked step promised, to first order, against what it did."""
    names = [f"{kind}_{side}_change" for kind in ("first_order", "realised")]
    if not all(name in run.steps for name in names):
        return None
    promised, realised = (run.steps[name] for name in names)
    known = np.flatnonzero(np.isfinite(promised) & np.isfinite(realised))
    if not len(known):
        return None
    kept = known[extremes(realised[known] - promised[known])]
    series = {
        "name": "a checked step", "color": COLOR_OF_SET[side], "x": shorts(promised[kept]), "y": shorts(realised[kept]),
        "mode": "points", "hints": [f"step {step:,.0f}" for step in run.steps["step"][kept]],
    }  # fmt: skip
    name, ratio = name_of(run, side), _median_ratio(run, side)
    return Chart(
        f"Promise and reality: the {name}",
        f"First-order change of the {name} that a step promised, to the right, and what came of it, upwards; on "
        f"the dotted line the promise is exact. {counted(len(known), 'steps')} {were(len(known))} checked{ratio}.",
        {
            "kind": "xy",
            "x": {"label": f"promised change of the {name}"},
            "y": {"label": "realised"},
            "series": [series],
            "diagonal": 1,
            "zero": True,
            "nearest": True,
            "square": True,
        },
    )


def _median_ratio(run: Run, side: str) -> str:
    promise = (run.evaluation or {}).get("promise") or {}
    found = promise.get("median_ratio", {}).get(side)
    return "" if found is None else f"; the median of realised over promised is {found:.3g}"


def over_steps(series: list[dict[str, Any]], unit: str, run: Run | None = None) -> dict[str, Any]:
    """A chart's spec with steps to the right; what is above 0 and spreads far on a logarithmic scale.

    Args:
        series: see `line`.
        unit: of what is drawn upwards.
        run: whose stop is marked, if it was stopped.
    """
    values = [v for one in series for v in one["y"] if v is not None]
    spread = max(values, default=0.0) / max(float(np.median(values)) if values else 1.0, 1e-12)
    is_log = bool(values) and min(values) > 0 and spread > 50
    y = {"label": f"{unit} (log)" if is_log else unit, "log": is_log}
    stop = [{"x": run.last_step, "label": "stop"}] if run is not None and _was_stopped(run) else []
    return {
        "kind": "xy",
        "x": {"label": "step", "whole": True},
        "y": y,
        "series": series,
        "marks": stop,
    }


def _was_stopped(run: Run) -> bool:
    return run.ended_kind not in (None, ALL_DONE.kind, "other")  # its evaluation.json may name none


def _stop_in_words(run: Run) -> str:
    if not run.is_finished:
        return "The run is not finished."
    return f"The run ended at step {run.last_step:,} because {run.ended}."
