"""`hamu.train`: make the original model, or the retain model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.core.distributed import from_main
from hamu.errors import HamuError
from hamu.files import EVALUATION, MODEL, read_json
from hamu.unlearning.jobs.forgetting import save_whole
from hamu.unlearning.jobs.kinds import choose_task
from hamu.unlearning.jobs.options import RunOptions
from hamu.unlearning.jobs.plan import RunPlan, plan
from hamu.unlearning.jobs.progress import ProgressBar, leaving_in_order, silent
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.record import check_same, with_settings, write_model_card
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import train_original
from hamu.unlearning.trainer.evaluations import first_not_finite_loss, set_figures
from hamu.unlearning.trainer.resumable import ResumableTrainer


@dataclass(frozen=True)
class Trained:
    """Result of `train`.

    Attributes:
        folder, model: the output folder, and the model in it.
        figures: losses and accuracies on the training and test data, and the seconds of training.
        was_complete: the run to resume had already ended.
        merge_failure: reason why `merge` failed; "" if it did not.
    """

    folder: Path
    model: Path
    figures: dict[str, Any]
    was_complete: bool = False
    merge_failure: str = ""


def train(*, console: Console | None = None, **options: Any) -> Trained | RunPlan:
    """Train the original model; with `without_forget`, the retain model.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu train`, which --help-all lists, with the same defaults.

    Returns:
        The trained model and its figures; with `dry_run` the plan of the run.

    Raises:
        HamuError: if an option is unknown or does not fit, or training diverged.
    """
    console = console or silent()
    settings = settings_of("train", options)
    run, resume = settings.of(RunOptions), settings.of(RunOptions).resume
    if run.model is None:
        raise HamuError(
            "name the model with --model: resnet20, tiny-llama, a folder, or hub:OWNER/NAME"
        )
    if run.dry_run:
        return plan(settings, console)
    task = choose_task(settings, console)
    task.classes_of = None if task.is_built_in(run.model) else run.model
    folder = task.folder(resume=resume)
    if resume and folder.has(EVALUATION):
        done = read_json(folder.path / EVALUATION)
        return Trained(folder.path, folder.path / MODEL, done, was_complete=True)
    task.settle_adapter()
    with folder:
        return _train(task, folder, resume)


def _train(task: Task, folder: RunFolder, resume: bool) -> Trained:
    args, given, start = task.args, task.given, task.classes_of
    data, test = _sets(task)
    set_seed(args.seed)
    model = task.new_model(str(task.run.model), data)
    sets = {"training": data, "test": test}
    inputs = from_main(lambda: task.inputs(sets, {"original": start}))
    if resume:
        check_same(folder.path, inputs)
    data, test = task.fitted(model, data, test)
    args.disable_tqdm = True
    bar = ProgressBar(task.console, "train")

    @contextmanager
    def around(trainer: ResumableTrainer) -> Iterator[None]:
        # an earlier run gives way only to a first checkpoint, or once training has succeeded
        trainer.before_saving = lambda: folder.begin(given, with_settings(inputs, given))
        trainer.beside_model = task.beside_model()
        with bar, leaving_in_order("train", trainer):
            yield

    begin = time.perf_counter()
    train_original(model, data, args, task.collator(), [bar], test, resume=resume, around=around)
    figures = {"seconds": round(time.perf_counter() - begin, 1)}
    known = {name: one for name, one in (("train", data), ("test", test)) if one is not None}
    figures |= set_figures({name: task.predict(model, one) for name, one in known.items()})
    broken = first_not_finite_loss(figures)
    if broken is not None:
        raise HamuError(
            f"training diverged: {broken} is not finite; lower --learning_rate {args.learning_rate}"
        )
    folder.begin(given, with_settings(inputs, given))
    of_sets = {
        name: {key: figures[f"{name}_{key}"] for key in ("loss", "accuracy")} for name in known
    }
    reports: Any = {"": {"train": {}, "test": {}} | of_sets}
    card = partial(write_model_card, base=start, reports=reports)
    failure = save_whole(task, folder, model, card)
    folder.write_json(EVALUATION, figures)
    return Trained(folder.path, folder.path / MODEL, figures, merge_failure=failure)


def _sets(task: Task) -> tuple[Any, Any]:
    """Training and test data; without the forget set if so asked."""
    if not task.run.without_forget:
        data, test = task.train_and_test()
        task.console.print(f"{len(data)} training {task.noun} of {data.source}")
        return data, test
    problem = task.problem()
    left_out = f"{len(problem.forget)} left out ({problem.forget_name})"
    task.console.print(f"{len(problem.retain)} training {task.noun}, {left_out}")
    return problem.retain, problem.test
