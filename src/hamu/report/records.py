"""Sections on single records: forgotten ones, membership inference, texts and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hamu.data import ImageData, TextRecords
from hamu.evaluation import (
    AttackScores,
    Predictions,
    TokenPredictions,
    loss_attack,
    min_k_scores,
    probabilities,
    rouge_l_recall,
)
from hamu.report.charts import (
    AFTER,
    BEFORE,
    BUCKETS,
    COLOR_OF_SET,
    FORGET,
    TEST,
    Chart,
    Section,
    Table,
    axis,
    counted,
    number,
    plane,
    series,
)
from hamu.report.run import Run
from hamu.unlearning.goal_report import forgotten_words, goal_name, has_share, meaning
from hamu.unlearning.goals import record_losses

ROLES = ("before", "after")
NO_GOAL = (
    "Nothing told when a record counts as forgotten: it takes test data, a retain model, or the "
    "loss that each record "
    "must have (target_forget_loss)."
)
_QUANTILES = {
    "min": "lowest loss",
    "q25": "25%",
    "median": "median",
    "q75": "75%",
    "max": "highest loss",
}
_LEAST = 1e-6  # lower losses are drawn here: a logarithmic axis has no 0
_BINS = 24


@dataclass(frozen=True)
class AnsweredRecord:
    """A prompt, the expected answer, and each model's name, answer and ROUGE-L recall."""

    prompt: str
    expected: str
    answers: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class ImageObservations:
    """Predictions of the classifiers before and after.

    Attributes:
        predictions: by role ("before", "after") and set ("retain", "forget", "test").
        counts, sizes: predicted images of each set, and all it has.
        classes: names in the data; a model may have more outputs.
        pictures: forget images to show, by `hamu.report.images.most_and_least_changed`.
        embeddings: by role and set, [N, D]; empty without, for the reason `no_embedding`.
        seed: of the run.
    """

    predictions: Mapping[str, Mapping[str, Predictions]]
    counts: Mapping[str, int]
    sizes: Mapping[str, int]
    classes: Sequence[str]
    pictures: Mapping[str, ImageData]
    embeddings: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    no_embedding: str = ""
    seed: int = 42


@dataclass(frozen=True)
class TextObservations:
    """Predictions of the language models before and after.

    Attributes:
        predictions: by role and set.
        texts: the predicted records of each set, in order.
        answers: by set, some prompts with both answers; empty without, for the reason `no_answers`.
    """

    predictions: Mapping[str, Mapping[str, TokenPredictions]]
    texts: Mapping[str, TextRecords]
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    no_answers: str = ""


Observations = ImageObservations | TextObservations


def answered(texts: TextRecords, answers: Mapping[str, Sequence[str]]) -> list[AnsweredRecord]:
    """Records with the scored answers of each model.

    Args:
        texts: the records.
        answers: by the model's name, its answers in the records' order.
    """
    expected = [record.answer.strip() for record in texts.records]
    scored = [
        zip([label] * len(given), given, rouge_l_recall(given, expected).tolist(), strict=True)
        for label, given in answers.items()
    ]
    return [
        AnsweredRecord(record.prompt.strip(), right, tuple(of_models))
        for record, right, *of_models in zip(texts.records, expected, *scored, strict=True)
    ]


def goal_sentence(goal: Mapping[str, Any]) -> str:
    """Count of forgotten records with its meaning."""
    share = "" if has_share(goal) else f"; it asks for {goal['share']:.0%} of them"
    before = goal["before"]["forgotten"]
    return f"{forgotten_words(goal)} ({meaning(goal)}){share}. Before the run, {before:,} were."


def forgotten_section(run: Run, observed: Observations | None) -> Section:
    """Count, quantiles, worst ten and distribution of the losses of single records."""
    goal = run.goal
    charts = [] if observed is None else [_distribution(observed)]
    if goal is None:
        missing = [NO_GOAL[0].lower() + NO_GOAL[1:].rstrip(".")] if run.is_finished else []
        return Section("Record by record", charts=charts, missing=missing)
    tables = [_quantiles(goal, observed)]
    worst = [
        [f"{place}", number(one["loss"]), number(one["target"])]
        for place, one in enumerate(goal["after"]["worst"], 1)
    ]
    if worst:
        head = ["furthest from being forgotten", "loss", "needed"]
        tables.append(Table(head, worst, "At most ten records are listed."))
    return Section("Record by record", goal_sentence(goal), charts, tables)


def _quantiles(goal: Mapping[str, Any], observed: Observations | None) -> Table:
    rows = [
        [f"forget, {role}", f"{goal[role]['forgotten']:,} of {goal[role]['records']:,}",
         *(number(goal[role]["loss_quantiles"][name]) for name in _QUANTILES)]
        for role in ROLES
    ]  # fmt: skip
    caption = f"Forgotten by the goal {goal_name(goal)}, and the quantiles of the losses of single records."
    if observed is not None and "test" in observed.predictions["before"]:
        unseen = record_losses(observed.predictions["before"]["test"]).numpy()
        levels = np.quantile(unseen, (0.0, 0.25, 0.5, 0.75, 1.0))
        rows.append(["test, before", "-", *(number(float(value)) for value in levels)])
        caption += " The test records were never trained on."
    return Table(["records", "forgotten", *_QUANTILES.values()], rows, caption)


def _distribution(observed: Observations) -> Chart:
    """Share of the records with at most each loss."""
    found = {
        "forget, before": (BEFORE, observed.predictions["before"]["forget"]),
        "forget, after": (AFTER, observed.predictions["after"]["forget"]),
    }
    if "test" in observed.predictions["before"]:
        found["test, before: never trained on"] = (TEST, observed.predictions["before"]["test"])
    curves, says = [], []
    for name, (color, predictions) in found.items():
        losses = np.sort(record_losses(predictions).numpy())
        losses = losses[np.isfinite(losses)]
        share = np.arange(1, len(losses) + 1) / max(1, len(losses))
        curves.append(series(name, np.maximum(losses, _LEAST), share, color, line={"shape": "hv"}))
        if len(losses):
            low, mid, high = np.quantile(losses, (0.25, 0.5, 0.75))
            says.append(
                f"{name}: a quarter below {low:.3g}, half below {mid:.3g}, three quarters below "
                f"{high:.3g}"
            )
    x = axis("loss of a record, nats", type="log")
    return Chart(
        "Losses, record by record",
        "The share of the records, upwards, whose loss is at most that to the right (below "
        f"{_LEAST:g}: drawn "
        f"there). {'; '.join(says)}.",
        plane(curves, x, axis("share of the records", (0, 1)), nearest=True),
        wide=True,
    )


def membership_section(found: Observations, retain_model_auc: float | None = None) -> Section:
    """Histograms of an attack's scores before and after, and its ROC curves."""
    title = "Membership inference"
    if "test" not in found.predictions["after"]:
        return Section(title, missing=["there are no test data, which were never trained on"])
    is_image = isinstance(found, ImageObservations)
    known = {role: scores for role in ROLES if (scores := _attack(found, role)) is not None}
    if not known:
        missing = "too few records can be matched, or a score is not finite"
        return Section(title, missing=[missing])
    name = "by the probability of the right class" if is_image else "by Min-K%"
    intro = (
        f"An attacker gives each record a score {name}, higher the more it looks trained on. Where "
        "the curves of "
        "forget and test records lie upon each other, it cannot tell them; an AUC of 0.5 is "
        "ideal, and one below it "
        f"shows a forget set that stands out too."
    )
    if retain_model_auc is not None:
        intro += f" The retain model, which never saw the forget set, has an AUC of {retain_model_auc:.3f}."
    # images: probabilities, as the logarithms that the attack ranks reach far down
    shown = {
        role: [part.exp() if is_image else part for part in (one.members, one.nonmembers)]
        for role, one in known.items()
    }
    every = torch.cat([part for parts in shown.values() for part in parts]).numpy()
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    charts = [_histogram(role, parts, edges, known[role].auc) for role, parts in shown.items()]
    return Section(title, intro, [*charts, _roc(known)])


def _attack(found: Observations, role: str) -> AttackScores | None:
    if isinstance(found, ImageObservations):
        sets = found.predictions[role]
        return loss_attack(sets["forget"], sets["test"], found.seed)
    scores = [min_k_scores(found.predictions[role][name]) for name in ("forget", "test")]
    is_usable = all(len(s) and bool(torch.isfinite(s).all()) for s in scores)
    return AttackScores(scores[0], scores[1]) if is_usable else None


def _histogram(role: str, parts: list[Tensor], edges: np.ndarray, auc: float) -> Chart:
    forget, test = parts
    curves, medians = [], []
    for name, color, values in (("forget", FORGET, forget), ("test", TEST, test)):
        counts = np.histogram(values.numpy(), edges)[0] / len(values)
        heights = [*counts, counts[-1]]
        curves.append(series(name, edges, np.array(heights), color, line={"shape": "hv"}))
        medians.append(f"median of the {name} records {values.median():.3g}")
    return Chart(
        f"Scores {role}",
        f"Shares of the records by score, {role} unlearning: {len(forget)} forget records and "
        f"{len(test)} test records; {'; '.join(medians)}; AUC {auc:.3f}.",
        plane(curves, axis("score"), axis("share of records", rangemode="tozero")),
    )


def _roc(known: Mapping[str, AttackScores]) -> Chart:
    curves, says = [], []
    for role, color in zip(ROLES, (BEFORE, AFTER), strict=True):
        if role in known:
            nonmembers, members = known[role].roc()
            auc = f"{known[role].auc:.3f}"
            curves.append(series(f"{role}, AUC {auc}", nonmembers, members, color))
            says.append(f"AUC {role} {auc}")
    x = axis("test records taken for forget records", (0, 1))
    y = axis("forget records found", (0, 1))
    return Chart(
        "ROC of the attack",
        "Share of forget records that are found, upwards, at each share of test records taken for "
        "one, to the right; "
        f"on the dotted line the attacker guesses. {'; '.join(says)}.",
        plane(curves, x, y, diagonal=1, nearest=True, square=True),
    )


def texts_section(found: TextObservations, contents: bool) -> Section:
    """Probabilities of all records, and with contents some answers."""
    missing = []
    if not contents:
        missing.append("prompts and answers: --contents shows them")
    elif not found.answers:
        missing.append(f"answers: {found.no_answers}")
    records = sum(len(texts) for texts in found.texts.values())
    intro = f"Both models on {counted(records, 'records')}, read anew for this report."
    answers = found.answers if contents else {}
    if answers:
        intro += " Answers are greedy; in brackets the ROUGE-L recall of the right answer."
    charts = [_probabilities(found, contents)]
    return Section("Texts", intro, charts, answers=answers, missing=missing)


def _probabilities(found: TextObservations, contents: bool) -> Chart:
    """Probability of each answer before and after, thinned by rank of change."""
    clouds, says = [], []
    for name, texts in found.texts.items():
        before, after = (probabilities(found.predictions[role][name]).numpy() for role in ROLES)
        order = np.argsort(after - before, kind="stable")
        ranks = np.linspace(0, len(order) - 1, min(len(order), 2 * BUCKETS)).astype(int)
        places = np.take(order, ranks)
        rows = texts.rows.numpy()
        hints = [f"row {rows[n]}" for n in places] if contents else ()
        color = COLOR_OF_SET[name]
        clouds.append(
            series(name, before[places], after[places], color, mode="markers", hints=hints)
        )
        means = f"{before.mean():.3f} before, {after.mean():.3f} after"
        says.append(f"{name}: {means}, over {counted(len(after), 'records')}")
    x, y = axis("before", (0, 1)), axis("after", (0, 1))
    return Chart(
        "Probability of each record's answer",
        "exp(-mean loss per token) of every answer, before to the right and after upwards; below "
        "the dotted line it "
        f"is less likely than before. Means: {'; '.join(says)}.",
        plane(clouds[::-1], x, y, diagonal=1, nearest=True, square=True),
        wide=True,
    )
