"""`hamu.train` and `hamu.unlearn`: the jobs that change a model and save it; or plan it."""

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, set_seed

from hamu.core.distributed import from_main, is_main, world_size
from hamu.core.gram import SIDES
from hamu.errors import HamuError, Interrupted, handling, reading
from hamu.evaluation import build_metrics
from hamu.evaluation.membership import attacker_words
from hamu.evaluation.predictions import Predictions
from hamu.files import EVALUATION, MERGED, MODEL, RECORD, file_digest, read_json
from hamu.models import first_not_finite, storage
from hamu.unlearning import record
from hamu.unlearning.goals import forgotten_words, has_share
from hamu.unlearning.jobs.options import RunOptions
from hamu.unlearning.jobs.plan import RunPlan, plan
from hamu.unlearning.jobs.settings import recorded_settings, settings_of
from hamu.unlearning.jobs.tasks import WAYS, Task, choose_task
from hamu.unlearning.record.inputs import Inputs, check_same, with_settings
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig, UnlearnTrainer, train_original
from hamu.unlearning.trainer.config import without_effect
from hamu.unlearning.trainer.logs import ProgressBar, StepLog, kept_open, silent
from hamu.unlearning.trainer.promise import kept_in_words
from hamu.unlearning.trainer.resumable import ResumableTrainer, check_finite
from hamu.unlearning.trainer.sides import first_not_finite_loss, set_figures
from hamu.unlearning.trainer.trainer import quiet_trainer

_NO_STEP = "interrupted before this process took a step"
_EXPECTED = ("expected_retain", "expected_forget")
_OF_A_FORGET_SET = ("rho", "forget_seed", "allow_missing")
_HARDLY = 0.05  # a probability that is 5% lower or higher


@dataclass(frozen=True)
class Trained:
    """Result of `train`."""

    folder: Path
    figures: dict[str, Any] = field(repr=False)  # losses and accuracies by set, and the seconds
    was_complete: bool = False  # the run to resume had already ended
    merge_failure: str = ""  # reason why `merge` failed

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.folder / MODEL


@dataclass(frozen=True)
class Unlearned(Trained):
    """Result of `unlearn`; its figures are those of evaluation.json.

    They are "before" and "after", the trajectory, "goal" with the standings (None if nothing
    defines forgotten), and how the run ended.
    """

    lines: tuple[str, ...] = ()  # the course of the run and what of it is saved

    @property
    def record_digest(self) -> str:
        """The SHA-256 of record.json; "" in a process that does not write it."""
        return file_digest(self.folder / RECORD) if is_main() else ""


def train(*, console: Console | None = None, **options: Any) -> Trained | RunPlan:
    """Train the original model; with `without_forget`, the retain model; with `dry_run`, plan it.

    Raises:
        HamuError: also if training diverged.
    """
    console = console or silent()
    settings = settings_of("train", options)
    run = settings.of(RunOptions)
    if run.model is None:
        raise HamuError("name the model with --model: resnet20, tiny-llama, or a saved one")
    unused = [way for way in WAYS if options.get(way) is not None and not run.without_forget]
    if unused:
        raise HamuError(
            f"{unused[0]} {options[unused[0]]} has no effect on training with all data; give "
            f"--without_forget to leave these records out"
        )
    if run.dry_run:
        return plan(settings, console)
    task = choose_task(settings, console)
    task.tell_unused("on training", {"retain_model", *_EXPECTED}, options)
    if not run.without_forget:
        task.tell_unused("without --without_forget", {*_OF_A_FORGET_SET}, options)
    task.classes_of = None if task.is_built_in(run.model) else run.model
    folder = task.folder()
    if run.resume and _is_complete(folder, EVALUATION):
        return Trained(folder.path, read_json(folder.path / EVALUATION), was_complete=True)
    task.settle_adapter()
    with folder:
        return _train(task, folder)


def _is_complete(folder: RunFolder, last: str) -> bool:
    """True for a run with its last file and its results; a HamuError names what is damaged."""
    place, again = folder.path / MODEL, "and --resume makes it anew"
    if not (folder.has(last) and folder.has(EVALUATION) and place.is_dir()):
        return False
    with reading(f"the model in {place} is damaged", f"; remove that folder, {again}"):
        if not storage.open_tensors(place.glob("*.safetensors")):
            raise ValueError("it has no weights")
    why = record.read_record(folder.path)[1] if last == RECORD else ""
    if why:
        raise HamuError(f"{folder.path / RECORD} is damaged: {why}; remove it, {again}")
    return True


def _train(task: Task, folder: RunFolder) -> Trained:
    args, start, resume = task.args, task.classes_of, task.run.resume
    if task.run.without_forget:
        problem = task.problem()
        data, test = problem.retain, problem.test
        more = f", {len(problem.forget)} left out ({problem.forget_name})"
        if start is not None and task.trained_on_others(start, problem):
            task.tell(
                f"warning: {start} was trained on other records than the retain set, by its "
                f"inputs.json; if those left out are among them, start from the model before that"
            )
    else:
        data, test = task.train_and_test()
        more = f" of {data.source}"
    task.console.print(f"{len(data)} training {task.noun}{more}")
    set_seed(args.seed)
    model = task.new_model(str(task.run.model), data)
    folder.check_room(_saved_bytes(task, model))
    data, test = task.fitted(model, data, test)
    sets = {"training": data, "test": test}
    inputs = from_main(lambda: task.inputs(sets, {"original": start}))
    if resume:
        check_same(folder.path, inputs)
    args.disable_tqdm = True
    bar = ProgressBar(task.console, "train")
    begin_folder = partial(folder.begin, task.given, with_settings(inputs, task.given))

    @contextmanager
    def around(trainer: ResumableTrainer) -> Iterator[None]:
        # an earlier run gives way only to a first checkpoint, or once training has succeeded
        trainer.before_saving, trainer.beside_model = begin_folder, task.beside_model()
        with bar, leaving_in_order("train", trainer):
            yield

    begin = time.perf_counter()
    train_original(model, data, args, [bar], test, resume=resume, around=around)
    figures = {"seconds": round(time.perf_counter() - begin, 1)}
    known = {name: one for name, one in (("train", data), ("test", test)) if one is not None}
    with finishing(task.console):
        figures |= set_figures({name: task.predict(model, one) for name, one in known.items()})
        check_finite("training", first_not_finite_loss(figures), args.learning_rate)
        report = {n: {f: figures[f"{n}_{f}"] for f in ("loss", "accuracy")} for n in known}
        report = {n: found | {"samples": len(known[n])} for n, found in report.items()}
        failure = _save(task, folder, model, begin_folder, base=start, reports={"": report})
        folder.write_json(EVALUATION, figures)
    return Trained(folder.path, figures, merge_failure=failure)


@contextmanager
def leaving_in_order(command: str, trainer: ResumableTrainer) -> Iterator[None]:
    """End training after its current step on the first signal, at once on a second one."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            lost = "what was done since the last checkpoint is lost"
            raise Interrupted(f"interrupted again; {lost}", number)
        received.append(number)
        trainer.interrupted_by = signal.Signals(number).name
        if not trainer.has_begun:
            raise Interrupted(_NO_STEP, number)

    with handling(note):
        yield
    if not trainer.was_interrupted:  # a signal after the last step is too late to matter
        return
    number = received[0] if received else signal.SIGTERM
    if not trainer.has_begun:  # the step that it came in was taken back
        raise Interrupted(_NO_STEP, number)
    step, folder = trainer.state.global_step, shlex.quote(str(trainer.args.output_dir))
    saved = f"step {step} is saved in {trainer.checkpoints.path(step)}"
    several = world_size() > 1
    here = os.environ.get("LOCAL_WORLD_SIZE", world_size())
    program = f"torchrun --nproc_per_node {here} -m hamu" if several else "hamu"
    way = f"go on with: {program} {command} --resume --output_dir {folder}"
    raise Interrupted(f"interrupted by {trainer.interrupted_by}; {saved}; {way}", number)


@contextmanager
def finishing(console: Console) -> Iterator[None]:
    """Let a first signal wait behind the last step: the model is all that the run has done."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise Interrupted("interrupted again; what it had not saved is lost", number)
        received.append(number)
        name = signal.Signals(number).name
        console.print(f"{name}: all steps are done; it ends when the model is measured and saved")

    with handling(note):
        yield


def unlearn(*, console: Console | None = None, **options: Any) -> Unlearned | RunPlan:
    """Unlearn the forget set from a model, by goal unless the options name how; or plan it.

    Raises:
        HamuError: also if no step could be taken, or the run diverged.
    """
    console = console or silent()
    settings = settings_of("unlearn", options)
    args, run = settings.of(UnlearnConfig), settings.of(RunOptions)
    args.check_processes()
    if not args.eval_on_start:
        raise HamuError("eval_on_start measures the baseline of every figure; leave it on")
    if run.dry_run:
        return plan(settings, console)
    place = Path(str(args.output_dir))
    if run.resume and _is_complete(RunFolder(place, resume=True), RECORD):
        return Unlearned(place, read_json(place / EVALUATION), was_complete=True)
    build_metrics()  # a broken one is to cost no run
    task = choose_task(settings, console)
    where = "by goal" if args.auto else f"with {args.method}"
    where += " and --lasting" if args.lasting else ""
    given = options if "recipe" in options else settings.given
    task.tell_unused(where, without_effect(args), given)
    task.tell_unused("without --dry_run", {*_EXPECTED}, options)
    folder, problem = task.start()
    task.settle_adapter()
    if (Path(str(run.model)).parent / RECORD).is_file():
        task.tell(
            f"{run.model} was unlearned before: give what it forgot in the forget set again; left "
            f"in --data it is learned again, and left out of both it may come back"
        )
    with folder:
        reference = None
        if run.retain_model is not None:
            reference = task.predictions(run.retain_model, problem)[1]
        set_seed(args.seed)
        model = task.start_model(str(run.model))
        folder.check_room(_saved_bytes(task, model))
        problem = task.fitted_problem(model, problem)
        inputs = from_main(lambda: task.inputs_of(problem))
        if run.resume:
            check_same(folder.path, inputs)
        task.announce(problem, f", by {args.method}")
        begin = partial(folder.begin, settings.given, with_settings(inputs, settings.given))
        log = StepLog(folder, begin, run.resume)
        bar = ProgressBar(console, args.method)
        known = reference and reference["forget"]
        trainer = quiet_trainer(model, problem, args, [log, bar], known)
        args.max_steps = trainer.args.max_steps  # for the record
        trainer.add_callback(_Doubt(trainer, task.tell))
        log.trainer, trainer.before_saving = trainer, log.save
        trainer.beside_model = task.beside_model()
        with bar, kept_open(trainer):
            with leaving_in_order("unlearn", trainer):
                trainer.train(resume_from_checkpoint="newest" if run.resume else None)
            with finishing(console):
                _measure_end(trainer)
        with finishing(console):
            return _finish(task, folder, problem, trainer, inputs, reference)


def _measure_end(trainer: UnlearnTrainer) -> None:
    """Measure the model unless the last step was measured; refuse one of no use."""
    if not trainer.steps_taken:
        why = trainer.stop_reason or "there was none to take"
        doubts = (trainer.goal_run.figures() or {}).get("doubts", ())
        why = "; ".join((why, *doubts))
        raise HamuError(f"no step was taken, the model is as it was: {why}")
    rate = trainer.args.learning_rate
    check_finite("unlearning", first_not_finite(trainer.model), rate)
    if not trainer.predictions:
        trainer.evaluate()
    start, now = (set_figures(found) for found in (trainer.start_predictions, trainer.predictions))
    check_finite("unlearning", first_not_finite_loss(now, start), rate)


def _finish(
    task: Task,
    folder: RunFolder,
    problem: Any,
    trainer: UnlearnTrainer,
    inputs: Inputs,
    reference: Any,
) -> Unlearned:
    reports = {
        "before": task.report(trainer.start_predictions, problem, reference),
        "after": task.report(trainer.predictions, problem, reference),
    }
    evaluation = reports | trainer.history()
    evaluation["guessing_loss"] = guessing_loss(trainer.predictions, trainer.model)
    failure = _save(
        task,
        folder,
        trainer.model,
        trainer.before_saving,
        base=str(task.run.model),
        method=trainer.args.method,
        forget_records=len(problem.forget),
        cut=record.cut_records(problem.forget),
        reports=reports,
        goal=evaluation["goal"],
    )
    folder.write_json(EVALUATION, evaluation)
    if is_main():
        record.write_record(
            folder,
            trainer,
            evaluation,
            problem=problem,
            chosen_by=task.chosen_by(),
            settings=recorded_settings(task.settings),
            inputs=inputs,
        )
    lines = tuple(_outcome(trainer, problem, evaluation))
    return Unlearned(folder.path, evaluation, merge_failure=failure, lines=lines)


def _saved_bytes(task: Task, model: Any) -> int:
    if not hasattr(model, "peft_config"):
        return sum(parameter.nbytes for parameter in model.parameters())
    trained, everything = model.get_nb_trainable_parameters()  # those in 4 bits one by one
    return int(4 * (everything if task.run.merge else trained))


def _save(
    task: Task, folder: RunFolder, model: Any, begin: Callable[[], object] | None, **card: Any
) -> str:
    """Save a model with its card, and merged if asked for; returns why that failed."""
    card |= {"four_bit": task.run.load_in_4bit}
    beside = *task.beside_model(), partial(record.write_model_card, **card)
    folder.save_model(model, *beside, begin=begin or folder.prepare)
    try:
        if task.run.merge and hasattr(model, "peft_config"):
            folder.save_model(storage.merged(model), *beside, name=MERGED)
    except HamuError as error:  # the adapter is saved and recorded all the same
        return str(error)
    return ""


def _outcome(trainer: UnlearnTrainer, problem: Any, evaluation: Any) -> Iterator[str]:
    """Lines on the course of the run, and on what of it was saved."""
    start, end = (set_figures(one) for one in (trainer.start_predictions, trainer.predictions))
    rate, guess, goal = trainer.args.learning_rate, evaluation["guessing_loss"], evaluation["goal"]
    yield (
        f"steps: {trainer.steps_taken} taken, {trainer.steps_skipped} not taken; the run ended at "
        f"step {trainer.state.global_step} because {trainer.stop.text}"
    )
    if useless := useless_words(trainer.start_predictions, trainer.model):
        yield f"at the start {useless}"
    if start["retain_loss"] <= guess < end["retain_loss"]:
        went = f"its retain loss went from {start['retain_loss']:.4f} to {end['retain_loss']:.4g}"
        way = f"lower --learning_rate {rate:g}, or end such a run by --max_retain_loss"
        yield f"the model is of no use: {went}, above the {guess:.2f} of guessing; {way}"
    controller = trainer.controller
    if controller is None:
        moves = [abs(end[f"{side}_loss"] - start[f"{side}_loss"]) for side in SIDES]
        may_warn = trainer.stop.kind == "all steps" and "forget" in trainer.sides
        if may_warn and max(moves) < _HARDLY:
            losses = (
                f"the forget loss was {start['forget_loss']:.4f} and is {end['forget_loss']:.4f}"
            )
            suits = trainer.args.method == "hamu-q" and trainer.args.forget_objective is None
            suits &= goal is None or not has_share({**goal, "after": goal["before"]})
            finds = ", --auto finds one" if suits else ""
            way = f"take more steps, or a higher rate (`hamu assess` suggests one{finds})"
            yield f"the model has hardly moved: {losses}, at learning rate {rate:g}; {way}"
        yield _best(trainer)
    else:
        if controller.goal_sentence not in trainer.stop.text:
            yield controller.goal_sentence
        if not controller.updates_of_best:
            yield "no step brought a better model: the one saved is that before the run"
    if goal is not None:
        before = f"before the run {goal['before']['forgotten']:,} were"
        is_more = goal["after"]["forgotten"] > goal["before"]["forgotten"]
        lasts = "; whether that lasts: hamu attack" if is_more else ""
        yield f"{forgotten_words(goal)}; {before}{lasts}"
    if attacker := attacker_words(evaluation["after"]):
        yield attacker
    if cut := record.cut_records(problem.forget):
        yield record.cut_words(cut, len(problem.forget))
    if trainer.promise is not None and trainer.pair.method.constrained is not None:
        yield kept_in_words(trainer.promise)


class _Doubt(TrainerCallback):
    """Say before the first step that a model does worse than guessing on what is to stay."""

    def __init__(self, trainer: UnlearnTrainer, tell: Callable[[str], None]) -> None:
        self._trainer, self._tell = trainer, tell

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the first evaluation."""
        found = self._trainer.start_predictions
        if not state.global_step and (said := useless_words(found, self._trainer.model)):
            self._tell(said)


def useless_words(predictions: Mapping[str, Any], model: Any) -> str:
    """Say that the retain loss is above that of guessing; "" if it is not."""
    loss, guess = set_figures(predictions)["retain_loss"], guessing_loss(predictions, model)
    fits = "the model is of no use, or tokenizer, template or labels do not fit it"
    if not math.isfinite(loss):
        return f"the retain loss is {loss}: the model is damaged, or rules out what is to stay"
    said = f"the retain loss is {loss:.4f}, above the {guess:.2f} of guessing: {fits}"
    return said if loss > guess else ""


def guessing_loss(predictions: Mapping[str, Any], model: Any) -> float:
    """The loss of a model that gives every class, or every token, the same probability."""
    if isinstance(predictions["retain"], Predictions):
        return math.log(predictions["retain"].logits.shape[1])
    return math.log(len(model.get_input_embeddings().weight))


def _best(trainer: UnlearnTrainer) -> str:
    """The best evaluation, and where its state is saved."""
    args, state = trainer.args, trainer.state
    name = str(args.metric_for_best_model).removeprefix("eval_")
    found = {e["step"]: e[f"eval_{name}"] for e in state.log_history if f"eval_{name}" in e}
    step = (max if args.greater_is_better else min)(found, key=found.__getitem__)
    best = trainer.restored
    saved = state.global_step if best is None else best
    if not step:
        better = f"no evaluated state was better by {name} than the model before the run"
        return f"{better}; the model saved is {'the last' if best is None else f'of step {best}'}"
    checkpoint = trainer.checkpoints.path(int(step))
    place = "which was not saved; --load_best_model_at_end with --save_strategy keeps it"
    if step == saved:
        place = "which is the model saved"
    elif checkpoint.exists():
        place = f"in {checkpoint}"
    return f"best {name} {found[step]:+.4g} at step {step}, {place}"
