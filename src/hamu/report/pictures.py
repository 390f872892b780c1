"""Pictures that commands save, by matplotlib, and the looks of runs that the page shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np

mpl.use("Agg", force=False)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hamu.assess import Frontier
from hamu.core.methods import HamuQ, HamuU
from hamu.evaluation.attack_results import (
    ORIGINAL,
    RELEARNING,
    RETRAINED,
    UNLEARNED,
    AttackResult,
)
from hamu.evaluation.gains import Gains, is_near
from hamu.report.tables import attack_figure, strengths

# Okabe and Ito's colours, distinct in print and for colour-blind readers.
STYLES: dict[str, tuple[str, str]] = {
    "hamu-q": ("#D55E00", "o"),
    "hamu-u": ("#0072B2", "s"),
    "ft": ("#009E73", "^"),
    "ga": ("#000000", "v"),
    "gdiff": ("#CC79A7", "D"),
    "kl": ("#E69F00", "P"),
    "scrub": ("#56B4E9", "X"),
    "gru": ("#7F7F7F", "<"),
    "pcgrad": ("#8C6D31", ">"),
    "cagrad": ("#882255", "d"),
    "npo": ("#332288", "p"),
    "simnpo": ("#999933", "h"),
}
COLOR_OF_MODEL = {UNLEARNED: "#D55E00", ORIGINAL: "#7F7F7F", RETRAINED: "#009E73"}
_RING: dict[str, Any] = {"marker": "o", "markersize": 13}
_RING |= {"markerfacecolor": "none", "linestyle": "none"}
_OF_FRONTIER = {  # title and axes
    "hamu-q": (
        "HAMU-Q: forget by at least Q",
        r"demanded rise of the forget loss, $Q/\eta$",
        r"least change of the retain loss $/\eta$",
    ),
    "hamu-u": (
        "HAMU-U: improve retain by at least U",
        r"demanded fall of the retain loss, $U/\eta$",
        r"least loss of forget quality $/\eta$",
    ),
}
Trajectory = Sequence[Gains]
Limits = tuple[tuple[float, float], tuple[float, float]]


class Look(NamedTuple):
    """Colour of a run's lines and plotly's dash pattern, "" for a solid line."""

    color: str
    dash: str = ""


def looks_of(methods: Sequence[str]) -> list[Look]:
    """Give each run a look, no two alike.

    The first run of a method has its colour. Others take the colours of methods that are not drawn;
    when these are used up, dash patterns begin.
    """
    colors = {method: color for method, (color, _) in STYLES.items()}
    free = [color for method, color in colors.items() if method not in methods]
    found: list[Look] = []
    for method in methods:
        own = [colors[method], *free] if method in colors else free or [*colors.values()]
        dashes = ("" if n == 0 else "7px,3px" + ",2px,3px" * (n - 1) for n in itertools.count())
        looks = (Look(color, dash) for dash in dashes for color in own)
        found.append(next(look for look in looks if look not in found))
    return found


def styles_of(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method; each installed method has a colour of its own."""
    names = list(dict.fromkeys(methods))
    looks = zip(names, looks_of(names), strict=True)
    return {name: (look.color, STYLES.get(name, ("", "."))[1]) for name, look in looks}


def limits_of(trajectories: Sequence[Trajectory]) -> Limits:
    """Limits that show two thirds of the trajectories whole, with a margin; the others are cut."""
    limits = []
    for axis in (0, 1):
        ends = sorted(max(abs(point[axis]) for point in points) for points in trajectories)
        bound = 1.6 * ends[max(0, (2 * len(ends)) // 3 - 1)] or 1.0
        every = [point[axis] for points in trajectories for point in points]
        values = [value for value in every if abs(value) <= bound]
        low, high = min(values, default=0.0), max(values, default=0.0)
        margin = 0.08 * (high - low) or bound
        limits.append((low - margin, high + margin))
    return limits[0], limits[1]


def label_of(name: str, end: Gains, limits: Limits) -> str:
    """Name of a method, with its end where that lies outside the picture."""
    retain, forget = end
    inside = all(low <= value <= high for value, (low, high) in zip(end, limits, strict=True))
    return name if inside else f"{name} (ends at {retain:.2g}, {forget:.2g})"


def plot_trajectories(trajectories: Mapping[str, Trajectory], path: Path, title: str = "") -> None:
    """Draw -ΔL_r against ΔL_f with a marker per evaluation (paper, Fig. 4) and save it.

    Up and to the right is better. Both losses change alike on the dotted diagonal. The legend
    states the ends of trajectories that the picture cuts.

    Args:
        trajectories: by method its points (-ΔL_r, ΔL_f), from (0, 0) on.
        path: of the picture; the suffix chooses the format.
        title: above it.
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
    """Draw trajectories of runs beside the methods' hypervolumes and save them.

    Args:
        runs: method, points (see `plot_trajectories`) and gains of the model saved, the best
            first; later runs of a method are drawn fainter.
        hypervolumes: by method.
        path: of the picture; the suffix chooses the format.
        title: above it.
    """
    figure, (axes, bars) = plt.subplots(
        1, 2, figsize=(10.5, 5.2), width_ratios=(3, 1), layout="constrained"
    )
    styles = styles_of([*(method for method, _, _ in runs), *hypervolumes])
    paths, ends = [run[:2] for run in runs], [end for _, _, end in runs]
    draw_trajectories(axes, paths, title, ends=ends, styles=styles)
    names = sorted(hypervolumes, key=hypervolumes.__getitem__)
    volumes = [hypervolumes[name] for name in names]
    drawn = bars.barh(names, volumes, color=[styles[name][0] for name in names], height=0.7)
    bars.bar_label(drawn, [f"{volume:.3g}" for volume in volumes], padding=3)
    bars.set(title="hypervolume", xticks=[])
    bars.margins(x=0.2)
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    save_figure(figure, path)


def plot_frontiers(frontiers: Mapping[str, Frontier], method: HamuQ | HamuU, path: Path) -> None:
    """Draw and save the first-order cost of every demand (Theorem 4.1, App. B.6).

    Args:
        frontiers: by variant.
        method: of the run to come; its demand is marked in its panel.
        path: of the picture; the suffix chooses the format.
    """
    size = (5.2 * len(frontiers), 4.2)
    figure, panels = plt.subplots(1, len(frontiers), figsize=size, layout="constrained")
    for axes, (name, found) in zip(panels, frontiers.items(), strict=True):
        _draw_frontier(axes, name, found)
        scale = found.feasible_limit if method.constraint_mode == "relative" else 1.0
        demand = method.constraint * scale
        if name == method.name and demand <= found.feasible_limit * (1 + 1e-9):
            cost = found.at(demand)[0] if name == "hamu-q" else -found.at(demand)[1]
            label = f"the demand, {demand:.3g}"
            axes.plot([demand], [cost], "o", color=STYLES[name][0], markersize=8, label=label)
            axes.legend(frameon=False, loc="upper left")
    save_figure(figure, path)


def _draw_frontier(axes: Axes, name: str, found: Frontier) -> None:
    free, limit = found.free_limit, found.feasible_limit
    change = found.retain_change if name == "hamu-q" else -found.forget_change
    low, high = float(change.min()), float(change.max())
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvspan(0, free, color="#009E73", alpha=0.10, linewidth=0)
    axes.axvspan(free, limit, color="#D55E00", alpha=0.10, linewidth=0)
    axes.plot(found.demand, change, color=STYLES[name][0], linewidth=2.4)
    for at, text, side, gap in ((free, "free", "right", -4), (limit, "feasible", "left", 4)):
        axes.axvline(at, color="0.4", linewidth=1, linestyle=":")
        place: dict[str, Any] = {"ha": side, "va": "bottom", "rotation": 90, "fontsize": 9}
        place |= {"xytext": (gap, 4), "textcoords": "offset points"}
        axes.annotate(f"{text} {at:.3g}", (at, low), color="0.35", **place)
    margin = 0.06 * (high - low) or 1.0
    title, across, up = _OF_FRONTIER[name]
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.set(xlim=(0, limit * 1.07), ylim=(low - margin, high + margin))
    axes.spines[["top", "right"]].set_visible(False)


def draw_trajectories(
    axes: Axes,
    runs: Sequence[tuple[str, Trajectory]],
    title: str,
    *,
    ends: Sequence[Gains] | None = None,
    legend: bool = True,
    styles: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Draw every run (method, points) in its method's colour, the first bold and in the legend.

    `ends` are the gains of the models saved, ringed unless a run's last point; `styles` are those
    of `styles_of`.
    """
    styles = styles or styles_of(name for name, _ in runs)
    firsts: dict[str, Trajectory] = {}
    for name, points in runs:
        firsts.setdefault(name, points)
    limits = limits_of(list(firsts.values()))
    reach = max(map(abs, (*limits[0], *limits[1])))
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.plot([-reach, reach], [reach, -reach], ":", color="0.5", linewidth=1, zorder=0)
    ringed = False
    for place, (name, points) in enumerate(runs):
        end = points[-1] if ends is None else ends[place]
        color, marker = styles[name]
        is_first, is_ours = points is firsts[name], name.startswith("hamu")
        alpha = 1.0 if is_first else 0.3
        label = label_of(name, end, limits) if is_first else None
        look: dict[str, Any] = {"marker": marker, "markersize": 6, "markevery": slice(1, None)}
        look |= {"linewidth": 2.4 if is_ours else 1.3, "zorder": 2 + is_ours + is_first}
        axes.plot(*np.array(points).T, color=color, alpha=alpha, label=label, **look)
        if not is_near(end, points[-1]):
            ringed = True
            axes.plot(*end, color=color, alpha=alpha, **_RING)
    if ringed:
        axes.plot([], [], color="0.4", label="the model saved", **_RING)
    axes.set(xlim=limits[0], ylim=limits[1], title=title)
    axes.set_xlabel(r"retain utility gained, $-\Delta L_r$")
    axes.set_ylabel(r"forget quality gained, $\Delta L_f$")
    axes.spines[["top", "right"]].set_visible(False)
    arrow = {"arrowstyle": "->", "color": "0.5"}
    axes.annotate(
        "better", (1, 1), (0.9, 0.9), "axes fraction", None, arrow, color="0.5", ha="right"
    )
    if legend:
        above = "best run (others fainter)" if len(runs) > len(firsts) else None
        beside = (1.01, 0.5)
        shown = axes.legend(loc="center left", bbox_to_anchor=beside, frameon=False, title=above)
        shown.set_alignment("left")


def plot_attacks(result: AttackResult, path: Path) -> None:
    """Draw the forgotten records over the strength of each attack, a panel each, and save it.

    Lines are means over seeds, bands reach from the lowest to the highest.
    """
    count = max(1, len(result.outcomes))  # none where all attacks are skipped
    size = (4.2 * count, 3.8)
    figure, panels = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    for axes, (attack, by_model) in zip(panels[0], result.outcomes.items(), strict=False):
        measured, relearns = attack_figure(attack, result), attack in RELEARNING
        for role, outcome in by_model.items():
            color, values = COLOR_OF_MODEL[role], np.array(outcome.figures[measured.key])
            xs = outcome.at if relearns else range(len(values))
            axes.plot(xs, values.mean(1), color=color, marker="o", markersize=4, label=role)
            ends = (values.min(1), values.max(1))
            axes.fill_between(xs, *ends, color=color, alpha=0.15, linewidth=0)
            if not relearns:
                axes.set_xticks(xs, strengths(attack, outcome))
        across = "steps of fine-tuning" if relearns else ""
        axes.set(title=attack, xlabel=across, ylabel=measured.label)
        if measured.key != "loss":
            axes.set_ylim(-0.03, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure to a file, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    figure.savefig(beside, dpi=150, format=path.suffix.lstrip("."))
    plt.close(figure)
    beside.replace(path)
