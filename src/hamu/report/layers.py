"""Heat maps over layers and steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from hamu.report.elements import Chart, Section, counted, shorts
from hamu.report.run import Layers, Run

_MOST_ROWS, _MOST_COLUMNS = 160, 200


def layers_section(run: Run) -> Section:
    """Heat maps of cosθ and ‖Δw‖ of every block at the logged steps."""
    found = run.layers
    if found is None:
        return Section("Layers", missing=["layers.jsonl is not there, or has no step"])
    charts = []
    if np.isfinite(found.cos).any():
        charts.append(_chart(
            found, found.cos, "cosθ: where both gradients meet",
            "cosθ between retain and forget gradient of each block: 1 in full conflict (to forget is to hurt), 0 "
            "independent, -1 both want the same step.",
            {"scale": "diverging", "low": -1.0, "high": 1.0},
        ))  # fmt: skip
    if np.isfinite(found.change).any():
        charts.append(_chart(
            found, found.change, "‖Δw‖: where the weights moved",
            "Length of the change of each block's weights in one step, on a logarithmic scale.",
            {"scale": "sequential", "log": True, **_positive_limits(found.change)},
        ))  # fmt: skip
    missing = []
    if not np.isfinite(found.cos).any():
        missing.append("cosθ: the method takes one gradient alone, or none was finite")
    if not np.isfinite(found.change).any():
        missing.append(
            "‖Δw‖: this optimizer's steps were not looked at; leave --check_steps at its default, or above 0"
        )
    steps = counted(len(found.steps), "logged steps")
    intro = f"{counted(len(found.blocks), 'blocks')} at {steps}, the first block on top."
    return Section("Layers", intro, charts, missing=missing)


def _chart(
    layers: Layers, values: np.ndarray, title: str, meaning: str, scale: dict[str, Any]
) -> Chart:
    """A heat map of [T, L] figures; where a screen shows fewer cells, some are joined by their largest magnitude."""
    rows, names = _joined(values.T, _short_names(layers.blocks), _MOST_ROWS)
    columns, steps = _joined(rows.T, [f"{step:,}" for step in layers.steps], _MOST_COLUMNS)
    spec = {
        "kind": "heat", "rows": names, "columns": steps, "values": [shorts(row) for row in columns.T], "xlabel": "step",
        **scale,
    }  # fmt: skip
    empty = (
        " Cells are empty where it is not known, as of a step that was not taken."
        if np.isnan(values).any()
        else ""
    )
    return Chart(title, f"{meaning} {_in_words(layers, values)}{empty}", spec, wide=True)


def _joined(values: np.ndarray, names: Sequence[str], most: int) -> tuple[np.ndarray, list[str]]:
    """Join rows into at most this many, each the largest magnitude of those that are joined in it."""
    if len(values) <= most:
        return values, list(names)
    parts = np.array_split(np.arange(len(values)), most)
    rows = []
    for part in parts:
        magnitude = np.where(np.isfinite(values[part]), np.abs(values[part]), -1.0)
        rows.append(np.take_along_axis(values[part], magnitude.argmax(0)[None], 0)[0])
    return np.array(rows), [
        names[p[0]] if len(p) == 1 else f"{names[p[0]]} … {names[p[-1]]}" for p in parts
    ]


def _short_names(names: Sequence[str]) -> list[str]:
    """Shorten names by what says nothing: the modules that all are in, and the ending of weights."""
    parts = [name.split(".") for name in names]
    shared = sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    )
    return [".".join(own[shared:]).removesuffix(".weight") or ".".join(own) for own in parts]


def _in_words(layers: Layers, values: np.ndarray) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a block that is never known has no mean
        means = np.nanmean(np.where(np.isfinite(values), values, np.nan), axis=0)
    if not np.isfinite(means).any():
        return ""
    high, low = int(np.nanargmax(means)), int(np.nanargmin(means))
    return (
        f"Highest on average in {layers.blocks[high]} ({means[high]:.3g}), lowest in {layers.blocks[low]} "
        f"({means[low]:.3g})."
    )


def _positive_limits(values: np.ndarray) -> dict[str, float]:
    """The limits of a logarithmic scale: at most six orders of magnitude."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return {"low": 1e-6, "high": 1.0}
    high = float(positive.max())
    return {"low": max(float(positive.min()), high * 1e-6), "high": high}
