"""Charts of the course of runs: trajectories, steps, layers, and several runs side by side."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import plotly.graph_objects as go

from hamu.evaluation.gains import drawn_entries
from hamu.report.charts import (
    BUCKETS,
    COLOR_OF_SET,
    FORGET,
    RETAIN,
    TEST,
    Chart,
    Section,
    axis,
    counted,
    course,
    heat,
    plane,
    series,
)
from hamu.report.pictures import Look, label_of, limits_of
from hamu.report.run import Layers, Run
from hamu.unlearning.stop_reason import ALL_DONE

_SIDES = ("forget", "retain")
_DASHED = {"dash": "6px,4px"}
_GREY = "#7F7F7F"


def trajectories(runs: Sequence[Run], looks: Sequence[Look], *, wide: bool = False) -> Chart | None:
    """ΔL_f against -ΔL_r, a marker per evaluation (paper, Fig. 4); None without two of them."""
    drawn = [(run, look) for run, look in zip(runs, looks, strict=True) if len(run.points) > 1]
    if not drawn:
        return None
    limits = limits_of([run.points for run, _ in drawn])
    lines, rings, ends = [], [], []
    for run, look in drawn:
        xs, ys = np.array(run.points).T
        hints = ["start", *(e.get("at", f"step {e['step']:,}") for e in drawn_entries(run.entries))]
        end = run.gains or run.points[-1]
        name = label_of(run.name if len(runs) > 1 else run.method, end, limits)
        line: dict[str, Any] = {"width": 3 if run.method.startswith("hamu") else 2}
        line |= {"dash": look.dash} if look.dash else {}
        lines.append(series(name, xs, ys, look.color, mode="lines+markers", hints=hints, line=line))
        ends.append(f"{run.name} ends at ({end.retain:+.3g}, {end.forget:+.3g})")
        if run.earlier_state:
            ends[-1] += f", ringed: the model saved is {run.earlier_state}"
            ring = {"symbol": "circle-open", "size": 16, "color": look.color}
            rings.append(go.Scatter(x=[end.retain], y=[end.forget], mode="markers", marker=ring,
                                    showlegend=False, hoverinfo="skip"))  # fmt: skip
    figure = plane(
        [*lines, *rings], axis("retain utility gained, -ΔL_r", limits[0]),
        axis("forget quality gained, ΔL_f", limits[1]), diagonal=-1, nearest=True, square=wide,
    )  # fmt: skip
    return Chart(
        "Trajectory",
        "Gain on the retain set, -ΔL_r, to the right, and on the forget set, ΔL_f, upwards, with "
        "a marker per "
        "evaluation; both losses change alike on the dotted line. Up and to the right is better. "
        f"{'; '.join(ends)}.",
        figure,
        wide,
    )


def losses_of_runs(runs: Sequence[Run], looks: Sequence[Look], side: str) -> Chart | None:
    """The loss of one side in the runs whose steps log it."""
    key, drawn = f"{side}_loss", zip(runs, looks, strict=True)
    there = [(run, look) for run, look in drawn if key in run.steps and run.logs_loss(side)]
    if not there:
        return None
    lines = [
        series(run.name, run.steps["step"], run.steps[key], look.color,
               line={"dash": look.dash} if look.dash else None)
        for run, look in there
    ]  # fmt: skip
    says = [course(f"run {run.name}", run.steps["step"], run.steps[key]) for run, _ in there]
    title = f"The {side} loss of the steps' batches"
    return Chart(title, " ".join(says), _over_steps(lines, "loss, nats"))


def steps_section(run: Run) -> Section:
    """Losses, hardness, demand, branches, and promised against realised changes of the steps."""
    charts = [
        _losses(run),
        *(_objective(run, side) for side in _SIDES),
        _hardness(run),
        _demand(run),
        _branches(run),
        *(_promise(run, side) for side in _SIDES),
    ]
    logged = len(run.steps.get("step", ()))
    if not logged:
        return Section("Step by step", missing=["there is no logged step"])
    intro = f"From {counted(logged, 'logged steps')}."
    if logged > 2 * BUCKETS:
        intro += (
            f" The lines show the lowest and the highest value of each of {BUCKETS} stretches, so no "
            f"peak is lost."
        )
    return Section("Step by step", intro, [chart for chart in charts if chart is not None])


def _losses(run: Run) -> Chart | None:
    """Losses of the steps' batches, where they are logged, and of the evaluations."""
    lines, says = [], []
    for side in _SIDES:
        key, color = f"{side}_loss", COLOR_OF_SET[side]
        if key not in run.steps:
            continue
        if run.logs_loss(side):
            steps, losses = run.steps["step"], run.steps[key]
            lines.append(series(f"{side}, batches", steps, losses, color))
            says.append(course(f"The {side} loss of the steps' batches", steps, losses))
        found = [(e["step"], e[f"eval_{key}"]) for e in run.entries if f"eval_{key}" in e]
        if found:
            xs, ys = np.array(found, dtype=float).T
            lines.append(series(f"{side}, evaluations", xs, ys, color, mode="markers"))
            says.append(course(f"The {side} loss on {run.measured_on(side)}", xs, ys))
    if not lines:
        return None
    end = f"The run ended at step {run.last_step:,} because {run.ended}."
    says.append(end if run.is_finished else "The run is not finished.")
    return Chart("Losses", " ".join(says), _over_steps(lines, "loss, nats", run))


def _objective(run: Run, side: str) -> Chart | None:
    """Logged values of a side whose objective is not the loss."""
    if f"{side}_loss" not in run.steps or run.logs_loss(side):
        return None
    name = run.objective(side)
    meaning = (
        f"The {side} objective of the method is {name}, not the loss; it has a scale of its own."
        if name
        else f"The {side} objective is unknown here: the method {run.method} is not installed, or its settings "
        f"cannot be read."
    )
    styles = {f"{side}_loss": (f"{side} objective, batches", COLOR_OF_SET[side], None)}
    return _lines(run, f"Objective of the method: {side}", styles, "objective", meaning)


def _hardness(run: Run) -> Chart | None:
    """κ, with its thresholds for a method with a constraint."""
    styles = {
        "kappa": ("κ", RETAIN, None),
        "direct_threshold": ("direct up to (κ1, κ3)", TEST, _DASHED),
        "stop_threshold": ("costs from (κ2, κ4)", FORGET, _DASHED),
    }
    title, says = "Hardness κ", "Below 0 what helps one side helps the other; above 0 it costs it."
    if "stop_threshold" in run.steps:
        title += " and its thresholds"
        says = (
            "Of the model as one block: below the lower threshold the step for one side alone does "
            "enough for the "
            "other; between both the step is bent; above the upper one every step that meets the "
            "demand must hurt."
        )
    return _lines(run, title, styles, "g_r · g_f", says)


def _demand(run: Run) -> Chart | None:
    styles = {
        "demand": ("demanded", FORGET, None),
        "free_limit": ("possible without harm", TEST, None),
        "max_demand": ("possible at all", _GREY, _DASHED),
    }
    says = "The run is to stop where more is demanded than is possible without harm."
    return _lines(run, "Demand of the steps", styles, "change per learning rate", says)


def _lines(
    run: Run,
    title: str,
    styles: Mapping[str, tuple[str, str, Mapping[str, str] | None]],
    unit: str,
    meaning: str,
) -> Chart | None:
    """Columns of the log over the steps: by column its name, colour and line."""
    there = {key: style for key, style in styles.items() if key in run.steps}
    if not there:
        return None
    steps = run.steps["step"]
    lines = [series(n, steps, run.steps[key], c, line=line) for key, (n, c, line) in there.items()]
    says = [course(name, steps, run.steps[key]) for key, (name, *_) in there.items()]
    return Chart(title, " ".join([meaning, *says]), _over_steps(lines, unit, run))


def _branches(run: Run) -> Chart | None:
    if "direct_share" not in run.steps:
        return None
    steps, share = run.steps["step"], run.steps["direct_share"]
    parts = (("direct", share, TEST), ("rectified", 1 - share, "#E69F00"))
    areas = [series(n, steps, values, color, stackgroup="blocks") for n, values, color in parts]
    figure = _over_steps(areas, "share of blocks", run)
    figure.update_yaxes(range=[0, 1], tickformat=".0%", type="linear")
    return Chart(
        "Branches: direct and rectified blocks",
        "Direct blocks take the objective's own gradient, which meets the demand already; "
        "rectified ones bend it. "
        f"{course('The share of direct blocks', steps, share)}",
        figure,
    )


def _promise(run: Run, side: str) -> Chart | None:
    """First-order change that each checked step promised, against the change it made."""
    keys = [f"{kind}_{side}_change" for kind in ("first_order", "realised")]
    if not all(key in run.steps for key in keys):
        return None
    promised, realised = (run.steps[key] for key in keys)
    known = np.flatnonzero(np.isfinite(promised) & np.isfinite(realised))
    if not len(known):
        return None
    name = f"{side} {'loss' if run.logs_loss(side) else 'objective'}"
    promise = (run.evaluation or {}).get("promise") or {}
    ratio = promise.get("median_ratio", {}).get(side)
    median = "" if ratio is None else f"; the median of realised over promised is {ratio:.3g}"
    hints = [f"step {step:,.0f}" for step in run.steps["step"][known]]
    points = series("a checked step", promised[known], realised[known], COLOR_OF_SET[side], mode="markers",
                    hints=hints)  # fmt: skip
    x, y = axis(f"promised change of the {name}"), axis("realised")
    return Chart(
        f"Promise and reality: the {name}",
        f"First-order change of the {name} that a step promised, to the right, and what came of "
        "it, upwards; on "
        f"the dotted line the promise is exact. {counted(len(known), 'checked steps')}{median}.",
        plane([points], x, y, diagonal=1, nearest=True, square=True),
    )


def _over_steps(lines: Sequence[go.Scatter], unit: str, run: Run | None = None) -> go.Figure:
    """Series over the steps, with the stop of a run that was stopped.

    Positive values that spread far get a logarithmic scale.
    """
    values = [v for line in lines for v in line.y if v is not None]
    is_log = bool(values) and min(values) > 0 and max(values) > 50 * max(np.median(values), 1e-12)
    y = axis(f"{unit} (log)" if is_log else unit, type="log" if is_log else "linear")
    figure = plane(lines, axis("step"), y)
    # evaluation.json of a run may name no stop reason
    if run is not None and run.ended_kind not in (None, ALL_DONE.kind, "other"):
        figure.add_vline(run.last_step, line={"dash": "dash", "width": 1}, annotation_text="stop")
    return figure


def layers_section(run: Run) -> Section:
    """Heat maps of cosθ and ‖Δw‖ of every block at the logged steps."""
    found = run.layers
    if found is None:
        return Section("Layers", missing=["layers.jsonl is not there, or has no step"])
    charts, missing = [], []
    if np.isfinite(found.cos).any():
        charts.append(_blocks(
            found, found.cos, "cosθ: where both gradients meet",
            "cosθ between retain and forget gradient of each block: 1 in full conflict (to forget "
            "is to hurt), 0 "
            "independent, -1 both want the same step.", limits=(-1.0, 1.0), scale="RdBu_r",
            hover=": cosθ %{z:.3g}",
        ))  # fmt: skip
    else:
        missing.append("cosθ: the method takes one gradient alone, or none was finite")
    if np.isfinite(found.change).any():
        charts.append(_blocks(
            found, found.change, "‖Δw‖: where the weights moved",
            "Length of the change of each block's weights in one step, as a power of ten.",
            scale="Blues", hover=": 10^%{z:.2f}",
        ))  # fmt: skip
    else:
        missing.append(
            "‖Δw‖: this optimizer's steps were not looked at; leave --check_steps at its default, "
            "or above 0"
        )
    steps = counted(len(found.steps), "logged steps")
    intro = f"{counted(len(found.blocks), 'blocks')} at {steps}, the first block on top."
    return Section("Layers", intro, charts, missing=missing)


def _blocks(
    layers: Layers,
    values: np.ndarray,
    title: str,
    meaning: str,
    *,
    hover: str,
    **scale: Any,
) -> Chart:
    """Heat map of [T, L] figures."""
    parts = [name.split(".") for name in layers.blocks]
    shared = len([*takewhile(lambda one: len(set(one)) == 1, zip(*parts, strict=False))])
    names = [".".join(one[shared:]).removesuffix(".weight") or ".".join(one) for one in parts]
    height = 110 + min(480, 18 * min(len(names), 160))
    figure = heat(
        names, [f"{step:,}" for step in layers.steps], values.T,
        hover=f"%{{y}}, step %{{x}}{hover}", height=height, **scale,
    )  # fmt: skip
    says = [meaning]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a block without a value has no mean
        means = np.nanmean(np.where(np.isfinite(values), values, np.nan), axis=0)
    if np.isfinite(means).any():
        high, low = int(np.nanargmax(means)), int(np.nanargmin(means))
        says.append(
            f"Highest on average in {layers.blocks[high]} ({means[high]:.3g}), lowest in "
            f"{layers.blocks[low]} "
            f"({means[low]:.3g})."
        )
    if np.isnan(values).any():
        says.append("Cells are empty where it is not known, as of a step that was not taken.")
    return Chart(title, " ".join(says), figure, wide=True)
