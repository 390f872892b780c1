"""Fig. 10 and Table 3: all methods on a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from experiments.paper.common import METHODS
from experiments.paper.experiment import (
    SIMILAR_STEPS,
    TEXT_STEPS,
    Claim,
    Figures,
    Scale,
    Trained,
    Wanted,
)
from experiments.paper.finished_run import FinishedRun
from experiments.paper.pictures import draw_methods, panels, save_panels
from hamu.evaluation.gains import Gains, gains_of
from hamu.evaluation.membership import auc_of
from hamu.report.pictures import STYLES, new_figure, save_figure

_SETTINGS = ("dissimilar", "similar")
_EPOCHS = 10  # of the paper, 720 steps; with the paraphrases 9
_PAPER_KAPPA = {"dissimilar": 4.0e-4, "similar": 6.1e-4}
_ADAM_RATE = 1e-5  # of the paper's Table 3
_ORDERED = 0.8  # Spearman's coefficient from which on one column follows another
_ALL = ("ft", "ga", "gdiff", "kl", "scrub", "gru", "pcgrad", "hamu-q", "hamu-u")
_COLUMNS = (
    "retain_gain",
    "forget_gain",
    "retain_accuracy",
    "forget_accuracy",
    "utility",
    "membership",
)
_HEADS = ("-ΔL_r", "ΔL_f", "retain acc.", "forget acc.", "model utility (prob.)", "MIA")
_TABLE = {
    "before": (0.000, 0.000, 0.924, 0.907, 0.779, 0.999),
    "ft": (0.216, -0.104, 0.997, 0.941, 0.966, 1.000),
    "ga": (-105.392, 105.552, 0.002, 0.002, 0.000, 0.447),
    "gdiff": (-1.452, 11.284, 0.769, 0.485, 0.188, 0.186),
    "kl": (-0.867, 7.061, 0.805, 0.593, 0.335, 0.098),
    "scrub": (-0.290, 13.179, 0.878, 0.562, 0.575, 0.216),
    "gru": (-105.213, 105.326, 0.002, 0.002, 0.000, 0.457),
    "pcgrad": (-1.443, 11.325, 0.769, 0.485, 0.189, 0.187),
    "hamu-q": (0.151, 2.075, 0.976, 0.754, 0.907, 0.552),
    "hamu-u": (0.008, 4.372, 0.931, 0.663, 0.788, 0.198),
}
_NOT_ITS_DATA = (
    "A small model trained from nothing differs from a pretrained 7B model with an adapter, and "
    "AdamW does not keep the promise."
)


def _have_own_originals(finished: Mapping[str, FinishedRun]) -> bool:
    """True if the runs of the two settings have started from different models."""
    models = [
        {
            str(one.inputs["original model"])
            for key, one in finished.items()
            if key.endswith(f" {name}")
        }
        for name in _SETTINGS
    ]
    return all(models) and not set.intersection(*models)


class Language(Trained):
    """Fig. 10: all methods, with and without the forget data said again in the retain data."""

    name = "figure-10"
    reference = "Fig. 10"
    title = "All methods on a language model, forget and retain data semantically dissimilar and similar"
    task = "text"
    about = (
        "Similar: paraphrases of the forget records (TOFU's `paraphrased_answer`) are retained. "
        "Each setting trains its own original model; with a given one, κ does not compare."
    )

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Every method runs for 720 steps in both settings; in the similar one only where there are such data."""
        dissimilar = {f"{method} dissimilar": scale.wanted(method, _EPOCHS) for method in METHODS}
        if not scale.has_similar:
            return dissimilar
        shorter = TEXT_STEPS / SIMILAR_STEPS
        similar = {
            f"{method} similar": replace(
                wanted, similar=True, epochs=wanted.epochs * shorter, paper_epochs=_EPOCHS * shorter
            )
            for method, wanted in zip(METHODS, dissimilar.values(), strict=True)
        }
        return dissimilar | similar

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give trajectories and κ by setting and method."""
        found: dict[str, Any] = {
            "trajectories": {},
            "kappa": {},
            "own_originals": _have_own_originals(finished),
        }
        for name in _SETTINGS:
            there = {m: finished[f"{m} {name}"] for m in METHODS if f"{m} {name}" in finished}
            if there:
                found["trajectories"][name] = {m: one.trajectory for m, one in there.items()}
                found["kappa"][name] = there["hamu-q"].mean("kappa") if "hamu-q" in there else None
        return found

    def claims(self, figures: Figures) -> list[Claim]:
        """State that similar data are harder, and which methods gain on both sides."""
        kappa = figures["kappa"]
        known = all(kappa.get(name) is not None for name in _SETTINGS)
        claims = [
            Claim(
                "κ of HAMU-Q, mean over the run, is higher where the data are similar",
                " and ".join(f"{kappa[n]:.2g} ({n})" for n in _SETTINGS) if known else None,
                kappa["similar"] > kappa["dissimilar"]
                if known and figures.get("own_originals")
                else None,
                " and ".join(f"{value:.2g} ({name})" for name, value in _PAPER_KAPPA.items()),
                "κ is a mean over a trajectory, and the trajectories part. Where one original model serves both "
                "settings it has not been trained on the paraphrases, and the two do not compare.",
            )
        ]
        for name in _SETTINGS:
            line = figures["trajectories"].get(name, {}).get("hamu-q")
            end = None if line is None else Gains(*line[-1])
            claims.append(
                Claim(
                    f"{name}: HAMU-Q ends with a gain on both sides",
                    None if end is None else f"-ΔL_r {end.retain:+.3g}, ΔL_f {end.forget:+.3g}",
                    None if end is None else end.joint > 0,
                    otherwise=_NOT_ITS_DATA,
                )
            )
        ends = {
            m: Gains(*line[-1]) for m, line in figures["trajectories"].get("dissimilar", {}).items()
        }
        complete = len(ends) == len(METHODS)
        both = [m for m, end in ends.items() if end.joint > 0]
        claims.append(
            Claim(
                "dissimilar: only HAMU-Q and GDiff gain on both sides",
                ", ".join(both) or "no method",
                set(both) == {"hamu-q", "gdiff"} if complete else None,
                otherwise=_NOT_ITS_DATA,
            )
        )
        for side, what in (("forget", "ΔL_f"), ("retain", "-ΔL_r")):
            gains = [getattr(ends[m], side) for m in ("hamu-q", "gdiff") if m in ends]
            ours, theirs = gains if len(gains) == 2 else (None, None)
            claims.append(
                Claim(
                    f"dissimilar: HAMU-Q gains more {what} than GDiff",
                    None if ours is None else f"{ours:+.3g} against {theirs:+.3g}",
                    None if ours is None else ours > theirs,
                    otherwise="GDiff pays with retain loss.",
                )
            )
        return claims

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel for each setting; what runs off is cut, as in the paper."""
        figure, axes = panels(max(1, len(figures["trajectories"])), 5.2)
        for one, (name, lines) in zip(axes, figures["trajectories"].items(), strict=False):
            draw_methods(one, lines, f"semantically {name}")
        save_panels(figure, axes, path)


class Metrics(Trained):
    """Table 3: further methods and figures, with AdamW."""

    name = "table-3"
    reference = "Table 3 (App. H.2)"
    title = "Further baselines and figures on a language model, with AdamW"
    task = "text"
    about = (
        "Learning rate: the recipe's if it uses AdamW, else the paper's 1e-5. MIA: AUC of Min-K% "
        "on the forget set; 0.5 is ideal."
    )

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """Every method runs for 3 epochs."""
        has_adam = str(scale.base.get("optim", "sgd")).startswith("adamw")
        rate = scale.rate if has_adam or scale.learning_rate is not None else _ADAM_RATE
        changes = {"optim": "adamw_torch", "learning_rate": rate}
        return {m: replace(scale.wanted(m, 3, **changes), whole=True) for m in _ALL}

    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """Give a row for each method, and one for the model that all started from."""
        rows: dict[str, dict[str, float | None]] = {}
        for method, one in finished.items():
            gains = dict(zip(_COLUMNS[:2], gains_of(one.evaluation), strict=True))
            rows[method] = {**gains, **_report(one.evaluation["after"])}
            rows.setdefault(
                "before", {**dict.fromkeys(_COLUMNS[:2], 0.0), **_report(one.evaluation["before"])}
            )
        paper = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _TABLE.items()}
        return {"rows": {name: rows[name] for name in _TABLE if name in rows}, "paper": paper}

    def claims(self, figures: Figures) -> list[Claim]:
        """State what the appendix reads from the table."""
        rows = {name: row for name, row in figures["rows"].items() if name != "before"}
        complete = len(rows) == len(_ALL)
        both = [m for m, row in rows.items() if row["retain_gain"] > 0 and row["forget_gain"] > 0]
        claims = [
            Claim(
                "HAMU-Q and HAMU-U are the only methods with a gain on both sides",
                ", ".join(both) or "no method",
                set(both) == {"hamu-q", "hamu-u"} if complete else None,
                otherwise="See Fig. 10.",
            )
        ]
        for gain, key, sign in (("retain_gain", "retain_accuracy", 1), ("retain_gain", "utility", 1),
                                ("forget_gain", "forget_accuracy", -1)):  # fmt: skip
            order = _rank_correlation(rows, gain, key)
            claims.append(
                Claim(
                    f"{key.replace('_', ' ')} follows {_HEADS[_COLUMNS.index(gain)]} over the methods "
                    f"(Spearman {'at least' if sign > 0 else 'at most -'}{' ' * (sign > 0)}{_ORDERED})",
                    order,
                    None if order is None or not complete else sign * order >= _ORDERED,
                    _rank_correlation({m: figures["paper"][m] for m in _ALL}, gain, key),
                    "Methods that end close together change places.",
                )
            )
        distance = {
            m: abs(row["membership"] - 0.5)
            for m, row in rows.items()
            if row["membership"] is not None
        }
        others = [m for m in ("hamu-u", "gru") if m in distance]
        told = "hamu-q" in distance and len(others) == 2
        claims.append(
            Claim(
                "HAMU-Q's MIA is closer to 0.5 than those of HAMU-U and GRU",
                ", ".join(f"{m} {rows[m]['membership']:.3f}" for m in ("hamu-q", *others))
                if told
                else None,
                all(distance["hamu-q"] < distance[m] for m in others) if told else None,
                "hamu-q 0.552, hamu-u 0.198, gru 0.457",
                "MIA falls with the forget loss: who forgets more is closer, until past 0.5. (In the paper's own "
                "table GRU is closer than HAMU-Q.)",
            )
        )
        return claims

    def table(self, figures: Figures) -> list[list[str]]:
        """List our figures, with the paper's in brackets."""
        lines = [["method", *_HEADS]]
        for name, row in figures["rows"].items():
            cells = [
                f"{'-' if row[key] is None else f'{row[key]:.3f}'} ({figures['paper'][name][key]:.3f})"
                for key in _COLUMNS
            ]
            lines.append([name, *cells])
        return lines

    def draw(self, figures: Figures, path: Path) -> None:
        """Draw a panel of bars for each column, the paper's as a mark."""
        figure = new_figure(12, 6)
        grid = figure.subplots(2, 3)
        names = list(figures["rows"])
        for axes, key, head in zip(grid.flat, _COLUMNS, _HEADS, strict=True):
            heights = [figures["rows"][name][key] for name in names]
            for name, height in zip(names, heights, strict=True):
                if height is None:
                    axes.text(name, 0, "?", ha="center", va="bottom", color="0.4")
            known = [math.nan if height is None else height for height in heights]
            axes.bar(
                names, known, color=[STYLES.get(name, ("0.5", ""))[0] for name in names], width=0.7
            )
            axes.plot(
                names,
                [figures["paper"][name][key] for name in names],
                "_",
                color="black",
                markersize=14,
            )
            if key.endswith("gain"):
                axes.set_yscale("symlog", linthresh=0.1)
            axes.set_title(head)
            axes.tick_params(axis="x", rotation=60)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle("bars: ours; dashes: the paper's")
        save_figure(figure, path)


def _report(report: Mapping[str, Any]) -> dict[str, float | None]:
    """The columns of the table that a report of a model has."""
    return {
        "retain_accuracy": report["retain"]["accuracy"],
        "forget_accuracy": report["forget"]["accuracy"],
        "utility": report["retain"].get("probability"),
        "membership": auc_of(report),
    }


def _rank_correlation(rows: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float | None:
    pairs = [(row[one], row[other]) for row in rows.values() if row[other] is not None]
    if len(pairs) < 3 or len({b for _, b in pairs}) < 2:
        return None
    return round(
        float(spearmanr(*zip(*pairs, strict=True)).statistic), 12
    )  # ranks give fractions, such as 0.8
