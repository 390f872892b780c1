"""`hamu.assess`, `hamu.evaluate` and `hamu.attack`: measure, and train nothing that stays."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from transformers import set_seed

from hamu import files
from hamu.assess import Assessment, assess_model, check_settings
from hamu.core.gram import SIDES
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy
from hamu.data import TextRecords, collate, encode, read_text, subset
from hamu.data.text import loose_words
from hamu.errors import HamuError
from hamu.evaluation import attacks, build_metrics, forget_quality, tofu_report
from hamu.evaluation.answers import PERTURBED
from hamu.evaluation.attacks import AttackData, AttackResult, AttackSettings, Kind, attack_each
from hamu.evaluation.membership import attacker_words
from hamu.evaluation.memorization import gibberish, knowmem
from hamu.evaluation.predictions import splits_alike
from hamu.evaluation.reports import open_unlearning
from hamu.files import MINIATURE
from hamu.report.page import answers_page
from hamu.report.pictures import plot_attacks, plot_frontiers
from hamu.report.run import answered
from hamu.unlearning.goals import NOTHING_TELLS, choose_goal, goal_lines, goal_report
from hamu.unlearning.jobs.named_metrics import named_metrics
from hamu.unlearning.jobs.options import OF_TRAINING, TOFU_SETS, AssessOptions, EvaluateOptions
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.tasks import Problem, Task, TextTask, choose_task
from hamu.unlearning.jobs.training import useless_words
from hamu.unlearning.record.inputs import saved_model_entry, set_entries
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.logs import silent, task_bar

_REAL_ANSWERS = 1000  # that tell language from gibberish
_LOOKED_AT = 200  # retain records, before an assessment
_UNFINISHED = "Whether it lasts is open: the attacks have not come to their end."
_ROLES = {"model": attacks.UNLEARNED, "original": attacks.ORIGINAL, "retain": attacks.RETRAINED}


@dataclass(frozen=True)
class Assessed:
    """Result of `assess`."""

    folder: Path  # with assess.json and frontier.png
    assessment: Assessment = field(repr=False)  # all figures, and the verdict
    forget_file: str = ""  # whose rows those of the forget records are, if not those of the data


@dataclass(frozen=True)
class Attacked:
    """Result of `attack`."""

    folder: Path  # with attack.json and attack.png
    forget_name: str
    result: AttackResult = field(repr=False)  # curves and robustness by attack and model


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`."""

    folder: Path  # with evaluation.json
    forget_name: str
    report: dict[str, Any] = field(repr=False)  # the figures
    lines: tuple[str, ...]  # the standing against the goal, or the reason why there is none
    attacked: Attacked | None


def assess(*, console: Console | None = None, **options: Any) -> Assessed:
    """Say before a run how hard it is, what it will cost, and whether to start.

    The verdict is the exit code: 0, 3 (it costs) or 4 (next to nothing is free, or no step is
    possible). Takes the options of unlearn, but for --auto and what belongs to it, --lasting,
    --dry_run and --resume.
    """
    settings = settings_of("assess", options)
    asked, args = settings.of(AssessOptions), settings.of(UnlearnConfig)
    task = choose_task(settings, console or silent())
    how: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "max_grad_norm": args.max_grad_norm or None,
        "batch_size": args.per_device_train_batch_size,
        "most_batches": asked.assess_batches,
        "curvature_samples": asked.curvature_samples,
        "bootstrap_memory": asked.bootstrap_memory,
    }
    check_settings(**how)
    folder, problem = task.start()
    task.settle_adapter()
    task.tell_unused("on an assessment", {"bf16", "fp16"}, options)
    set_seed(args.seed)  # of a new adapter
    model = task.start_model(str(task.run.model)).to(args.device)
    problem = task.fitted_problem(model, problem)
    method = args.build_method()
    if not isinstance(method, HamuQ | HamuU):
        method = HamuQ(args.constraint, args.constraint_mode)  # type: ignore[arg-type]
    instead = "" if method.name == args.method else f", as {args.method} has no constraint"
    task.announce(problem, f": assessed for {method.name}{instead}")
    usual = (None, CrossEntropy.name)
    others = [f"{name} to {side}" for side, name in args.objectives().items() if name not in usual]
    if others:
        known = f"cross-entropy on both sides, but {args.method} has another loss"
        task.tell(f"assessed with {known}: {', '.join(others)}. Hardness and cost may differ")
    some = task.predict(model, subset(problem.retain, _LOOKED_AT, args.seed))
    if useless := useless_words({"retain": some}, model):
        task.tell(f"warning: {useless}")
    with folder:
        with task_bar(task.console) as bar:
            shown = bar.add_task("assess", total=None)
            found = assess_model(
                model,
                problem.retain,
                problem.forget,
                collate=collate,
                method=method,
                blocks=args.blocks,  # type: ignore[arg-type]
                conflicts=asked.conflicts,
                seed=args.seed,
                progress=lambda n, of: bar.update(shown, completed=round(n), total=round(of)),
                **how,
            )
        named = {"forget_set": problem.forget_name, "objectives_of_the_run": args.objectives()}
        # the figures first: they show whose folder this is
        folder.write_json(files.ASSESSMENT, named | found.record())
        folder.write_config(settings.given)
        plot_frontiers(found.frontiers, found.method, folder.path / files.FRONTIER)
    file = settings.value("forget_data")
    return Assessed(folder.path, found, Path(file).name if file else "")


def evaluate(*, console: Console | None = None, **options: Any) -> Evaluated:
    """Measure a model on the retain, forget and test data."""
    settings = settings_of("evaluate", options)
    build_metrics()  # a broken one is to cost no run
    task = choose_task(settings, console or silent())
    folder, problem = task.start()
    asked, retain_model = settings.of(EvaluateOptions), task.run.retain_model
    named = named_metrics(task, problem, asked)
    tofu = _tofu_sets(task, problem, asked) if isinstance(task, TextTask) else {}
    task.tell_unused("on a measurement", {*OF_TRAINING}, options)
    of_attacks = settings.of(AttackSettings)
    attacks = attacks_on(task, problem) if of_attacks.attacks else None
    task.tell_unused("without --attacks", set() if attacks else {*vars(of_attacks)}, options)
    goal = choose_goal(problem.sets(), asked, has_retain_model=retain_model is not None)
    with folder:
        reference, original, ratios = None, None, None
        if retain_model is not None:
            other, reference = task.predictions(retain_model, problem)
            if isinstance(task, TextTask) and "forget" in tofu:
                ratios = _tofu(task, other, {"forget": tofu["forget"]})["forget"]["truth_ratios"]
            del other
        if goal is not None and goal.kind == "unseen" and task.original_model is not None:
            original = task.predictions(task.original_model, problem, only=("test",))[1]
        model, predictions = task.predictions(str(task.run.model), problem)
        report = task.report(predictions, problem, reference)
        report["goal"] = None
        if goal is not None:
            others = {"original": original, "retain_model": reference}
            report["goal"] = goal_report(goal, predictions, problem.forget.rows, **others)
        lines = [NOTHING_TELLS] if goal is None else goal_lines(report["goal"])
        lines += filter(None, [attacker_words(report), useless_words(predictions, model)])
        # first what is known, whatever becomes of what takes longer
        folder.write_json(files.EVALUATION, report)
        folder.write_config(settings.given)
        if isinstance(task, TextTask):
            if tofu:
                report["tofu"] = _tofu(task, model, tofu, asked.generate)
                if ratios is not None:
                    ours = report["tofu"]["forget"]["truth_ratios"]
                    report["tofu"]["forget_quality"] = forget_quality(ours, ratios)
                if report.get("privleak") is not None:  # beside forget quality
                    report["tofu"]["privleak"] = report["privleak"]
                folder.write_json(files.EVALUATION, report)
            if asked.generate:
                report["metrics"] |= _answers(task, folder, model, problem, asked.generate)
        report["metrics"] |= named(model, predictions)
        folder.write_json(files.EVALUATION, report)
        if asked.format:
            folder.write_json(files.OPEN_UNLEARNING, open_unlearning(report))
        del model
        attacked = None if attacks is None else attacks(folder)
    return Evaluated(folder.path, problem.forget_name, report, tuple(lines), attacked)


def _tofu_sets(task: TextTask, problem: Problem, asked: EvaluateOptions) -> dict[str, TextRecords]:
    """Read the data of TOFU; of forget and retain records those with answers in these sets."""

    def answers_of(texts: TextRecords) -> list[str]:
        return [" ".join(record.answer.split()) for record in texts.records]

    named = {name.removesuffix("_perturbed"): getattr(asked, name) for name in TOFU_SETS}
    sets = {n: task.read(task.located(place), "train") for n, place in named.items() if place}
    for name in filter(sets.__contains__, SIDES):
        texts, known = sets[name], {*answers_of(problem.sets()[name])}
        mine = [i for i, answer in enumerate(answers_of(texts)) if answer in known]
        if len(mine) < len(texts):
            away = f"answers of {named[name]} are not in the {name} set"
            fate = "they are left out of" if mine else "all the same, all are in"
            task.tell(f"{len(texts) - len(mine)} of {len(texts)} {away}; {fate} TOFU's figures")
            sets[name] = texts.select(mine) if mine else texts
    if sets:
        tokenizer = task.load_tokenizer(str(task.run.model), task.run.base_model)
        for texts in sets.values():
            for one in (texts, texts.answering(PERTURBED)):
                encode(one, tokenizer, task.data.max_length)
    return sets


def _tofu(
    task: TextTask, model: Any, sets: Mapping[str, TextRecords], generate: int = 0
) -> dict[str, Any]:
    how = (task.args.eval_batch_size, task.length_for(model), generate, task.args.seed)
    with task.evaluation_precision():
        return tofu_report(model, task.tokenizer, sets, *how)


def _answers(
    task: TextTask, folder: RunFolder, model: Any, problem: Problem, most: int
) -> dict[str, float | None]:
    """Write answers side by side, as a page and as JSON lines; returns their figures."""
    models = [("answer", model, task.tokenizer)]
    if task.original_model:
        original = task.load_model(task.original_model)
        models = [("before", original, task.tokenizer), ("after", model, models[0][2])]
    pages, lines = {}, []
    found: dict[str, float | None] = {}
    for name in ("forget", "retain"):
        texts = task.some_records(problem.sets()[name], most)
        if not all(record.prompt for record in texts.records):
            task.tell(f"no answers are generated for the {name} set: plain text has no prompt")
            continue
        answers = {}
        for label, one, task.tokenizer in models:
            answers[label] = task.answers_of(one.to(task.args.device), texts)
        pages[name] = page = answered(texts, answers)
        for row in page:
            line: dict[str, Any] = {"set": name, "prompt": row.prompt, "expected": row.expected}
            line |= {label: {"answer": text, "rouge": r} for label, text, r in row.answers}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        _, own, rouge = zip(*(row.answers[-1] for row in page), strict=True)
        known = knowmem(own, [row.expected for row in page], task.tokenizer)
        found |= {f"{name}_rouge": fmean(rouge), f"{name}_knowmem": known.mean().item()}
        if name == "forget":
            real = task.some_records(problem.retain, _REAL_ANSWERS).records
            found["gibberish"] = gibberish(own, [record.answer for record in real])
    if pages:
        folder.write_text(files.ANSWERS_PAGE, answers_page(pages), private=True)
        folder.write_text(files.ANSWERS, "".join(lines), private=True)
    task.tokenizer = models[-1][2]
    return found


def attack(*, console: Console | None = None, **options: Any) -> Attacked:
    """Fine-tune copies of a model, and measure whether what was forgotten comes back."""
    task = choose_task(settings_of("attack", options), console or silent())
    folder, problem = task.start()
    task.tell_unused("on an attack, which has settings of its own", {*OF_TRAINING}, options)
    run = attacks_on(task, problem)
    with folder:
        attacked = run(folder)
        folder.write_config(task.given)
    return attacked


def _unknown(texts: TextRecords, problem: Problem) -> TextRecords:
    """The texts that the problem does not hold, but for case, punctuation and template."""

    def contents(record: Any) -> set[str]:
        whole, answer = map(loose_words, (f"{record.prompt} {record.answer}", record.answer))
        return {whole, answer} if answer.count(" ") > 2 else {whole}

    known = {
        one
        for data in (problem.retain, problem.forget)
        for r in data.records
        for one in contents(r)
    }
    return texts.select([i for i, r in enumerate(texts.records) if not contents(r) & known])


def attacks_on(task: Task, problem: Problem) -> Callable[[RunFolder], Attacked]:
    """Check the attacks asked for; returns what runs them on all models and saves the result."""
    settings = task.settings.of(AttackSettings)
    kind: Kind = "text" if isinstance(task, TextTask) else "image"
    names = settings.names(kind)
    task.settle_adapter()
    unrelated, named = None, settings.unrelated_data
    if attacks.RELEARN_UNRELATED in names:
        texts = task.read(task.located(named), "train") if named else read_text(MINIATURE)
        unrelated = _unknown(texts, problem)
        if left_out := len(texts) - len(unrelated):
            which = f"{left_out} of {len(texts)} unrelated texts"
            task.tell(f"{which} are among those to retain or to forget and are left out")
    elif named is not None:
        only = attacks.RELEARN_UNRELATED
        raise HamuError(f"unrelated_data {named} has no effect without the attack {only}")
    models = task.named_models()
    fitted_sets = {  # what does not load, or fit, is to cost no attack
        key: task.fitted_problem(task.start_model(name), problem).forget
        for key, name in models.items()
    }
    for other, forget in fitted_sets.items():
        if not splits_alike(forget, fitted_sets["model"]):
            raise HamuError(
                f"the {other} model splits the forget records into other tokens than the unlearned "
                f"one, or reads fewer, whose losses do not compare; leave it out"
            )
    forget_set = set_entries("forget", problem.forget)["forget set"]

    def loaded(bar: Progress) -> Iterator[tuple[str, Any, AttackData]]:
        for key, name in models.items():
            bar.update(TaskID(0), description=f"attacks on the {_ROLES[key]} model")
            set_seed(task.args.seed)  # of a new adapter
            model = task.on_device(task.start_model(name))
            fitted = task.fitted_problem(model, problem)
            more = task.fitted(model, unrelated)[0] if unrelated else None
            form = (task.args.eval_batch_size, more, task.tokenizer)
            yield _ROLES[key], model, AttackData(fitted.retain, fitted.forget, *form)

    def run(folder: RunFolder) -> Attacked:
        with task_bar(task.console) as bar:
            job = bar.add_task("attacks", total=len(models) * settings.work(names, kind))
            advance = partial(bar.advance, job)
            named: dict[str, Any] = {}
            each = attack_each(loaded(bar), settings, task.args.seed, advance)
            for result, (key, name) in zip(each, models.items(), strict=True):
                named[_ROLES[key]] = saved_model_entry(name, task.base_of(name))
                so_far: dict[str, Any] = {"complete": len(named) == len(models)}
                if not so_far["complete"]:
                    so_far |= {"lasts": None, "verdict": _UNFINISHED}
                is_packed = task.run.load_in_4bit
                of = {"models": named, "forget_set": forget_set, "load_in_4bit": is_packed}
                folder.write_json(files.ATTACK, result.to_json() | so_far | of)
        plot_attacks(result, folder.path / files.ATTACK_PICTURE)
        return Attacked(folder.path, problem.forget_name, result)

    return run
