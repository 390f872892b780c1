"""Unlearning problem of a job: its task, its sets as a model takes them, predictions for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.data import UnlearningData
from hamu.data.forget_sets import subset
from hamu.data.text import is_text
from hamu.errors import HamuError
from hamu.unlearning.jobs.image_task import ImageTask
from hamu.unlearning.jobs.options import DataOptions, OriginalOptions, RunOptions
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.jobs.text_task import TextTask
from hamu.unlearning.record import Inputs
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig
from hamu.unlearning.trainer.resumable import to_channels_last


def open_problem(
    data_options: DataOptions,
    run_options: RunOptions,
    args: TrainConfig,
    given: Mapping[str, Any],
    console: Console,
    further: OriginalOptions | None = None,
    *,
    resume: bool = False,
) -> tuple[Task, RunFolder, UnlearningData[Any]]:
    """What every command that has a model starts with: the task, the output folder, the problem read."""
    if run_options.model is None:
        raise HamuError(
            "name the model with --model: a folder written by `hamu train`, or hub:OWNER/NAME"
        )
    task = choose_task(data_options, run_options, console)
    folder = RunFolder(
        args.output_dir,
        overwrite=run_options.overwrite,
        resume=resume,
        sources=task.sources(further),
    )
    task.fill_in(args, given)
    return task, folder, task.problem()


def fitted_problem(task: Task, model: Any, problem: UnlearningData[Any]) -> UnlearningData[Any]:
    """All sets of a problem in the form that the model takes."""
    retain, forget, test = task.fitted(model, problem.retain, problem.forget, problem.test)
    return replace(problem, retain=retain, forget=forget, test=test)


def inputs_of(
    task: Task, problem: UnlearningData[Any], models: Mapping[str, str | None] | None = None
) -> Inputs:
    """What a run of unlearning reads, by its digests.

    Args:
        task: whose options name the models.
        problem: whose sets are read.
        models: see `Task.inputs`; by default the original and the retain model.
    """
    options = task.run_options
    sets = {"forget": problem.forget, "retain": problem.retain, "test": problem.test}
    if models is None:
        models = {"original": options.model, "retain": options.retain_model}
    return task.inputs(sets, models)


def predictions_of(
    task: Task,
    source: str,
    problem: UnlearningData[Any],
    args: TrainConfig,
    most: int | None = None,
    base: str | None = None,
    *,
    whole_forget: bool = False,
    only: Collection[str] = ("retain", "forget", "test"),
) -> tuple[Any, dict[str, Any]]:
    """A saved model, and its predictions for every set (or some sets; at most this many records of each, but for a
    forget set that is looked at whole), in the form that it takes.

    Its base model, if it is an adapter, may be somewhere else than it says.
    """
    model = task.load_model(source, base).to(args.device)
    if args.channels_last:  # as training has it: the order changes the last digits
        to_channels_last(model)
    fitted = fitted_problem(task, model, problem)
    return model, {
        name: task.predict(
            model,
            subset(data, None if whole_forget and name == "forget" else most, args.seed),
            args,
        )
        for name, data in fitted.sets().items()
        if name in only
    }


def choose_task(data: DataOptions, run: RunOptions, console: Console) -> Task:
    """The task of `task_name`."""
    if run.trust_remote_code:
        console.print(
            "code that comes with a model is run, and can do all that you can", style="yellow"
        )
    tasks: dict[str, type[Task]] = {"image": ImageTask, "text": TextTask}
    return tasks[task_name(data)](data, run, console)


def task_name(data: DataOptions) -> str:
    """The task that --task names, or that the data's name shows: "image" or "text".

    Raises:
        HamuError: if the name is unknown.
    """
    if data.task == "auto":
        named = [] if data.data is None else [data.data, str(Path(data.data_dir or "") / data.data)]
        says_text = data.prompt_column is not None or data.answer_column is not None
        return "text" if says_text or any(map(is_text, named)) else "image"
    if data.task not in ("image", "text"):
        raise HamuError(f"task {data.task!r} is unknown; choose image, text or auto")
    return data.task
