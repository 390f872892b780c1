"""`hamu.compare`: methods, constraints, learning rates and seeds on one problem."""

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu import files
from hamu.core.methods import build_method, method_classes
from hamu.errors import HamuError, Interrupted, counted, handling
from hamu.evaluation import AttackSettings, build_metrics
from hamu.evaluation.gains import Level
from hamu.files import read_json
from hamu.report.pictures import plot_comparison
from hamu.report.tables import csv_table, latex_page, markdown_page
from hamu.unlearning.compare import STRENGTHS, Cell, cells, random_cells
from hamu.unlearning.compare.children import Call, Children
from hamu.unlearning.compare.runs import Comparison, Plan, Runs, check_same_inputs, trajectory
from hamu.unlearning.jobs.measure import attacks_on
from hamu.unlearning.jobs.options import IN_FILES, NOT_TAKEN, CompareOptions
from hamu.unlearning.jobs.settings import every_option, settings_of
from hamu.unlearning.jobs.tasks import Problem, Task, choose_task
from hamu.unlearning.run_folder import MARK, RunFolder
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import unused_settings
from hamu.unlearning.trainer.logs import silent, task_bar


@dataclass(frozen=True)
class Compared:
    """Result of `compare`."""

    folder: Path  # with comparison.json, .csv, .md, .tex and .png
    comparison: Comparison = field(repr=False)  # rows, means over seeds and hypervolumes
    finished: int  # runs, of
    runs: int
    others: int  # runs that are in the folder besides


def compare(*, console: Console | None = None, **options: Any) -> Compared:
    """Unlearn by several methods, constraints, learning rates and seeds, and compare the results.

    Takes the options of unlearn, but for --method, --auto and what belongs to it, --lasting,
    --dry_run and --resume. Each run has a process of its own. The same command again goes on where
    it was. With `at` they are compared where they have forgotten, or paid, equally; with `trials`
    each method is tuned alike before.
    """
    environment = dict(os.environ)  # of the runs; reading settings changes it
    settings = settings_of("compare", options)
    asked, args = settings.of(CompareOptions), settings.of(UnlearnConfig)
    args.check_processes()
    attacks = settings.of(AttackSettings)
    _check_attacks(asked, args, attacks)
    build_metrics()  # a broken one is to cost no run
    methods, seeds = asked.methods or method_classes(), asked.seeds or [args.seed]
    grid = _grid(asked, args, methods, seeds)
    task = choose_task(settings, console or silent())
    task.tell_unused("on these runs", _without_effect(asked, attacks, methods), options)
    folder, problem = _started(task)
    task.settle_adapter()
    if attacks.attacks:
        attacks_on(task, problem)  # refuses what would fail after all runs
    model = str(task.run.model)
    own = {*vars(asked), *vars(attacks), *NOT_TAKEN["compare"], "output_dir"}
    shared = {name: value for name, value in settings.given.items() if name not in own}

    def planned(grid: Iterable[Cell]) -> list[Plan]:
        return [_planned(cell.name, cell.columns(), cell.settings(shared)) for cell in grid]

    plans = planned(grid)
    with folder:
        folder.prepare()
        runs = Runs(
            folder,
            plans,
            every_option,
            lambda: task.inputs_of(task.fitted_problem(task.load_model(model), problem)),
            overwrite=task.run.overwrite,
            options={"trust_remote_code": task.run.trust_remote_code},
            level=Level.parse(asked.at) if asked.at else None,
        )
        before = len(runs) - len(runs.waiting)
        task.announce(problem, f"; {len(runs)} runs, {before} of them finished before")
        # runs may change from here on
        folder.remove(*files.COMPARISON_TABLES, files.COMPARISON_PICTURE)
        children = Children(asked.jobs, environment, run_job)
        run_waiting(runs, children, task.console, "compare")
        if asked.trials is not None or attacks.attacks:
            runs.best = frozenset(runs.comparison().best_settings().values())
        if asked.trials is not None:
            winners = [cell for cell in grid if cell.setting in runs.best]
            more = planned(replace(cell, seed=seed) for cell in winners for seed in seeds[1:])
            plans += more
            runs.add(more)
            run_waiting(runs, children, task.console, "compare")
        if attacks.attacks:
            states = _states(runs, plans)
            runs.add(states)
            run_waiting(runs, children, task.console, "compare")
            _attack(runs, states, attacks, children, task.console)
        return _compared(runs, folder, f"Forgetting {counted(len(problem.forget), task.noun)}")


def _started(task: Task) -> tuple[RunFolder, Problem]:
    """The folder, of a comparison that has begun or of none, and the problem."""
    place = Path(str(task.args.output_dir))
    task.run.resume = all((place / name).is_file() for name in (MARK, files.COMPARISON))
    if not task.run.resume and (place / files.CONFIG).is_file():
        raise HamuError(
            f"{place} holds something else, which would be gone before the first run of this "
            f"comparison has begun; choose another --output_dir"
        )
    return task.start()


def _grid(
    asked: CompareOptions, args: UnlearnConfig, methods: Iterable[str], seeds: list[int]
) -> list[Cell]:
    """The settings of all runs; of a search the trials, with the first seed."""
    if asked.trials is not None:
        return random_cells(methods, asked.trials, args.learning_rate, seeds[0])
    rates = asked.learning_rates or [args.learning_rate]
    return cells(methods, asked.constraints or [args.constraint], rates, seeds)


def _attack(
    runs: Runs, states: list[Plan], attacks: AttackSettings, children: Children, console: Console
) -> None:
    """Attack the models of finished runs, but for those with the results of such attacks."""
    asked = {name: value for name, value in asdict(attacks).items() if value is not None}
    calls, folders = {}, runs.folders()
    for plan in (plan for plan in states if plan.name in folders):
        run = folders[plan.name]
        path = run / files.ATTACK_FOLDER / files.ATTACK
        known = read_json(path) if path.is_file() else {"complete": False}
        if not known.get("complete", True) or known["settings"] != asdict(attacks):
            places = {"model": str(run / files.MODEL), "output_dir": str(path.parent)}
            taken = {n: value for n, value in plan.settings.items() if n in IN_FILES["attack"]}
            options = {**taken, **asked, **runs.options, "overwrite": True, **places}
            calls[plan.name] = Call(plan.name, "attack", options)
            path.unlink(missing_ok=True)  # its figure is of another attack
            runs.read(plan.name)
    runs.save()
    ended = children.make([*calls.values()])
    with handling(children.ask_to_end), task_bar(console, shown=bool(calls)) as bar:
        for call in bar.track(ended, total=len(calls), description="attack"):
            why = f" failed: {call.reason}" if call.reason else ""
            console.print(f"{call.name}: attack{why}, {call.seconds:.0f} s", soft_wrap=True)
            runs.read(call.name)
            if not (call.reason and children.asked_by):
                del calls[call.name]
    _check_not_interrupted(children, len(calls))
    runs.save()


def _check_attacks(asked: CompareOptions, args: UnlearnConfig, attacks: AttackSettings) -> None:
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if attacks.attacks and (asked.at is None or schedule != "constant"):
        raise HamuError(
            f"attacks {attacks.attacks} are on the state at a loss, to which a run is repeated: "
            "give --at, and leave --lr_scheduler_type at constant"
        )


def _without_effect(
    asked: CompareOptions, attacks: AttackSettings, methods: Iterable[str]
) -> set[str]:
    unused = set.intersection(*(unused_settings(build_method(name)) for name in methods))
    unused |= {"constraints"} if "constraint" in unused else set()
    unused |= set() if asked.trials is None else {*STRENGTHS}  # which are drawn
    return unused | (set() if attacks.attacks else {*vars(attacks)})


def _states(runs: Runs, plans: Iterable[Plan]) -> list[Plan]:
    """Plans that end at the first evaluated state at the level, of the best settings."""
    steps: Mapping[str, Any] = {row["run"]: row.get("at_evaluated") for row in runs.rows}
    found = []
    for plan in plans:
        if plan.columns["setting"] in runs.best and steps.get(plan.name):
            step = int(steps[plan.name])
            settings = {**plan.settings, "max_steps": step, "load_best_model_at_end": False}
            name = f"{plan.name}{files.STATE}{step}"
            found.append(_planned(name, plan.columns, settings, plan.name))
    return found


def _planned(
    name: str, columns: Mapping[str, Any], settings: Mapping[str, Any], state_of: str | None = None
) -> Plan:
    try:
        return Plan(name, {**columns}, settings, every_option(settings), state_of)
    except HamuError as error:
        raise HamuError(f"{name}: {error}") from error


def _compared(runs: Runs, folder: RunFolder, title: str) -> Compared:
    finished = runs.folders()
    check_same_inputs(finished)
    comparison = runs.comparison()
    contents = (csv_table(comparison.rows), markdown_page(comparison), latex_page(comparison))
    for name, content in zip(files.COMPARISON_TABLES, contents, strict=True):
        folder.write_text(name, content)
    ended = [row for row in comparison.shown if row["run"] in finished]
    drawn = [(row["method"], *trajectory(finished[row["run"]])) for row in ended]
    if drawn:
        picture = folder.path / files.COMPARISON_PICTURE
        plot_comparison(drawn, comparison.hypervolumes, picture, title, comparison.level_gain)
    others = {path.parent.name for path in folder.path.glob(f"*/{files.RECORD}")}
    others = {name for name in others if re.sub(rf"{files.STATE}\d+$", "", name) not in finished}
    return Compared(folder.path, comparison, len(finished), len(runs), len(others))


def run_job(job: str, options: Mapping[str, Any]) -> None:
    """Call a job by its name, in a child process."""
    getattr(import_module("hamu.unlearning.jobs"), job)(**options)


def run_waiting(runs: Runs, children: Children, console: Console, command: str) -> None:
    """Run what waits, a line for each that ends; a signal interrupts once all under way ended."""
    shown = bool(runs.waiting)
    with handling(children.ask_to_end), task_bar(console, shown=shown) as bar:
        for row in bar.track(runs.run(children), total=len(runs.waiting), description=command):
            end = f" failed: {row['failed']}"
            if not row["failed"]:
                end = (
                    f": ΔL_f {row['forget_gain']:+.4g}, -ΔL_r {row['retain_gain']:+.4g}, "
                    f"{row['steps']} steps, {row['seconds']:.0f} s"
                )
            console.print(f"{row['run']}{end}", soft_wrap=True)
    _check_not_interrupted(children, len(runs.waiting))


def _check_not_interrupted(children: Children, left: int) -> None:
    if children.asked_by and left:
        name = signal.Signals(children.asked_by).name
        why = f"interrupted by {name}; not finished: {left}; the same command goes on"
        raise Interrupted(why, children.asked_by)
