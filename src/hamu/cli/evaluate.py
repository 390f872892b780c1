"""`hamu evaluate`: measure a model on an unlearning problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hamu.cli.options import DataOptions, EvaluateOptions, RunOptions, parse
from hamu.cli.tasks import Task, choose_task, fitted_problem
from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig
from hamu.training.original import to_channels_last
from hamu.training.pairing import subset


def run(argv: list[str], console: Console) -> int:
    """Measure, print, save evaluation.json."""
    data_options, run_options, further, args, resolved = parse(
        "evaluate",
        "Measure a model on the retain, forget and test data.",
        argv,
        DataOptions,
        RunOptions,
        EvaluateOptions,
        TrainConfig,
    )
    build_metrics()  # a broken one is to cost no run
    task, folder, problem = opened(data_options, run_options, args, resolved, console, further)
    task.check_models(further)
    task.read_further(further)
    reference = None
    if run_options.retain_model is not None:
        reference = predictions_of(task, run_options.retain_model, problem, args)[1]
    model, predictions = predictions_of(task, run_options.model, problem, args)
    report = task.report(predictions, problem, reference, args)
    console.print(f"forget set: {problem.forget_name}")
    task.show({"": report})
    with folder:
        folder.write_config(resolved)
        path = folder.write_json("evaluation.json", report)  # kept, whatever becomes of what takes longer
        task.evaluate_further(model, args, further, report)
        folder.write_json("evaluation.json", report)
        for name, text in task.further_files(model, problem, args, further).items():
            folder.write_text(name, text, private=True)
    console.print(f"all figures are in {path}", soft_wrap=True, markup=False)
    return 0


def opened(
    data_options: DataOptions,
    run_options: RunOptions,
    args: TrainConfig,
    given: Mapping[str, Any],
    console: Console,
    further: EvaluateOptions | None = None,
    *,
    resume: bool = False,
) -> tuple[Task, RunFolder, UnlearningData[Any]]:
    """What every command that has a model starts with: the task, the output folder, the problem read."""
    if run_options.model is None:
        raise HamuError("name the model with --model: a folder written by `hamu train`, or hub:OWNER/NAME")
    if run_options.without_forget:
        raise HamuError("without_forget is for hamu train, which makes the retain model so; leave it out")
    task = choose_task(data_options, run_options, console)
    folder = RunFolder(args.output_dir, overwrite=run_options.overwrite, resume=resume, sources=task.sources(further))
    task.fill_in(args, given)
    return task, folder, task.problem()


def predictions_of(
    task: Task,
    source: str,
    problem: UnlearningData[Any],
    args: TrainConfig,
    most: int | None = None,
    base: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A saved model, and its predictions for every set (at most so many of each), in the form that it takes.

    Its base model, if it is an adapter, may be somewhere else than it says.
    """
    model = task.load_model(source, base).to(args.device)
    if args.channels_last:  # as training has it: the order changes the last digits
        to_channels_last(model)
    fitted = fitted_problem(task, model, problem)
    return model, {
        name: task.predict(model, subset(data, most, args.seed), args) for name, data in fitted.sets().items()
    }
