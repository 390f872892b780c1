"""`hamu train`: make the original model, or with --without_forget the retain model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.cli.dry_run import show_plan
from hamu.cli.interrupts import leaving_in_order
from hamu.cli.options import DataOptions, ResumeOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.progress import ProgressBar
from hamu.cli.tasks import Task, choose_task
from hamu.core.distributed import from_main
from hamu.errors import HamuError
from hamu.files import EVALUATION
from hamu.models.saving import CannotMerge
from hamu.unlearning.record import check_same, with_settings, write_model_card
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, train_original
from hamu.unlearning.trainer.measuring import first_not_finite_loss, set_figures
from hamu.unlearning.trainer.resumable import ResumableTrainer


def run(argv: list[str], console: Console) -> int:
    """Train, save the model, print its figures."""
    parsed = parse(
        "train",
        "Train the original model; with --without_forget, the retain model.",
        argv,
        DataOptions,
        RunOptions,
        ResumeOptions,
        TrainConfig,
    )
    data_options, run_options, args = (
        parsed.of(DataOptions),
        parsed.of(RunOptions),
        parsed.of(TrainConfig),
    )
    resume, given = parsed.of(ResumeOptions).resume, parsed.given
    if run_options.model is None:
        raise HamuError(
            "name the model with --model: resnet20, tiny-llama, a folder, or hub:OWNER/NAME"
        )
    if run_options.dry_run:
        return show_plan(console, data_options, run_options, args, given)
    task = choose_task(data_options, run_options, console)
    start = None if task.is_built_in(run_options.model) else run_options.model
    task.classes_of = start
    sources = task.sources(is_training=True)
    folder = RunFolder(
        args.output_dir, overwrite=run_options.overwrite, resume=resume, sources=sources
    )
    if resume and folder.has(EVALUATION):
        console.print(f"the run in {args.output_dir} is complete", soft_wrap=True)
        return 0
    task.settle_adapter(given)
    with folder:
        task.fill_in(args, given)
        train, test = _sets(task, console)
        set_seed(args.seed)
        model = task.new_model(run_options.model, train)
        inputs = from_main(
            lambda: task.inputs({"training": train, "test": test}, {"original": start})
        )
        if resume:
            check_same(folder.path, inputs)
        train, test = task.fitted(model, train, test)
        args.disable_tqdm = True
        bar = ProgressBar(console, "train")

        @contextmanager
        def around(trainer: ResumableTrainer) -> Iterator[None]:
            # an earlier run gives way only to a first checkpoint, or once training has succeeded
            trainer.before_saving = lambda: folder.begin(given, with_settings(inputs, given))
            trainer.beside_model = task.beside_model()
            with bar, leaving_in_order("train")(trainer):
                yield

        begin = time.perf_counter()
        train_original(
            model, train, args, task.collator(), [bar], test, resume=resume, around=around
        )
        figures = {"seconds": round(time.perf_counter() - begin, 1)}
        sets = {"train": train, "test": test}
        figures |= set_figures(
            {
                name: task.predict(model, data, args)
                for name, data in sets.items()
                if data is not None
            }
        )
        broken = first_not_finite_loss(figures)
        if broken is not None:
            raise HamuError(
                f"training diverged: {broken} is not finite; lower --learning_rate {args.learning_rate}"
            )
        folder.begin(given, with_settings(inputs, given))
        reports = {"": {name: _of_set(figures, name) for name in ("train", "test")}}
        path = task.save_model(
            folder, model, partial(write_model_card, base=start, reports=reports)
        )
        failure = None
        try:
            task.save_merged(folder, model)
        except CannotMerge as error:  # the adapter is trained all the same
            failure = error
        folder.write_json(EVALUATION, figures)
    for name in ("train", "test"):
        if f"{name}_loss" in figures:
            console.print(
                f"{name}: loss {figures[f'{name}_loss']:.4f}, accuracy {figures[f'{name}_accuracy']:.2%}"
            )
    console.print(f"the model is in {path}", soft_wrap=True)
    if failure is not None:
        raise failure
    return 0


def _sets(task: Task, console: Console) -> tuple[Any, Any]:
    """What to train on, and the test data if there are any: without the forget set, if so asked."""
    if not task.run_options.without_forget:
        train, test = task.train_and_test()
        console.print(f"{len(train)} training {task.noun} of {train.source}")
        return train, test
    problem = task.problem()
    left_out = f"{len(problem.forget)} left out ({problem.forget_name})"
    console.print(f"{len(problem.retain)} training {task.noun}, {left_out}")
    return problem.retain, problem.test


def _of_set(figures: dict[str, float], name: str) -> dict[str, float]:
    """The figures of one set."""
    keys = ("loss", "accuracy")
    return {key: figures[f"{name}_{key}"] for key in keys if f"{name}_{key}" in figures}
