"""The two pictures of docs/theory.md: the regimes of hardness, and the step in the plane of the two gradients.

    python examples/theory_figures.py

Every step, cost, threshold and regime is computed by the library. Both pictures are saved in docs/images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch, Wedge

from hamu import HamuQ, HamuU, Method, PairGram, PairStep
from hamu.assess import REGIMES

# As in hamu.reporting.plots: HAMU-Q vermilion, HAMU-U blue, the retain side green, the forget side black.
STEP, RETAIN, FORGET = {"hamu-q": "#D55E00", "hamu-u": "#0072B2"}, "#009E73", "#000000"
KEPT, WITHIN, FREE = "#E4F2FB", "#A9D7F3", "#F0E442"
REGIME_COLORS = ("#009E73", "#E69F00", "#882255")
RATE, FORGET_NORM = 1.5, 1.12  # the drawings' η and ‖g_f‖, where ‖g_r‖ = 1


def solve(method: Method, degrees: float, forget_norm: float = FORGET_NORM) -> tuple[PairStep, np.ndarray, np.ndarray]:
    """What the method makes of one block with g_f upwards and g_r at this angle to it: the step, g_r, g_f."""
    angle = np.deg2rad(degrees)
    retain, forget = np.array([np.sin(angle), np.cos(angle)]), np.array([0.0, forget_norm])
    products = (retain @ retain, forget @ forget, retain @ forget)
    gram = PairGram(*(torch.tensor([p], dtype=torch.float64) for p in products))
    return PairStep(gram, method.weigh(gram), gram.clip_factors(None), "step"), retain, forget


def draw_regimes(share: float) -> plt.Figure:
    """The least retain cost against κ, for gradients of norm 1 and one demand."""
    kappas = np.linspace(-1, 1, 2001)
    steps = [solve(HamuQ(share), degrees, 1.0)[0] for degrees in np.rad2deg(np.arccos(kappas))]
    costs = np.array([step.promised_retain_change.item() for step in steps])
    regimes, status = np.array([int(step.regime) for step in steps]), steps[0].weights.constraint
    edges = [-1, status.direct_threshold.item(), status.stop_threshold.item(), 1]
    notes = (
        "descent on the\nretain loss\nforgets enough",
        "descent mixed with the forget gradient\nforgets enough, and the retain loss still falls",
        "forgetting\nenough raises\nthe retain loss",
    )
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    for number, color in enumerate(REGIME_COLORS):
        inside, middle = regimes == number, sum(edges[number : number + 2]) / 2
        axes.axvspan(*edges[number : number + 2], color=color, alpha=0.12, linewidth=0)
        axes.plot(kappas[inside], costs[inside], color=color, linewidth=3.5, zorder=3, clip_on=False)
        axes.text(middle, 1.29, REGIMES[number], ha="center", va="center", fontsize=11, weight="bold")
        axes.text(middle, 1.18, notes[number], color="0.25", ha="center", va="top", fontsize=9)
    axes.axhline(0, color="0.35", linewidth=1)
    axes.vlines(edges[1:3], -1.12, 1.42, color="0.45", linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(edges[1:3], np.interp(edges[1:3], kappas, costs), "o", color="white", markeredgecolor="0.2", zorder=4)
    axes.text(0, 0, "retain loss rises\n\nretain loss falls", color="0.35", ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1, 1), ylim=(-1.12, 1.42), ylabel=r"least retain cost $F_r^\ast / \eta$")
    axes.set_xticks([*edges, 0], ["$-n_r n_f$", r"$\kappa_1$", r"$\kappa_2$", "$n_r n_f$", "0"])
    axes.set_yticks([-1, 0, share], ["$-n_r^2$", "0", r"$\varphi\, n_r^2$"])
    axes.set_xlabel(r"hardness $\kappa = g_r \cdot g_f$, from opposed to identical gradients")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_updates(share: float) -> plt.Figure:
    """The step in the plane of the two gradients: five problems, and all directions of g_r at once."""
    figure, grid = plt.subplots(2, 3, figsize=(11.4, 8.8), layout="constrained")
    hamu_q, hamu_u = (method(share, constraint_mode="relative") for method in (HamuQ, HamuU))
    problems = zip("abcde", [hamu_q] * 4 + [hamu_u], (140, 105, 55, 18, 55), strict=True)
    for axes, problem in zip(grid.flat, problems, strict=False):
        draw_problem(axes, *problem)
    draw_all_directions(grid[1, 2], "f", hamu_q)
    legend = [Patch(color=c) for c in (KEPT, WITHIN, FREE)] + [Line2D([], [], color="0.35", linestyle="--")]
    labels = ("keeps the promise", "and lies within the radius", "and the other side gains", "other loss unchanged")
    figure.legend(legend, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=11)
    return figure


def draw_problem(axes: plt.Axes, letter: str, method: Method, degrees: float) -> None:
    """One problem: where the promise is kept, what of it is free, the gradients and the step."""
    step, retain, forget = solve(method, degrees)
    draw_region(axes, step, retain, forget, free=True)
    arrow(axes, retain, RETAIN, "$g_r$")
    arrow(axes, forget, FORGET, "$g_f$")
    arrow(axes, update_of(step, retain, forget), STEP[method.name], r"$\Delta w$", width=3.2)
    name = REGIMES[int(step.regime)]
    if name == "rectified":
        name += ", conflicting" if step.kappa > 0 else ", compatible"
    changes = [RATE * change.item() for change in (step.promised_retain_change, step.promised_forget_change)]
    axes.set_title(f"({letter}) {method.name.upper()}: {name}", fontsize=12, weight="bold")
    text = rf"$\theta = {degrees}°,\ \ \Delta L_r = {changes[0]:+.2f},\ \ \Delta L_f = {changes[1]:+.2f}$"
    axes.text(0, -1.95, text, ha="center", va="center", fontsize=11)


def draw_all_directions(axes: plt.Axes, letter: str, method: Method) -> None:
    """Where the step ends when g_r turns all the way round, and the regime of each direction."""
    for degrees in range(-180, 180):
        step, retain, forget = solve(method, degrees)
        if degrees == -180:
            draw_region(axes, step, retain, forget, free=False)
        color = REGIME_COLORS[int(step.regime)]
        axes.add_patch(Wedge((0, 0), 1.78, 89.4 - degrees, 90.6 - degrees, width=0.14, color=color, linewidth=0))
        axes.plot(*update_of(step, retain, forget), "o", color=STEP[method.name], markersize=6, zorder=7)
    arrow(axes, forget, FORGET, "$g_f$")
    spots = ((0, -1.95, 0), (1.9, 0, -90), (0, 1.95, 0))
    for name, color, (x, y, turn) in zip(REGIMES, REGIME_COLORS, spots, strict=True):
        axes.text(x, y, name, color=color, ha="center", va="center", fontsize=11, weight="bold", rotation=turn)
    axes.text(0.1, 0.62, "collinear", color=STEP[method.name], va="center", fontsize=10)
    axes.text(0, -0.55, "ring: direction of $g_r$\ndots: end of the step", ha="center", va="center", fontsize=11)
    axes.set_title(f"({letter}) {method.name.upper()}: every direction of $g_r$", fontsize=12, weight="bold")


def update_of(step: PairStep, retain: np.ndarray, forget: np.ndarray) -> np.ndarray:
    """Δw = -η g*."""
    return -RATE * (step.weights.retain.item() * retain + step.weights.forget.item() * forget)


def draw_region(axes: plt.Axes, step: PairStep, retain: np.ndarray, forget: np.ndarray, free: bool) -> None:
    """The circle, where the promise is kept and, if asked, where the other side gains as well."""
    status = step.weights.constraint
    demand, radius = RATE * status.demand.item(), RATE * status.radius.item()
    g_c, g_o = (-retain, -forget) if status.swapped else (forget, retain)
    points = np.stack(np.meshgrid(xs := np.linspace(-2.1, 2.1, 1401), xs), -1)
    kept = points @ g_c >= demand
    within = kept & (np.linalg.norm(points, axis=-1) <= radius)
    for region, color in ((kept, KEPT), (within, WITHIN), (within & free & (points @ g_o <= 0), FREE)):
        if region.any():
            axes.contourf(xs, xs, region, levels=(0.5, 1.5), colors=[color])
    if free:
        x, y = g_o * radius / np.linalg.norm(g_o)
        axes.plot([y, -y], [-x, x], color="0.35", linewidth=1, linestyle="--")
    axes.add_patch(Circle((0, 0), radius, fill=False, color="0.4", linewidth=1.2))
    axes.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), aspect="equal")
    axes.axis("off")


def arrow(axes: plt.Axes, tip: np.ndarray, color: str, label: str, width: float = 2.2) -> None:
    style = {"arrowstyle": "-|>,head_width=0.3,head_length=0.6", "color": color, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", tip, (0, 0), arrowprops=style | {"linewidth": width}, zorder=6)
    axes.text(*(tip * (1 + 0.22 / np.linalg.norm(tip))), label, color=color, fontsize=14, ha="center", va="center")


if __name__ == "__main__":
    images = Path(__file__).parents[1] / "docs" / "images"
    draw_regimes(0.7).savefig(images / "regimes.png", dpi=130)
    draw_updates(0.5).savefig(images / "update.png", dpi=130, bbox_inches="tight")
