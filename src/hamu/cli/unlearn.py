"""`hamu unlearn`: unlearn the forget set from a model."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from hamu.assess import Assessment, assess
from hamu.cli.dry_run import show_plan
from hamu.cli.evaluate import opened, predictions_of
from hamu.cli.interrupts import leaving_in_order
from hamu.cli.layer_log import LayerLog
from hamu.cli.options import DataOptions, ResumeOptions, RunOptions, parse, recorded_settings
from hamu.cli.progress import ProgressBar, peak_memory
from hamu.cli.tasks import Task, fitted_problem
from hamu.data import UnlearningData
from hamu.distributed import is_main
from hamu.errors import HamuError
from hamu.methods import HamuQ
from hamu.models import check_finite
from hamu.models.loading import folder_of
from hamu.record import Asked, build, figures_of, model_entry, write
from hamu.run_folder import RunFolder
from hamu.training import UnlearnConfig, UnlearnTrainer
from hamu.training.auto import TUNED, tuned
from hamu.training.promise import describe
from hamu.training.trainer import ALL_DONE

_CURVATURE_SAMPLES = 64
_ASSESSED_BATCHES = 10  # of each side, before a run by goal


def run(argv: list[str], console: Console) -> int:
    """Unlearn, save the model and what happened, print before and after."""
    data_options, run_options, going_on, args, resolved = parse(
        "unlearn", "Unlearn the forget set from a model.", argv, DataOptions, RunOptions, ResumeOptions, UnlearnConfig
    )
    resume = going_on.resume
    if args.resume_from_checkpoint:
        raise HamuError("a run goes on in its own folder; give --resume and its --output_dir")
    if run_options.dry_run:
        return show_plan(console, data_options, run_options, args)
    if resume and RunFolder(args.output_dir, resume=True).has("record.json"):
        console.print(f"the run in {args.output_dir} is complete")
        return 0
    task, folder, problem = opened(data_options, run_options, args, resolved, console, resume=resume)
    reference = None
    if run_options.retain_model is not None:
        reference = predictions_of(task, run_options.retain_model, problem, args, args.max_eval_samples)[1]
    set_seed(args.seed)
    model = task.start_model(str(run_options.model))
    models = _models(task) if is_main() else {}
    problem = fitted_problem(task, model, problem)
    console.print(
        f"forget {len(problem.forget)} {task.noun} ({problem.forget_name}), retain {len(problem.retain)}, "
        f"by {args.method}"
    )
    hardness = None
    if args.auto and not resume:
        hardness = figures_of(_tune(model, problem, args, task, console).hamu_q)
        resolved |= {name: getattr(args, name) for name in TUNED}
    log = StepLog(folder, resolved, resume)
    trainer = new_trainer(model, problem, args, [log, ProgressBar(console, args.method)], task.collator())
    log.trainer, trainer.before_saving, trainer.assessed = trainer, log.begin, hardness
    try:
        with leaving_in_order("unlearn")(trainer):
            trainer.train(resume_from_checkpoint="newest" if resume else None)
    finally:
        folder.discard_if_empty()
    if not trainer.steps_taken:
        raise HamuError(f"no step was taken, the model is as it was: {trainer.stop_reason or 'there was none to take'}")
    check_finite(model, f"unlearning diverged; lower --learning_rate {args.learning_rate} or choose another method")
    is_known = trainer.predictions and trainer.evaluated_step == trainer.state.global_step
    if not is_known or args.load_best_model_at_end:
        trainer.evaluate()
    path = task.save_model(folder, model)
    reports = {
        name: task.report(predictions, problem, reference, args)
        for name, predictions in (("before", trainer.start_predictions), ("after", trainer.predictions))
    }
    ended = trainer.stop_reason or ALL_DONE
    evaluation = reports | {
        "trajectory": [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry],
        "steps_taken": trainer.steps_taken,
        "steps_skipped": trainer.steps_skipped,
        "promise": trainer.promise,
        "steering": None if trainer.steering is None else trainer.steering.history,
        "ended": ended,
    }
    folder.write_json("evaluation.json", evaluation)
    task.show(reports)
    console.print(
        f"{trainer.steps_taken} steps taken, {trainer.steps_skipped} not taken; the run ended at step "
        f"{trainer.state.global_step} because {ended}"
    )
    console.print(_best(trainer) if trainer.steering is None else trainer.steering.outcome)
    if trainer.promise is not None:
        console.print(describe(trainer.promise))
    console.print(f"the model is in {path}; {peak_memory()}")
    if is_main():
        settings = recorded_settings(data_options, run_options, args, resolved)
        asked = Asked(problem, task.chosen_by(), settings, **models, hardness=trainer.assessed)
        readable, digest = write(folder, build(asked, trainer, evaluation, folder.path))
        console.print(f"the record is in {readable}; the SHA-256 of record.json is {digest}", soft_wrap=True)
    console.print(f"to look at it: hamu report {shlex.quote(str(folder.path))}", soft_wrap=True)
    return 0


def _models(task: Task) -> dict[str, Any]:
    """The models that a run reads, for its record."""
    found = {}
    for role, source in (("before", task.run_options.model), ("retain_model", task.run_options.retain_model)):
        if source is not None:
            base = task.base_of(source)
            adapter = None if base is None else folder_of(source)
            found[role] = model_entry(source, folder_of(base or source), adapter)
    return found


def _best(trainer: UnlearnTrainer) -> str:
    """Which evaluation of the run was best for both sides, and what of it was saved."""
    name = f"eval_{str(trainer.args.metric_for_best_model).removeprefix('eval_')}"
    found = [entry for entry in trainer.state.log_history if name in entry]
    if not found:
        return f"no evaluation measured {name.removeprefix('eval_')}"
    best = (max if trainer.args.greater_is_better else min)(found, key=lambda entry: entry[name])
    text = f"best {name.removeprefix('eval_')} {best[name]:+.4g} at step {best['step']}"
    folder = Path(trainer.args.output_dir) / f"checkpoint-{best['step']}"
    saved = trainer.state.best_global_step if trainer.args.load_best_model_at_end else trainer.state.global_step
    if best["step"] == 0:
        return f"best {name.removeprefix('eval_')} at the start: no later evaluation was better"
    if best["step"] == saved:
        return f"{text}, which is the model saved"
    if folder.exists():
        return f"{text}, in {folder}"
    return f"{text}, which was not saved; --load_best_model_at_end with --save_strategy keeps such a state"


def _tune(model: Any, problem: UnlearningData[Any], args: UnlearnConfig, task: Task, console: Console) -> Assessment:
    """Set what a run by goal finds by itself, by an assessment; returns that."""
    found = assess(
        model.to(args.device),
        problem.retain,
        problem.forget,
        collate=task.collator(),
        method=HamuQ(0.5, "relative"),
        max_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        batch_size=args.per_device_train_batch_size,
        most_batches=_ASSESSED_BATCHES,
        conflicts=False,
        blocks=args.blocks,  # type: ignore[arg-type]
        curvature_samples=_CURVATURE_SAMPLES,
        seed=args.seed,
    )
    tuned(args, found)
    console.print(
        f"{found.verdict.headline} (κ {found.hamu_q.kappa:+.3g}, cosθ {found.hamu_q.cos:+.3f}); starting with learning "
        f"rate {args.learning_rate:.3g} and a demand of {args.constraint:.0%} of what is possible"
    )
    return found


def new_trainer(
    model: Any,
    problem: UnlearningData[Any],
    args: UnlearnConfig,
    callbacks: list[TrainerCallback],
    collator: Callable[[Any], Mapping[str, Any]],
) -> UnlearnTrainer:
    """A trainer for this problem that prints nothing by itself."""
    args.disable_tqdm = True
    trainer = UnlearnTrainer(
        model,
        args,
        retain_dataset=problem.retain,
        forget_dataset=problem.forget,
        test_dataset=problem.test,
        data_collator=collator,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class StepLog(TrainerCallback):
    """Writes the settings, then a line per step to steps.jsonl and layers.jsonl, once a first step was taken."""

    trainer: UnlearnTrainer | None = None

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], resume: bool) -> None:
        self._folder, self._settings, self._resume = folder, settings, resume
        self._begun = False
        self._lines: list[dict[str, Any]] = []
        self._layers = LayerLog(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a run that is resumed, steps after the checkpoint will be taken once more."""
        if self._resume:
            self._folder.keep_lines("steps.jsonl", lambda line: line["step"] <= state.global_step)
            self._layers.resume(state.global_step, self._folder.count_lines("steps.jsonl"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once a step was taken, and no sooner, an earlier run may give way; a checkpoint may come next."""
        if self._has_begun():
            self.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Append the figures of a step; figures that are not finite become null, which JSON can hold."""
        if "taken" in logs:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
            self._lines.append({"step": state.global_step, **finite})
            if self.trainer is not None:
                self._layers.take(state.global_step, self.trainer)
        if self._has_begun():
            self.begin()

    def begin(self) -> None:
        """Let an earlier run give way, and write the settings."""
        if not self._begun:
            self._folder.write_config(self._settings)
            self._begun = True
        for line in self._lines:
            self._folder.append_line("steps.jsonl", line)
        self._lines.clear()
        self._layers.write()

    def _has_begun(self) -> bool:
        return self._begun or (self.trainer is not None and self.trainer.steps_taken > 0)
