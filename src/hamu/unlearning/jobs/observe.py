"""Answers and predictions of both models of a run, for its report."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hamu.data import ImageData, TextRecords, UnlearningData
from hamu.data.forget_sets import draw_positions, subset
from hamu.errors import HamuError
from hamu.evaluation import embed
from hamu.report.observations import (
    ROLES,
    AnsweredRecord,
    ImageObservations,
    Observations,
    TextObservations,
    answered,
    most_and_least_changed,
)
from hamu.unlearning.jobs.named_sources import NamedSources
from hamu.unlearning.jobs.problem import fitted_problem
from hamu.unlearning.jobs.text_task import TextTask, some_records

_EMBEDDED = 500  # images of each set


def observe(sources: NamedSources, most: int, answers: int, console: Console) -> Observations:
    """Ask both models, one after the other.

    Args:
        sources: of the run.
        most: records of each set that are predicted.
        answers: prompts of the forget and of the retain set that are answered; 0 for none.
        console: where to say what is under way.

    Raises:
        HamuError: if a model or the data are not there, do not fit, or are not those of the run (any more).
    """
    sources.check_unchanged()
    limit = sources.named.args.max_eval_samples
    most = most if limit is None else min(most, limit)
    task, problem = sources.named.task, sources.problem
    if isinstance(task, TextTask):
        return _texts(sources, task, problem, most, answers, console)
    return _images(sources, problem, most, console)


def _images(
    sources: NamedSources, problem: UnlearningData[ImageData], most: int, console: Console
) -> ImageObservations:
    task, args = sources.named.task, sources.named.args
    predictions, embeddings, refused = {}, {}, ""
    for role in ROLES:
        console.print(f"the model {role} looks at the images")
        model, predictions[role] = sources.loaded(role, most)
        try:
            embeddings[role] = {
                name: embed(
                    model, subset(data, _EMBEDDED, args.seed), args.eval_batch_size, task.collator()
                )
                for name, data in fitted_problem(task, model, problem).sets().items()
            }
        except HamuError as error:
            refused = str(error)
    counts = {name: len(one.labels) for name, one in predictions["after"].items()}
    sizes = {name: len(data) for name, data in problem.sets().items()}
    chosen = draw_positions(len(problem.forget), most, args.seed)
    pictures = {  # no more than is shown: a report may be of many runs
        title: problem.forget.select(
            places if chosen is None else [chosen[place] for place in places]
        )
        for title, places in most_and_least_changed(predictions).items()
    }
    classes = problem.forget.classes
    shown = {} if refused else embeddings
    return ImageObservations(
        predictions, counts, sizes, classes, pictures, shown, refused, args.seed
    )


def _texts(
    sources: NamedSources,
    task: TextTask,
    problem: UnlearningData[TextRecords],
    most: int,
    answers: int,
    console: Console,
) -> TextObservations:
    args = sources.named.args
    texts = {name: some_records(data, most, args.seed) for name, data in problem.sets().items()}
    asked = {
        name: some_records(problem.sets()[name], answers, args.seed)
        for name in ("forget", "retain")
    }
    asked = {
        name: data
        for name, data in asked.items()
        if answers and all(record.prompt for record in data.records)
    }
    predictions: dict[str, Any] = {}
    said: dict[str, dict[str, list[str]]] = {name: {} for name in asked}
    for role in ROLES:
        console.print(f"the model {role} reads the records{' and answers some' if asked else ''}")
        model, predictions[role] = sources.loaded(role, most)
        for name, data in asked.items():
            said[name][role] = task.answers_of(model, task.tokenizer, data, args)
    found: dict[str, list[AnsweredRecord]] = {
        name: answered(data, said[name]) for name, data in asked.items()
    }
    why = "plain text has no prompt" if answers else "--answers 0 leaves them out"
    return TextObservations(predictions, texts, found, "" if found else why)
