"""`hamu.assess`, `hamu.evaluate` and `hamu.attack`: measure, and train nothing that stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from hamu.assess import Assessment, assess_model, check_settings
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy
from hamu.data import TextRecords, UnlearningData, encode, read_text
from hamu.data.sources import MINIATURE
from hamu.errors import HamuError
from hamu.evaluation import TofuSets, build_metrics, forget_quality, tofu_report
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
from hamu.evaluation.attacks import AttackData, attack_all, check_can_quantize
from hamu.evaluation.tofu import PERTURBED
from hamu.files import (
    ANSWERS,
    ANSWERS_PAGE,
    ASSESSMENT,
    ATTACK,
    ATTACK_PICTURE,
    EVALUATION,
    FRONTIER,
)
from hamu.models.language import load_tokenizer
from hamu.report import plot_frontiers
from hamu.report.observations import AnsweredRecord, answered
from hamu.report.page import answers_page
from hamu.report.pictures import plot_attacks
from hamu.unlearning.goal_report import goal_lines, goal_report
from hamu.unlearning.goals import NOTHING_TELLS, choose_goal
from hamu.unlearning.jobs.kinds import TextTask, choose_task
from hamu.unlearning.jobs.options import AssessOptions, EvaluateOptions
from hamu.unlearning.jobs.progress import silent, task_bar
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.task import TOFU_SETS, Task
from hamu.unlearning.record.record import plain
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig


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
    settings = settings_of("assess", options)
    asked, args = settings.of(AssessOptions), settings.of(UnlearnConfig)
    task = choose_task(settings, console or silent())
    how: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "max_grad_norm": args.clip_norm,
        "batch_size": args.per_device_train_batch_size,
        "most_batches": asked.assess_batches,
        "curvature_samples": asked.curvature_samples,
        "bootstrap_memory": asked.bootstrap_memory,
    }
    check_settings(**how)
    folder, problem = task.start()
    task.check_models()
    task.settle_adapter()
    set_seed(args.seed)  # of a new adapter
    model = task.start_model(str(task.run.model)).to(args.device)
    problem = task.fitted_problem(model, problem)
    method = args.build_method()
    if not isinstance(method, HamuQ | HamuU):
        method = HamuQ(args.constraint, args.constraint_mode)  # type: ignore[arg-type]
    _announce(task, problem, method, args)
    with task_bar(task.console) as bar:
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
        named = {"forget_set": problem.forget_name, "objectives_of_the_run": args.objectives()}
        # the figures first: they show whose folder this is
        path = folder.write_json(ASSESSMENT, named | found.record())
        folder.write_config(settings.given)
        plot_frontiers(found.frontiers, found.method, folder.path / FRONTIER)
    return Assessed(folder.path, path, folder.path / FRONTIER, found)


def _announce(
    task: Task, problem: UnlearningData[Any], method: HamuQ | HamuU, args: UnlearnConfig
) -> None:
    """Name the problem, and the difference between the assessment and the run to come."""
    instead = "" if method.name == args.method else f", as {args.method} has no constraint"
    task.announce(problem, f": assessed for {method.name}{instead}")
    others = [
        f"{name} to {side}"
        for side, name in args.objectives().items()
        if name not in (None, CrossEntropy.name)
    ]
    if others:
        task.console.print(
            f"assessed with cross-entropy on both sides, but {args.method} has another loss: "
            f"{', '.join(others)}. How hard that is, and what it costs, may differ",
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
    settings = settings_of("evaluate", options)
    build_metrics()  # a broken one is to cost no run
    task = choose_task(settings, console or silent())
    folder, problem = task.start()
    task.check_models()
    asked = settings.of(EvaluateOptions)
    sets = _tofu_sets(task, asked) if isinstance(task, TextTask) else TofuSets()
    attacks = _attacks(task, problem) if settings.of(AttackSettings).attacks else None
    goal = choose_goal(
        problem.sets(),
        asked.goal,
        asked.target_forget_loss,
        asked.target_share,
        has_retain_model=task.run.retain_model is not None,
    )
    reference, ratios = _of_retain_model(task, problem, sets)
    original = None
    if goal is not None and goal.kind == "unseen" and task.original_model is not None:
        original = task.predictions(task.original_model, problem, only=("test",))[1]
    model, predictions = task.predictions(str(task.run.model), problem)
    report = task.report(predictions, problem, reference)
    report["goal"] = None
    if goal is not None:
        report["goal"] = goal_report(goal, predictions, original=original, retain_model=reference)
    lines = [NOTHING_TELLS] if report["goal"] is None else goal_lines(report["goal"])
    attacked = None
    with folder:
        # first what is known, whatever becomes of what takes longer
        path = folder.write_json(EVALUATION, plain(report))
        folder.write_config(settings.given)
        if sets != TofuSets():
            report["tofu"] = tofu = _tofu(task, model, sets, asked.generate)
            if ratios is not None:
                tofu["forget_quality"] = forget_quality(tofu["forget"]["truth_ratios"], ratios)
            if report.get("privleak") is not None:
                tofu["privleak"] = report["privleak"]  # the table has it beside forget quality
            folder.write_json(EVALUATION, plain(report))
        if isinstance(task, TextTask) and asked.generate:
            _write_answers(task, folder, model, problem, asked.generate)
        if attacks is not None:
            del model
            attacked = _saved(attacks(), folder, problem)
    return Evaluated(folder.path, path, problem.forget_name, report, tuple(lines), attacked)


def _tofu_sets(task: TextTask, options: EvaluateOptions) -> TofuSets:
    """The data of TOFU's figures that are named, once a tokenizer has been tried on them."""
    named = [getattr(options, name) for name in TOFU_SETS]  # in the order of `TofuSets`
    read = [name and task.read(task.located(name), "train") for name in named]
    if any(read):
        run = task.run
        source, trusted = run.tokenizer or str(run.model), run.trust_remote_code
        tokenizer = load_tokenizer(source, run.base_model, trust_remote_code=trusted)
        for texts in filter(None, read):
            for one in (texts, texts.answering(PERTURBED)):
                encode(one, tokenizer, task.data.max_length)
    return TofuSets(*read)


def _of_retain_model(task: Task, problem: UnlearningData[Any], sets: TofuSets) -> tuple[Any, Any]:
    """The retain model's predictions, and its truth ratios for forget quality; None without."""
    if task.run.retain_model is None:
        return None, None
    model, reference = task.predictions(task.run.retain_model, problem)
    if sets.forget is None:
        return reference, None
    found = _tofu(task, model, TofuSets(forget=sets.forget), 0)
    return reference, found["forget"]["truth_ratios"]


def _tofu(task: Any, model: Any, sets: TofuSets, generate: int) -> dict[str, Any]:
    with task.evaluation_precision():
        return tofu_report(
            model,
            task.tokenizer,
            sets,
            task.args.eval_batch_size,
            task.length_for(model),
            generate or None,
            task.args.seed,
            generate=generate > 0,
        )


def _write_answers(
    task: TextTask, folder: RunFolder, model: Any, problem: UnlearningData[Any], most: int
) -> None:
    """Write the page of answers side by side, and the same as JSON lines."""
    original = task.original_model
    models = {"after" if original else "answer": (model, task.tokenizer)}
    if original:
        models = {"before": (task.load_model(original), task.tokenizer)} | models
    pages: dict[str, list[AnsweredRecord]] = {}
    lines = []
    for name in ("forget", "retain"):
        texts = task.some_records(problem.sets()[name], most)
        if not all(record.prompt for record in texts.records):
            task.console.print(
                f"no answers are generated for the {name} set: plain text has no prompt"
            )
            continue
        answers = {
            label: task.answers_of(one.to(task.args.device), tokenizer, texts)
            for label, (one, tokenizer) in models.items()
        }
        pages[name] = answered(texts, answers)
        for row in pages[name]:
            line: dict[str, Any] = {"set": name, "prompt": row.prompt, "expected": row.expected}
            line |= {label: {"answer": text, "rouge": r} for label, text, r in row.answers}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    if pages:
        folder.write_text(ANSWERS_PAGE, answers_page(pages), private=True)
        folder.write_text(ANSWERS, "".join(lines), private=True)


def attack(*, console: Console | None = None, **options: Any) -> Attacked:
    """Fine-tune copies of a model, and measure whether what was forgotten comes back.

    Args:
        console: shows progress; silent by default.
        options: the options of `hamu attack`, which --help-all lists, with the same defaults.

    Raises:
        HamuError: if an option or an attack is unknown or does not fit.
    """
    task = choose_task(settings_of("attack", options), console or silent())
    folder, problem = task.start()
    task.check_models()
    result = _attacks(task, problem)()
    with folder:
        attacked = _saved(result, folder, problem)
        folder.write_config(task.given)
    return attacked


def _saved(result: AttackResult, folder: RunFolder, problem: UnlearningData[Any]) -> Attacked:
    path = folder.write_json(ATTACK, plain(result.to_json()))
    plot_attacks(result, folder.path / ATTACK_PICTURE)
    return Attacked(folder.path, path, problem.forget_name, result)


def _attacks(task: Task, problem: UnlearningData[Any]) -> Callable[[], AttackResult]:
    """Check the attacks asked for; returns what runs them on one model after the other."""
    settings = task.settings.of(AttackSettings)
    kind: Kind = "text" if isinstance(task, TextTask) else "image"
    names = settings.names(kind)
    if QUANTIZE in names:
        check_can_quantize()
    task.settle_adapter()
    unrelated = _unrelated(task, problem, names)
    roles = {"model": UNLEARNED, "original": ORIGINAL, "retain": RETRAINED}
    models = {roles[key]: name for key, name in task.named_models().items()}

    def data_for(model: Any) -> AttackData:
        fitted = task.fitted_problem(model, problem)
        [others] = task.fitted(model, unrelated) if unrelated else [None]
        tokenizer = getattr(task, "tokenizer", None)
        sets = (fitted.retain, fitted.forget)
        return AttackData(*sets, task.collator(), task.args.eval_batch_size, others, tokenizer)

    def run() -> AttackResult:
        with task_bar(task.console) as bar:
            job = bar.add_task("attacks", total=len(models) * settings.work(names, kind))

            def loaded() -> Iterator[tuple[str, Any, AttackData]]:
                for role, name in models.items():
                    bar.update(job, description=f"attacks on the {role} model")
                    model = task.on_device(task.start_model(name))
                    yield role, model, data_for(model)

            return attack_all(
                loaded(), settings, task.args.seed, lambda steps: bar.advance(job, steps)
            )

    return run


def _unrelated(
    task: Task, problem: UnlearningData[Any], names: Collection[str]
) -> TextRecords | None:
    """Texts for relearn-unrelated, without those of the problem."""
    named = task.settings.of(AttackSettings).unrelated_data
    if RELEARN_UNRELATED not in names:
        if named is not None:
            raise HamuError(
                f"unrelated_data {named} has no effect without the attack {RELEARN_UNRELATED}; "
                f"leave it out"
            )
        return None
    texts = task.read(task.located(named), "train") if named else read_text(MINIATURE)
    known = {*problem.retain.digests(), *problem.forget.digests()}
    return texts.select([i for i, one in enumerate(texts.digests()) if one not in known])
