"""`hamu.assess`, `hamu.evaluate` and `hamu.attack`: measure, and train nothing that stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.assess import Assessment, assess_model, check_settings
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy
from hamu.data import TextRecords, UnlearningData, read_text
from hamu.data.sources import MINIATURE
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.evaluation.attack_results import (
    ORIGINAL,
    QUANTIZE,
    RELEARN_UNRELATED,
    RETRAINED,
    UNLEARNED,
    AttackResult,
    AttackSettings,
    Kind,
)
from hamu.evaluation.attacks import AttackData, attack_model, check_can_quantize, collected
from hamu.files import ASSESSMENT, ATTACK, ATTACK_PICTURE, EVALUATION, FRONTIER
from hamu.report import plot_frontiers
from hamu.report.pictures import plot_attacks
from hamu.unlearning.goal_report import goal_lines, goal_report
from hamu.unlearning.goals import NOTHING_TELLS, choose_goal
from hamu.unlearning.jobs.options import (
    AssessOptions,
    DataOptions,
    EvaluateOptions,
    OriginalOptions,
    RunOptions,
)
from hamu.unlearning.jobs.problem import fitted_problem, open_problem, predictions_of
from hamu.unlearning.jobs.progress import silent, task_bar
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.jobs.text_evaluation import TextEvaluation
from hamu.unlearning.jobs.text_task import TextTask
from hamu.unlearning.record.record import plain
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.resumable import to_channels_last


@dataclass(frozen=True)
class Assessed:
    """Result of `assess`.

    Attributes:
        folder, figures, picture: the output folder, and the files in it.
        assessment: all figures, and the verdict.
    """

    folder: Path
    figures: Path
    picture: Path
    assessment: Assessment


@dataclass(frozen=True)
class Attacked:
    """Result of `attack`.

    Attributes:
        folder, figures: the output folder, and the file of figures in it.
        forget_name: the name of the forget set.
        result: curves and robustness by attack and model.
    """

    folder: Path
    figures: Path
    forget_name: str
    result: AttackResult


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`.

    Attributes:
        folder, figures: the output folder, and the file of figures in it.
        forget_name: the name of the forget set.
        report: the figures.
        lines: the standing against the goal, or the reason why there is none.
        attacked: result of the attacks; None without.
    """

    folder: Path
    figures: Path
    forget_name: str
    report: dict[str, Any]
    lines: tuple[str, ...]
    attacked: Attacked | None


def assess(*, console: Console | None = None, **options: Any) -> Assessed:
    """Measure before a run how hard it is and what it costs; the verdict names the decision.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu assess`, which --help-all lists, with the same defaults.

    Raises:
        HamuError: if an option is unknown or does not fit.
    """
    console = console or silent()
    settings = settings_of("assess", options)
    run = settings.of(RunOptions)
    asked = settings.of(AssessOptions)
    args = settings.of(UnlearnConfig)
    how: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "max_grad_norm": args.clip_norm,
        "batch_size": args.per_device_train_batch_size,
        "most_batches": asked.assess_batches,
        "curvature_samples": asked.curvature_samples,
        "bootstrap_memory": asked.bootstrap_memory,
    }
    check_settings(**how)
    task, folder, problem = open_problem(
        settings.of(DataOptions), run, args, settings.given, console
    )
    how["batch_size"] = args.per_device_train_batch_size  # the task may have its own default
    task.check_models()
    task.settle_adapter(settings.given)
    set_seed(args.seed)  # of a new adapter
    model = task.start_model(str(run.model)).to(args.device)
    problem = fitted_problem(task, model, problem)
    method = args.build_method()
    if not isinstance(method, HamuQ | HamuU):
        method = HamuQ(args.constraint, args.constraint_mode)  # type: ignore[arg-type]
    _announce(task, problem, method, args, console)
    with task_bar(console) as bar:
        shown = bar.add_task("assess", total=None)
        found = assess_model(
            model,
            problem.retain,
            problem.forget,
            collate=task.collator(),
            method=method,
            blocks=args.blocks,  # type: ignore[arg-type]
            conflicts=asked.conflicts,
            seed=args.seed,
            progress=lambda done, total: bar.update(
                shown, completed=round(done), total=round(total)
            ),
            **how,
        )
    with folder:
        said = {"forget_set": problem.forget_name, "objectives_of_the_run": args.objectives()}
        # the figures first: they show whose folder this is
        path = folder.write_json(ASSESSMENT, said | found.record())
        folder.write_config(settings.given)
        picture = folder.path / FRONTIER
        plot_frontiers(found.frontiers, found.method, picture)
    return Assessed(folder.path, path, picture, found)


def _announce(
    task: Task,
    problem: UnlearningData[Any],
    method: HamuQ | HamuU,
    args: UnlearnConfig,
    console: Console,
) -> None:
    """Name the problem, and how the run to come differs from the assessment."""
    instead = "" if method.name == args.method else f", as {args.method} has no constraint"
    console.print(
        f"forget {len(problem.forget)} {task.noun} ({problem.forget_name}), retain {len(problem.retain)}: assessed for "
        f"{method.name}{instead}"
    )
    others = [
        f"{name} to {side}"
        for side, name in args.objectives().items()
        if name not in (None, CrossEntropy.name)
    ]
    if others:
        console.print(
            f"assessed with cross-entropy on both sides, but {args.method} has another loss: {', '.join(others)}. How "
            f"hard that is, and what it costs, may differ",
            soft_wrap=True,
        )


def evaluate(*, console: Console | None = None, **options: Any) -> Evaluated:
    """Measure a model on the retain, forget and test data.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu evaluate`, which --help-all lists, with the same defaults.

    Raises:
        HamuError: if an option is unknown or does not fit.
    """
    console = console or silent()
    settings = settings_of("evaluate", options)
    run = settings.of(RunOptions)
    asked = settings.of(EvaluateOptions)
    args = settings.of(TrainConfig)
    build_metrics()  # a broken one is to cost no run
    task, folder, problem = open_problem(
        settings.of(DataOptions), run, args, settings.given, console, asked
    )
    task.check_models(asked)
    further = TextEvaluation(task, asked, args) if isinstance(task, TextTask) else None
    attacks, attacker = settings.of(AttackSettings), None
    if attacks.attacks:
        attacker = _Attacker(task, problem, attacks, asked.original_model, args, settings.given)
    goal = choose_goal(
        problem.sets(),
        asked.goal,
        asked.target_forget_loss,
        asked.target_share,
        has_retain_model=run.retain_model is not None,
    )
    reference = original = None
    if run.retain_model is not None:
        model, reference = predictions_of(task, run.retain_model, problem, args)
        if further is not None:
            further.ask_retain_model(model)
        del model  # gone before another is loaded
    if goal is not None and goal.kind == "unseen" and asked.original_model is not None:
        original = predictions_of(task, asked.original_model, problem, args, only=("test",))[1]
    model, predictions = predictions_of(task, str(run.model), problem, args)
    report = task.report(predictions, problem, reference, args)
    report["goal"] = None
    if goal is not None:
        report["goal"] = goal_report(goal, predictions, original=original, retain_model=reference)
    lines = [NOTHING_TELLS] if report["goal"] is None else goal_lines(report["goal"])
    attacked = None
    with folder:
        # first what is known, whatever becomes of what takes longer
        path = folder.write_json(EVALUATION, plain(report))
        folder.write_config(settings.given)
        if further is not None:
            further.measure(model, report)
            folder.write_json(EVALUATION, plain(report))
            for name, text in further.files(model, problem).items():
                folder.write_text(name, text, private=True)
        if attacker is not None:
            del model
            attacked = _saved(attacker.run(), folder, problem)
    return Evaluated(folder.path, path, problem.forget_name, report, tuple(lines), attacked)


def attack(*, console: Console | None = None, **options: Any) -> Attacked:
    """Fine-tune copies of a model, and measure whether what was forgotten comes back.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu attack`, which --help-all lists, with the same defaults.

    Raises:
        HamuError: if an option or an attack is unknown or does not fit.
    """
    console = console or silent()
    settings = settings_of("attack", options)
    run = settings.of(RunOptions)
    args = settings.of(TrainConfig)
    asked = settings.of(OriginalOptions)
    task, folder, problem = open_problem(
        settings.of(DataOptions), run, args, settings.given, console, asked
    )
    task.check_models(asked)
    attacks = settings.of(AttackSettings)
    attacker = _Attacker(task, problem, attacks, asked.original_model, args, settings.given)
    result = attacker.run()
    with folder:
        attacked = _saved(result, folder, problem)
        folder.write_config(settings.given)
    return attacked


def _saved(result: AttackResult, folder: RunFolder, problem: UnlearningData[Any]) -> Attacked:
    path = folder.write_json(ATTACK, plain(result.to_json()))
    plot_attacks(result, folder.path / ATTACK_PICTURE)
    return Attacked(folder.path, path, problem.forget_name, result)


class _Attacker:
    """Attacks of one problem, checked when it is made.

    Args:
        task: of the command.
        problem: as it was read.
        settings: which attacks.
        original: the model before unlearning, if it is named.
        args: settings of evaluation.
        given: the options that were given.

    Raises:
        HamuError: if an attack is unknown or cannot be run.
    """

    def __init__(
        self,
        task: Task[Any, Any, Any],
        problem: UnlearningData[Any],
        settings: AttackSettings,
        original: str | None,
        args: TrainConfig,
        given: Mapping[str, Any],
    ) -> None:
        self._task, self._problem, self._settings, self._args = task, problem, settings, args
        run = task.run_options
        self._models = {UNLEARNED: run.model, ORIGINAL: original, RETRAINED: run.retain_model}
        self._kind: Kind = "text" if isinstance(task, TextTask) else "image"
        self._names = settings.names(self._kind)
        if QUANTIZE in self._names:
            check_can_quantize()
        task.settle_adapter(given)
        self._unrelated = self._read_unrelated()

    def run(self) -> AttackResult:
        """Load and attack one model after the other."""
        models = {role: name for role, name in self._models.items() if name is not None}
        found, data = {}, None
        work = len(models) * self._settings.work(self._names, self._kind)
        with task_bar(self._task.console) as bar:
            job = bar.add_task("attacks", total=work)
            for role, name in models.items():
                bar.update(job, description=f"attacks on the {role} model")
                model = self._task.start_model(name).to(self._args.device)
                if self._args.channels_last:
                    to_channels_last(model)
                data = self._data_for(model)
                found[role] = attack_model(
                    model,
                    data,
                    self._settings,
                    seed=self._args.seed,
                    role=role,
                    advance=lambda steps: bar.advance(job, steps),
                )
        assert data is not None  # there is always an unlearned model
        return collected(found, data, self._settings)

    def _data_for(self, model: Any) -> AttackData:
        """The problem in the form that a model takes."""
        fitted = fitted_problem(self._task, model, self._problem)
        unrelated = None
        if self._unrelated:
            [unrelated] = self._task.fitted(model, self._unrelated)
        return AttackData(
            fitted.retain,
            fitted.forget,
            self._task.collator(),
            self._args.eval_batch_size,
            unrelated,
            getattr(self._task, "tokenizer", None),
        )

    def _read_unrelated(self) -> TextRecords | None:
        """Texts for relearn-unrelated, without those of the problem."""
        named = self._settings.unrelated_data
        if RELEARN_UNRELATED not in self._names:
            if named is not None:
                raise HamuError(
                    f"unrelated_data {named} has no effect without the attack {RELEARN_UNRELATED}; leave it out"
                )
            return None
        source = None if named is None else self._task.located(named)
        texts = read_text(MINIATURE) if source is None else self._task.read(source, "train")
        known = {*self._problem.retain.digests(), *self._problem.forget.digests()}
        return texts.select([i for i, one in enumerate(texts.digests()) if one not in known])
