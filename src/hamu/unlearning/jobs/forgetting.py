"""`hamu.unlearn`: unlearn the forget set from a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.core.distributed import from_main, is_main
from hamu.core.gram import SIDES
from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.evaluation.predictions import Predictions
from hamu.files import EVALUATION, MODEL, READABLE_RECORD, RECORD, file_digest, read_json
from hamu.models import first_not_finite
from hamu.models.storage import CannotMerge
from hamu.unlearning.goal_report import standing_line
from hamu.unlearning.jobs.kinds import choose_task
from hamu.unlearning.jobs.options import RunOptions
from hamu.unlearning.jobs.plan import RunPlan, plan
from hamu.unlearning.jobs.progress import ProgressBar, leaving_in_order, peak_memory, silent
from hamu.unlearning.jobs.settings import recorded_settings, settings_of
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.record import (
    Inputs,
    check_same,
    with_settings,
    write_model_card,
    write_record,
)
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer
from hamu.unlearning.trainer.evaluations import first_not_finite_loss, set_figures
from hamu.unlearning.trainer.logs import StepLog, kept_open
from hamu.unlearning.trainer.promise import describe
from hamu.unlearning.trainer.trainer import quiet_trainer

_HARDLY = 0.05  # a probability that is 5% lower or higher


@dataclass(frozen=True)
class Unlearned:
    """Result of `unlearn`.

    Attributes:
        folder, model: the output folder, and the model in it.
        before, after: the figures of the model before and after the run.
        goal: the goal of the run, and the standings before and after; None if nothing defines
            forgotten.
        stop_reason: a word for it, such as "goal reached".
        record: the readable record; None in a process that does not write it.
        record_digest: the SHA-256 of record.json.
        lines: the course of the run and what of it is saved, a sentence each.
        memory: the peak memory, in words.
        was_complete: the run to resume had already ended.
        merge_failure: reason why `merge` failed; "" if it did not.
    """

    folder: Path
    model: Path
    before: dict[str, Any]
    after: dict[str, Any]
    goal: dict[str, Any] | None
    stop_reason: str
    record: Path | None
    record_digest: str
    lines: tuple[str, ...] = ()
    memory: str = ""
    was_complete: bool = False
    merge_failure: str = ""


def unlearn(*, console: Console | None = None, **options: Any) -> Unlearned | RunPlan:
    """Unlearn the forget set from a model, by goal unless the options name how.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu unlearn`, which --help-all lists, with the same defaults.

    Returns:
        The model, its figures and the record; with `dry_run` the plan of the run.

    Raises:
        HamuError: if an option is unknown or does not fit, no step could be taken, or the run
            diverged.
    """
    console = console or silent()
    settings = settings_of("unlearn", options)
    args, given = settings.of(UnlearnConfig), settings.given
    resume = settings.of(RunOptions).resume
    if not args.eval_on_start:
        raise HamuError(
            "eval_on_start measures the model before unlearning, the baseline of every figure; "
            "leave it on"
        )
    if settings.of(RunOptions).dry_run:
        return plan(settings, console)
    if resume and RunFolder(str(args.output_dir), resume=True).has(RECORD):
        return _result(Path(str(args.output_dir)), was_complete=True)
    build_metrics()  # a broken one is to cost no run
    task = choose_task(settings, console)
    folder, problem = task.start(resume=resume)
    task.check_models()
    task.settle_adapter()
    with folder:
        retained = task.run.retain_model
        reference = None if retained is None else task.predictions(retained, problem)[1]
        set_seed(args.seed)
        model = task.start_model(str(task.run.model))
        inputs = from_main(lambda: task.inputs_of(problem))
        if resume:
            check_same(folder.path, inputs)
        problem = task.fitted_problem(model, problem)
        task.announce(problem, f", by {args.method}")
        log = StepLog(folder, given, with_settings(inputs, given), resume)
        bar = ProgressBar(console, args.method)
        known = reference and reference["forget"]
        trainer = quiet_trainer(model, problem, args, [log, bar], task.collator(), known)
        log.trainer, trainer.before_saving = trainer, log.begin
        trainer.beside_model = task.beside_model()
        with bar, kept_open(trainer):
            _train(trainer, resume)
        return _finish(task, folder, problem, trainer, inputs, reference)


def _finish(
    task: Task,
    folder: RunFolder,
    problem: UnlearningData[Any],
    trainer: UnlearnTrainer,
    inputs: Inputs,
    reference: Any,
) -> Unlearned:
    """Save the model, its figures and the record."""
    before, after = (
        task.report(predictions, problem, reference)
        for predictions in (trainer.start_predictions, trainer.predictions)
    )
    evaluation = {"before": before, "after": after} | trainer.history()
    card = partial(
        write_model_card,
        base=str(task.run.model),
        method=trainer.args.method,
        forget_records=len(problem.forget),
        reports={"before": before, "after": after},
        goal=evaluation["goal"],
    )
    failure = save_whole(task, folder, trainer.model, card)
    folder.write_json(EVALUATION, evaluation)
    if is_main():
        write_record(
            folder,
            trainer,
            evaluation,
            problem=problem,
            chosen_by=task.chosen_by(),
            settings=recorded_settings(task.settings),
            inputs=inputs,
        )
    return _result(
        folder.path,
        evaluation,
        lines=tuple(_outcome(trainer)),
        memory=peak_memory(trainer.args.device),
        merge_failure=failure,
    )


def _result(folder: Path, evaluation: Any = None, **more: Any) -> Unlearned:
    """The result of a run, as its files have it."""
    found = read_json(folder / EVALUATION) if evaluation is None else evaluation
    return Unlearned(
        folder,
        folder / MODEL,
        found["before"],
        found["after"],
        found["goal"],
        found["ended_kind"],
        folder / READABLE_RECORD if is_main() else None,
        file_digest(folder / RECORD) if is_main() else "",
        **more,
    )


def save_whole(task: Task, folder: RunFolder, model: Any, card: Any) -> str:
    """Save a model with its card, and merged if asked for; returns why that failed."""
    folder.save_model(model, *task.beside_model(), card)
    try:
        task.save_merged(folder, model)
    except CannotMerge as error:  # the adapter is saved and recorded all the same
        return str(error)
    return ""


def _train(trainer: UnlearnTrainer, resume: bool) -> None:
    """Unlearn, and measure the model unless the last step was measured; refuse one of no use."""
    with leaving_in_order("unlearn", trainer):
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
            f"unlearning diverged: {broken} is not finite; lower --learning_rate "
            f"{trainer.args.learning_rate} or choose another method"
        )


def _outcome(trainer: UnlearnTrainer) -> list[str]:
    """Lines on the course of the run, and on what of it was saved."""
    start, end = (set_figures(one) for one in (trainer.start_predictions, trainer.predictions))
    rate, guess = trainer.args.learning_rate, guessing_loss(trainer.predictions, trainer.model)
    lines = [
        f"steps: {trainer.steps_taken} taken, {trainer.steps_skipped} not taken; the run ended at "
        f"step {trainer.state.global_step} because {trainer.stop.text}"
    ]
    if start["retain_loss"] <= guess < end["retain_loss"]:
        lines.append(
            f"the model is of no use: its retain loss went from {start['retain_loss']:.4f} to "
            f"{end['retain_loss']:.4g}, above the {guess:.2f} of guessing; lower --learning_rate "
            f"{rate:g}, or end such a run by --max_retain_loss"
        )
    controller = trainer.controller
    if controller is None:
        moves = [abs(end[f"{side}_loss"] - start[f"{side}_loss"]) for side in SIDES]
        may_warn = trainer.stop.kind == "all steps" and "forget" in trainer.sides
        if may_warn and max(moves) < _HARDLY:
            lines.append(
                f"the model has hardly moved: the forget loss was {start['forget_loss']:.4f} and "
                f"is {end['forget_loss']:.4f}, at learning rate {rate:g}; `hamu assess` suggests a "
                f"rate, and --auto finds one"
            )
        lines.append(_best(trainer))
    elif controller.goal_sentence not in trainer.stop.text:
        lines.append(controller.goal_sentence)
    after = trainer.standings().get("after")
    goal = trainer.goal_run.goal
    if after is not None and goal is not None:
        line = standing_line(after.figures())
        lines.append(f"{line}, by the goal {goal.kind}; whether that lasts: hamu attack")
    return lines if trainer.promise is None else [*lines, describe(trainer.promise)]


def guessing_loss(predictions: Any, model: Any) -> float:
    """The loss of a model that gives every class, or every token, the same probability."""
    if isinstance(predictions["retain"], Predictions):
        return math.log(predictions["retain"].logits.shape[1])
    return math.log(len(model.get_input_embeddings().weight))


def _best(trainer: UnlearnTrainer) -> str:
    """The best evaluation, and where its state is saved."""
    args, state = trainer.args, trainer.state
    name = str(args.metric_for_best_model).removeprefix("eval_")
    found = [entry for entry in state.log_history if f"eval_{name}" in entry]
    if not found:
        return f"no evaluation measured {name}"
    best = (max if args.greater_is_better else min)(found, key=lambda one: one[f"eval_{name}"])
    text = f"best {name} {best[f'eval_{name}']:+.4g} at step {best['step']}"
    folder = trainer.checkpoints.path(int(best["step"]))
    saved = state.best_global_step if args.load_best_model_at_end else state.global_step
    if best["step"] == 0:
        return f"{text}, the start: no later evaluation was better"
    if best["step"] == saved:
        return f"{text}, which is the model saved"
    if folder.exists():
        return f"{text}, in {folder}"
    return f"{text}, which was not saved; --load_best_model_at_end with --save_strategy keeps it"
