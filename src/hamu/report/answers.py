"""A page of prompts with a model's answers before and after unlearning, forget and retain side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader

from hamu.data import TextRecords
from hamu.evaluation import rouge_l_recall

_TITLES = {"forget": "To be forgotten", "retain": "To be kept", "test": "Never trained on"}


@dataclass(frozen=True)
class AnsweredRecord:
    """One prompt and what was answered.

    Attributes:
        prompt: what the model was given.
        expected: the right answer.
        answers: for each model its name, its answer, and the ROUGE-L recall of that.
    """

    prompt: str
    expected: str
    answers: tuple[tuple[str, str, float], ...]


def answered(texts: TextRecords, answers: Mapping[str, Sequence[str]]) -> list[AnsweredRecord]:
    """Records with what each model has answered, scored.

    Args:
        texts: the records.
        answers: by what the model is called, its answers in the records' order.
    """
    expected = [record.answer.strip() for record in texts.records]
    scored = [
        [
            (label, answer, score)
            for answer, score in zip(given, rouge_l_recall(given, expected).tolist(), strict=True)
        ]
        for label, given in answers.items()
    ]
    return [
        AnsweredRecord(record.prompt.strip(), right, of_models)
        for record, right, of_models in zip(
            texts.records, expected, zip(*scored, strict=True), strict=True
        )
    ]


def answers_page(sets: Mapping[str, Sequence[AnsweredRecord]]) -> str:
    """The page, as one HTML file that needs nothing else.

    Args:
        sets: "forget", "retain" (and "test"), each a list of records.
    """
    environment = Environment(loader=PackageLoader("hamu.report", ""), autoescape=True)
    sides = [(title, sets[name]) for name, title in _TITLES.items() if name in sets]
    return environment.get_template("answers.html.j2").render(sides=sides)
