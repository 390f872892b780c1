"""Whether forgotten records can still be told from those that were never trained on: scores and ROC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hamu.evaluation import AttackScores, loss_attack, min_k_scores
from hamu.report.elements import AFTER, BEFORE, FORGET, TEST, Chart, Section, extremes, shorts
from hamu.report.observations import ROLES, ImageObservations, Observations

_BINS = 24


def membership_section(found: Observations, theirs: float | None = None) -> Section:
    """Histograms of an attack's scores before and after, and its ROC curves.

    Args:
        found: the predictions of both models.
        theirs: the retain model's AUC, None without one.
    """
    if "test" not in found.predictions["after"]:
        return Section(
            "Membership inference", missing=["there are no test data, which were never trained on"]
        )
    attacks = {role: _attack(found, role) for role in ROLES}
    known = {role: scores for role, scores in attacks.items() if scores is not None}
    if not known:
        return Section(
            "Membership inference",
            missing=["too few records can be matched, or a score is not finite"],
        )
    name = (
        "by the probability of the right class"
        if isinstance(found, ImageObservations)
        else "by Min-K%"
    )
    intro = (
        f"An attacker gives each record a score {name}, higher the more it looks trained on. Where the curves of "
        f"forget and test records lie upon each other, it cannot tell them; an AUC of 0.5 is ideal, and one below it "
        f"shows a forget set that stands out too."
    )
    if theirs is not None:
        intro += f" The retain model, which never saw the forget set, has an AUC of {theirs:.3f}."
    shown = {role: _shown(found, scores) for role, scores in known.items()}
    every = np.concatenate([scores.both for scores in shown.values()])
    edges = np.linspace(
        every.min(), every.max() if every.max() > every.min() else every.min() + 1, _BINS + 1
    )
    charts = [_histogram(role, scores, edges, known[role].auc) for role, scores in shown.items()]
    return Section("Membership inference", intro, [*charts, _roc(known)])


def _attack(found: Observations, role: str) -> AttackScores | None:
    if isinstance(found, ImageObservations):
        return loss_attack(
            found.predictions[role]["forget"], found.predictions[role]["test"], found.seed
        )
    scores = [min_k_scores(found.predictions[role][name]) for name in ("forget", "test")]
    is_usable = all(len(s) and bool(torch.isfinite(s).all()) for s in scores)
    return AttackScores(scores[0], scores[1]) if is_usable else None


def _shown(found: Observations, scores: AttackScores) -> AttackScores:
    """Scores as the axis has them: of images probabilities, which tie far down; the attack ranks their logarithms."""
    if not isinstance(found, ImageObservations):
        return scores
    return AttackScores(scores.members.exp(), scores.nonmembers.exp())


def _histogram(role: str, scores: AttackScores, edges: np.ndarray, auc: float) -> Chart:
    groups = {"forget": (FORGET, scores.members), "test": (TEST, scores.nonmembers)}
    series = []
    for name, (color, values) in groups.items():
        counts = np.histogram(values.numpy(), edges)[0] / len(values)
        series.append(
            {
                "name": name,
                "color": color,
                "x": shorts(edges),
                "y": shorts([*counts, counts[-1]]),
                "mode": "steps",
            }
        )
    medians = "; ".join(
        f"median of the {name} records {values.median():.3g}"
        for name, (_, values) in groups.items()
    )
    return Chart(
        f"Scores {role}",
        f"Shares of the records by score, {role} unlearning: {len(scores.members)} forget records and "
        f"{len(scores.nonmembers)} test records; {medians}; AUC {auc:.3f}.",
        {"kind": "xy", "x": {"label": "score"}, "y": {"label": "share of records", "low": 0}, "series": series},
    )  # fmt: skip


def _roc(known: Mapping[str, AttackScores]) -> Chart:
    colors = dict(zip(ROLES, (BEFORE, AFTER), strict=True))
    series: list[dict[str, Any]] = []
    for role, scores in known.items():
        nonmembers, members = scores.roc()
        kept = extremes(members)
        series.append({
            "name": f"{role}, AUC {scores.auc:.3f}", "color": colors[role], "x": shorts(nonmembers[kept]),
            "y": shorts(members[kept]),
        })  # fmt: skip
    says = "; ".join(f"AUC {role} {scores.auc:.3f}" for role, scores in known.items())
    return Chart(
        "ROC of the attack",
        f"Share of forget records that are found, upwards, at each share of test records taken for one, to the right; "
        f"on the dotted line the attacker guesses. {says}.",
        {
            "kind": "xy",
            "x": {"label": "test records taken for forget records", "limits": [0, 1]},
            "y": {"label": "forget records found", "limits": [0, 1]},
            "series": series,
            "diagonal": 1,
            "square": True,
        },
    )
