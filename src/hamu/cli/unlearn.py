"""`hamu unlearn`: unlearn the forget set from a model."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from hamu.cli.evaluate import normalized_for, predictions_of
from hamu.cli.options import DataOptions, RunOptions, parse
from hamu.cli.problem import read_problem, sources
from hamu.cli.progress import ProgressBar
from hamu.cli.tables import membership_line, reference_table, report_table
from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import classifier_report
from hamu.models import check_finite, check_fits, load_classifier
from hamu.run_folder import RunFolder
from hamu.training import UnlearnConfig, UnlearnTrainer
from hamu.training.original import collate


def run(argv: list[str], console: Console) -> int:
    """Unlearn, save the model and what happened, print before and after."""
    data_options, run_options, args, resolved = parse(
        "unlearn", "Unlearn the forget set from a model.", argv, DataOptions, RunOptions, UnlearnConfig
    )
    if run_options.model is None:
        raise HamuError("name the model with --model: a folder written by `hamu train`, or hub:OWNER/NAME")
    used = (*sources(data_options), *filter(None, (run_options.model, run_options.retain_model)))
    folder = RunFolder(args.output_dir, overwrite=run_options.overwrite, sources=used)
    problem = read_problem(data_options)
    model = load_classifier(run_options.model)
    for data in (problem.retain, problem.forget, problem.test):
        if data is not None:
            check_fits(model, data)
    problem = normalized_for(model, problem)
    reference = None
    if run_options.retain_model is not None:
        reference = predictions_of(run_options.retain_model, problem, args, args.max_eval_samples)
    console.print(
        f"forget {len(problem.forget)} images ({problem.forget_name}), retain {len(problem.retain)}, by {args.method}"
    )
    if args.resume_from_checkpoint:
        raise HamuError("resuming from the command line is not supported yet; use UnlearnTrainer.train in Python")
    set_seed(args.seed)
    trainer = new_trainer(model, problem, args, [StepLog(folder), ProgressBar(console, args.method)])
    try:
        trainer.train()
    finally:
        folder.discard_if_empty()
    check_finite(model, f"unlearning diverged; lower --learning_rate {args.learning_rate} or choose another method")
    path = folder.save_model(model)
    folder.write_config(resolved)
    if trainer.evaluated_step != trainer.state.global_step or args.load_best_model_at_end:
        trainer.evaluate()
    reports = {
        name: classifier_report(predictions, problem.retain.classes, problem.target_class, reference, args.seed)
        for name, predictions in (("before", trainer.start_predictions), ("after", trainer.predictions))
    }
    ended = trainer.stop_reason or "the last epoch is done"
    folder.write_json(
        "evaluation.json",
        reports
        | {
            "trajectory": [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry],
            "steps_taken": trainer.steps_taken,
            "steps_skipped": trainer.steps_skipped,
            "ended": ended,
        },
    )
    console.print(report_table(reports))
    for name, report in reports.items():
        console.print(f"{name}: {membership_line(report)}")
    if reference is not None:
        console.print(reference_table(reports["after"]))
    console.print(
        f"{trainer.steps_taken} steps taken, {trainer.steps_skipped} not taken; the run ended because {ended}"
    )
    console.print(f"the model is in {path}")
    return 0


def new_trainer(
    model: Any, problem: UnlearningData, args: UnlearnConfig, callbacks: list[TrainerCallback]
) -> UnlearnTrainer:
    """A trainer for this problem that prints nothing by itself."""
    args.disable_tqdm = True
    trainer = UnlearnTrainer(
        model,
        args,
        retain_dataset=problem.retain,
        forget_dataset=problem.forget,
        test_dataset=problem.test,
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class StepLog(TrainerCallback):
    """Writes a line per step to steps.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A first step was possible: only now may an earlier run give way, and before a checkpoint comes."""
        self._folder.prepare()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Append the figures of a step; figures that are not finite become null, which JSON can hold."""
        if "taken" in logs:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
            self._folder.append_line("steps.jsonl", {"step": state.global_step, **finite})
