"""What became of a language model, record by record."""

from __future__ import annotations

import numpy as np

from hamu.evaluation import probabilities
from hamu.report.elements import BUCKETS, COLOR_OF_SET, Chart, Section, counted, shorts
from hamu.report.observations import ROLES, TextObservations


def texts_section(found: TextObservations, contents: bool) -> Section:
    """Show the probabilities of all records, and some answers."""
    missing = []
    if not contents:
        missing.append("prompts and answers: --contents shows them")
    elif not found.answers:
        missing.append(f"answers: {found.no_answers}")
    records = sum(len(texts) for texts in found.texts.values())
    intro = f"Both models on {counted(records, 'records')}, read anew for this report."
    if contents and found.answers:
        intro += " Answers are greedy; in brackets the ROUGE-L recall of the right answer."
    return Section(
        "Texts",
        intro,
        [_probabilities(found, contents)],
        answers=found.answers if contents else {},
        missing=missing,
    )


def _probabilities(found: TextObservations, contents: bool) -> Chart:
    """A chart of the probability of each record's answer before and after."""
    series, says = [], []
    for name, texts in found.texts.items():
        before, after = (probabilities(found.predictions[role][name]).numpy() for role in ROLES)
        places = _some(after - before)
        says.append(
            f"{name}: {before.mean():.3f} before, {after.mean():.3f} after, over {counted(len(after), 'records')}"
        )
        rows = texts.rows.numpy()
        series.append({
            "name": name, "color": COLOR_OF_SET[name], "x": shorts(before[places]), "y": shorts(after[places]),
            "mode": "points", "hints": [f"row {rows[n]}" if contents else "" for n in places],
        })  # fmt: skip
    return Chart(
        "Probability of each record's answer",
        f"exp(-mean loss per token) of every answer, before to the right and after upwards; below the dotted line it "
        f"is less likely than before. Means: {'; '.join(says)}.",
        {
            "kind": "xy",
            "x": {"label": "before", "limits": [0, 1]},
            "y": {"label": "after", "limits": [0, 1]},
            "series": series[::-1],
            "diagonal": 1,
            "nearest": True,
            "square": True,
        },
        wide=True,
    )


def _some(change: np.ndarray) -> np.ndarray:
    """Choose some of very many records: evenly over the order of their change, the ends among them."""
    order = np.argsort(change, kind="stable")
    places = np.linspace(0, len(order) - 1, min(len(order), 2 * BUCKETS)).astype(int)
    return np.take(order, places)
