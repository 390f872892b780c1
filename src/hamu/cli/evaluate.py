"""`hamu evaluate`: measure a model on an unlearning problem."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hamu.cli.attack import Attacker, write_and_show
from hamu.cli.options import DataOptions, EvaluateOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.problem import open_problem, predictions_of
from hamu.cli.tasks import Task
from hamu.cli.text_evaluation import TextEvaluation
from hamu.cli.text_task import TextTask
from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.evaluation.attacks import AttackSettings
from hamu.files import EVALUATION
from hamu.unlearning.goal_report import GoalSettings, goal_lines, goal_settings
from hamu.unlearning.record.record import plain
from hamu.unlearning.trainer import TrainConfig


def run(argv: list[str], console: Console) -> int:
    """Measure, print, save evaluation.json."""
    parsed = parse(
        "evaluate",
        "Measure a model on the retain, forget and test data.",
        argv,
        DataOptions,
        RunOptions,
        EvaluateOptions,
        AttackSettings,
        TrainConfig,
    )
    run_options, options, args = (
        parsed.of(RunOptions),
        parsed.of(EvaluateOptions),
        parsed.of(TrainConfig),
    )
    build_metrics()  # a broken one is to cost no run
    task, folder, problem = open_problem(
        parsed.of(DataOptions), run_options, args, parsed.given, console, options
    )
    task.check_models(options)
    further = TextEvaluation(task, options, args) if isinstance(task, TextTask) else None
    settings = parsed.of(AttackSettings)
    attacker = None
    if settings.attacks:
        attacker = Attacker(task, problem, settings, options.original_model, args, parsed.given)
    goal, why_none = _goal(options, problem, has_retain_model=run_options.retain_model is not None)
    reference = (
        None if run_options.retain_model is None else _reference(task, problem, args, further)
    )
    original = (
        _original(task, problem, args, options)
        if goal is not None and goal.kind == "unseen"
        else None
    )
    model, predictions = predictions_of(task, str(run_options.model), problem, args)
    report = task.report(predictions, problem, reference, args)
    report["goal"] = None
    if goal is not None:
        report["goal"] = goal.report(predictions, original=original, retain_model=reference)
    with folder:
        path = folder.write_json(
            EVALUATION, plain(report)
        )  # kept, whatever becomes of what takes longer
        folder.write_config(parsed.given)
        console.print(f"forget set: {problem.forget_name}")
        task.show({"": report})
        for line in [why_none] if report["goal"] is None else goal_lines(report["goal"]):
            console.print(line, soft_wrap=True)
        if further is not None:
            further.measure(model, report)
            folder.write_json(EVALUATION, plain(report))
            for name, text in further.files(model, problem).items():
                folder.write_text(name, text, private=True)
        if attacker is not None:
            del model
            write_and_show(attacker.run(), folder, console)
    console.print(f"all figures are in {path}", soft_wrap=True)
    return 0


def _goal(
    options: EvaluateOptions, problem: UnlearningData[Any], *, has_retain_model: bool
) -> tuple[GoalSettings | None, str]:
    """The goal to measure; None if none was named and nothing tells, and what to give then."""
    asked = (options.goal, options.target_forget_loss, options.target_share)
    try:
        return goal_settings(problem, *asked, has_retain_model=has_retain_model), ""
    except HamuError as error:
        if options.goal is not None:
            raise
        return None, str(error)


def _original(
    task: Task, problem: UnlearningData[Any], args: TrainConfig, options: EvaluateOptions
) -> dict[str, Any] | None:
    """The original model's predictions of the test data; None if it is not named."""
    if options.original_model is None:
        return None
    return predictions_of(task, options.original_model, problem, args, only=("test",))[1]


def _reference(
    task: Task, problem: UnlearningData[Any], args: TrainConfig, further: TextEvaluation | None
) -> dict[str, Any]:
    """The retain model's predictions; it is asked all there is to ask, and gone before another model is loaded."""
    model, predictions = predictions_of(task, str(task.run_options.retain_model), problem, args)
    if further is not None:
        further.ask_retain_model(model)
    return predictions
