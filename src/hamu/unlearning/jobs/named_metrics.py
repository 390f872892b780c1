"""Metrics that `hamu evaluate` measures by name only, as they take longer than all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hamu.data import encode
from hamu.data.forget_sets import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation.harness import harness_figures, harness_tasks
from hamu.evaluation.membership import auc_or_none, gradient_scores, shadow_figures
from hamu.evaluation.memorization import verbmem
from hamu.unlearning.jobs.options import EvaluateOptions
from hamu.unlearning.jobs.shadows import Shadows
from hamu.unlearning.jobs.tasks import Task, TextTask

_GRADNORM, _VERBMEM, _RMIA, _ULIRA = "mia_gradnorm", "verbmem", "rmia", "ulira"
Measure = Callable[[Any, Mapping[str, Any]], dict[str, float | None]]


def named_metrics(task: Task, problem: UnlearningData[Any], asked: EvaluateOptions) -> Measure:
    """Check what is asked for; returns what measures a model, given with its predictions."""
    names = asked.names("metrics")
    known = (_GRADNORM, _VERBMEM) if isinstance(task, TextTask) else (_RMIA, _ULIRA)
    for name in names:
        if name not in known:
            choices = f"of {task.noun} it may be {', '.join(known)}; all others need no name"
            raise HamuError(f"metrics has the unknown {name!r}; {choices}")
    if asked.format not in (None, "open-unlearning"):
        raise HamuError(f"format {asked.format!r} is unknown; it may be open-unlearning")
    if isinstance(task, TextTask):
        return _of_texts(task, problem, asked, names)
    for option in ("lm_eval", "format"):
        if getattr(asked, option):
            raise HamuError(f"{option} {getattr(asked, option)} is for texts; leave it out")
    if not names:
        return lambda model, predictions: {}
    shadows = Shadows(task, problem, asked.shadow_models, ulira=_ULIRA in names)

    def measure(model: Any, predictions: Mapping[str, Any]) -> dict[str, float | None]:
        sides = (predictions["forget"], predictions["test"])
        found = shadow_figures(*sides, shadows.predictions(), task.args.seed)
        return {key: value for key, value in found.items() if key.partition("_")[0] in names}

    return measure


def _of_texts(
    task: TextTask, problem: UnlearningData[Any], asked: EvaluateOptions, names: list[str]
) -> Measure:
    if _GRADNORM in names and problem.test is None:
        raise HamuError(f"{_GRADNORM} needs data never trained on; give --test_data")
    if _VERBMEM in names and not asked.generate:
        raise HamuError(f"{_VERBMEM} generates texts; give a --generate above 0")
    listed = asked.names("lm_eval")
    tasks = harness_tasks(listed) if listed else None
    size = task.args.eval_batch_size

    def measure(model: Any, predictions: Mapping[str, Any]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        with task.evaluation_precision():
            if _GRADNORM in names:
                sets = task.fitted_problem(model, problem).sets()
                both = [gradient_scores(model, sets[n], task.collator) for n in ("forget", "test")]
                found[_GRADNORM] = auc_or_none(*both)
            if _VERBMEM in names:
                texts = task.some_records(problem.forget, asked.generate)
                data = encode(texts, task.tokenizer, task.length_for(model))
                found["forget_verbmem"] = verbmem(model, task.tokenizer, data, size).mean().item()
            if tasks is not None:
                found |= harness_figures(tasks, model, task.tokenizer, size)
        return found

    return measure
