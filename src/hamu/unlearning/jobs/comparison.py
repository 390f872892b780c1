"""`hamu.compare`: methods, constraints, learning rates and seeds on one problem."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console

from hamu.core.methods import method_classes
from hamu.errors import HamuError, Interrupted
from hamu.evaluation import build_metrics
from hamu.files import COMPARISON_PICTURE, COMPARISON_TABLES, RECORD
from hamu.report.pictures import plot_comparison
from hamu.report.tables import csv_table, latex_page, markdown_page
from hamu.unlearning.compare.children import Children
from hamu.unlearning.compare.runs import (
    Cell,
    Comparison,
    Plan,
    Runs,
    cells,
    check_same_inputs,
    trajectory,
)
from hamu.unlearning.jobs.options import CompareOptions
from hamu.unlearning.jobs.progress import handling, silent, task_bar
from hamu.unlearning.jobs.settings import every_option, settings_of
from hamu.unlearning.jobs.tasks import choose_task
from hamu.unlearning.run_folder import RunFolder, holds_a_comparison
from hamu.unlearning.trainer import UnlearnConfig


@dataclass(frozen=True)
class Compared:
    """Result of `compare`."""

    folder: Path  # with comparison.json, .csv, .md, .tex and .png
    comparison: Comparison = field(repr=False)  # rows, means over seeds and hypervolumes
    finished: int  # how many runs finished,
    runs: int  # of how many,
    others: int  # and how many more are in the folder


def compare(*, console: Console | None = None, **options: Any) -> Compared:
    """Unlearn by several methods, constraints, learning rates and seeds, and compare the results.

    Takes the options of unlearn, but for --method, a goal, --dry_run and --resume. Each run has a
    process of its own. The same command again goes on where it was.
    """
    environment = dict(os.environ)  # of the runs; reading settings changes it
    settings = settings_of("compare", options)
    asked, args = settings.of(CompareOptions), settings.of(UnlearnConfig)
    build_metrics()  # a broken one is to cost no run
    grid = cells(
        asked.methods or method_classes(),
        asked.constraints or [args.constraint],
        asked.learning_rates or [args.learning_rate],
        asked.seeds or [args.seed],
    )
    task = choose_task(settings, console or silent())
    folder, problem = task.start(resume=holds_a_comparison(Path(str(args.output_dir))))
    task.settle_adapter()
    own = {*vars(asked), "output_dir"}
    shared = {name: value for name, value in settings.given.items() if name not in own}
    with folder, TemporaryDirectory(prefix="hamu-") as place:
        plans = [_planned(cell, shared, Path(place)) for cell in grid]
        folder.prepare()
        runs = Runs(
            folder,
            plans,
            every_option,
            lambda: task.inputs_of(problem),
            overwrite=task.run.overwrite,
            options={"trust_remote_code": task.run.trust_remote_code},
        )
        before = len(grid) - len(runs.waiting)
        task.announce(problem, f"; {len(grid)} runs, {before} of them finished before")
        folder.remove(*COMPARISON_TABLES, COMPARISON_PICTURE)  # runs may change from here on
        run_waiting(runs, Children(asked.jobs, environment, run_job), task.console, "compare")
        return _compared(runs, folder, f"Forgetting {len(problem.forget)} {task.noun}")


def _planned(cell: Cell, shared: Mapping[str, Any], place: Path) -> Plan:
    """The settings of a run in a file, once they fit together."""
    path = place / f"{cell.name}.yaml"
    path.write_text(yaml.safe_dump(cell.settings(shared), allow_unicode=True), encoding="utf-8")
    try:
        return Plan(cell.name, cell.columns(), path, every_option(path))
    except HamuError as error:
        raise HamuError(f"{cell.name}: {error}") from error


def _compared(runs: Runs, folder: RunFolder, title: str) -> Compared:
    """Save the tables and the picture."""
    finished = runs.folders()
    check_same_inputs(finished)
    comparison = runs.comparison()
    contents = (csv_table(comparison.rows), markdown_page(comparison), latex_page(comparison))
    for name, content in zip(COMPARISON_TABLES, contents, strict=True):
        folder.write_text(name, content)
    drawn = [
        (row["method"], *trajectory(finished[row["run"]]))
        for row in comparison.rows
        if row["run"] in finished
    ]
    if drawn:
        picture = folder.path / COMPARISON_PICTURE
        plot_comparison(drawn, comparison.hypervolumes, picture, title)
    others = {path.parent.name for path in folder.path.glob(f"*/{RECORD}")} - finished.keys()
    return Compared(folder.path, comparison, len(finished), len(runs), len(others))


def run_job(job: str, options: Mapping[str, Any]) -> None:
    """Call a job by its name, in a child process."""
    getattr(import_module("hamu.unlearning.jobs"), job)(**options)


def run_waiting(runs: Runs, children: Children, console: Console, command: str) -> None:
    """Run what waits, a line for each that ends; a signal interrupts once all under way ended."""
    with handling(children.ask_to_end), task_bar(console) as bar:
        for row in bar.track(runs.run(children), total=len(runs.waiting), description=command):
            end = f" failed: {row['failed']}"
            if not row["failed"]:
                end = (
                    f": ΔL_f {row['forget_gain']:+.4g}, -ΔL_r {row['retain_gain']:+.4g}, "
                    f"{row['steps']} steps, {row['seconds']:.0f} s"
                )
            console.print(f"{row['run']}{end}", soft_wrap=True)
    if children.asked_by and runs.waiting:
        raise Interrupted(
            f"interrupted by {signal.Signals(children.asked_by).name}; {len(runs.waiting)} runs "
            f"are not finished; the same command goes on with them",
            children.asked_by,
        )
