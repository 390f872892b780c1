"""`hamu evaluate`: measure a model on an unlearning problem."""

from __future__ import annotations

from rich.console import Console

from hamu.cli.options import DataOptions, EvaluateOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.problem import opened, predictions_of
from hamu.evaluation import build_metrics
from hamu.training import TrainConfig


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
