"""Fig. 6, 7 and 8: what the constraints Q and U buy, at which price, in how many epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.common import BASELINES, OURS, pearson_of
from experiments.paper.experiment import Claim, Figures, Scale, Trained, Wanted
from experiments.paper.finished_run import FinishedRun
from experiments.paper.pictures import RETAIN_GAIN, draw_shades, panels, save_panels
from hamu.evaluation.gains import Gains, pareto_optimal
from hamu.report.pictures import STYLES

CONSTRAINTS = (0.1, 0.3, 0.5, 0.7, 0.9)
_SYMBOL = {"hamu-q": "Q", "hamu-u": "U"}
_CONSTRAINED = {"hamu-q": ("forget", "ΔL_f"), "hamu-u": ("retain", "-ΔL_r")}
_FREE = {"hamu-q": ("retain", "-ΔL_r"), "hamu-u": ("forget", "ΔL_f")}
_MEASURED = ("direct_share", "kappa", "beyond")


class Varying(Trained):
    """Fig. 6: trajectories for several constraints."""

    name = "figure-6"
    reference = "Fig. 6"
    title = "HAMU-Q and HAMU-U for several Q and U, ρ = 0"
    task = "image"
    about = "Q/η and U/η = 0.1, 0.3, 0.5, 0.7, 0.9; the paper does not name its values."

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Both variants with every constraint run for 5 epochs."""
        return {
            f"{m} {c:g}": scale.wanted(m, 5, rho=0.0, constraint=c)
            for m in OURS
            for c in CONSTRAINTS
        }

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give the trajectories by method and constraint."""
        lines = {
            m: {f"{c:g}": finished[f"{m} {c:g}"] for c in CONSTRAINTS if f"{m} {c:g}" in finished}
            for m in OURS
        }
        return {
            "trajectories": {
                m: {c: one.trajectory for c, one in by.items()} for m, by in lines.items()
            },
            "steps": {m: _of_steps(list(by.values())) for m, by in lines.items()},
        }

    def claims(self, figures: Figures) -> list[Claim]:
        """State what a larger constraint buys, and what it costs."""
        claims = []
        for method in OURS:
            by = figures["trajectories"][method]
            for (side, what), sign, text in (
                (_CONSTRAINED[method], 1, "rises"),
                (_FREE[method], -1, "falls"),
            ):
                ends = [getattr(Gains(*line[-1]), side) for line in by.values()]
                moves = [sign * (b - a) > 0 for a, b in pairwise(ends)]
                claims.append(
                    Claim(
                        f"{method}: with {_SYMBOL[method]}, {what} {text} at every step of the grid",
                        f"{sum(moves)} of {len(moves)} steps: "
                        + ", ".join(f"{end:+.4g}" for end in ends),
                        all(moves) if len(by) == len(CONSTRAINTS) else None,
                        otherwise=_why_not_in_proportion(figures["steps"][method]),
                    )
                )
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each variant, a shade for each constraint."""
        figure, axes = panels(2)
        for one, method, shades in zip(axes, OURS, ("Oranges", "Blues"), strict=True):
            lines = {
                rf"${_SYMBOL[method]} = {c}\,\eta$": line
                for c, line in figures["trajectories"][method].items()
            }
            draw_shades(one, lines, shades, method.upper())
        save_panels(figure, (), path)


class Epochs(Trained):
    """Fig. 7: how long it takes to forget, and what is left of the retain utility then."""

    name = "figure-7"
    reference = "Fig. 7"
    title = "Epochs to L_f = 1 against the retain utility there, ρ = 0"
    task = "image"
    about = (
        "Ten times the learning rate of the other runs, to reach the target: at the first "
        "evaluation at 0.98 of it or more, or the step whose forget batch ends the run."
    )
    target = 1.0
    rate_factor = 10

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Both variants with every constraint, and the baselines, run for 25 epochs at most."""
        rate = scale.rate if scale.learning_rate is not None else scale.rate * self.rate_factor
        shared = {"rho": 0.0, "max_forget_loss": self.target, "learning_rate": rate}
        ours = {
            f"{m} {c:g}": scale.wanted(m, 25, constraint=c, **shared)
            for m in OURS
            for c in CONSTRAINTS
        }
        return ours | {m: scale.wanted(m, 25, **shared) for m in BASELINES}

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give for each run the point where it reached the target, None if it did not."""
        return {
            "target": self.target,
            "learning_rate": next(iter(self.runs(scale).values())).changes["learning_rate"],
            "reached": {key: reached(one, self.target) for key, one in finished.items()},
            "highest": {
                key: max(p["forget_loss"] for p in one.points) for key, one in finished.items()
            },
        }

    def claims(self, figures: Figures) -> list[Claim]:
        """State that a larger Q needs fewer epochs, at a price, and who is on the Pareto front."""
        reached_by = {key: point for key, point in figures["reached"].items() if point is not None}
        ours = {f"{method} {c:g}" for method in OURS for c in CONSTRAINTS}
        missing = (ours | {*BASELINES}) - figures["reached"].keys()
        highest = max(figures["highest"].values(), default=0.0)
        too_few = (
            f"Too few runs reached the target; the highest forget loss of any was {highest:.3g}. "
        )
        found = [
            (c, reached_by[f"hamu-q {c:g}"]) for c in CONSTRAINTS if f"hamu-q {c:g}" in reached_by
        ]
        claims = []
        for key, text in (("epoch", "the fewer epochs"), ("retain_gain", "the lower -ΔL_r")):
            r = pearson_of([c for c, _ in found], [point[key] for _, point in found])
            claims.append(
                Claim(
                    f"hamu-q: the higher Q, {text} at the target",
                    r if r is not None else f"{len(found)} of {len(CONSTRAINTS)} runs reached it",
                    None
                    if r is None or any(key.startswith("hamu-q") for key in missing)
                    else r < 0,
                    otherwise="" if r is not None else too_few,
                )
            )
        names = list(reached_by)
        front = pareto_optimal(
            [(-reached_by[n]["epoch"], reached_by[n]["retain_gain"]) for n in names]
        )
        baselines = [n for n, best in zip(names, front, strict=True) if best and n in BASELINES]
        claims.append(
            Claim(
                "no baseline is on the Pareto front of epochs and -ΔL_r",
                (", ".join(baselines) or "none is") if names else too_few,
                not baselines
                if not missing
                and any(n in BASELINES for n in names)
                and any(n not in BASELINES for n in names)
                else None,
                otherwise="Ascent alone is fastest; fine-tuning arrives last, with the most gained.",
            )
        )
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a point for each run that reached the target."""
        figure, [axes] = panels(1, 6.4)
        for method in (*OURS, *BASELINES):
            color, marker = STYLES[method]
            points = [
                (key, p)
                for key, p in figures["reached"].items()
                if p is not None and key.split()[0] == method
            ]
            if not points:
                continue
            xs, ys = [p["epoch"] for _, p in points], [p["retain_gain"] for _, p in points]
            axes.plot(
                xs, ys, marker, linestyle="-" if len(points) > 1 else "", color=color, label=method
            )
            for key, p in points if method in OURS else ():
                beside = (
                    ((5, -9), "left") if method == OURS[0] else ((-5, 4), "right")
                )  # the two may lie on each other
                axes.annotate(key.split()[1], (p["epoch"], p["retain_gain"]), fontsize=7, color=color,
                              xytext=beside[0], ha=beside[1], textcoords="offset points")  # fmt: skip
        axes.set(xlabel=f"epochs to $L_f = {figures['target']:g}$", ylabel=RETAIN_GAIN)
        missing = [key for key, point in figures["reached"].items() if point is None]
        if missing:
            axes.set_title("not reached: " + ", ".join(missing), fontsize=7, wrap=True)
        save_panels(figure, [axes], path)


class Fit(Trained):
    """Fig. 8: layer-wise constraints against one for the whole model."""

    name = "figure-8"
    reference = "Fig. 8"
    title = "ΔL_f against Q and -ΔL_r against U, layer-wise and global, ρ = 0"
    task = "image"
    about = (
        "Line y = ax: R² = 1 - Σ(y - ax)² / Σ(y - mean)²; uncentred: 1 - Σ(y - ax)² / Σy². "
        "Layer-wise: a block per tensor; global: one block. Promised: the demands on the clipped "
        "gradients times the norm before clipping, summed over steps."
    )

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Both variants with both kinds of blocks and every constraint run for 5 epochs."""
        found = {}
        for method in OURS:
            for c in CONSTRAINTS:
                found[f"{method} layer-wise {c:g}"] = scale.wanted(method, 5, rho=0.0, constraint=c)
                found[f"{method} global {c:g}"] = scale.wanted(
                    method, 5, rho=0.0, constraint=c, blocks="model"
                )
        return found

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give what was gained with each constraint, and the lines fitted."""
        found: Figures = {"constraint": list(CONSTRAINTS), "gain": {}, "line": {}, "steps": {}}
        found |= {"promised": {}, "line_of_promised": {}}
        max_norm = float(scale.base.get("max_grad_norm", 1.0))
        for method in OURS:
            side, sign = _CONSTRAINED[method][0], 1 if method == "hamu-q" else -1
            for kind in ("layer-wise", "global"):
                ends = [finished.get(f"{method} {kind} {c:g}") for c in CONSTRAINTS]
                gains = [None if one is None else one.last[f"{side}_gain"] for one in ends]
                found["gain"][f"{method} {kind}"] = gains
                found["line"][f"{method} {kind}"] = line_through_origin(CONSTRAINTS, gains)
                promised = [
                    None if one is None else sign * one.promised(side, max_norm) for one in ends
                ]
                found["promised"][f"{method} {kind}"] = promised
                found["line_of_promised"][f"{method} {kind}"] = line_through_origin(promised, gains)
                found["steps"][f"{method} {kind}"] = _of_steps(
                    [one for one in ends if one is not None]
                )
        return found

    def claims(self, figures: Figures) -> list[Claim]:
        """State how straight the lines are, and which kind of blocks is straighter and gains more."""
        claims = []
        for method in OURS:
            layer, whole = (
                figures["line"][f"{method} {kind}"] for kind in ("layer-wise", "global")
            )
            what, symbol = _CONSTRAINED[method][1], _SYMBOL[method]
            reason = _why_not_in_proportion(figures["steps"][f"{method} layer-wise"])
            known = layer["r_squared"] is not None
            claims.append(
                Claim(
                    f"{method}, layer-wise: {what} is proportional to {symbol}, R² at least 0.995",
                    layer["r_squared"], layer["r_squared"] >= 0.995 if known else None, 0.999, reason,
                )
            )  # fmt: skip
            both = known and whole["r_squared"] is not None
            claims.append(
                Claim(
                    f"{method}: R² is lower for the global constraint",
                    _compared(whole["r_squared"], layer["r_squared"]) if both else None,
                    whole["r_squared"] < layer["r_squared"] if both else None,
                    otherwise=reason,
                )
            )  # fmt: skip
            gains = [figures["gain"][f"{method} {kind}"] for kind in ("layer-wise", "global")]
            pairs = [(a, b) for a, b in zip(*gains, strict=True) if a is not None and b is not None]
            claims.append(
                Claim(
                    f"{method}: layer-wise gains more than global with every constraint",
                    f"{sum(a > b for a, b in pairs)} of {len(pairs)}",
                    all(a > b for a, b in pairs) if len(pairs) == len(CONSTRAINTS) else None,
                    otherwise="One constraint for the whole model takes the direct step in all layers or in none.",
                )
            )
        return claims

    def table(self, figures: Figures) -> list[list[str]]:
        """List both lines of each kind: against the constraint, and against what was promised."""
        lines = [["", "slope", "R²", "uncentred", "gained over promised", "R² against promised"]]
        for kind, line in figures["line"].items():
            promised = figures["line_of_promised"][kind]
            values = (*(line[key] for key in ("slope", "r_squared", "r_squared_uncentred")), promised["slope"],
                      promised["r_squared"])  # fmt: skip
            lines.append([kind, *("-" if value is None else f"{value:.4f}" for value in values)])
        return lines

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each variant."""
        figure, axes = panels(2)
        for one, method in zip(axes, OURS, strict=True):
            color, _ = STYLES[method]
            # one is seen in the other
            looks = (("layer-wise", "o", "-", color, color), ("global", "s", "--", "0.45", "none"))
            for kind, marker, style, tint, inside in looks:
                gains, line = (
                    figures["gain"][f"{method} {kind}"],
                    figures["line"][f"{method} {kind}"],
                )
                heights = [float("nan") if g is None else g for g in gains]
                r = "" if line["r_squared"] is None else rf", $R^2 = {line['r_squared']:.4f}$"
                one.plot(figures["constraint"], heights, marker, color=tint, markerfacecolor=inside,
                         markersize=5 if inside == color else 10, label=f"{kind}{r}")  # fmt: skip
                if line["slope"] is not None:
                    one.plot([0, 1], [0, line["slope"]], style, color=tint, linewidth=1)
            one.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            symbol = _SYMBOL[method]
            one.set(xlabel=rf"${symbol}/\eta$", title=method.upper(), xlim=(0, 1))
            one.set_ylabel(r"$\Delta L_f$" if method == "hamu-q" else r"$-\Delta L_r$")
            one.legend(frameon=False, fontsize=8)
        save_panels(figure, (), path)


def _of_steps(runs: Sequence[FinishedRun]) -> dict[str, float | None]:
    """Means over all steps of runs: blocks with a direct step, κ, steps that demand more than the gradients allow."""
    steps = [step for one in runs for step in one.log if "demand" in step]
    if not steps:
        return dict.fromkeys(_MEASURED)
    values = (
        [step["direct_share"] for step in steps],
        [step["kappa"] for step in steps],
        [float(step["demand"] > step["max_demand"]) for step in steps],
    )
    return {name: float(np.mean(value)) for name, value in zip(_MEASURED, values, strict=True)}


def _why_not_in_proportion(steps: Mapping[str, float | None]) -> str:
    """Causes that keep gains from following the constraint, and the size of each."""
    if None in steps.values():
        return ""
    return (
        "Direct steps exceed the constraint "
        f"({steps['direct_share']:.0%} of the blocks of all steps; mean κ {steps['kappa']:+.2f}), "
        f"infeasible demands are clamped ({steps['beyond']:.0%} of the steps), and the norms of "
        "clipped gradients change with their loss."
    )


def _compared(one: float, other: float) -> str:
    return f"{one:.4f}, {'lower' if one < other else 'higher'} by {abs(one - other):.1g}"


def reached(one: FinishedRun, target: float) -> dict[str, float] | None:
    """Epoch, retain gain and forget loss where a run reached its target, by its own end or at an evaluation."""
    there = next((point for point in one.points if point["forget_loss"] >= 0.98 * target), None)
    if there is None and one.evaluation.get("ended_kind") == "target" and one.is_whole:
        there = one.last
    return (
        None
        if there is None
        else {key: there[key] for key in ("epoch", "retain_gain", "forget_loss")}
    )


def line_through_origin(xs: Sequence[Any], ys: Sequence[Any]) -> dict[str, float | None]:
    """Slope, R² and uncentred R² of the line through the origin; None if a point is missing or all are alike."""
    if any(y is None for y in ys) or len(set(ys)) < 2:
        return {"slope": None, "r_squared": None, "r_squared_uncentred": None}
    x, y = np.array(xs), np.array(ys, dtype=float)
    slope = float(x @ y / (x @ x))
    rest = float(((y - slope * x) ** 2).sum())
    centred, raw = float(((y - y.mean()) ** 2).sum()), float((y**2).sum())
    return {"slope": slope, "r_squared": 1 - rest / centred, "r_squared_uncentred": 1 - rest / raw}
