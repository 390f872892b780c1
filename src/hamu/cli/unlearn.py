"""`hamu unlearn`: unlearn the forget set from a model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.cli.dry_run import show_plan
from hamu.cli.interrupts import leaving_in_order
from hamu.cli.options import DataOptions, ResumeOptions, RunOptions
from hamu.cli.outcome import outcome
from hamu.cli.parsing import Parsed, parse
from hamu.cli.problem import fitted_problem, inputs_of, open_problem, predictions_of
from hamu.cli.progress import ProgressBar, peak_memory
from hamu.cli.run_settings import recorded_settings
from hamu.cli.tasks import Task
from hamu.core.distributed import from_main, is_main
from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.json_files import read_json
from hamu.models import first_not_finite
from hamu.models.merging import CannotMerge
from hamu.unlearning.record import Asked, Inputs, build, check_same, with_settings, write
from hamu.unlearning.run_files import EVALUATION, HARDNESS, RECORD
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer
from hamu.unlearning.trainer.measuring import history
from hamu.unlearning.trainer.measuring import first_not_finite_loss, set_figures
from hamu.unlearning.trainer.trainer import quiet_trainer
from hamu.unlearning.trainer.logs import StepLog
from hamu.unlearning.trainer.logs import kept_open

_BY_HAND = (
    "method",
    "learning_rate",
    "constraint",
    "constraint_mode",
    "forget_objective",
    "stopping",
)


def run(argv: list[str], console: Console) -> int:
    """Unlearn, save the model and what happened, print before and after."""
    types = (DataOptions, RunOptions, ResumeOptions, UnlearnConfig)
    parsed = parse("unlearn", "Unlearn the forget set from a model.", argv, *types, settle=_by_goal)
    data_options, run_options, args = (
        parsed.of(DataOptions),
        parsed.of(RunOptions),
        parsed.of(UnlearnConfig),
    )
    resume, given = parsed.of(ResumeOptions).resume, parsed.given
    if not args.eval_on_start:
        raise HamuError(
            "eval_on_start measures the model before unlearning, the baseline of every figure; leave it on"
        )
    if run_options.dry_run:
        return show_plan(console, data_options, run_options, args, given)
    if resume and RunFolder(args.output_dir, resume=True).has(RECORD):
        console.print(f"the run in {args.output_dir} is complete", soft_wrap=True)
        return 0
    build_metrics()  # a broken one is to cost no run
    task, folder, problem = open_problem(
        data_options, run_options, args, given, console, resume=resume
    )
    task.check_models()
    task.settle_adapter(given)
    with folder:
        prepared = _prepare(task, folder, problem, parsed, console)
        log = StepLog(
            folder, given, with_settings(prepared.inputs, given), resume, prepared.hardness
        )
        bar = ProgressBar(console, args.method)
        known = None if prepared.reference is None else prepared.reference["forget"]
        trainer = quiet_trainer(
            prepared.model, prepared.problem, args, [log, bar], task.collator(), known
        )
        log.trainer, trainer.before_saving = trainer, log.begin
        trainer.beside_model = task.beside_model()
        with bar, kept_open(trainer):
            _train(trainer, resume)
        _finish(task, folder, prepared, trainer, parsed, console)
    console.print(f"to look at it: hamu report {shlex.quote(str(folder.path))}", soft_wrap=True)
    return 0


def _by_goal(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Run by goal, unless a setting of a run by hand was given."""
    if "auto" not in given and not any(name in given for name in _BY_HAND):
        values["auto"] = given["auto"] = True


@dataclass(frozen=True)
class _Prepared:
    """What a run of unlearning starts from.

    Attributes:
        model: ready to be changed.
        problem: in the form that the model takes.
        inputs: what the run reads, by its digests.
        reference: the retain model's predictions, None without one.
        hardness: of the assessment before the run, None if there was none.
    """

    model: Any
    problem: UnlearningData[Any]
    inputs: Inputs
    reference: Mapping[str, Any] | None
    hardness: dict[str, Any] | None


def _prepare(
    task: Task, folder: RunFolder, problem: UnlearningData[Any], parsed: Parsed, console: Console
) -> _Prepared:
    """Ask the retain model, and load the model."""
    run_options, args, resume = (
        parsed.of(RunOptions),
        parsed.of(UnlearnConfig),
        parsed.of(ResumeOptions).resume,
    )
    reference = None
    if run_options.retain_model is not None:
        reference = predictions_of(
            task,
            run_options.retain_model,
            problem,
            args,
            args.max_eval_samples,
            whole_forget=args.forget_objective == "bounded",
        )[1]
    set_seed(args.seed)
    model = task.start_model(str(run_options.model))
    inputs = from_main(lambda: inputs_of(task, problem))
    if resume:
        check_same(folder.path, inputs)
    fitted = fitted_problem(task, model, problem)
    console.print(
        f"forget {len(fitted.forget)} {task.noun} ({fitted.forget_name}), retain {len(fitted.retain)}, by {args.method}"
    )
    hardness = read_json(folder.path / HARDNESS) if resume and folder.has(HARDNESS) else None
    return _Prepared(model, fitted, inputs, reference, hardness)


def _finish(
    task: Task,
    folder: RunFolder,
    prepared: _Prepared,
    trainer: UnlearnTrainer,
    parsed: Parsed,
    console: Console,
) -> None:
    """Save the model, its figures and the record, and print before and after."""
    args, problem = parsed.of(UnlearnConfig), prepared.problem
    path = task.save_model(folder, prepared.model)
    reports = {
        name: task.report(predictions, problem, prepared.reference, args)
        for name, predictions in (
            ("before", trainer.start_predictions),
            ("after", trainer.predictions),
        )
    }
    evaluation = reports | history(trainer)
    folder.write_json(EVALUATION, evaluation)
    failure = None
    try:
        task.save_merged(folder, prepared.model)
    except CannotMerge as error:  # what was unlearned is recorded all the same
        failure = error
    record = None
    if is_main():
        settings = recorded_settings(
            parsed.of(DataOptions), parsed.of(RunOptions), args, parsed.given
        )
        asked = Asked(problem, task.chosen_by(), settings, prepared.inputs, prepared.hardness)
        record = write(folder, build(asked, trainer, evaluation, folder.path))
    task.show(reports)
    for line in outcome(trainer):
        console.print(line)
    console.print(f"the model is in {path}; {peak_memory(args.device)}", soft_wrap=True)
    if record is not None:
        readable, digest = record
        console.print(
            f"the record is in {readable}; the SHA-256 of record.json is {digest}", soft_wrap=True
        )
    if failure is not None:
        raise failure


def _train(trainer: UnlearnTrainer, resume: bool) -> None:
    """Unlearn, and measure what came out if the last step was not.

    Raises:
        HamuError: if there is no new model, or none that is of use.
    """
    with leaving_in_order("unlearn")(trainer):
        trainer.train(resume_from_checkpoint="newest" if resume else None)
    if not trainer.steps_taken:
        tried = f"{trainer.steps_skipped} tried, and the last one skipped as {trainer.skip_reason}"
        why = trainer.stop_reason or (tried if trainer.steps_skipped else "there was none to take")
        raise HamuError(f"no step was taken, the model is as it was: {why}")
    _check_finite(trainer, first_not_finite(trainer.model))
    is_known = trainer.predictions and trainer.evaluated_step == trainer.state.global_step
    if not is_known or trainer.args.load_best_model_at_end:
        trainer.evaluate()
    start, now = (set_figures(found) for found in (trainer.start_predictions, trainer.predictions))
    _check_finite(trainer, first_not_finite_loss(now, start))


def _check_finite(trainer: UnlearnTrainer, broken: str | None) -> None:
    """Refuse a model of which something is not finite."""
    if broken is not None:
        raise HamuError(
            f"unlearning diverged: {broken} is not finite; lower --learning_rate {trainer.args.learning_rate} or "
            f"choose another method"
        )
