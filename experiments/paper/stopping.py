"""Fig. 9: hardness grows while a run goes on, until the stopping criterion is met."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.paper.common import OURS, pearson_of
from experiments.paper.experiment import Claim, Figures, Scale, Trained, Wanted
from experiments.paper.finished_run import FinishedRun
from experiments.paper.pictures import draw_lines
from hamu.evaluation.gains import Gains
from hamu.report.pictures import STYLES, new_figure, save_figure

_OBJECTIVE = {"hamu-q": ("retain", r"-\Delta L_r"), "hamu-u": ("forget", r"\Delta L_f")}
_THRESHOLD = {
    "hamu-q": r"$\kappa_2$, the whole model's",
    "hamu-u": r"$\kappa_4$, the whole model's",
}

_ALIKE = 1e-6  # by which rounding may part two rates that are the same
_LOST = 0.1  # of the highest gain, while the objective has only begun to fall


class Stopping(Trained):
    """Fig. 9: hardness by epoch, and the epoch at which the criterion would have ended the run."""

    name = "figure-9"
    reference = "Fig. 9"
    title = "Hardness and stopping, ρ = 0.5"
    task = "image"
    about = (
        "Termination: the first step that meets the criterion (App. C); by the means, the first epoch "
        "whose mean demand exceeds the mean limit at κ above 0. Dashed: κ2 (κ4) of the whole model."
    )

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Both variants run for 25 epochs."""
        return {m: scale.wanted(m, 25, rho=0.5) for m in OURS}

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give the trajectory, hardness by epoch and the termination epoch, by method."""
        found: Figures = {}
        for method, one in finished.items():
            first = next((step["step"] for step in one.log if step.get("criterion_met")), None)
            headroom = zip(
                one.by_epoch("demand"),
                one.by_epoch("free_limit"),
                one.by_epoch("kappa"),
                strict=True,
            )
            met = [
                number
                for number, (q, most, kappa) in enumerate(headroom, 1)
                if q > most and kappa > 0
            ]
            found[method] = {
                "epoch": [point["epoch"] for point in one.points],
                "trajectory": one.trajectory,
                "kappa": one.by_epoch("kappa"),
                "stop_threshold": one.by_epoch("stop_threshold"),
                "terminates": None if first is None else first / one.batches.steps,
                "terminates_by_means": met[0] if met else None,
            }
        return found

    def claims(self, figures: Figures) -> list[Claim]:
        """State that hardness rises, gains slow down, and the criterion comes with their fall."""
        claims = []
        for method in OURS:
            one = figures.get(method)
            if one is None:
                claims.append(Claim(f"{method}: hardness increases with the epochs", None, None))
                continue
            kappa = one["kappa"]
            r = pearson_of(range(len(kappa)), kappa)
            claims.append(
                Claim(
                    f"{method}: hardness increases with the epochs",
                    None
                    if r is None
                    else f"{r:.3f}; {kappa[0]:+.3f} in the first epoch, {kappa[-1]:+.3f} in the last",
                    None if r is None else r > 0,
                    otherwise="Too few or too small steps to use up the room that there is, or a model that knows its "
                    "data by heart.",
                )
            )
            values = [getattr(Gains(*point), _OBJECTIVE[method][0]) for point in one["trajectory"]]
            claims.append(_slowing(method, values))
            claims.append(_timely(method, one, values))
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw (a) trajectories, and (b, c) the objective above hardness, with the termination epoch."""
        figure = new_figure(12.5, 5.2)
        grid = figure.subplot_mosaic([["a", *OURS], ["a", *(f"{m} κ" for m in OURS)]])
        draw_lines(grid["a"], {method: one["trajectory"] for method, one in figures.items()})
        for method, one in figures.items():
            color, _ = STYLES[method]
            side, symbol = _OBJECTIVE[method]
            above, below = grid[method], grid[f"{method} κ"]
            above.plot(
                one["epoch"],
                [getattr(Gains(*p), side) for p in one["trajectory"]],
                "o-",
                color=color,
            )
            above.set(title=method.upper(), ylabel=f"${symbol}$")
            epochs = range(1, len(one["kappa"]) + 1)
            below.plot(epochs, one["kappa"], "o-", color=color, label=r"$\bar\kappa$")
            below.plot(epochs, one["stop_threshold"], "--", color="0.5", label=_THRESHOLD[method])
            below.set(xlabel="epoch", ylabel="hardness")
            below.legend(frameon=False, fontsize=8)
            for axes in (above, below):
                axes.spines[["top", "right"]].set_visible(False)
                if one["terminates"] is not None:
                    axes.axvline(one["terminates"], color="0.3", linestyle=":")
        save_figure(figure, path)


def _slowing(method: str, values: list[float]) -> Claim:
    """True if an epoch of the second half of the run gained less than one of the first; they may differ by an epoch."""
    text = (
        f"{method}: the second half of the run gains less per epoch on its objective than the first"
    )
    half = len(values) // 2
    if not 0 < half < len(values) - 1:
        return Claim(text, None, None)
    first, second = (
        (values[half] - values[0]) / half,
        (values[-1] - values[half]) / (len(values) - 1 - half),
    )
    return Claim(
        text,
        f"{first:+.3g}, then {second:+.3g}",
        second < first - _ALIKE * abs(first),
        otherwise="As the forget loss grows its gradient does too, and what is clipped to 1 counts for more of the "
        "loss: gains accelerate as long as hardness is low.",
    )


def _timely(method: str, one: Mapping[str, Any], values: list[float]) -> Claim:
    """True if the criterion is met near the highest gain: at most an epoch before it, and while most of it is there."""
    text = (
        f"{method}: the criterion is met where its objective falls, with at least 90% of the gain"
    )
    end, highest = one["terminates"], max(values)
    peak = one["epoch"][values.index(highest)]
    means = one["terminates_by_means"]
    by_means = f"by the epochs' means {'never' if means is None else f'in epoch {means}'}"
    if end is None:
        falls = peak < one["epoch"][-1]
        return Claim(
            text,
            f"not met in {one['epoch'][-1]:g} epochs, {by_means}; the objective "
            + (f"is highest at epoch {peak:g}" if falls else "still rises"),
            False if falls else None,
            otherwise="Batch noise makes the headroom look larger than it is, so that the criterion comes late.",
        )
    left = next(
        (value for epoch, value in zip(one["epoch"], values, strict=True) if epoch >= end),
        values[-1],
    )
    gained = highest - values[0]
    lost = (highest - left) / gained if gained > 0 and end > peak else 0.0
    timely = (
        end >= peak - 1 and lost <= _LOST if gained > 0 else end <= 1
    )  # nothing gained: it falls from the start
    return Claim(
        text,
        f"met at epoch {end:.3g}, {by_means}; the objective is highest at epoch {peak:g}"
        + (f", {lost:.1%} of it lost after" if gained > 0 and end > peak else ""),
        None
        if timely and peak == one["epoch"][-1]
        else timely,  # what still rises has not begun to fall
        otherwise="One noisy step can meet the criterion early; `--stopping_patience` and "
        "`--stopping_window` steady it. Batch noise makes the headroom look larger, so "
        "that it can come late.",
    )
