"""Pictures saved as files: trajectories of gains (the paper's Fig. 4), comparisons of runs, frontiers of demands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg", force=False)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hamu.assess import Frontier
from hamu.core.methods import HamuQ, HamuU
from hamu.evaluation.gains import Gains
from hamu.report.looks import looks_of
from hamu.report.trajectories import STYLES, Trajectory, is_near, label_of, limits_of

_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 13,
    "markerfacecolor": "none",
    "linestyle": "none",
}


def plot_trajectories(trajectories: Mapping[str, Trajectory], path: Path, title: str = "") -> None:
    """Draw -ΔL_r against ΔL_f with a marker per evaluation (paper, Fig. 4) and save it.

    Up and to the right is better: the forget loss rose and the retain loss fell. On the dotted diagonal both losses
    change alike. Methods that run far off are cut at the edge of the picture, and the legend says where they ended.

    Args:
        trajectories: for each method the points (retain gain -ΔL_r, forget gain ΔL_f), starting at (0, 0).
        path: where to save; the suffix chooses the format.
        title: printed above.
    """
    figure, axes = plt.subplots(figsize=(7.5, 5.2), layout="constrained")
    draw_trajectories(axes, list(trajectories.items()), title)
    save_figure(figure, path)


def plot_comparison(
    runs: Sequence[tuple[str, Trajectory, Gains]],
    hypervolumes: Mapping[str, float],
    path: Path,
    title: str = "",
) -> None:
    """Draw the trajectories of several runs of each method, and the hypervolumes of the methods, and save them.

    Args:
        runs: of each its method, its points, see `plot_trajectories`, and the point of the model that it has saved, the
            best first: of each method the first run is drawn as its own, the others fainter.
        hypervolumes: by method.
        path: where to save; the suffix chooses the format.
        title: printed above.
    """
    figure, (axes, bars) = plt.subplots(
        1, 2, figsize=(10.5, 5.2), width_ratios=(3, 1), layout="constrained"
    )
    ends = [end for _, _, end in runs]
    styles = styles_of([*(method for method, _, _ in runs), *hypervolumes])
    draw_trajectories(
        axes, [(method, points) for method, points, _ in runs], title, ends=ends, styles=styles
    )
    names = sorted(hypervolumes, key=hypervolumes.__getitem__)
    colors = [styles[name][0] for name in names]
    drawn = bars.barh(names, [hypervolumes[name] for name in names], color=colors, height=0.7)
    bars.bar_label(drawn, [f"{hypervolumes[name]:.3g}" for name in names], padding=3)
    bars.set_title("hypervolume")
    bars.margins(x=0.2)
    bars.set_xticks([])
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    save_figure(figure, path)


def plot_frontiers(frontiers: Mapping[str, Frontier], method: HamuQ | HamuU, path: Path) -> None:
    """Draw what every demand costs to first order, for both variants (Theorem 4.1, App. B.6), and save it.

    Args:
        frontiers: by variant.
        method: the method of the run to come, whose demand is marked in its own panel.
        path: where to save; the suffix chooses the format.
    """
    figure, panels = plt.subplots(
        1, len(frontiers), figsize=(5.2 * len(frontiers), 4.2), layout="constrained"
    )
    for axes, (name, found) in zip(panels, frontiers.items(), strict=True):
        forgets = name == "hamu-q"
        change = found.retain_change if forgets else -found.forget_change
        color = STYLES[name][0]
        free = found.free_limit
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.axvspan(0, free, color="#009E73", alpha=0.10, linewidth=0)
        axes.axvspan(free, found.feasible_limit, color="#D55E00", alpha=0.10, linewidth=0)
        axes.plot(found.demand, change, color=color, linewidth=2.4)
        low, high = float(change.min()), float(change.max())
        for limit, text in ((free, "free"), (found.feasible_limit, "feasible")):
            axes.axvline(limit, color="0.4", linewidth=1, linestyle=":")
            axes.annotate(
                f"{text} {limit:.3g}", (limit, low), xytext=(-4, 4), textcoords="offset points", rotation=90,
                ha="right", va="bottom", color="0.35", fontsize=9,
            )  # fmt: skip
        if name == method.name:
            scale = found.feasible_limit if method.constraint_mode == "relative" else 1.0
            demand = method.constraint * scale
            if demand <= found.feasible_limit * (1 + 1e-9):
                cost = found.at(demand)[0] if forgets else -found.at(demand)[1]
                axes.plot(
                    [demand],
                    [cost],
                    "o",
                    color=color,
                    markersize=8,
                    label=f"the demand, {demand:.3g}",
                )
                axes.legend(frameon=False, loc="upper left")
        axes.set_title(
            "HAMU-Q: forget by at least Q" if forgets else "HAMU-U: improve retain by at least U"
        )
        axes.set_xlabel(
            r"demanded rise of the forget loss, $Q/\eta$"
            if forgets
            else r"demanded fall of the retain loss, $U/\eta$"
        )
        axes.set_ylabel(
            r"least change of the retain loss $/\eta$"
            if forgets
            else r"least loss of forget quality $/\eta$"
        )
        margin = 0.06 * (high - low) or 1.0
        axes.set(xlim=(0, found.feasible_limit * 1.04), ylim=(low - margin, high + margin))
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def styles_of(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method; one that is installed has a colour that no other one here has."""
    names = list(dict.fromkeys(methods))
    return {
        name: (look.color, STYLES.get(name, ("", "."))[1])
        for name, look in zip(names, looks_of(names), strict=True)
    }


def draw_trajectories(
    axes: Axes,
    runs: Sequence[tuple[str, Trajectory]],
    title: str,
    *,
    ends: Sequence[Gains] | None = None,
    legend: bool = True,
    styles: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Draw every run in the colour of its method: the first of a method in the legend and bold, others fainter.

    Args:
        axes: where to draw.
        runs: method and points of each.
        title: printed above.
        ends: of each run the point of the model that it has saved, by default its last one; ringed if it is another.
        legend: whether there is one.
        styles: of the methods, where other pictures share them; see `styles_of`.
    """
    styles = styles or styles_of(name for name, _ in runs)
    firsts: dict[str, Trajectory] = {}
    for name, points in runs:
        firsts.setdefault(name, points)
    limits = limits_of(list(firsts.values()))
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    reach = max(map(abs, (*limits[0], *limits[1])))
    axes.plot([-reach, reach], [reach, -reach], ":", color="0.5", linewidth=1, zorder=0)
    ends = [points[-1] for _, points in runs] if ends is None else ends
    is_ringed = False
    for (name, points), end in zip(runs, ends, strict=True):
        xs, ys = zip(*points, strict=True)
        color, marker = styles[name]
        is_first, is_ours = points is firsts[name], name.startswith("hamu")
        axes.plot(
            xs, ys, color=color, marker=marker, markersize=6, markevery=slice(1, None),
            label=label_of(name, end, limits) if is_first else None, alpha=1.0 if is_first else 0.3,
            linewidth=2.4 if is_ours else 1.3, zorder=2 + is_ours + is_first,
        )  # fmt: skip
        if not is_near(end, points[-1]):
            is_ringed = True
            axes.plot(*end, color=color, alpha=1.0 if is_first else 0.3, **_RING)
    if is_ringed:
        axes.plot([], [], color="0.4", label="the model saved", **_RING)
    axes.set(xlim=limits[0], ylim=limits[1], title=title)
    axes.set_xlabel(r"retain utility gained, $-\Delta L_r$")
    axes.set_ylabel(r"forget quality gained, $\Delta L_f$")
    axes.annotate(
        "better", (1, 1), (0.90, 0.90), xycoords="axes fraction", color="0.5", ha="right", va="top",
        arrowprops={"arrowstyle": "->", "color": "0.5"},
    )  # fmt: skip
    meaning = "best run (others fainter)" if len(runs) > len(firsts) else None
    if legend:
        axes.legend(
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            title=meaning,
            alignment="left",
        )
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure to a file, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    figure.savefig(beside, dpi=150, format=path.suffix.lstrip("."))
    plt.close(figure)
    beside.replace(path)
