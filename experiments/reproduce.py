"""The paper's figures and tables, at any scale."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.paper import EXPERIMENTS, Computed, Experiment, Measured, Scale, Trained, Wanted
from experiments.paper.page import PAGE, VERDICTS, check_output, page, results_in, stands_for
from experiments.paper.planning import OF_EXPERIMENTS, PaperRuns
from experiments.paper.results import refreshed_result, result_of
from experiments.paper.stage import Order, Stage
from hamu.errors import HamuError, Interrupted, handling, unknown
from hamu.files import located
from hamu.report.tables import plain_table
from hamu.unlearning.compare.children import Call, Children
from hamu.unlearning.compare.runs import Plan, Row, check_same_inputs
from hamu.unlearning.jobs.comparison import run_job, run_waiting
from hamu.unlearning.jobs.options import DataOptions, EvaluateOptions
from hamu.unlearning.jobs.settings import Parser, every_option, settings_of
from hamu.unlearning.jobs.tasks import task_name
from hamu.unlearning.record.inputs import text_digest
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig

_RECIPES = {"image": "cifar10-resnet20", "text": "tofu-tiny"}


def run(argv: list[str], console: Console) -> int:
    """Run the experiments that are named, print what agrees, and write the page."""
    environment = dict(os.environ)  # of the runs; reading settings changes it
    options = _parser().parse_args(argv)
    if not options.names:
        _list(console)
        return 0
    chosen = _chosen(options.names)
    _check(options)
    output = RunFolder(options.output_dir, resume=True)
    check_output(output.path, EXPERIMENTS)
    names = [one.name for one in chosen]
    page(
        results_in(output.path, _without(names)), EXPERIMENTS
    )  # beside the new ones, so told now if they cannot be
    if options.redraw:
        _redraw(chosen, output, console)
        return 0
    work = RunFolder(options.work_dir or output.path / "work", resume=True)
    stages = {
        task: _stage(task, options, work.path)
        for task in dict.fromkeys(one.task for one in chosen if one.task)
    }
    own = [
        key
        for stage in stages.values()
        for key in OF_EXPERIMENTS
        if options.config and key in stage.scale.base
    ]
    if own:
        console.print(
            f"chosen by the experiments, whatever the settings say: {', '.join(own)}",
            soft_wrap=True,
        )
    if options.dry_run:
        _show_plan(chosen, stages, console)
        return 0
    for stage in stages.values():
        stage.check()
    if work.path.resolve() == output.path.resolve():
        work = output
    with output, work:
        for folder in (output, work):
            folder.prepare()
        children = Children(options.jobs, environment, run_job)
        stale = _stale(names, output.path)
        for task, stage in stages.items():
            wanted = [
                one for one in chosen if isinstance(one, Trained | Measured) and one.task == task
            ]
            _run_stage(stage, wanted, output, children, console, stale)
        for one in chosen:
            if isinstance(one, Computed):
                _write(one, result_of(one, one.compute()), output, console, stale)
    console.print(f"the page of all that has been run is {output.path / PAGE}", soft_wrap=True)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m experiments", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("names", nargs="*", help="figures and tables, or all; without any, they are listed")
    add(
        "--recipe",
        help="what to run them on; without --config cifar10-resnet20 for images, tofu-tiny for texts",
    )
    add("--config", help="settings of your own, which win over the recipe's")
    add("--data_dir", help="folder with the recipe's data")
    add(
        "--similar_data",
        help="texts: records with paraphrased_answer, which repeat the forget set; by default the recipe's",
    )
    add(
        "--model",
        help="an original model; without it one is trained by the recipe, for figure-10 one more on the paraphrases "
        "too",
    )
    add(
        "--fraction",
        type=float,
        default=1.0,
        help="of the data; batches shrink with it, so that the steps stay",
    )
    add(
        "--train_fraction",
        type=float,
        help="the share of the data that the original model is trained on; by default --fraction",
    )
    add("--epochs", type=float, help="of every run; by default the paper's")
    add("--learning_rate", type=float, help="of every run; by default the recipe's")
    add("--bf16", action="store_true", help="steps in bfloat16, evaluations in float32")
    add(
        "--seed",
        type=int,
        help="of the sample and of every run; by default that of the settings, else 42",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--jobs", type=int, default=1, help="run this many at a time, each in a process of its own")
    add("--output_dir", default="runs/reproduce", help="where figures and the page go")
    add("--work_dir", help="where data, models and runs are kept; by default work in --output_dir")
    add(
        "--redraw",
        action="store_true",
        help="run nothing: claims, pictures and page anew from the JSON that is there",
    )
    add("--dry_run", action="store_true", help="say what would be run, and how many steps")
    return parser


def _list(console: Console) -> None:
    table = plain_table("name", "in the paper", "runs on", "what it shows")
    for one in EXPERIMENTS.values():
        table.add_row(
            one.name,
            one.reference,
            {"image": "images", "text": "texts", "": "-"}[one.task],
            one.title,
        )
    console.print(table)
    console.print("python -m experiments NAME ... | all; --dry_run says what would be run.")


def _chosen(names: Sequence[str]) -> list[Experiment]:
    if "all" in names:
        return list(EXPERIMENTS.values())
    for name in names:
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, (*EXPERIMENTS, "all"))
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


def _check(options: argparse.Namespace) -> None:
    import torch

    if not 0 < options.fraction <= 1:
        raise HamuError(
            f"fraction {options.fraction} must be a share of the data, above 0 and at most 1"
        )
    if options.train_fraction is not None:
        if not options.fraction <= options.train_fraction <= 1:
            raise HamuError(
                f"train_fraction {options.train_fraction} must be from fraction {options.fraction} to 1: an original "
                f"model has seen all that the runs forget"
            )
        if options.model is not None:
            raise HamuError(
                "--train_fraction is for an original model that is trained here; leave it out with --model"
            )
    for name in ("epochs", "learning_rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise HamuError(f"{name} {value} must be positive")
    if options.jobs < 1:
        raise HamuError(f"jobs {options.jobs} must be at least 1")
    if options.device not in ("auto", "cpu", "cuda"):
        raise HamuError(f"device {options.device!r} is unknown; choose auto, cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise HamuError("there is no CUDA device; leave --device out")


def _stage(task: str, options: argparse.Namespace, work: Path) -> Stage:
    """Stage of the recipe and the user's own settings."""
    recipe = options.recipe or (None if options.config else _RECIPES[task])
    files = {"recipe": recipe, "config": options.config, "data_dir": options.data_dir or None}
    seeded = files | {"seed": options.seed}
    unlearning = settings_of("unlearn", seeded)
    data, args = unlearning.of(DataOptions), unlearning.of(UnlearnConfig)
    further = settings_of("evaluate", files).of(EvaluateOptions)
    train = settings_of("train", seeded).given
    is_text = task_name(data) == "text"
    settings = _settings_name(recipe, options.config, {"seed": args.seed} | train)
    if task == "image" and is_text:
        raise HamuError(
            f"recipe {settings} is of texts, but some of these run on images; name only those that do not"
        )
    paraphrases = options.similar_data
    if is_text and paraphrases is None and further.forget_perturbed is not None:
        paraphrases = located(further.forget_perturbed, data.data_dir)
    scale = Scale(
        settings,
        unlearning.given,
        is_text,
        options.fraction,
        options.epochs,
        options.learning_rate,
        args.seed,
        paraphrases is not None,
    )
    device = {"use_cpu": True} if options.device == "cpu" else {}
    device |= {"bf16": True, "full_precision_eval": True} if options.bf16 else {}
    share = options.train_fraction or options.fraction
    return Stage(scale, train, device, options.model, share, paraphrases, work)


def _settings_name(recipe: str | None, config: str | None, train: Mapping[str, Any]) -> str:
    """Name of the settings; that of a file has a digest of the settings that train the original model."""
    if config is None:
        return str(recipe)
    told = {
        key: value for key, value in train.items() if key != "data_dir"
    }  # a sample knows what it is of
    own = f"{Path(config).stem}-{text_digest(json.dumps(told, sort_keys=True))[:8]}"
    return f"{recipe}-{own}" if recipe else own


def _show_plan(chosen: Sequence[Experiment], stages: Mapping[str, Stage], console: Console) -> None:
    table = plain_table("name", "runs", "epochs", "steps", right=(1, 2, 3))
    everything: dict[str, Wanted] = {}
    for one in chosen:
        wanted = one.runs(stages[one.task].scale) if one.task else {}
        epochs = sorted({w.epochs for w in wanted.values()})
        length = ", ".join(f"{e:g}" for e in epochs) or "-"
        table.add_row(
            one.name, str(len(wanted)), length, str(sum(w.steps for w in wanted.values()))
        )
        for w in wanted.values():
            key = repr(
                (one.task, w.method, sorted(w.changes.items()), w.steps_per_epoch, w.similar)
            )
            if key not in everything or everything[key].epochs < w.epochs:
                everything[key] = w
    console.print(table)
    steps = sum(w.steps for w in everything.values())
    console.print(
        f"together, each run made once: {len(everything)} runs, {steps} steps of both sides at most"
    )
    for stage in stages.values():
        if stage.model is None:
            runs = [
                w
                for one in chosen
                if stages.get(one.task) is stage
                for w in one.runs(stage.scale).values()
            ]
            both = ", and one on the paraphrases too" if any(w.similar for w in runs) else ""
            console.print(
                f"and an original model{both}, {stage.trained_on} by the settings {stage.scale.recipe}; --model gives "
                f"one"
            )


def _run_stage(
    stage: Stage,
    experiments: Sequence[Trained | Measured],
    output: RunFolder,
    children: Children,
    console: Console,
    stale: set[str],
) -> None:
    scale = stage.scale
    with RunFolder(stage.runs, resume=True) as folder:
        order = Order(stage, experiments)
        for similar in order.settings_of_data:
            training = stage.training(similar)
            if training is not None:
                of = ", on the paraphrases too" if similar else ""
                console.print(f"training the original model by the settings {scale.recipe}{of}")
                _train(training, children)
        console.print(
            f"settings {scale.recipe}, {scale.fraction:g} of the data, {stage.sample.retain} records to retain"
        )
        for one in experiments:
            rows: dict[str, Row] = {}
            finished: dict[str, Path] = {}
            while plans := _not_in(rows, order.plans(one)):
                runs = PaperRuns(folder, plans, every_option, lambda: stage.inputs)
                instead = " in place of longer ones that failed" if rows else ""
                before = len(runs) - len(runs.waiting)
                console.print(
                    f"{one.name}: {len(runs)} runs{instead}, {before} of them finished before"
                )
                run_waiting(runs, children, console, one.name)
                rows |= {row["run"]: row for row in runs.rows}
                finished |= runs.folders()
                for runs_of_one in order.by_model(finished):
                    check_same_inputs(runs_of_one, of=("original model",))
                order.pass_over(rows)
            _write(one, order.result(one, rows), output, console, stale)


def _not_in(rows: Mapping[str, Row], plans: Iterable[Plan]) -> list[Plan]:
    """The plans of runs that have no row."""
    return [plan for plan in plans if plan.name not in rows]


def _train(training: Call, children: Children) -> None:
    with handling(children.ask_to_end):
        reasons = [ended.reason for ended in children.make([training])]
    if children.asked_by:
        raise Interrupted(
            f"interrupted by {signal.Signals(children.asked_by).name} while the original model was trained; the same "
            f"command goes on with it",
            children.asked_by,
        )
    for reason in reasons:
        if reason:
            raise HamuError(f"the original model was not trained: {reason}")


def _redraw(chosen: Sequence[Experiment], output: RunFolder, console: Console) -> None:
    """Of those that are there; which ones are not, the page says."""
    results = results_in(output.path, {one.name: one for one in chosen})
    if not results:
        raise HamuError(
            f"{output.path} holds no result of {', '.join(one.name for one in chosen)}; leave out --redraw"
        )
    refreshed = {
        name: refreshed_result(EXPERIMENTS[name], result) for name, result in results.items()
    }
    stale = _stale(refreshed, output.path)
    with output:
        output.prepare()
        for name, result in refreshed.items():
            _write(EXPERIMENTS[name], result, output, console, stale)


def _stale(names: Iterable[str], folder: Path) -> set[str]:
    """Experiments of which there is a result that cannot be shown: it is damaged, or of another version."""
    found = set()
    for name in names:
        try:
            page(results_in(folder, {name: EXPERIMENTS[name]}), EXPERIMENTS)
        except HamuError:
            found.add(name)
    return found


def _without(names: Collection[str]) -> dict[str, Experiment]:
    """All experiments but these."""
    return {name: one for name, one in EXPERIMENTS.items() if name not in names}


def _write(
    one: Experiment, result: Mapping[str, Any], output: RunFolder, console: Console, stale: set[str]
) -> None:
    """The figures, then the picture that is drawn from them, then the page; what agrees goes to the screen.

    Args:
        one: the experiment.
        result: what has come out.
        output: where to.
        console: the screen.
        stale: experiments whose results cannot be shown until they are made, as this one is now.
    """
    output.write_json(f"{one.name}.json", result)
    one.draw(result["figures"], output.path / f"{one.name}.png")
    stale.discard(one.name)
    output.write_text(PAGE, page(results_in(output.path, _without(stale)), EXPERIMENTS))
    instead = stands_for(dict(result))
    console.print(
        f"{one.name}, {one.reference}: {one.title}{instead and f' ({instead})'}",
        style="bold",
        soft_wrap=True,
    )
    for claim in result["claims"]:
        ours, paper = (
            f"{c:.4g}" if isinstance(c, float) else c for c in (claim["ours"], claim["paper"])
        )
        beside = "" if paper is None else f" (paper: {paper})"
        verdict = VERDICTS[claim["holds"]]
        console.print(f"  {verdict}: {claim['text']}: {ours or '-'}{beside}", soft_wrap=True)
