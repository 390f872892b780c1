"""`hamu reproduce`: the paper's figures and tables, at any scale."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console

from hamu.cli.compare import run_waiting
from hamu.cli.options import DataOptions, EvaluateOptions, Parser, RunOptions, every_option, parse
from hamu.cli.tables import plain_table
from hamu.compare import Children, Plan
from hamu.compare.children import Call
from hamu.compare.runs import RECORD
from hamu.errors import HamuError
from hamu.paper import EXPERIMENTS, Claim, Experiment, Measurement, Scale, Wanted
from hamu.paper.outcome import Outcome
from hamu.paper.page import page, results_in
from hamu.paper.planning import PaperRun, PaperRuns, longest, run_of, settings_of
from hamu.paper.sampling import Sample, sample_images, sample_texts
from hamu.record.record import plain
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig, UnlearnConfig

_RECIPES = {"image": "cifar10-resnet20", "text": "tofu-tiny"}
_VERDICT = {True: "agrees", False: "does not agree", None: "cannot be told"}


@dataclass(frozen=True)
class Stage:
    """All that is the same for the runs of one task.

    Attributes:
        scale: of its experiments.
        train: the recipe's settings for `hamu train`.
        device: settings that say where runs are made.
        model: the original model, None to train one.
        paraphrases: where the forget set stands in other words, None if nowhere.
    """

    scale: Scale
    train: Mapping[str, Any]
    device: Mapping[str, Any]
    model: str | None
    paraphrases: str | None


def run(argv: list[str], console: Console) -> int:
    """Run the experiments that are named, print what agrees, and write the page."""
    environment = dict(os.environ)  # of the runs; reading settings changes it
    options = _parser().parse_args(argv)
    if not options.names:
        _list(console)
        return 0
    chosen = _chosen(options.names)
    _check(options)
    stages = {task: _stage(task, options) for task in dict.fromkeys(one.task for one in chosen if one.task)}
    if options.dry_run:
        _show_plan(chosen, stages, console)
        return 0
    output = RunFolder(options.output_dir, resume=True)
    work = RunFolder(options.work_dir or output.path / "work", resume=True)
    with output, work:
        work.prepare()
        children = Children(options.jobs, environment, work.lock)
        for task, stage in stages.items():
            of_task = [one for one in chosen if one.task == task]
            _run_stage(stage, of_task, work, output, children, console)
        for one in chosen:
            if not one.task:
                _write(one, {"scale": None, "runs": {}, "failed": {}}, one.figures({}, _NO_SCALE), output, console)
        path = output.write_text("README.md", page(results_in(output.path, EXPERIMENTS), EXPERIMENTS))
    console.print(f"the page of all that has been run is {path}")
    return 0


_NO_SCALE = Scale("", {}, False, 1.0, None, None, 42)  # for what is computed and not run


def _parser() -> Parser:
    parser = Parser(prog="hamu reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", help="figures and tables, or all; without any, they are listed")
    add("--recipe", help="what to run them on [images: cifar10-resnet20, texts: tofu-tiny]")
    add("--data_dir", help="folder with the recipe's data")
    add("--similar_data", help="texts: records with paraphrased_answer, which repeat the forget set [the recipe's]")
    add("--model", help="an original model; without it one is trained by the recipe on the fraction of the data")
    add("--fraction", type=float, default=1.0, help="of the data; batches shrink with it, so that the steps stay [1]")
    add("--epochs", type=float, help="of every run [the paper's]")
    add("--learning_rate", type=float, help="of every run [the recipe's]")
    add("--bf16", action="store_true", help="steps in bfloat16, evaluations in float32")
    add("--seed", type=int, default=42, help="of the sample and of every run [42]")
    add("--device", default="auto", help="auto, cpu or cuda [auto]")
    add("--jobs", type=int, default=1, help="run so many at a time, each in a process of its own [1]")
    add("--output_dir", default="runs/reproduce", help="where figures and the page go [runs/reproduce]")
    add("--work_dir", help="where data, models and runs are kept [work in --output_dir]")
    add("--dry_run", action="store_true", help="say what would be run, and how many steps")
    return parser


def _list(console: Console) -> None:
    table = plain_table("name", "in the paper", "runs on", "what it shows")
    for one in EXPERIMENTS.values():
        table.add_row(one.name, one.reference, {"image": "images", "text": "texts", "": "-"}[one.task], one.title)
    console.print(table)
    console.print("hamu reproduce NAME ... | all; --dry_run says what would be run.")


def _chosen(names: Sequence[str]) -> list[Experiment]:
    if "all" in names:
        return list(EXPERIMENTS.values())
    for name in names:
        if name not in EXPERIMENTS:
            raise HamuError(f"there is no {name} to reproduce; choose of {', '.join(EXPERIMENTS)}, or all")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


def _check(options: argparse.Namespace) -> None:
    import torch

    if not 0 < options.fraction <= 1:
        raise HamuError(f"fraction {options.fraction} must be a share of the data, above 0 and at most 1")
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


def _stage(task: str, options: argparse.Namespace) -> Stage:
    """What the recipe says."""
    recipe = options.recipe or _RECIPES[task]
    argv = ["--recipe", recipe] + (["--data_dir", options.data_dir] if options.data_dir else [])
    data, _, _, base = parse(
        "unlearn", "", [*argv, "--seed", str(options.seed)], DataOptions, RunOptions, UnlearnConfig
    )
    _, further, _ = parse("evaluate", "", argv, DataOptions, EvaluateOptions)
    train = parse("train", "", [*argv, "--seed", str(options.seed)], DataOptions, RunOptions, TrainConfig)[-1]
    is_text = data.task == "text"
    if not is_text and data.forget_class is None:
        raise HamuError(f"the recipe {recipe} names no class to forget; these experiments need one")
    if task == "image" and is_text:
        raise HamuError(f"recipe {recipe} is of texts, but some of these run on images; name only those that do not")
    paraphrases = options.similar_data
    if is_text and paraphrases is None and further.forget_perturbed is not None:
        paraphrases = str(Path(data.data_dir or "") / further.forget_perturbed)
    scale = Scale(
        recipe,
        base,
        is_text,
        options.fraction,
        options.epochs,
        options.learning_rate,
        options.seed,
        paraphrases is not None,
    )
    device = {"use_cpu": True} if options.device == "cpu" else {}
    device |= {"bf16": True, "full_precision_eval": True} if options.bf16 else {}
    return Stage(scale, train, device, options.model, paraphrases)


def _show_plan(chosen: Sequence[Experiment], stages: Mapping[str, Stage], console: Console) -> None:
    table = plain_table("name", "runs", "epochs", "steps", right=(1, 2, 3))
    everything: dict[str, Wanted] = {}
    for one in chosen:
        wanted = one.runs(stages[one.task].scale) if one.task else {}
        epochs = sorted({w.epochs for w in wanted.values()})
        length = ", ".join(f"{e:g}" for e in epochs) or "-"
        table.add_row(one.name, str(len(wanted)), length, str(sum(w.steps for w in wanted.values())))
        for w in wanted.values():
            key = repr((one.task, w.method, sorted(w.changes.items()), w.steps_per_epoch, w.similar))
            if key not in everything or everything[key].epochs < w.epochs:
                everything[key] = w
    console.print(table)
    steps = sum(w.steps for w in everything.values())
    console.print(f"together, each run made once: {len(everything)} runs, {steps} steps of both sides at most")
    for stage in stages.values():
        if stage.model is None:
            console.print(f"and an original model, trained by recipe {stage.scale.recipe}; --model gives one")


def _run_stage(
    stage: Stage,
    experiments: Sequence[Experiment],
    work: RunFolder,
    output: RunFolder,
    children: Children,
    console: Console,
) -> None:
    scale = stage.scale
    wanted = {one.name: one.runs(scale) for one in experiments}
    samples = {False: _sample(stage, work, similar=False)}
    if any(w.similar for runs in wanted.values() for w in runs.values()):
        samples[True] = _sample(stage, work, similar=True)
    model = _model(stage, samples[False], work, children, console)
    settings = {
        name: {
            key: settings_of(w, scale.base, samples[w.similar], model, scale.seed, stage.device)
            for key, w in runs.items()
        }
        for name, runs in wanted.items()
    }
    asked = {run_of(s): s for of_one in settings.values() for s in of_one.values()}
    whole = {run_of(settings[name][key]) for name, of_one in wanted.items() for key, w in of_one.items() if w.whole}
    folder = RunFolder(work.path / "runs", resume=True)
    made = longest(asked, _finished(folder.path), whole)
    with folder, TemporaryDirectory(prefix="hamu-") as place:
        plans = {run: _planned(run, asked, Path(place)) for run in dict.fromkeys(made.values())}
        folder.prepare()
        runs = PaperRuns(folder, plans, every_option)
        console.print(
            f"{', '.join(wanted)}: recipe {scale.recipe}, {scale.fraction:g} of the data, {samples[False].retain} "
            f"records to retain; {len(plans)} runs, {len(plans) - len(runs.waiting)} of them finished before",
            soft_wrap=True,
        )
        run_waiting(runs, children, console, "reproduce")
    rows = {row["run"]: row for row in runs.rows}
    for one in experiments:
        found, failed, listed = {}, {}, {}
        for key, w in wanted[one.name].items():
            own = settings[one.name][key]
            row = rows[made[run_of(own)].name]
            listed[key] = {
                "run": row["run"],
                "epochs": w.epochs,
                "learning_rate": float(own["learning_rate"]),
                "batch": own["per_device_train_batch_size"] * own["gradient_accumulation_steps"],
                "seconds": row["seconds"],
            }
            if row["failed"]:
                failed[key] = row["failed"]
            else:
                found[key] = Outcome(folder.path / row["run"], w.steps, w.steps_per_epoch)
        said = {
            "scale": {
                "recipe": scale.recipe, "fraction": scale.fraction, "retain": samples[False].retain, "seed": scale.seed,
                "device": _device_name(stage), "model": "given" if stage.model else "trained on the same data",
            },
            "runs": listed,
            "failed": failed,
        }  # fmt: skip
        if isinstance(one, Measurement):
            plain_run = scale.wanted("hamu-q", 1)
            figures = one.measure(
                settings_of(plain_run, scale.base, samples[False], model, scale.seed, stage.device), scale
            )
        else:
            figures = one.figures(found, scale)
        _write(one, said, figures, output, console)


def _planned(run: PaperRun, settings: Mapping[PaperRun, Mapping[str, Any]], place: Path) -> Plan:
    """The settings of a run in a file; a longer run that is at hand has those of the run that it serves."""
    own = next(s for other, s in settings.items() if other.setting == run.setting)
    path = place / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump({**own, "num_train_epochs": run.epochs}, allow_unicode=True), encoding="utf-8")
    return Plan(path, every_option(path))


def _finished(folder: Path) -> list[PaperRun]:
    found = []
    for record in folder.glob(f"*/{RECORD}"):
        setting, _, epochs = record.parent.name.rpartition("-e")
        method, _, digest = setting.rpartition("-")
        found.append(PaperRun(method, digest, float(epochs)))
    return found


def _sample(stage: Stage, work: RunFolder, *, similar: bool) -> Sample:
    scale = stage.scale
    with RunFolder(work.path / "data", resume=True) as folder:
        if scale.is_text:
            return sample_texts(scale.base, scale.fraction, scale.seed, folder, stage.paraphrases if similar else None)
        return sample_images(scale.base, scale.fraction, scale.seed, folder)


def _model(stage: Stage, sample: Sample, work: RunFolder, children: Children, console: Console) -> str:
    """The original model: the one that is given, or one that the recipe trains on the fraction of the data."""
    if stage.model is not None:
        if not Path(stage.model).is_dir() and not stage.model.startswith("hub:"):
            raise HamuError(f"the model {stage.model} is not there; give a folder written by `hamu train`")
        return stage.model
    scale = stage.scale
    of_data = ("data", "test_data", "forget_data", "data_dir")
    device = {key: value for key, value in stage.device.items() if key != "full_precision_eval"}
    settings = {k: v for k, v in stage.train.items() if k not in of_data} | dict(sample.settings) | device
    batch = int(settings.get("per_device_train_batch_size", 128))
    settings["per_device_train_batch_size"] = max(1, round(batch * scale.fraction))
    place = work.path / "models" / f"{scale.recipe}-{scale.fraction:g}-s{scale.seed}"
    if not (place / "evaluation.json").is_file():
        console.print(f"training the original model by recipe {scale.recipe}")
        with TemporaryDirectory(prefix="hamu-") as temporary:
            path = Path(temporary) / "train.yaml"
            path.write_text(yaml.safe_dump(settings), encoding="utf-8")
            begun = ("--resume",) if (place / "config.yaml").is_file() else ("--config", str(path), "--overwrite")
            for ended in children.make([Call("the original model", ("train", *begun, "--output_dir", str(place)))]):
                if ended.reason:
                    raise HamuError(f"the original model was not trained: {ended.reason}")
    return str(place / "model")


def _device_name(stage: Stage) -> str:
    import torch

    name = "cuda" if torch.cuda.is_available() and "use_cpu" not in stage.device else "cpu"
    return f"{name}, steps in bfloat16" if "bf16" in stage.device else name


def _write(
    one: Experiment, said: Mapping[str, Any], figures: Mapping[str, Any], output: RunFolder, console: Console
) -> None:
    """The figures, then the picture that is drawn from them; what agrees goes to the screen."""
    figures = plain(dict(figures))
    claims = one.claims(figures)
    result = {
        "name": one.name, "reference": one.reference, "title": one.title, "about": one.settings, **said,
        "claims": [claim.as_json() for claim in claims], "table": one.table(figures), "figures": figures,
    }  # fmt: skip
    output.write_json(f"{one.name}.json", plain(result))
    one.draw(figures, output.path / f"{one.name}.png")
    _show(one, claims, console)


def _show(one: Experiment, claims: Sequence[Claim], console: Console) -> None:
    console.print(f"{one.name} ({one.reference}): {one.title}", style="bold")
    for claim in claims:
        ours = f"{claim.ours:.4g}" if isinstance(claim.ours, float) else claim.ours or "-"
        paper = "" if claim.paper is None else f" (paper: {claim.paper})"
        console.print(f"  {_VERDICT[claim.holds]}: {claim.text}: {ours}{paper}", soft_wrap=True, markup=False)
