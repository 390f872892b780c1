"""Fig. 11 and 12 and Table 2: learning rates, optimizers and batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.paper.experiment import Claim, Figures, Scale, Trained, Wanted
from experiments.paper.finished_run import FinishedRun
from experiments.paper.pictures import FORGET_GAIN, RETAIN_GAIN, draw_shades, panels, save_panels
from hamu.evaluation.gains import Gains
from hamu.report.pictures import new_figure, save_figure

_FACTORS = (0.25, 0.5, 1.0, 2.0)
_IMAGES = 45_000  # to retain, in the paper
_TABLE = {  # Table 2: -ΔL_r, ΔL_f, retain and forget accuracy
    128: (-0.416, 14.7, 0.727, 0.0),
    256: (0.146, 6.04, 0.849, 0.024),
    512: (0.246, 2.65, 0.888, 0.181),
    1024: (0.252, 1.11, 0.889, 0.432),
    2048: (0.201, 0.48, 0.862, 0.588),
}
_COLUMNS = ("retain_gain", "forget_gain", "retain_accuracy", "forget_accuracy")


class Rates(Trained):
    """Fig. 11: smaller steps keep their promise better."""

    name = "figure-11"
    reference = "Fig. 11"
    title = "HAMU-U for several learning rates, U = 0.6 η"
    task = "text"
    about = "The paper gives no learning rates. With a relative constraint, U is 0.6 of what is possible."

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """HAMU-U runs for 10 epochs at every rate."""
        return {
            f"{factor * scale.rate:g}": scale.wanted(
                "hamu-u", 10, learning_rate=factor * scale.rate, constraint=0.6
            )
            for factor in _FACTORS
        }

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give the trajectories by learning rate."""
        return {"trajectories": {rate: one.trajectory for rate, one in finished.items()}}

    def claims(self, figures: Figures) -> list[Claim]:
        """State that the retain side is kept the better, the smaller the rate is."""
        ends = {
            float(rate): Gains(*line[-1]).retain for rate, line in figures["trajectories"].items()
        }
        low, high = min(ends, default=0.0), max(ends, default=0.0)
        known = len(ends) == len(_FACTORS)
        second_order = (
            "With an optimizer that rescales coordinates (AdamW) the promise of first order is not kept at any rate; "
            "`--correct_steps` would keep it."
        )
        return [
            Claim(
                "the lowest rate ends with a positive -ΔL_r",
                ends[low] if known else None, ends[low] > 0 if known else None, otherwise=second_order,
            ),
            Claim(
                "the lowest rate ends with a higher -ΔL_r than the highest",
                f"{ends[low]:+.4g} against {ends[high]:+.4g}" if known else None,
                ends[low] > ends[high] if known else None,
                otherwise="As long as every rate is small enough for first order, a larger one goes farther in the "
                "same direction in the same number of steps.",
            ),
        ]  # fmt: skip

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a shade for each rate."""
        figure, [axes] = panels(1, 6.0)
        lines = {rf"$\eta = {rate}$": line for rate, line in figures["trajectories"].items()}
        draw_shades(axes, lines, "Blues", "HAMU-U")
        save_panels(figure, (), path)


class Optimizers(Trained):
    """Fig. 12: SGD against AdamW."""

    name = "figure-12"
    reference = "Fig. 12 (App. G.2)"
    title = "HAMU-U (U = 0.9 η) with SGD and with AdamW"
    task = "image"
    about = "Both at the same learning rate. The paper's caption names Q; HAMU-U's constraint is U."

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """HAMU-U runs for 5 epochs with each optimizer."""
        return {
            name: scale.wanted("hamu-u", 5, rho=0.0, constraint=0.9, optim=optim)
            for name, optim in (("SGD", "sgd"), ("AdamW", "adamw_torch"))
        }

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give the trajectories, with their epochs."""
        return {
            "trajectories": {name: one.trajectory for name, one in finished.items()},
            "epoch": {
                name: [point["epoch"] for point in one.points] for name, one in finished.items()
            },
        }

    def claims(self, figures: Figures) -> list[Claim]:
        """Hold one epoch of AdamW against all of SGD's."""
        lines = figures["trajectories"]
        if len(lines) < 2:
            return [Claim("AdamW gains more on both sides in 1 epoch than SGD in 5", None, None)]
        first = min(1, len(lines["AdamW"]) - 1)
        one, all_of_sgd = Gains(*lines["AdamW"][first]), Gains(*lines["SGD"][-1])
        return [
            Claim(
                f"AdamW gains more {what} in 1 epoch than SGD in {figures['epoch']['SGD'][-1]:g}",
                f"{getattr(one, side):+.4g} against {getattr(all_of_sgd, side):+.4g}",
                getattr(one, side) > getattr(all_of_sgd, side),
                otherwise="AdamW's steps are far longer than clipped gradients and do not follow "
                "g*, so a side can lose.",
            )
            for side, what in (("forget", "ΔL_f"), ("retain", "-ΔL_r"))
        ]

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw with logarithmic axes, as in the paper, that are linear around 0 where a side has lost."""
        figure, [axes] = panels(1, 5.6)
        lines = {name: line[1:] for name, line in figures["trajectories"].items() if len(line) > 1}
        draw_shades(axes, lines, "Blues", "HAMU-U")
        for side, axis, scale in (
            ("retain", axes.xaxis, axes.set_xscale),
            ("forget", axes.yaxis, axes.set_yscale),
        ):
            values = [getattr(Gains(*point), side) for line in lines.values() for point in line]
            if not values:
                continue
            if min(values) > 0:
                scale("log")
            else:
                reach = min(abs(value) for value in values if value)
                scale("symlog", linthresh=reach)
                low, high = sorted(
                    axis.get_view_interval()
                )  # what lies within the linear part is printed over 0
                axis.set_ticks(
                    [t for t in axis.get_ticklocs() if low <= t <= high and not 0 < abs(t) <= reach]
                )
        save_panels(figure, (), path)


class BatchSizes(Trained):
    """Table 2: batches of 128 to 2048."""

    name = "table-2"
    reference = "Table 2 (App. G.3)"
    title = "HAMU-Q with batches of 128 to 2048"
    task = "image"
    about = "The paper gives neither epochs nor constraint (here 5, and Q/η = 0.5 by default)."

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """HAMU-Q runs for 5 epochs with each batch size, ρ = 0."""
        found = {}
        for size in _TABLE:
            found[str(size)] = replace(
                scale.wanted("hamu-q", 5, rho=0.0), steps_per_epoch=-(-_IMAGES // size)
            )
        return found

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give our row and the paper's, by batch size."""
        rows = {size: {key: one.last[key] for key in _COLUMNS} for size, one in finished.items()}
        batches = {size: one.batches.records for size, one in finished.items()}
        paper = {str(size): dict(zip(_COLUMNS, row, strict=True)) for size, row in _TABLE.items()}
        return {"rows": rows, "paper": paper, "batch_here": batches}

    def claims(self, figures: Figures) -> list[Claim]:
        """State how the gains fall with the batch size, and where retain accuracy peaks."""
        rows = [figures["rows"].get(str(size)) for size in _TABLE]
        known = [row for row in rows if row is not None]
        complete = len(known) == len(_TABLE)
        gains = [row["forget_gain"] for row in known]
        falls = sum(a > b for a, b in pairwise(gains))
        accuracies = [row["retain_accuracy"] for row in known]
        peak = (
            list(_TABLE)[max(range(len(accuracies)), key=accuracies.__getitem__)]
            if complete
            else None
        )
        return [
            Claim(
                "ΔL_f falls from each batch size to the next larger",
                f"{falls} of {len(_TABLE) - 1}" if complete else None,
                falls == len(_TABLE) - 1 if complete else None,
                "4 of 4",
                "More steps of the same length forget more, unless they are spent in different directions.",
            ),
            Claim(
                "retain accuracy peaks in the middle, neither at 128 nor at 2048",
                None if peak is None else f"at {peak}",
                None if peak is None else peak not in (128, 2048),
                "at 1024",
                "The original model here fits its retain data better than the paper's, so that more steps have less "
                "to improve.",
            ),
        ]

    def table(self, figures: Figures) -> list[list[str]]:
        """List our figures, with the paper's in brackets."""
        lines = [["batch size", "here", "-ΔL_r", "ΔL_f", "retain accuracy", "forget accuracy"]]
        for size, row in figures["rows"].items():
            paper, forms = figures["paper"][size], ("+.3f", ".3g", ".1%", ".1%")
            cells = [
                f"{row[key]:{form}} ({paper[key]:{form}})"
                for key, form in zip(_COLUMNS, forms, strict=True)
            ]
            lines.append([size, str(figures["batch_here"][size]), *cells])
        return lines

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each column: ours and the paper's."""
        figure = new_figure(8.5, 6.5)
        grid = figure.subplots(2, 2)
        labels = dict(
            zip(
                _COLUMNS,
                (RETAIN_GAIN, FORGET_GAIN, "retain accuracy", "forget accuracy"),
                strict=True,
            )
        )
        for axes, key in zip(grid.flat, _COLUMNS, strict=True):
            kinds: tuple[tuple[str, Mapping[str, Any], str], ...] = (
                ("ours", figures["rows"], "o-"), ("paper", figures["paper"], "s--"),
            )  # fmt: skip
            for name, rows, style in kinds:
                axes.plot(
                    [int(size) for size in rows],
                    [row[key] for row in rows.values()],
                    style,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set(xlabel="batch size of the paper", ylabel=labels[key])
            axes.spines[["top", "right"]].set_visible(False)
            if key == "forget_gain":
                axes.set_yscale("symlog", linthresh=0.1)
        grid[0, 0].legend(frameon=False)
        save_figure(figure, path)
