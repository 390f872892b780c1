"""Fig. 1 and 2: the regimes of hardness, and the step in the plane of the two gradients.

Every step, cost, threshold and regime is computed by the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch, Wedge

from experiments.paper.experiment import Claim, Computed, Figures
from hamu.assess import REGIMES
from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU, Method
from hamu.core.pair import PairStep
from hamu.report.pictures import STYLES, new_figure, save_figure

_RETAIN, _FORGET = "#009E73", "#000000"
_KEPT, _WITHIN, _FREE = "#E4F2FB", "#A9D7F3", "#F0E442"
_REGIME_COLORS = ("#009E73", "#E69F00", "#882255")
_SHARE = {"figure-1": 0.7, "figure-2": 0.5}  # of what is possible, demanded in each
_RATE, _FORGET_NORM = 1.5, 1.12  # the drawings' η and ‖g_f‖, where ‖g_r‖ = 1
_TURN = 3  # degrees between two directions of g_r
_PROBLEMS = (("hamu-q", 140), ("hamu-q", 105), ("hamu-q", 55), ("hamu-q", 18), ("hamu-u", 55))
_METHODS: dict[str, type[HamuQ] | type[HamuU]] = {"hamu-q": HamuQ, "hamu-u": HamuU}
_NOTES = (
    "descent on the\nretain loss\nforgets enough",
    "descent mixed with the forget gradient\nforgets enough, and the retain loss still falls",
    "forgetting\nenough raises\nthe retain loss",
)


class Regimes(Computed):
    """Fig. 1: the least cost of forgetting against hardness."""

    name = "figure-1"
    reference = "Fig. 1"
    title = "Regimes of hardness: the least retain cost against κ"
    about = "Gradients of norm 1; demand 0.7 of the largest possible rise of the forget loss."

    def compute(self) -> Figures:
        """Give κ, cost and regime on a grid, and both thresholds."""
        kappas = -np.cos(np.linspace(0, np.pi, 601))  # denser where the cost is steep
        steps = [
            _solve(HamuQ(_SHARE[self.name], "relative"), d, 1.0)[0]
            for d in np.rad2deg(np.arccos(kappas))
        ]
        status = steps[0].weights.constraint
        assert status is not None
        return {
            "share": _SHARE[self.name],
            "kappa": kappas.tolist(),
            "cost": [step.promised_retain_change.item() for step in steps],
            "regime": [step.regime.item() for step in steps if step.regime is not None],
            "thresholds": [status.direct_threshold.item(), status.stop_threshold.item()],
        }

    def claims(self, figures: Figures) -> list[Claim]:
        """Check Theorem 4.1, Corollary 4.2 and Theorem 4.4 on the grid."""
        costs, kappas = np.array(figures["cost"]), np.array(figures["kappa"])
        direct, stop = figures["thresholds"]
        lowest, spread = float(np.diff(costs).min()), float(np.ptp(costs[kappas < direct]))
        away = np.abs(kappas - stop) > 1e-3
        signs = np.sign(costs[away]) == np.sign(kappas[away] - stop)
        return [
            Claim(
                "the least cost never falls as κ rises (Corollary 4.2)",
                f"least rise {lowest:.0e}",
                lowest >= -1e-12,
            ),
            Claim("below κ1 it is constant", f"spread {spread:.0e}", spread < 1e-9),
            Claim(
                "positive above κ2, negative below (Theorem 4.4)",
                f"{signs.mean():.0%} of the grid",
                bool(signs.all()),
            ),
        ]

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw the cost against κ, the regimes shaded."""
        kappas, costs, regimes = (np.array(figures[key]) for key in ("kappa", "cost", "regime"))
        edges = [-1, *figures["thresholds"], 1]
        figure = new_figure(9, 4.4)
        axes = figure.subplots()
        for number, color in enumerate(_REGIME_COLORS):
            inside, middle = regimes == number, sum(edges[number : number + 2]) / 2
            axes.axvspan(edges[number], edges[number + 1], color=color, alpha=0.12, linewidth=0)
            axes.plot(
                kappas[inside], costs[inside], color=color, linewidth=3.5, zorder=3, clip_on=False
            )
            axes.text(
                middle, 1.29, REGIMES[number], ha="center", va="center", fontsize=11, weight="bold"
            )
            axes.text(middle, 1.18, _NOTES[number], color="0.25", ha="center", va="top", fontsize=9)
        axes.axhline(0, color="0.35", linewidth=1)
        axes.vlines(edges[1:3], -1.12, 1.42, color="0.45", linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(
            edges[1:3],
            np.interp(edges[1:3], kappas, costs),
            "o",
            color="white",
            markeredgecolor="0.2",
            zorder=4,
        )
        axes.text(
            0,
            0,
            "retain loss rises\n\nretain loss falls",
            color="0.35",
            ha="center",
            va="center",
            fontsize=9,
        )
        axes.set(xlim=(-1, 1), ylim=(-1.12, 1.42), ylabel=r"least retain cost $F_r^\ast / \eta$")
        axes.set_xticks([*edges, 0], ["$-n_r n_f$", r"$\kappa_1$", r"$\kappa_2$", "$n_r n_f$", "0"])
        axes.set_yticks([-1, 0, figures["share"]], ["$-n_r^2$", "0", r"$\varphi\, n_r^2$"])
        axes.set_xlabel(r"hardness $\kappa = g_r \cdot g_f$, from opposed to identical gradients")
        axes.spines[["top", "right"]].set_visible(False)
        save_figure(figure, path)


class Updates(Computed):
    """Fig. 2: the step in the plane of the two gradients."""

    name = "figure-2"
    reference = "Fig. 2"
    title = "The step in the plane of the two gradients"
    about = "Demand half of what is possible: five problems, and all directions of g_r."

    def compute(self) -> Figures:
        """Give gradients, step and region of each problem, and of a turn of g_r."""
        share = _SHARE[self.name]
        problems = [
            _problem(_METHODS[name](share, "relative"), degrees) for name, degrees in _PROBLEMS
        ]
        turn = [_problem(HamuQ(share, "relative"), degrees) for degrees in range(-180, 180, _TURN)]
        return {"problems": problems, "turn": turn}

    def claims(self, figures: Figures) -> list[Claim]:
        """State what every step of the turn must do."""
        slack = min(one["kept"] for one in [*figures["problems"], *figures["turn"]])
        over = max(
            np.hypot(*one["update"]) / one["radius"]
            for one in [*figures["problems"], *figures["turn"]]
        )
        gains = [one["retain_change"] < 1e-12 for one in figures["turn"] if one["regime"] != 2]
        return [
            Claim(
                "every step keeps its promise",
                f"smallest change over demand {slack:.12f}",
                slack >= 1 - 1e-9,
            ),
            Claim(
                "no step is longer than the radius",
                f"longest over radius {over:.12f}",
                bool(over <= 1 + 1e-9),
            ),
            Claim(
                "below κ2 the retain loss does not rise",
                f"{sum(gains)} of {len(gains)} directions",
                all(gains),
            ),
        ]

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw five problems and a turn of g_r."""
        figure = new_figure(11.4, 8.8)
        grid = figure.subplots(2, 3)
        for axes, letter, problem in zip(grid.flat, "abcde", figures["problems"], strict=False):
            _draw_problem(axes, letter, problem)
        _draw_turn(grid[1, 2], figures["turn"])
        legend = [Patch(color=c) for c in (_KEPT, _WITHIN, _FREE)] + [
            Line2D([], [], color="0.35", linestyle="--")
        ]
        labels = (
            "keeps the promise",
            "and lies within the radius",
            "and the other side gains",
            "other loss unchanged",
        )
        figure.legend(
            legend, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=11
        )
        save_figure(figure, path)


def _solve(
    method: Method, degrees: float, forget_norm: float = _FORGET_NORM
) -> tuple[PairStep, Any, Any]:
    """Step, g_r and g_f of one block with g_f upwards and g_r at this angle to it."""
    angle = np.deg2rad(degrees)
    retain, forget = np.array([np.sin(angle), np.cos(angle)]), np.array([0.0, forget_norm])
    products = [[retain @ retain], [forget @ forget], [retain @ forget]]
    gram = PairGram(*torch.tensor(products, dtype=torch.float64))
    return PairStep(gram, method.weigh(gram), gram.clip_factors(None), "step"), retain, forget


def _problem(method: Method, degrees: float) -> dict[str, Any]:
    """One problem and its step Δw = -η g*, as JSON holds them."""
    step, retain, forget = _solve(method, degrees)
    status = step.weights.constraint
    assert status is not None
    assert step.regime is not None
    changes = {
        side: _RATE * getattr(step, f"promised_{side}_change").item()
        for side in ("retain", "forget")
    }
    demand = _RATE * status.demand.item()
    return {
        "method": method.name,
        "degrees": degrees,
        "retain": retain.tolist(),
        "forget": forget.tolist(),
        "update": (
            -_RATE * (step.weights.retain.item() * retain + step.weights.forget.item() * forget)
        ).tolist(),
        "radius": _RATE * status.radius.item(),
        "demand": demand,
        "kept": (-changes["retain"] if status.constrained == "retain" else changes["forget"])
        / demand,
        "retain_change": changes["retain"],
        "forget_change": changes["forget"],
        "regime": step.regime.item(),
        "conflicting": bool(step.kappa > 0),
    }


def _draw_problem(axes: Axes, letter: str, one: Mapping[str, Any]) -> None:
    """Draw the region that keeps the promise, its free part, the gradients and the step."""
    _draw_region(axes, one, free=True)
    _arrow(axes, one["retain"], _RETAIN, "$g_r$")
    _arrow(axes, one["forget"], _FORGET, "$g_f$")
    _arrow(axes, one["update"], STYLES[one["method"]][0], r"$\Delta w$", width=3.2)
    name = REGIMES[one["regime"]]
    if name == "rectified":
        name += ", conflicting" if one["conflicting"] else ", compatible"
    axes.set_title(f"({letter}) {one['method'].upper()}: {name}", fontsize=12, weight="bold")
    changes = (
        rf"\Delta L_r = {one['retain_change']:+.2f},\ \ \Delta L_f = {one['forget_change']:+.2f}"
    )
    axes.text(
        0,
        -1.95,
        rf"$\theta = {one['degrees']}°,\ \ {changes}$",
        ha="center",
        va="center",
        fontsize=11,
    )


def _draw_turn(axes: Axes, turn: Sequence[Mapping[str, Any]]) -> None:
    """Draw the ends of the step while g_r turns once around, and the regime of each direction."""
    _draw_region(axes, turn[0], free=False)
    color = STYLES[turn[0]["method"]][0]
    for one in turn:
        middle, shade = 90 - one["degrees"], _REGIME_COLORS[one["regime"]]
        axes.add_patch(
            Wedge(
                (0, 0),
                1.78,
                middle - 0.6 * _TURN,
                middle + 0.6 * _TURN,
                width=0.14,
                color=shade,
                linewidth=0,
            )
        )
        axes.plot(*one["update"], "o", color=color, markersize=6, zorder=7)
    _arrow(axes, turn[0]["forget"], _FORGET, "$g_f$")
    spots = ((0, -1.95, 0), (1.9, 0, -90), (0, 1.95, 0))
    for name, shade, (x, y, angle) in zip(REGIMES, _REGIME_COLORS, spots, strict=True):
        axes.text(
            x,
            y,
            name,
            color=shade,
            ha="center",
            va="center",
            fontsize=11,
            weight="bold",
            rotation=angle,
        )
    axes.text(0.1, 0.62, "collinear", color=color, va="center", fontsize=10)
    axes.text(
        0,
        -0.55,
        "ring: direction of $g_r$\ndots: end of the step",
        ha="center",
        va="center",
        fontsize=11,
    )
    axes.set_title(
        f"(f) {turn[0]['method'].upper()}: every direction of $g_r$", fontsize=12, weight="bold"
    )


def _draw_region(axes: Axes, one: Mapping[str, Any], free: bool) -> None:
    """The circle, where the promise is kept and, if asked, where the other side gains as well."""
    retain, forget, radius = np.array(one["retain"]), np.array(one["forget"]), one["radius"]
    g_c, g_o = (-retain, -forget) if one["method"] == "hamu-u" else (forget, retain)
    points = np.stack(np.meshgrid(xs := np.linspace(-2.1, 2.1, 1401), xs), -1)
    kept = points @ g_c >= one["demand"]
    within = kept & (np.linalg.norm(points, axis=-1) <= radius)
    for region, color in (
        (kept, _KEPT),
        (within, _WITHIN),
        (within & free & (points @ g_o <= 0), _FREE),
    ):
        if region.any():
            axes.contourf(xs, xs, region, levels=(0.5, 1.5), colors=[color])
    if free:
        x, y = g_o * radius / np.linalg.norm(g_o)
        axes.plot([y, -y], [-x, x], color="0.35", linewidth=1, linestyle="--")
    axes.add_patch(Circle((0, 0), radius, fill=False, color="0.4", linewidth=1.2))
    axes.set(xlim=(-2.1, 2.1), ylim=(-2.1, 2.1), aspect="equal")
    axes.axis("off")


def _arrow(axes: Axes, tip: Sequence[float], color: str, label: str, width: float = 2.2) -> None:
    style = {
        "arrowstyle": "-|>,head_width=0.3,head_length=0.6",
        "color": color,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", (tip[0], tip[1]), (0, 0), arrowprops=style | {"linewidth": width}, zorder=6)
    place = np.array(tip) * (1 + 0.22 / np.linalg.norm(tip))
    axes.text(place[0], place[1], label, color=color, fontsize=14, ha="center", va="center")
