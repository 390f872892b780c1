"""Shared by the pictures of the experiments: panels, trajectories, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hamu.evaluation.gains import Gains
from hamu.report.pictures import draw_trajectories, new_figure, save_figure, styles_of

RETAIN_GAIN, FORGET_GAIN = (
    r"retain utility gained, $-\Delta L_r$",
    r"forget quality gained, $\Delta L_f$",
)


def panels(count: int, width: float = 4.6) -> tuple[Figure, Sequence[Axes]]:
    """A row of panels."""
    figure = new_figure(width * count, 4.2)
    axes = figure.subplots(1, count, squeeze=False)
    for one in axes[0]:
        one.locator_params(axis="x", nbins=5)
    return figure, list(axes[0])


def save_panels(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    """Save, with one legend below for all panels, if any has something to say in it."""
    labels: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
        one.spines[["top", "right"]].set_visible(False)
    if labels:
        rows = -(-len(labels) // max(1, int(figure.get_size_inches()[0] / 1.3)))
        columns = -(-len(labels) // rows)
        figure.legend(
            labels.values(), labels.keys(), loc="outside lower center", ncols=columns, frameon=False
        )
    save_figure(figure, path)


def draw_methods(
    axes: Axes, trajectories: Mapping[str, Sequence[Sequence[float]]], title: str
) -> None:
    """A trajectory for each method; what runs off is cut, and the legend of the panel says where it ends."""
    if not trajectories:
        axes.set_title(f"{title}: no run")
        return
    runs = [(name, [Gains(*point) for point in points]) for name, points in trajectories.items()]
    draw_trajectories(axes, runs, title, legend=False)
    far = [line.get_label() for line in axes.get_lines() if "ends at" in str(line.get_label())]
    for line in axes.get_lines():
        line.set_label(str(line.get_label()).split(" (ends")[0])
    if far:
        axes.text(
            0.02, 0.02, "\n".join(map(str, far)), transform=axes.transAxes, fontsize=7, color="0.35", va="bottom",
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0}, zorder=9,
        )  # fmt: skip


def draw_lines(axes: Axes, trajectories: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """A trajectory for each method, all of it."""
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    styles = styles_of(trajectories)
    for name, points in trajectories.items():
        color, marker = styles[name]
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=name)
    axes.set(xlabel=RETAIN_GAIN, ylabel=FORGET_GAIN)
    axes.spines[["top", "right"]].set_visible(False)
    if trajectories:
        axes.legend(frameon=False)


def draw_shades(
    axes: Axes, trajectories: Mapping[str, Sequence[Sequence[float]]], color_map: str, title: str
) -> None:
    """Trajectories that differ in one number, from light to dark."""
    shades = colormaps[color_map]
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    for number, (name, points) in enumerate(trajectories.items()):
        color = shades(0.35 + 0.6 * number / max(1, len(trajectories) - 1))
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, "o-", color=color, markersize=4, label=name)
    axes.set(xlabel=RETAIN_GAIN, ylabel=FORGET_GAIN, title=title)
    if trajectories:
        axes.legend(frameon=False, fontsize=8)


def draw_curves(
    axes: Axes, xs: Sequence[float], curves: Mapping[str, Sequence[float | None]]
) -> None:
    """A curve for each method; points that are missing leave a gap."""
    styles = styles_of(curves)
    for name, values in curves.items():
        color, marker = styles[name]
        heights = [float("nan") if value is None else value for value in values]
        width = 2.4 if name.startswith("hamu") else 1.3
        axes.plot(
            xs, heights, color=color, marker=marker, linewidth=width, markersize=5, label=name
        )
