"""Pictures that commands save, by matplotlib, and the looks of runs that the page shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from hamu.assess import Frontier
from hamu.core.methods import TABLE, HamuQ, HamuU
from hamu.evaluation import attacks
from hamu.evaluation.gains import Gains
from hamu.files import finding_room
from hamu.report.tables import attack_figure, strengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of each method, in the order of the table: Okabe and Ito's colours, distinct in print and for
# colour-blind readers, then further ones; beyond these both return.
_COLORS = (
    *("#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#8C6D31", "#882255", "#332288", "#999933", "#44AA99", "#AA4499", "#117733", "#DDAA33"),
    *("#6699CC", "#AA4466", "#66CCEE", "#BB5566", "#004488", "#CC6677"),
)
_MARKERS = "os^vDPX<>dph*8H"
COLOR_OF_MODEL = {
    attacks.UNLEARNED: "#D55E00",
    attacks.ORIGINAL: "#7F7F7F",
    attacks.RETRAINED: "#009E73",
}
_RING: dict[str, Any] = {"marker": "o", "markersize": 13, "mfc": "none", "linestyle": "none"}
_ON_FRONTIER = {  # demand and price by variant
    "hamu-q": (r"rise of the forget loss, $Q/\eta$", r"rise of the retain loss $/\eta$"),
    "hamu-u": (r"fall of the retain loss, $U/\eta$", r"fall of the forget loss $/\eta$"),
}
Trajectory = Sequence[Gains]
Limits = tuple[tuple[float, float], tuple[float, float]]


def styles_of(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method; those of other packages come after the table's."""
    looks = zip(cycle(_COLORS), cycle(_MARKERS), strict=False)
    return dict(zip(dict.fromkeys([*TABLE, *methods]), looks, strict=False))


STYLES = styles_of(())


def _label(method: str) -> str:
    """Name in a picture: no formula, and no underscore at its start, which hides it in a legend."""
    return (" " * method.startswith("_") + method).replace("$", r"\$")


def looks_of(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Give each run its method's colour, and a further run of a method a dash pattern of plotly."""
    styles, drawn, found = styles_of(methods), Counter[str](), []
    for method in methods:
        again = drawn[method]
        dash = "7px,3px" + ",2px,3px" * (again - 1) if again else "solid"
        found.append((styles[method][0], dash))
        drawn[method] += 1
    return found


def limits_of(trajectories: Sequence[Trajectory]) -> Limits:
    """Limits that show two thirds of the trajectories whole, with a margin; the others are cut.

    Those that never leave the origin need no room and do not count.
    """
    ends = np.array([np.abs(points).max(0) for points in trajectories]).reshape(-1, 2)
    ends = ends[ends.any(1)]
    count = round(len(ends) * 2 / 3)
    # two thirds lie within these, of each axis alone others; those closest to both are shown
    typical = np.sort(ends, 0)[count - 1 : count].clip(min=1e-12)
    shown = ends[np.argsort((ends / typical).max(1, initial=0), kind="stable")[:count]]
    points = np.array([point for points in trajectories for point in points]).reshape(-1, 2)
    near = points[(np.abs(points) <= 1.6 * shown.max(0, initial=0.0)).all(1)]
    low, high = near.min(0, initial=0.0), near.max(0, initial=0.0)
    margin = np.where(high > low, 0.08 * (high - low), 1.0)
    x, y = map(tuple, np.stack([low - margin, high + margin], 1).tolist())
    return x, y


def plot_trajectories(trajectories: Mapping[str, Trajectory], path: Path, title: str = "") -> None:
    """Draw -ΔL_r against ΔL_f by method, with a marker per evaluation (paper, Fig. 4)."""
    figure = new_figure(7.5, 5.2)
    draw_trajectories(figure.subplots(), list(trajectories.items()), title)
    save_figure(figure, path)


def plot_comparison(
    runs: Sequence[tuple[str, Trajectory, Gains]],
    hypervolumes: Mapping[str, float],
    path: Path,
    title: str = "",
    level: tuple[str, float] | None = None,
) -> None:
    """Draw runs (method, points, gains of the model saved), the best first, beside hypervolumes.

    A dashed line shows the gain of a side at which they are compared.
    """
    figure = new_figure(10.5, 5.2)
    axes, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    styles = styles_of([*(method for method, _, _ in runs), *hypervolumes])
    ends = [end for _, _, end in runs]
    draw_trajectories(axes, [run[:2] for run in runs], title, ends=ends, styles=styles)
    if level is not None:
        line = axes.axhline if level[0] == "forget" else axes.axvline
        line(level[1], linestyle="--", color="0.3", linewidth=1, zorder=1)
    names = sorted(hypervolumes, key=hypervolumes.__getitem__)
    colors = [styles[name][0] for name in names]
    lengths = [hypervolumes[name] for name in names]
    drawn = bars.barh([*map(_label, names)], lengths, color=colors, height=0.7)
    bars.bar_label(drawn, fmt="%.3g", padding=3)
    bars.set(title="hypervolume", xticks=[])
    bars.margins(x=0.2)
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    save_figure(figure, path)


def plot_frontiers(frontiers: Mapping[str, Frontier], method: HamuQ | HamuU, path: Path) -> None:
    """Draw the first-order cost of every demand by variant, and mark the method's (App. B.6)."""
    figure = new_figure(5.2 * len(frontiers), 4.2)
    panels = figure.subplots(1, len(frontiers))
    for axes, (name, found) in zip(panels, frontiers.items(), strict=True):
        free, limit, color = found.free_limit, found.feasible_limit, STYLES[name][0]
        cost = found.retain_change if name == "hamu-q" else -found.forget_change
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.axvspan(0, free, color="#009E73", alpha=0.10, linewidth=0, label=f"free {free:.3g}")
        text = f"feasible {limit:.3g}"
        axes.axvspan(free, limit, color="#D55E00", alpha=0.10, linewidth=0, label=text)
        axes.plot(found.demand, cost, color=color, linewidth=2.4)
        demand = method.constraint * (limit if method.constraint_mode == "relative" else 1.0)
        if name == method.name and demand <= limit * (1 + 1e-9):
            at = np.interp(demand, found.demand, cost)
            label = f"the demand, {demand:.3g}"
            axes.plot([demand], [at], "o", color=color, markersize=8, label=label)
        axes.legend(frameon=False, loc="upper left")
        demanded, paid = _ON_FRONTIER[name]
        axes.set(title=name, xlabel=f"demanded {demanded}", ylabel=f"least {paid}")
        axes.set_xlim(0, limit * 1.07)
        axes.locator_params(axis="x", nbins=5)  # more labels of a small limit would meet
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_trajectories(
    axes: Axes,
    runs: Sequence[tuple[str, Trajectory]],
    title: str,
    *,
    ends: Sequence[Gains] | None = None,
    legend: bool = True,
    styles: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Draw every run (method, points) in its method's colour, the first opaque and in the legend.

    `ends` are the gains of the models saved, ringed unless a run's last point; `styles` are those
    of `styles_of`.
    """
    styles = styles or styles_of(name for name, _ in runs)
    firsts: dict[str, Trajectory] = {}
    for name, points in runs:
        firsts.setdefault(name, points)
    limits, ring = limits_of(list(firsts.values())), "the model saved"
    for place, (name, points) in enumerate(runs):
        end = points[-1] if ends is None else ends[place]
        (color, marker), is_first, label = styles[name], points is firsts[name], _label(name)
        if not all(low <= at <= high for at, (low, high) in zip(end, limits, strict=True)):
            label += " (ends at {:.3g}, {:.3g})".format(*end)
        look: dict[str, Any] = {"color": color, "alpha": 1.0 if is_first else 0.3}
        look["zorder"] = 2 + is_first
        width, label = 2.4 if name.startswith("hamu") else 1.3, label if is_first else "_hidden"
        line: dict[str, Any] = {"marker": marker, "label": label, "linewidth": width}
        axes.plot(*np.array(points).T, markevery=slice(1, None), **line, **look)
        if not np.allclose(end, points[-1], rtol=1e-4, atol=1e-7):
            axes.plot(*end, label=ring, **look, **_RING)
            ring = "_hidden"
    for line_at in (axes.axhline, axes.axvline):
        line_at(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axline((0, 0), slope=-1, linestyle=":", color="0.5", linewidth=1, zorder=0)
    axes.set(xlim=limits[0], ylim=limits[1], title=title)
    axes.set(xlabel=r"retain utility gained, $-\Delta L_r$")
    axes.set(ylabel=r"forget quality gained, $\Delta L_f$")
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", nbins=5)  # more labels of small gains would run into each other
    arrow = {"arrowstyle": "->", "color": "0.5"}
    axes.annotate("better", (1, 1), (0.8, 0.9), "axes fraction", arrowprops=arrow, color="0.5")
    if legend:
        above = "best run (others fainter)" if len(runs) > len(firsts) else None
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title=above)


def plot_attacks(result: attacks.AttackResult, path: Path) -> None:
    """Draw the forgotten records over the strength of each attack: means and ranges over seeds."""
    count = max(1, len(result.outcomes))  # none where all attacks are skipped
    figure = new_figure(4.2 * count, 3.8)
    panels = figure.subplots(1, count, squeeze=False)
    for axes, (attack, by_model) in zip(panels[0], result.outcomes.items(), strict=False):
        measured, relearns = attack_figure(attack, result), attack in attacks.RELEARNING
        for role, outcome in by_model.items():
            color, values = COLOR_OF_MODEL[role], np.array(outcome.figures[measured.key])
            xs = outcome.at if relearns else range(len(values))
            axes.plot(xs, values.mean(1), color=color, marker="o", markersize=4, label=role)
            axes.fill_between(xs, values.min(1), values.max(1), color=color, alpha=0.15)
            if not relearns:
                axes.set_xticks(xs, strengths(attack, outcome))
        across = "steps of fine-tuning" if relearns else ""
        axes.set(title=attack, xlabel=across, ylabel=fill(measured.label, 40))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """Empty figure of this size in inches."""
    from matplotlib.figure import Figure  # takes a second, which few commands need

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure to a file, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    with finding_room(f"{path} cannot be written"):
        figure.savefig(beside, dpi=150, format=path.suffix.lstrip("."))
    beside.replace(path)
