"""Predictions and answers of the models of a run, before and after, for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hamu.data import ImageData, TextRecords
from hamu.evaluation import Predictions, TokenPredictions, rouge_l_recall

ROLES = ("before", "after")
_SHOWN = 12  # images


class AnsweredRecord(NamedTuple):
    """A prompt, the expected answer, and each model's name, answer and ROUGE-L recall."""

    prompt: str
    expected: str
    answers: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class ImageObservations:
    """Predictions of the classifiers, by role ("before", "after") and set, and what goes with them.

    `counts` are the predicted images of each set, `sizes` all it has; `classes` the names in the
    data, of which a model may have more outputs; `pictures` forget images, by
    `most_and_least_changed`; `embeddings` [N, D] by role and set, or the reason `no_embedding`.
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
    """Predictions of the language models, by role and set, of the records in `texts`.

    `answers` are some prompts with both answers, by set; empty for the reason `no_answers`.
    """

    predictions: Mapping[str, Mapping[str, TokenPredictions]]
    texts: Mapping[str, TextRecords]
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    no_answers: str = ""


Observations = ImageObservations | TextObservations


def answered(texts: TextRecords, answers: Mapping[str, Sequence[str]]) -> list[AnsweredRecord]:
    """Score the answers of each model, by its name and in the records' order."""
    expected = [record.answer.strip() for record in texts.records]
    scores = {name: rouge_l_recall(given, expected).tolist() for name, given in answers.items()}
    return [
        AnsweredRecord(
            record.prompt.strip(),
            expected[n],
            tuple((name, given[n], scores[name][n]) for name, given in answers.items()),
        )
        for n, record in enumerate(texts.records)
    ]


def right_probability(predictions: Predictions) -> np.ndarray:
    """Probability of the right class, [N]."""
    return np.exp(-predictions.losses.numpy())  # type: ignore[no-any-return]


def most_and_least_changed(
    predictions: Mapping[str, Mapping[str, Predictions]],
) -> dict[str, list[int]]:
    """Positions of the forget images whose right class changed most and least in probability."""
    before, after = (right_probability(predictions[role]["forget"]) for role in ROLES)
    order = np.argsort(-np.abs(after - before), kind="stable")
    most = order[:_SHOWN].tolist()
    return {"changed most": most, "changed least": order[len(most) :][::-1][:_SHOWN].tolist()}
