"""`hamu compare`: several methods, constraints, learning rates and seeds, from one model and on one problem."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console

from hamu.cli import main
from hamu.cli.options import CompareOptions, DataOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.problem import inputs_of, open_problem
from hamu.cli.run_settings import every_option
from hamu.cli.running import run_waiting
from hamu.core.methods import method_classes
from hamu.errors import HamuError
from hamu.evaluation import build_metrics
from hamu.files import COMPARISON, COMPARISON_PICTURE, COMPARISON_TABLES, RECORD
from hamu.report import plot_comparison
from hamu.report.comparison import (
    CAPTION,
    SETTINGS,
    columns_of,
    csv_table,
    latex_page,
    markdown_page,
    notes,
    start_line,
    volumes_line,
    written,
)
from hamu.report.tables import plain_table
from hamu.unlearning.compare import Cell, Children, Comparison, Plan, Runs, cells
from hamu.unlearning.compare.rows import Row, check_same_inputs, trajectory
from hamu.unlearning.run_folder import RunFolder, holds_a_comparison
from hamu.unlearning.trainer import UnlearnConfig

_SHOWN = (*COMPARISON_TABLES, COMPARISON_PICTURE)  # made when all runs have ended
_SEVERAL = {
    "--constraint": "--constraints",
    "--learning_rate": "--learning_rates",
    "--seed": "--seeds",
}


def run(argv: list[str], console: Console) -> int:
    """Run what is not finished, print and save the table and the picture."""
    environment = dict(os.environ)  # of the runs; reading settings changes it
    _check_flags(argv)
    parsed = parse(
        "compare",
        "Unlearn by several methods, with several constraints, learning rates and seeds, and compare what comes out. "
        "Takes the options of unlearn, but for --method, a goal, --dry_run and --resume. The same command again goes "
        "on where it was.",
        argv,
        DataOptions,
        RunOptions,
        CompareOptions,
        UnlearnConfig,
    )
    run_options, options, args = (
        parsed.of(RunOptions),
        parsed.of(CompareOptions),
        parsed.of(UnlearnConfig),
    )
    given = parsed.given
    _check(options)
    build_metrics()  # a broken one is to cost no run
    grid = cells(
        options.methods or method_classes(),
        options.constraints or [args.constraint],
        options.learning_rates or [args.learning_rate],
        options.seeds or [args.seed],
    )
    goes_on = holds_a_comparison(Path(args.output_dir))
    task, folder, problem = open_problem(
        parsed.of(DataOptions), run_options, args, given, console, resume=goes_on
    )
    if task.is_local(str(run_options.model)) and not Path(str(run_options.model)).is_dir():
        raise HamuError(
            f"the model {run_options.model} is not there; give a folder written by `hamu train`"
        )
    task.settle_adapter(given)
    shared = {
        name: value for name, value in given.items() if name not in (*vars(options), "output_dir")
    }
    with folder, TemporaryDirectory(prefix="hamu-") as place:
        plans = {cell: _planned(cell, shared, Path(place)) for cell in grid}
        folder.prepare()
        flags = ("--trust_remote_code",) if run_options.trust_remote_code else ()
        runs = Runs(
            folder,
            plans,
            every_option,
            lambda: inputs_of(task, problem),
            overwrite=run_options.overwrite,
            flags=flags,
        )
        console.print(
            f"forget {len(problem.forget)} {task.noun} ({problem.forget_name}), retain {len(problem.retain)}; "
            f"{len(grid)} runs, {len(grid) - len(runs.waiting)} of them finished before"
        )
        folder.remove(
            *_SHOWN
        )  # runs may change from here on, and what shows them comes after the last
        run_waiting(runs, Children(options.jobs, environment, main), console, "compare")
        _compare(runs, folder, f"Forgetting {len(problem.forget)} {task.noun}", console)
    return 0


def _compare(runs: Runs, folder: RunFolder, title: str, console: Console) -> None:
    """Show and save the table and the picture."""
    finished = runs.folders()
    check_same_inputs(finished)
    comparison = runs.comparison()
    table, page, tex, drawing = _SHOWN
    folder.write_text(table, csv_table(comparison.rows))
    folder.write_text(page, markdown_page(comparison))
    folder.write_text(tex, latex_page(comparison))
    show(comparison, console)
    others = [
        path.parent.name
        for path in folder.path.glob(f"*/{RECORD}")
        if path.parent.name not in finished
    ]
    if others:
        console.print(
            f"not in this table: {len(others)} more in {folder.path}; name their settings too to have all in one",
            soft_wrap=True,
        )
    if not finished:
        raise HamuError(
            f"no run finished, of {len(runs)}; the reasons are printed above and in {folder.path / COMPARISON}"
        )
    drawn = [
        (row["method"], *trajectory(finished[row["run"]]))
        for row in comparison.rows
        if row["run"] in finished
    ]
    picture = folder.path / drawing
    plot_comparison(drawn, comparison.hypervolumes, picture, title)
    console.print(
        f"the table is in {folder.path} as comparison.md, .tex, .csv and .json, the picture in {picture}",
        soft_wrap=True,
    )


def _check_flags(argv: list[str]) -> None:
    """Refuse flags that compare has no place for, before their values are looked at."""
    given = {
        "--" + word[2:].partition("=")[0].replace("-", "_")
        for word in argv
        if word.startswith("--")
    }
    if "--resume" in given:
        raise HamuError("compare needs no --resume: the same command again goes on where it was")
    for one, several in _SEVERAL.items():
        if one in given and several in given:
            raise HamuError(f"{several} takes the place of {one}; leave out one of them")


def _check(options: CompareOptions) -> None:
    for name in ("constraints", "learning_rates"):
        for value in getattr(options, name) or []:
            if not math.isfinite(value):
                raise HamuError(f"{name} {value} must be finite numbers")
    if options.jobs < 1:
        raise HamuError(f"jobs {options.jobs} must be at least 1")


def _planned(cell: Cell, shared: Mapping[str, Any], place: Path) -> Plan:
    """The settings of a run in a file, once it is sure that they fit together."""
    path = place / f"{cell.name}.yaml"
    path.write_text(yaml.safe_dump(cell.settings(shared), allow_unicode=True), encoding="utf-8")
    try:
        return Plan(path, every_option(path))
    except HamuError as error:
        raise HamuError(f"{cell.name}: {error}") from error


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, the means over seeds, the hypervolumes, and the runs that ended before their last step."""
    _show_table(comparison.rows, console)
    if comparison.means:
        console.print("means over seeds ± standard deviation:")
        _show_table(comparison.means, console)
    for line in (start_line(comparison), CAPTION, volumes_line(comparison), *notes(comparison)):
        if line:
            console.print(line, soft_wrap=True)


def _show_table(rows: Sequence[Row], console: Console) -> None:
    """Print a table as wide as it must be; a setting that is the same in all rows is left out."""
    same = [column for column in SETTINGS[1:] if len({row.get(column.key) for row in rows}) == 1]
    columns = [column for column in columns_of(rows) if column not in same]
    right = tuple(number for number, column in enumerate(columns) if column.form)
    table = plain_table(*(column.head for column in columns), right=right)
    table.collapse_padding = True
    for row in rows:
        table.add_row(*(written(row, column) for column in columns))
    table.width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table, crop=False)
