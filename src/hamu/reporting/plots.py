"""The paper's central picture: what was gained on both sides, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg", force=False)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that stay apart in print and for colour-blind readers (Okabe and Ito); ours are solid and thick.
_STYLES: dict[str, tuple[str, str]] = {
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
Trajectory = Sequence[tuple[float, float]]


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
    limits = _limits(trajectories)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    reach = max(map(abs, (*limits[0], *limits[1])))
    axes.plot([-reach, reach], [reach, -reach], ":", color="0.5", linewidth=1, zorder=0)
    for number, (name, points) in enumerate(trajectories.items()):
        _draw(axes, name, points, number, limits)
    axes.set(xlim=limits[0], ylim=limits[1], title=title)
    axes.set_xlabel(r"retain utility gained, $-\Delta L_r$")
    axes.set_ylabel(r"forget quality gained, $\Delta L_f$")
    axes.annotate(
        "better", (1, 1), (0.90, 0.90), xycoords="axes fraction", color="0.5", ha="right", va="top",
        arrowprops={"arrowstyle": "->", "color": "0.5"},
    )  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _draw(axes: Axes, name: str, points: Trajectory, number: int, limits: tuple[tuple[float, float], ...]) -> None:
    color, marker = _STYLES.get(name, (f"C{number}", "."))
    ours = name.startswith("hamu")
    xs, ys = zip(*points, strict=True)
    inside = limits[0][0] <= xs[-1] <= limits[0][1] and limits[1][0] <= ys[-1] <= limits[1][1]
    label = name if inside else f"{name} (ends at {xs[-1]:.2g}, {ys[-1]:.2g})"
    axes.plot(
        xs, ys, color=color, marker=marker, markersize=6, markevery=slice(1, None), label=label,
        linewidth=2.4 if ours else 1.3, zorder=3 if ours else 2,
    )  # fmt: skip


def _limits(trajectories: Mapping[str, Trajectory]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits that show two thirds of the methods whole, with room to spare; what runs farther off is cut."""
    limits = []
    for axis in (0, 1):
        ends = sorted(max(abs(point[axis]) for point in points) for points in trajectories.values())
        bound = 1.6 * ends[max(0, (2 * len(ends)) // 3 - 1)] or 1.0
        values = [point[axis] for points in trajectories.values() for point in points if abs(point[axis]) <= bound]
        low, high = min(values, default=0.0), max(values, default=0.0)
        margin = 0.08 * (high - low) or bound
        limits.append((low - margin, high + margin))
    return limits[0], limits[1]


def _save(figure: Figure, path: Path) -> None:
    """Save whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    figure.savefig(beside, dpi=150, format=path.suffix.lstrip("."))
    plt.close(figure)
    beside.replace(path)
