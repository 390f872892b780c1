"""Metrics that `hamu evaluate` measures by name only, as they take longer than all others.

RMIA and U-LiRA train shadow models as the original model was trained, and unlearn them as the run;
general ability is measured by lm-evaluation-harness (Gao et al. 2024).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

from hamu.data import encode
from hamu.data.forget_sets import UnlearningData
from hamu.errors import HamuError, first_line
from hamu.evaluation.membership import (
    FEWEST,
    AttackScores,
    ShadowPredictions,
    gradient_scores,
    matched_by_class,
    shadow_figures,
)
from hamu.evaluation.memorization import verbmem
from hamu.files import CONFIG, RECORD
from hamu.unlearning.jobs.options import DataOptions, EvaluateOptions, RunOptions
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.tasks import Task, TextTask, choose_task
from hamu.unlearning.trainer import UnlearnConfig, train_original
from hamu.unlearning.trainer.logs import task_bar
from hamu.unlearning.trainer.trainer import quiet_trainer

_GRADNORM, _VERBMEM, _RMIA, _ULIRA = "mia_gradnorm", "verbmem", "rmia", "ulira"
Measure = Callable[[Any, Mapping[str, Any]], dict[str, float | None]]
# A shadow model leaves nothing behind, and is measured here alone.
_ALONE = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
}


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
                found[_GRADNORM] = AttackScores(*both).auc
            if _VERBMEM in names:
                texts = task.some_records(problem.forget, asked.generate)
                data = encode(texts, task.tokenizer, task.length_for(model))
                found["forget_verbmem"] = verbmem(model, task.tokenizer, data, size).mean().item()
            if tasks is not None:
                found |= harness_figures(tasks, model, task.tokenizer, size)
        return found

    return measure


class Shadows:
    """Pool of forget records and as many test records, and the models that train on half of it.

    Two models at a time take the two halves of a random division by class, so that as many were
    trained on a record as were not; all train on the retain set.
    """

    def __init__(
        self, task: Task, problem: UnlearningData[Any], count: int, *, ulira: bool
    ) -> None:
        if count < 4 or count % 2:
            raise HamuError(f"shadow_models {count} must be an even number of at least 4")
        if problem.test is None:
            raise HamuError("rmia and ulira need data never trained on; give --test_data")
        self._task, self._problem, self._count = task, problem, count
        self._test: Any = problem.test
        self._train, self._unlearn = _settings_behind(str(task.run.model))
        if ulira and self._unlearn is None:
            raise HamuError(
                f"ulira repeats the run that made the model, and {task.run.model} is in no folder "
                f"of hamu unlearn; leave out ulira"
            )
        self._unlearn = self._unlearn if ulira else None
        seed = task.args.seed
        self._drawn = matched_by_class(problem.forget.labels, problem.test.labels, seed)[1]
        if len(self._drawn) < FEWEST:
            raise HamuError(
                f"rmia and ulira need at least {FEWEST} test images of the classes that are "
                f"forgotten; there are {len(self._drawn)}"
            )

    def predictions(self) -> ShadowPredictions:
        """Train all shadow models, one after the other, and predict the pool with each."""
        pool = self._problem.forget.joined(self._test.select(self._drawn))
        seed, generator = self._task.args.seed, torch.Generator()
        trained, unlearned, holds = [], [], []
        with TemporaryDirectory() as place, task_bar(self._task.console) as bar:
            for number in bar.track(range(self._count), description="shadow models"):
                generator.manual_seed(seed + number // 2)
                half = _half_of_each(pool.labels, generator)
                half = ~half if number % 2 else half
                found = self._trained(pool, half, seed + number, place)
                trained.append(found[0])
                unlearned += found[1:]
                holds.append(half)
        after = torch.stack(unlearned) if unlearned else None
        return ShadowPredictions(torch.stack(trained), after, torch.stack(holds))

    def _trained(self, pool: Any, half: Tensor, seed: int, place: str) -> list[Tensor]:
        """Logits [N, K] of one model for the pool, after training and, if asked for, unlearning."""
        problem, task = self._problem, self._task
        mine, rest = half.nonzero().flatten(), (~half).nonzero().flatten()
        data = problem.retain.joined(pool.select(mine))
        how = {**_ALONE, "output_dir": place, "seed": seed}
        options = {"config": str(self._train), "eval_on_start": False, **how}
        settings = settings_of("train", options)
        maker = choose_task(settings, Console(quiet=True))
        set_seed(seed)
        model = maker.new_model(str(maker.run.model), data)
        data, known = maker.fitted(model, data, pool)
        maker.args.disable_tqdm = True
        train_original(model, data, maker.args, task.collator)
        found = [task.predict(model, known).logits]
        if self._unlearn is None:
            return found
        options = {"config": str(self._unlearn), **how}
        kinds = (DataOptions, RunOptions, UnlearnConfig)
        args = settings_of("unlearn", options, kinds).of(UnlearnConfig)
        args.settle_batch_sizes(is_text=False)
        sets = {"forget": pool.select(mine), "test": self._unseen(pool, rest)}
        own = maker.fitted_problem(model, replace(problem, **sets))
        quiet_trainer(model, own, args, [], task.collator).train()
        return [*found, task.predict(model, known).logits]

    def _unseen(self, pool: Any, rest: Tensor) -> Any:
        """Test data that a model was not trained on, with the half of the pool that it lacks."""
        others = torch.ones(len(self._test), dtype=torch.bool)
        others[self._drawn] = False
        return self._test.select(others.nonzero().flatten()).joined(pool.select(rest))


def _half_of_each(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Random half of the records of each class, [N] bool; of an odd number one more or less."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in set(labels.tolist()):
        places = (labels == label).nonzero().flatten()
        places = places[torch.randperm(len(places), generator=generator)]
        extra = int(torch.randint(2, (), generator=generator))
        chosen[places[: (len(places) + extra) // 2]] = True
    return chosen


def _settings_behind(model: str) -> tuple[Path, Path | None]:
    """The config.yaml of the training behind a model, and that of the run that unlearned it."""
    config, unlearn = Path(model).parent / CONFIG, None
    if config.with_name(RECORD).is_file():
        unlearn = config
        options = settings_of("unlearn", {"config": str(config)}, (RunOptions,))
        config = Path(str(options.of(RunOptions).model)).parent / CONFIG
    if not config.is_file():
        raise HamuError(
            f"rmia and ulira train shadow models as the original model was trained, and {config} "
            f"is not there; name a model of hamu train, or of a run of hamu unlearn from one"
        )
    return config, unlearn


def harness_tasks(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Find the tasks of lm-evaluation-harness: its manager, and the tasks for `harness_figures`.

    Args:
        names: names of its tasks, or YAML files.

    Raises:
        HamuError: if it is not installed, or a task is unknown.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise HamuError(
            f"lm_eval {','.join(names)} needs lm-evaluation-harness, which is not installed; pip "
            f"install 'hamu[lm-eval]', or leave it out"
        ) from error
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if not (Path(name).is_file() if name in files else manager.match_tasks([name])):
            known = "a YAML file, or a name of `lm-eval ls tasks`"
            raise HamuError(f"lm_eval task {name!r} is unknown; expected {known}")
    return manager, list(names)


def harness_figures(
    tasks: tuple[Any, list[Any]], model: Any, tokenizer: Any, batch_size: int
) -> dict[str, float]:
    """Measure the model on tasks of `harness_tasks`; figures by task and metric, "TASK_METRIC".

    Raises:
        HamuError: if a task cannot be run.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    manager, names = tasks
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    how: dict[str, Any] = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": False}
    try:
        with redirect_stderr(io.StringIO()):  # bars of every step
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            found = lm_eval.simple_evaluate(wrapped, tasks=names, **how)
    except Exception as error:  # of its own, of data that are not there, of a task's own code
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise HamuError(f"lm_eval {','.join(names)} cannot be run: {reason}") from error
    return {
        f"{task}_{metric.removesuffix(',none')}": float(value)
        for task, figures in found["results"].items()
        for metric, value in figures.items()
        if isinstance(value, float) and "_stderr" not in metric
    }
