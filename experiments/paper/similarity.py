"""Fig. 3, 4, 5 and 13: all methods on problems of different hardness, set by the similarity mixing ratio ρ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.paper.common import BASELINES, METHODS, OURS, RHOS, pearson_of
from experiments.paper.experiment import Claim, Figures, Scale, Trained, Wanted, of_all
from experiments.paper.finished_run import FinishedRun
from experiments.paper.pictures import (
    FORGET_GAIN,
    RETAIN_GAIN,
    draw_curves,
    draw_methods,
    draw_shades,
    panels,
    save_panels,
)
from hamu.evaluation.gains import Gains, hypervolume, hypervolume_reference

_PAPER_PEARSON = {"hamu-q": 0.994, "hamu-u": 0.986}
_LOWEST_PEARSON = 0.98
_HARD = "0.75"  # the ρ at which the paper's methods part
_SMALL_STEPS = (
    "Small steps stay near the start. Where the gradients are opposed there, every method gains "
    "on both sides, in the order of their step lengths."
)
_NO_ROOM = {
    "start": "Only gains on both sides count from the start. Near κ2 (HAMU-U: κ4) the demand "
    "leaves the other side no gain.",
    "worst": "Methods that sacrifice the retain loss cover much area from there. Near κ4 HAMU-U "
    "leaves the forget loss little room to rise.",
}


def _runs(
    scale: Scale, methods: tuple[str, ...], rhos: tuple[float, ...], epochs: float
) -> dict[str, Wanted]:
    return {f"{m} {rho:g}": scale.wanted(m, epochs, rho=rho) for rho in rhos for m in methods}


def _trajectories(
    finished: Mapping[str, FinishedRun], methods: tuple[str, ...], rhos: tuple[float, ...]
) -> dict[str, dict[str, list[Gains]]]:
    """The trajectories of runs, by ρ and method."""
    return {
        f"{rho:g}": {
            m: finished[f"{m} {rho:g}"].trajectory for m in methods if f"{m} {rho:g}" in finished
        }
        for rho in rhos
    }


class Similarity(Trained):
    """Fig. 3: hardness against similarity."""

    name = "figure-3"
    reference = "Fig. 3"
    title = "Hardness κ against the similarity mixing ratio ρ, and what ρ does to all methods"
    task = "image"
    about = "κ: mean over a run's steps, clipped batch gradients."

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Every method runs for 5 epochs at every ρ."""
        return _runs(scale, METHODS, RHOS, 5)

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give κ and both gains, by method, in the order of ρ."""
        found: dict[str, dict[str, list[float | None]]] = {
            "kappa": {},
            "cos": {},
            "retain_gain": {},
            "forget_gain": {},
        }
        for method in METHODS:
            there = [finished.get(f"{method} {rho:g}") for rho in RHOS]
            for key in ("retain_gain", "forget_gain"):
                found[key][method] = [None if one is None else one.last[key] for one in there]
            for key in ("kappa", "cos") if method in OURS else ():
                found[key][method] = [None if one is None else one.mean(key) for one in there]
        pearson = {
            key: {m: pearson_of(RHOS, v) for m, v in by_method.items()}
            for key, by_method in found.items()
        }
        return {"rho": list(RHOS), **found, "pearson": pearson}

    def claims(self, figures: Figures) -> list[Claim]:
        """State the correlation of κ with ρ, and the trend of every method."""
        claims = []
        for method, paper in _PAPER_PEARSON.items():
            ours = figures["pearson"]["kappa"][method]
            cosine = figures["pearson"]["cos"][method]
            claims.append(
                Claim(
                    f"{method}: κ against ρ, Pearson at least {_LOWEST_PEARSON}",
                    ours,
                    None if ours is None else ours >= _LOWEST_PEARSON,
                    paper,
                    "κ mixes the angle between the gradients with their lengths. At convergence "
                    "the mean gradient of all data is nearly zero, so the sides are opposed at "
                    "any ρ below 1: κ starts low and bends upwards late. Where a model knows its "
                    "data by heart, gradients are shorter than the clipping norm, and κ falls "
                    f"with their length. The cosine alone has a Pearson coefficient of {_written(cosine)}. The "
                    "draw of the forget set moves κ too, the more the fewer it has; "
                    "docs/results/hardness.md has means over seeds.",
                )
            )
        for key, what in (("retain_gain", "-ΔL_r"), ("forget_gain", "ΔL_f")):
            found = {m: r for m, r in figures["pearson"][key].items() if r is not None}
            falling = [method for method, r in found.items() if r < 0]
            against = ", ".join(m for m in found if m not in falling)
            claims.append(
                Claim(
                    f"the higher ρ, the lower {what}, for every method",
                    f"{len(falling)} of {len(found)} methods"
                    + (f"; not {against}" if against else ""),
                    of_all(not against, len(found) == len(METHODS)),
                    otherwise="A method that loses on one side can rise on the other, depending "
                    "on the original model.",
                )
            )
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw three panels over ρ: κ, -ΔL_r and ΔL_f."""
        figure, (left, middle, right) = panels(3)
        draw_curves(left, figures["rho"], figures["kappa"])
        for axes, key, label in (
            (middle, "retain_gain", RETAIN_GAIN),
            (right, "forget_gain", FORGET_GAIN),
        ):
            draw_curves(axes, figures["rho"], figures[key])
            axes.set_ylabel(label)
            axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            _clip(axes, figures[key])
        left.set_ylabel(r"hardness $\bar\kappa$, mean over the run")
        for axes in (left, middle, right):
            axes.set_xlabel(r"similarity mixing ratio $\rho$")
        save_panels(figure, (left, middle, right), path)


class Baselines(Trained):
    """Fig. 4: all methods where it is easy and where it is hard."""

    name = "figure-4"
    reference = "Fig. 4"
    title = "All methods, easy (ρ = 0) and hard (ρ = 0.75)"
    task = "image"
    about = (
        "Hypervolume of a trajectory's points (ΔL_f, -ΔL_r), one per epoch, from the start (0, 0) "
        "or from the reference of `hamu compare`. κ: mean over the steps. Criterion: App. C."
    )
    rhos: tuple[float, ...] = (0.0, 0.75)
    epochs = 5

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Every method runs at each ρ."""
        return _runs(scale, METHODS, self.rhos, self.epochs)

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give trajectories and hypervolumes, by ρ and method."""
        trajectories = _trajectories(finished, METHODS, self.rhos)
        volumes = {rho: volumes_of(by_method) for rho, by_method in trajectories.items()}
        ours = {m: finished[f"{m} {_HARD}"] for m in OURS if f"{m} {_HARD}" in finished}
        hardness = {
            m: {key: run.mean(key) for key in ("kappa", "criterion_met")} for m, run in ours.items()
        }
        return {"trajectories": trajectories, "hypervolumes": volumes, "hardness": hardness}

    def claims(self, figures: Figures) -> list[Claim]:
        """State which methods dominate which others."""
        hard, easy = figures["trajectories"][_HARD], figures["trajectories"]["0"]
        claims = [
            _volume_claim(method, figures["hypervolumes"][_HARD], reference)
            for reference in ("start", "worst")
            for method in OURS
        ]
        both = [m for m, points in hard.items() if Gains(*points[-1]).joint > 0]
        claims.append(
            Claim(
                "ρ = 0.75: only HAMU ends with a gain on both sides",
                ", ".join(both) or "no method",
                None if len(hard) < len(METHODS) else set(both) == set(OURS),
                otherwise="To first order GDiff gains on both sides wherever κ is below 1.",
            )
        )
        beaten = [
            f"{m} by {b}"
            for m in OURS
            for b in BASELINES
            if m in easy and b in easy and _dominates(easy[b], easy[m])
        ]
        claims.append(
            Claim(
                "ρ = 0: no baseline dominates a point of HAMU at the same epoch",
                "; ".join(beaten) or "none does",
                None if len(easy) < len(METHODS) else not beaten,
                otherwise=_SMALL_STEPS,
            )
        )
        return claims

    def table(self, figures: Figures) -> list[list[str]]:
        """List the ends, the hypervolumes and the hardness at ρ = 0.75."""
        from_start, from_worst = (
            figures["hypervolumes"][_HARD][reference] for reference in ("start", "worst")
        )
        hardness = figures.get("hardness", {})  # not in the files of earlier versions
        of_hardness = ["mean κ", "steps that meet the criterion"] if hardness else []
        head = [
            f"ρ = {_HARD}",
            "-ΔL_r",
            "ΔL_f",
            "hypervolume from the start",
            "from the worst retain loss",
        ]
        lines = [head + of_hardness]
        for method, points in figures["trajectories"][_HARD].items():
            end, found = Gains(*points[-1]), hardness.get(method, {})
            kappa, met = found.get("kappa"), found.get("criterion_met")
            volumes = [f"{volume[method]:.3g}" for volume in (from_start, from_worst)]
            cells = [
                "-" if kappa is None else f"{kappa:+.3f}",
                "-" if met is None else f"{met:.0%}",
            ]
            line = [method, f"{end.retain:+.4f}", f"{end.forget:+.4f}", *volumes]
            lines.append(line + cells if hardness else line)
        return lines

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each ρ."""
        figure, axes = panels(len(figures["trajectories"]))
        for one, (rho, trajectories) in zip(axes, figures["trajectories"].items(), strict=True):
            draw_methods(one, trajectories, rf"$\rho = {rho}$")
        save_panels(figure, axes, path)


class AllBaselines(Baselines):
    """Fig. 13: all methods at every ρ, for longer than in Fig. 4."""

    name = "figure-13"
    reference = "Fig. 13 (App. H.1)"
    title = "All methods at every ρ, for longer"
    about = "Hypervolumes as in Fig. 4."
    rhos = RHOS
    epochs = 25

    def table(self, figures: Figures) -> list[list[str]]:
        """List nothing beyond Fig. 4."""
        return []

    def claims(self, figures: Figures) -> list[Claim]:
        """State what the appendix says of all ρ."""
        claims = [
            replace(
                _volume_claim(m, figures["hypervolumes"][_HARD], "start"), otherwise="See Fig. 4."
            )
            for m in OURS
        ]
        for method in ("gdiff", *OURS):
            ends = [figures["trajectories"][f"{rho:g}"].get(method) for rho in RHOS]
            joint = [None if points is None else Gains(*points[-1]).joint for points in ends]
            r = pearson_of(RHOS, joint)
            claims.append(
                Claim(
                    f"{method} does worse as ρ grows: the smaller of its two gains falls",
                    r,
                    None if r is None else r < 0,
                    otherwise=_SMALL_STEPS,
                )
            )
        last = figures["trajectories"]["1"]
        both = [m for m, points in last.items() if Gains(*points[-1]).joint > 0]
        claims.append(
            Claim(
                "ρ = 1: no method ends with a gain on both sides",
                ", ".join(both) or "none does",
                of_all(not both, len(last) == len(METHODS)),
                otherwise="The images differ: as long as the forget images can be told apart, a "
                "small gain on both sides is possible.",
            )
        )
        return claims


class Enforced(Trained):
    """Fig. 5: each variant keeps its side."""

    name = "figure-5"
    reference = "Fig. 5"
    title = "HAMU-Q enforces ΔL_f > 0, HAMU-U enforces -ΔL_r > 0"
    task = "image"

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Both variants run for 5 epochs at every ρ."""
        return _runs(scale, OURS, RHOS, 5)

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give the trajectories by ρ and method."""
        return {"trajectories": _trajectories(finished, OURS, RHOS)}

    def claims(self, figures: Figures) -> list[Claim]:
        """State that one side is enforced, and what hardness does to the other."""
        claims = []
        kept = (
            ("hamu-q", "forget", "ΔL_f", "retain", "-ΔL_r"),
            ("hamu-u", "retain", "-ΔL_r", "forget", "ΔL_f"),
        )
        for method, side, enforced, other, paid in kept:
            found = {
                rho: [Gains(*point) for point in by[method]]
                for rho, by in figures["trajectories"].items()
                if method in by
            }
            gains = [getattr(point, side) for line in found.values() for point in line[1:]]
            paid_at = {rho: getattr(line[-1], other) for rho, line in found.items()}
            lowest = min(gains, default=None)
            complete = len(found) == len(RHOS)
            claims.append(
                Claim(
                    f"{method}: {enforced} is positive at every ρ and epoch",
                    lowest
                    if lowest is None
                    else f"{sum(gain > 0 for gain in gains)} of {len(gains)}, lowest {lowest:+.3g}",
                    None if lowest is None else of_all(lowest > 0, complete),
                    otherwise="The promise is of first order, for the batch and the clipped "
                    "gradient. It breaks where second order counts, or the batches say "
                    "little about the set.",
                )
            )
            r = pearson_of(RHOS, [paid_at.get(f"{rho:g}") for rho in RHOS])
            claims.append(
                Claim(
                    f"{method}: {paid} falls as ρ grows", r, None if r is None else r < 0,
                    otherwise="Gains on the free side also grow with the lengths of the gradients, "
                    "which change with ρ.",
                )
            )  # fmt: skip
            hardest = paid_at.get("1")
            claims.append(
                Claim(
                    f"ρ = 1: {method} ends with {paid} at or below 0",
                    hardest,
                    None if hardest is None else hardest <= 0,
                    otherwise="The forget set holds other images than the retain set: their "
                    "gradients are alike, not the same, and leave a little room.",
                )
            )
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each variant, a shade for each ρ."""
        figure, axes = panels(2)
        for one, method, shades in zip(axes, OURS, ("Oranges", "Blues"), strict=True):
            lines = {
                rf"$\rho = {rho}$": by[method]
                for rho, by in figures["trajectories"].items()
                if method in by
            }
            draw_shades(one, lines, shades, method.upper())
        save_panels(figure, (), path)


def volumes_of(trajectories: Mapping[str, Any]) -> dict[str, Any]:
    """Hypervolumes of trajectories, by method, seen from the start and from `hamu compare`'s reference."""
    gains = {method: [Gains(*point) for point in points] for method, points in trajectories.items()}
    worst = min((points[-1].retain for points in gains.values()), default=0.0)
    references = {"start": Gains(0.0, 0.0), "worst": hypervolume_reference(worst)}
    return {
        name: {"reference": (reference.forget, reference.retain)}
        | {method: hypervolume(points, reference) for method, points in gains.items()}
        for name, reference in references.items()
    }


def _volume_claim(method: str, volumes: Mapping[str, Any], reference: str) -> Claim:
    found = {name: value for name, value in volumes[reference].items() if name != "reference"}
    others = {name: value for name, value in found.items() if name in BASELINES}
    best = max(others, key=others.__getitem__, default=None)
    complete = method in found and len(others) == len(BASELINES)
    ours = (
        None
        if best is None or method not in found
        else f"{found[method]:.3g} against {others[best]:.3g} of {best}"
    )
    where = "the start" if reference == "start" else "the worst retain loss"
    return Claim(
        f"ρ = {_HARD}: {method}'s hypervolume exceeds every baseline's, from {where}",
        ours,
        found[method] > max(others.values()) if complete else None,
        otherwise=_NO_ROOM[reference],
    )


def _dominates(one: Any, other: Any) -> bool:
    """True if a trajectory is at least as good in both and better in one at an epoch of another."""
    pairs = list(zip(one[1:], other[1:], strict=False))
    return any(a[0] >= b[0] and a[1] >= b[1] and tuple(a) != tuple(b) for a, b in pairs)


def _written(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3f}"


def _clip(axes: Any, curves: Mapping[str, Any]) -> None:
    """Cut a panel at three times the reach of the two thirds that reach least."""
    reach = sorted(
        max((abs(v) for v in values if v is not None), default=0.0) for values in curves.values()
    )
    bound = 3 * reach[max(0, 2 * len(reach) // 3 - 1)]
    low, high = axes.get_ylim()
    if bound:
        axes.set_ylim(max(low, -bound), min(high, bound))
