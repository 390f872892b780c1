"""Attacks in pictures and in the report: does it last?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg", force=False)
from matplotlib import pyplot as plt

from hamu.evaluation.attacks import AttackResult, Outcome, sentence
from hamu.evaluation.attacks.result import MODELS, ORIGINAL, RETRAINED, UNLEARNED
from hamu.evaluation.attacks.settings import PREFILL, QUANTIZE, RELEARNING, SAMPLE
from hamu.report.elements import Chart, Section, Table, line
from hamu.report.plots import save_figure

MEANINGS = {
    "recognised": "share of forgotten records recognised, mean over seeds",
    "loss": "loss of forgotten records in nats a token, mean over seeds",
    "exact_memorization": "exact memorization of forgotten records",
    "rouge_l_recall": "ROUGE-L recall of the answers to forgotten records",
}
_AXES = {"recognised": "forgotten records recognised", "loss": "loss of forgotten records"}
_COLORS = {UNLEARNED: "#D55E00", ORIGINAL: "#7F7F7F", RETRAINED: "#009E73"}
_OF_TEXTS = {QUANTIZE: "exact_memorization", PREFILL: "rouge_l_recall", SAMPLE: "rouge_l_recall"}


def figure_of(attack: str, result: AttackResult) -> tuple[str, str]:
    """The figure by which an attack is shown, and its format."""
    is_asked = attack in (PREFILL, SAMPLE) or (attack == QUANTIZE and result.kind == "text")
    name = _OF_TEXTS[attack] if is_asked else result.figure
    return name, ".2f" if name == "loss" else ".3f" if name == "rouge_l_recall" else ".0%"


def heads_of(attack: str, outcome: Outcome) -> list[str]:
    """Name of the strengths of an attack."""
    if attack == QUANTIZE:
        return [f"{bits} bits" if bits else "as saved" for bits in outcome.at]
    if attack == SAMPLE:
        return [f"leak@{k}" for k in outcome.at]
    unit = "words" if attack == PREFILL else "steps"
    return [f"{at} {unit}" if place == 0 else str(at) for place, at in enumerate(outcome.at)]


def plot_attacks(result: AttackResult, path: Path) -> None:
    """Draw the forgotten records over the strength of each attack, a panel for each, and save it.

    Lines are means over seeds, bands reach from the lowest to the highest.

    Args:
        result: of at least one attack.
        path: where to save; the suffix chooses the format.
    """
    count = max(1, len(result.outcomes))
    figure, panels = plt.subplots(
        1, count, figsize=(4.2 * count, 3.8), layout="constrained", squeeze=False
    )
    for axes, (attack, by_model) in zip(panels[0], result.outcomes.items(), strict=False):
        name, _ = figure_of(attack, result)
        for role in (one for one in MODELS if one in by_model):
            values = np.array(by_model[role].figures[name])
            xs = by_model[role].at if attack in RELEARNING else range(len(values))
            color = _COLORS[role]
            axes.plot(xs, values.mean(1), color=color, marker="o", markersize=4, label=MODELS[role])
            axes.fill_between(
                xs, values.min(1), values.max(1), color=color, alpha=0.15, linewidth=0
            )
        if attack not in RELEARNING:
            outcome = next(iter(by_model.values()))
            axes.set_xticks(range(len(outcome.at)), heads_of(attack, outcome))
        else:
            axes.set_xlabel("steps of fine-tuning")
        if name != "loss":
            axes.set_ylim(-0.03, 1.03)
        axes.set_title(attack)
        axes.set_ylabel(_AXES.get(name, name.replace("_", " ")))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def attack_section(content: Mapping[str, Any] | None) -> Section:
    """The section "Does it last?" of a report.

    Args:
        content: of attack.json, None where there is none.
    """
    title = "Does it last?"
    if content is None:
        return Section(
            title,
            missing=[
                "attack.json: `hamu attack` makes it, in the run's folder or in attack/ there"
            ],
        )
    result = AttackResult.from_json(content)
    charts = [_chart(attack, result) for attack in result.outcomes if attack in RELEARNING]
    tables = [_table(attack, result) for attack in result.outcomes]
    intro = (
        f"{sentence(result)} The same attack on the other models is the yardstick; of each only copies are "
        f"changed. Up to {result.records['measured']:,} of {result.records['forget']:,} forgotten records are measured."
    )
    left_out = [f"{name}: {reason}" for name, reason in result.skipped.items()]
    return Section(title, intro, charts=charts, tables=tables, missing=left_out)


def _chart(attack: str, result: AttackResult) -> Chart:
    name, form = figure_of(attack, result)
    series, says = [], []
    for role in (one for one in MODELS if one in result.outcomes[attack]):
        outcome = result.outcomes[attack][role]
        means = np.array([outcome.mean(name, at) for at in outcome.at])
        series.append(line(MODELS[role], _COLORS[role], np.array(outcome.at), means, mode="both"))
        says.append(f"{MODELS[role]}: {means[0]:{form}} to {means[-1]:{form}}")
    y: dict[str, Any] = {"label": _AXES[name]}
    if name == "recognised":
        y |= {"limits": [0, 1], "percent": True}
    spec = {
        "kind": "xy",
        "x": {"label": "steps of fine-tuning", "whole": True},
        "y": y,
        "series": series,
    }
    return Chart(
        f"After {attack}", f"{_AXES[name].capitalize()}, means over seeds. {'; '.join(says)}.", spec
    )


def _table(attack: str, result: AttackResult) -> Table:
    name, form = figure_of(attack, result)
    by_model = result.outcomes[attack]
    rows = [
        [MODELS[role], *(format(by_model[role].mean(name, at), form) for at in by_model[role].at)]
        for role in MODELS
        if role in by_model
    ]
    heads = heads_of(attack, next(iter(by_model.values())))
    return Table([attack, *heads], rows, f"{attack}: {MEANINGS[name]}.")
