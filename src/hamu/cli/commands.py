"""The commands: flags in, one call of a job, its result in words."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.cli import printed
from hamu.cli.flags import OwnParser, given_flags
from hamu.errors import HamuError
from hamu.report.tables import plain_table
from hamu.unlearning import jobs
from hamu.unlearning.record import TOLERANCE

_ABOUT = {
    "train": "Train the original model; with --without_forget, the retain model.",
    "unlearn": "Unlearn the forget set from a model.",
    "assess": "Say before a run how hard it is, what it will cost, and whether to start: exit code 0, 3 (it costs) or 4 "
    "(next to nothing is free, or no step is possible). Takes the options of unlearn, but for a goal, --dry_run and "
    "--resume.",
    "evaluate": "Measure a model on the retain, forget and test data.",
    "attack": "Fine-tune copies of a model and look whether what was forgotten comes back.",
    "compare": "Unlearn by several methods, with several constraints, learning rates and seeds, and compare what comes "
    "out. Takes the options of unlearn, but for --method, a goal, --dry_run and --resume. The same command again goes "
    "on where it was.",
}
_VERIFY = """Check the record of a run against its files, its model, and the data and models that its config.yaml
names, as far as they are still there. Prints a line for each statement of the record: holds, does not hold, or cannot
be checked. Exit code 1 if something does not hold. Nothing is written."""
_WORDS = {True: "holds", False: "does not hold", None: "cannot be checked"}


def run(command: str, argv: list[str], console: Console) -> int:
    """Run a command and print its result; returns the exit code."""
    if command not in _ABOUT:
        return _verify(argv, console)
    if command == "compare" and any(word.startswith("--resume") for word in argv):
        raise HamuError("compare needs no --resume: the same command again goes on where it was")
    options = given_flags(command, _ABOUT[command], argv)
    result = getattr(jobs, command)(console=console, **options)
    return _PRINT[type(result)](result, console) or 0


def add_permissions(parser: OwnParser) -> None:
    """The flags --hub and --trust_remote_code: what `NamedSources` may read and run."""
    parser.add_argument(
        "--hub", action="append", default=[], metavar="hub:OWNER/NAME",
        help="a data set or model of the run that may be read from the hub, by the name that it has in config.yaml; "
        "may be given several times. Without it what is of the hub is not looked at",
    )  # fmt: skip
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code that comes with a model, which can do anything",
    )


def _verify(argv: list[str], console: Console) -> int:
    parser = OwnParser("verify", _VERIFY)
    parser.add_argument("run", help="the --output_dir of a `hamu unlearn`")
    parser.add_argument(
        "--no_models",
        action="store_true",
        help="do not evaluate the models again, which takes most of the time",
    )
    add_permissions(parser)
    result = jobs.verify(**vars(parser.parse_args(argv)))
    for finding in result.findings:
        why = f": {finding.why}" if finding.why else ""
        console.print(f"{_WORDS[finding.holds]:18} {finding.statement}{why}", soft_wrap=True)
    near = " and ".join(f"{value:g} ({precision})" for precision, value in TOLERANCE.items())
    console.print(
        f"\n{result.count(True)} hold, {result.count(False)} do not hold, {result.count(None)} cannot be checked; "
        f"figures may differ by {near}, relatively if above 1\nthe SHA-256 of record.json is {result.record_digest}",
        soft_wrap=True,
    )
    return 1 if result.count(False) else 0


def _plan(result: jobs.RunPlan, console: Console) -> None:
    table = plain_table("what", "how much", right=(1,))
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    console.print(result.note)


def _trained(result: jobs.Trained, console: Console) -> None:
    if result.was_complete:
        return _complete(result.folder, console)
    figures = result.figures
    for name in ("train", "test"):
        if f"{name}_loss" in figures:
            loss, accuracy = figures[f"{name}_loss"], figures[f"{name}_accuracy"]
            console.print(f"{name}: loss {loss:.4f}, accuracy {accuracy:.2%}")
    console.print(f"the model is in {result.model}", soft_wrap=True)
    if result.merge_failure:
        raise HamuError(result.merge_failure)
    return None


def _unlearned(result: jobs.Unlearned, console: Console) -> None:
    if result.was_complete:
        return _complete(result.folder, console)
    printed.reports({"before": result.before, "after": result.after}, console)
    for line in result.lines:
        console.print(line)
    console.print(f"the model is in {result.model}; {result.memory}", soft_wrap=True)
    if result.record is not None:
        console.print(
            f"the record is in {result.record}; the SHA-256 of record.json is {result.record_digest}",
            soft_wrap=True,
        )
    if result.merge_failure:
        raise HamuError(result.merge_failure)
    console.print(f"to look at it: hamu report {shlex.quote(str(result.folder))}", soft_wrap=True)
    return None


def _complete(folder: Path, console: Console) -> None:
    console.print(f"the run in {folder} is complete", soft_wrap=True)


def _assessed(result: jobs.Assessed, console: Console) -> int:
    printed.assessment(result.assessment, console)
    console.print(
        f"\nall figures are in {result.figures}, the frontier in {result.picture}", soft_wrap=True
    )
    return int(result.assessment.verdict.code)


def _evaluated(result: jobs.Evaluated, console: Console) -> None:
    console.print(f"forget set: {result.forget_name}")
    printed.reports({"": result.report}, console)
    for line in result.lines:
        console.print(line, soft_wrap=True)
    if "tofu" in result.report:
        console.print(printed.tofu_table(result.report["tofu"]))
    if result.attacked is not None:
        printed.attacks(result.attacked.result, result.attacked.figures, console)
    console.print(f"all figures are in {result.figures}", soft_wrap=True)


def _attacked(result: jobs.Attacked, console: Console) -> None:
    console.print(f"forget set: {result.forget_name}")
    printed.attacks(result.result, result.figures, console)


def _compared(result: jobs.Compared, console: Console) -> None:
    printed.comparison(result.comparison, console)
    if result.others:
        console.print(
            f"not in this table: {result.others} more in {result.folder}; name their settings too to have all in one",
            soft_wrap=True,
        )
    if not result.finished:
        raise HamuError(
            f"no run finished, of {result.runs}; the reasons are printed above and in "
            f"{result.folder / 'comparison.json'}"
        )
    console.print(
        f"the table is in {result.folder} as comparison.md, .tex, .csv and .json, the picture in {result.picture}",
        soft_wrap=True,
    )


_PRINT: dict[type, Callable[[Any, Console], int | None]] = {
    jobs.RunPlan: _plan,
    jobs.Trained: _trained,
    jobs.Unlearned: _unlearned,
    jobs.Assessed: _assessed,
    jobs.Evaluated: _evaluated,
    jobs.Attacked: _attacked,
    jobs.Compared: _compared,
}
