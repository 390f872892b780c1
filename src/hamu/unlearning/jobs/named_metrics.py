"""Metrics that `hamu evaluate` measures by name only, as they take longer than all others.

RMIA and U-LiRA train shadow models as the original model was trained, and unlearn them as the run;
general ability is measured by lm-evaluation-harness (Gao et al. 2024).
"""

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

from hamu.data import encode, subset
from hamu.errors import HamuError, first_line
from hamu.evaluation import Predictions, membership
from hamu.evaluation.memorization import verbmem
from hamu.files import CHECKPOINT, CONFIG, MODEL, RECORD
from hamu.unlearning.jobs.options import EvaluateOptions, RunOptions
from hamu.unlearning.jobs.settings import settings_of, settings_of_run
from hamu.unlearning.jobs.tasks import Problem, Task, TextTask, choose_task
from hamu.unlearning.record.inputs import digests_in, read_inputs, set_entries
from hamu.unlearning.trainer import UnlearnConfig, train_original
from hamu.unlearning.trainer.logs import task_bar
from hamu.unlearning.trainer.trainer import quiet_trainer

Measure = Callable[[Any, Mapping[str, Any]], dict[str, float | None]]
# A shadow model leaves nothing behind, and is measured here alone.
_ALONE = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
}


def named_metrics(task: Task, problem: Problem, asked: EvaluateOptions) -> Measure:
    """Check what is asked for; returns what measures a model, given with its predictions."""
    names = asked.names("metrics")
    known = ("mia_gradnorm", "verbmem") if isinstance(task, TextTask) else ("rmia", "ulira")
    for name in names:
        if name not in known:
            choices = f"of {task.noun} it may be {', '.join(known)}; all others need no name"
            raise HamuError(f"metrics has the unknown {name!r}; {choices}")
    if asked.format not in (None, "open-unlearning"):
        raise HamuError(f"format {asked.format!r} is unknown; it may be open-unlearning")
    if isinstance(task, TextTask):
        return _of_texts(task, problem, asked, names)
    if not names:
        return lambda model, predictions: {}
    shadows = _shadows(task, problem, asked.shadow_models, unlearned="ulira" in names)

    def measure(model: Any, predictions: Mapping[str, Any]) -> dict[str, float | None]:
        sides = (predictions["forget"], predictions["test"])
        found = membership.shadow_figures(*sides, shadows(), task.args.seed)
        return {key: value for key, value in found.items() if key.partition("_")[0] in names}

    return measure


def _of_texts(
    task: TextTask, problem: Problem, asked: EvaluateOptions, names: list[str]
) -> Measure:
    if "mia_gradnorm" in names and problem.test is None:
        raise HamuError("mia_gradnorm needs data never trained on; give --test_data")
    if "verbmem" in names and not asked.generate:
        raise HamuError("verbmem generates texts; give a --generate above 0")
    harness = _harness(task, asked.names("lm_eval"))

    def measure(model: Any, predictions: Mapping[str, Any]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        with task.evaluation_precision():
            if "mia_gradnorm" in names:
                sets = task.fitted_problem(model, problem).sets()
                both = [membership.gradient_scores(model, sets[n]) for n in ("forget", "test")]
                found["mia_gradnorm"] = membership.AttackScores(*both).auc
            if "verbmem" in names:
                texts = task.some_records(problem.forget, asked.generate)
                data = encode(texts, task.tokenizer, task.length_for(model))
                scores = verbmem(model, task.tokenizer, data, task.args.eval_batch_size)
                found["forget_verbmem"] = scores.mean().item()
            return found | harness(model)

    return measure


def _shadows(
    task: Task, problem: Problem, count: int, *, unlearned: bool
) -> Callable[[], membership.ShadowPredictions]:
    """Check what shadow models need; returns what trains them and predicts their pool.

    The pool has the forget records and as many test records. Two models at a time take the two
    halves of a random division by class, so that as many were trained on a record as were not; all
    train on the retain set.
    """
    if count < 4 or count % 2:
        raise HamuError(f"shadow_models {count} must be an even number of at least 4")
    forget, test, seed = problem.forget, problem.test, task.args.seed
    if test is None:
        raise HamuError("rmia and ulira need data never trained on; give --test_data")
    train_config, unlearn_config = _settings_behind(task, problem, unlearned=unlearned)
    drawn = membership.matched_by_class(forget.labels, test.labels, seed)[1]
    if len(drawn) < membership.FEWEST:
        raise HamuError(
            f"rmia and ulira need at least {membership.FEWEST} test images of the classes that "
            f"are forgotten; there are {len(drawn)}"
        )
    pool = forget.joined(test.select(drawn))
    unseen = test.select(sorted({*range(len(test))} - {*drawn.tolist()}))
    retrained: Any = None  # predictions of the retain model that the run compared with
    if unlearn_config is not None:
        named = settings_of_run(unlearn_config).of(RunOptions).retain_model
        if named is not None:
            retain_model = task.on_device(task.load_model(named))
            retrained = task.predict(retain_model, task.fitted(retain_model, pool, None)[0])

    def predicted(mine: list[int], rest: list[int], seed: int, place: str) -> list[Tensor]:
        """Logits [N, K] of one model for the pool, after training and, if asked for, unlearning."""
        data = problem.retain.joined(pool.select(mine))
        how = {**_ALONE, "output_dir": place, "seed": seed}
        options = {"config": str(train_config), "eval_on_start": False, **how}
        maker = choose_task(settings_of("train", options), Console(quiet=True))
        set_seed(seed)
        model = maker.new_model(str(maker.run.model), data)
        data, known = maker.fitted(model, data, pool)
        maker.args.disable_tqdm = True
        train_original(model, data, maker.args)
        found = [task.predict(model, known).logits]
        if unlearn_config is not None:
            args = settings_of_run(unlearn_config, **how).of(UnlearnConfig)
            sets = {"forget": pool.select(mine), "test": unseen.joined(pool.select(rest))}
            own = maker.fitted_problem(model, replace(problem, **sets))
            some = [*subset(mine, args.most_evaluated("forget"), args.seed)]  # that it evaluates
            known_of = retrained and Predictions(retrained.logits[some], retrained.labels[some])
            quiet_trainer(model, own, args, [], known_of).train()
            found.append(task.predict(model, known).logits)
        return found

    def train() -> membership.ShadowPredictions:
        from sklearn.model_selection import StratifiedKFold

        found, holds = [], torch.zeros(count, len(pool), dtype=torch.bool)
        with TemporaryDirectory() as place, task_bar(task.console) as bar:
            for number in bar.track(range(count), description="shadow models"):
                divided = StratifiedKFold(2, shuffle=True, random_state=seed + number // 2)
                mine, rest = list(divided.split(pool.labels, pool.labels))[number % 2]
                holds[number, mine] = True
                found.append(predicted(mine.tolist(), rest.tolist(), seed + number, place))
        trained, *after = map(torch.stack, zip(*found, strict=True))
        return membership.ShadowPredictions(trained, after[0] if after else None, holds)

    return train


def _check_shows_the_forget_set(
    task: Task, problem: Problem, train_config: Path, unlearn_config: Path | None
) -> None:
    """Refuse a run that forgot other records; warn of models that may know all from their start."""
    if unlearn_config is not None:
        run = unlearn_config.parent
        began = digests_in(read_inputs(run).get("forget set"))
        if began != digests_in(set_entries("forget", problem.forget)["forget set"]):
            raise HamuError(
                f"ulira repeats the run in {run}, which had another forget set than this; name "
                f"that, or leave out ulira"
            )
    start = str(settings_of("train", {"config": str(train_config)}).of(RunOptions).model)
    if not task.is_built_in(start):
        task.tell(
            f"warning: shadow models start from {start}, as the model did; if that was trained on "
            f"the records to forget, all of them know these, and the figures do not hold"
        )


def _settings_behind(task: Task, problem: Problem, *, unlearned: bool) -> tuple[Path, Path | None]:
    """The config.yaml of the training behind a model, and that of the run that unlearned it."""
    model = str(task.run.model)
    config = run = Path(model).parent / CONFIG
    is_of_run = config.with_name(RECORD).is_file()
    if is_of_run:
        config = Path(str(settings_of_run(run).of(RunOptions).model)).parent / CONFIG
    is_checkpoint, wrong = Path(model).name.startswith(CHECKPOINT), ""
    if is_of_run and config.with_name(RECORD).is_file():
        wrong = f"{model} was unlearned twice, first in {config.parent}"
    elif not config.is_file():
        wrong = f"{config} is not there; name a model of hamu train, or unlearned from one"
    elif unlearned and not is_of_run:
        wrong = f"{model} is in no folder of hamu unlearn; leave out ulira"
    elif is_checkpoint and (unlearned or not is_of_run):
        wrong = f"{model} is an earlier state; name its {MODEL} in place of it"
    elif unlearned and settings_of_run(run).of(UnlearnConfig).load_best_model_at_end:
        wrong = f"{model} is an earlier state (--load_best_model_at_end); leave out ulira"
    if wrong:
        raise HamuError(f"rmia and ulira repeat the runs that made the model, but {wrong}")
    _check_shows_the_forget_set(task, problem, config, run if unlearned else None)
    return config, run if unlearned else None


def _harness(task: TextTask, names: list[str]) -> Callable[[Any], dict[str, float]]:
    """Find tasks of lm-evaluation-harness, or YAML files; returns what measures a model on them."""
    if not names:
        return lambda model: {}
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
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
    how: dict[str, Any] = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": False}

    def measure(model: Any) -> dict[str, float]:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        parts = {"tokenizer": task.tokenizer, "batch_size": task.args.eval_batch_size}
        try:
            with redirect_stderr(io.StringIO()):  # bars of every step
                wrapped = HFLM(pretrained=model, **parts)
                found = lm_eval.simple_evaluate(wrapped, tasks=names, **how)
        except Exception as error:  # of its own, of data that are not there, of a task's own code
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise HamuError(f"lm_eval {','.join(names)} cannot be run: {reason}") from error
        return {
            f"{name}_{metric.removesuffix(',none')}": float(value)
            for name, figures in found["results"].items()
            for metric, value in figures.items()
            if isinstance(value, float) and "_stderr" not in metric
        }

    return measure
