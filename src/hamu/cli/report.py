"""`hamu report`: one HTML page of a run, or of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hamu.cli.commands import add_permissions
from hamu.cli.flags import OwnParser
from hamu.errors import HamuError
from hamu.files import REPORT, write_whole
from hamu.report.page import MARK, report_page
from hamu.report.run import Run, read_runs, run_folders
from hamu.unlearning.jobs.named_sources import NamedSources
from hamu.unlearning.jobs.observe import observe

_DESCRIPTION = """Make one HTML page of a run, finished or not, or of several side by side. It needs no network and
nothing beside it. What the models say about the data is measured again, as far as both are still where the config.yaml
of the run says; what is not there is named on the page. Only the page is written."""


def run(argv: list[str], console: Console) -> int:
    """Read, ask the models, write the page."""
    parser = OwnParser("report", _DESCRIPTION)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="the --output_dir of a `hamu unlearn`, or that of a `hamu compare`, which stands for all its runs",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help=f"where the page goes; by default {REPORT} in the folder that is named",
    )
    parser.add_argument(
        "--contents", action="store_true",
        help="also show what the data say: images, prompts, answers, names of classes, numbers of rows",
    )  # fmt: skip
    parser.add_argument(
        "--no_models",
        action="store_true",
        help="do not ask the models again, which takes most of the time",
    )
    parser.add_argument(
        "--samples", type=int, default=5000, help="ask about at most this many records of a set"
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=20,
        help="text, with --contents: show this many answers of each set",
    )
    add_permissions(parser)
    args = parser.parse_args(argv)
    for name, least in (("samples", 1), ("answers", 0)):
        if getattr(args, name) < least:
            raise HamuError(f"{name} {getattr(args, name)} must be at least {least}")
    named = [Path(name) for name in args.runs]
    folders = [folder for place in named for folder in run_folders(place)]
    target = _target(args.output, named)
    found = [one for folder in dict.fromkeys(folders) for one in _reported(folder, args, console)]
    made = report_page(found, contents=args.contents)
    page = made.encode(
        errors="backslashreplace"
    ).decode()  # a folder's name may have bytes that are no text
    write_whole(target, page, private=args.contents)
    console.print(f"the report is in {target} ({len(page.encode()) / 1e6:.1f} MB)", soft_wrap=True)
    return 0


def _target(output: str | None, named: Sequence[Path]) -> Path:
    """Where the page goes; nothing but an earlier page may be there."""
    if output is None and len(named) > 1:
        raise HamuError(
            f"{len(named)} folders are named: say where their common page goes, with --output FILE.html"
        )
    target = named[0] / REPORT if output is None else Path(output)
    if not target.parent.is_dir():
        raise HamuError(
            f"the folder {target.parent} of --output is not there; make it, or choose another"
        )
    if target.is_dir():
        raise HamuError(f"--output {target} is a folder; name a file, such as {target / REPORT}")
    if target.exists() and not target.is_file():
        raise HamuError(
            f"--output {target} is not a regular file, and cannot be replaced by a page; name another"
        )
    if target.is_file() and MARK.encode() not in target.read_bytes()[:1000]:
        raise HamuError(
            f"{target} is there and is not a report; choose another --output, or remove it"
        )
    return (
        target.resolve() if target.is_symlink() else target
    )  # a link stays, and leads to the page


def _reported(folder: Path, args: argparse.Namespace, console: Console) -> list[Run]:
    """The run in a folder with the predictions of its models, or the runs of a demo."""
    runs = read_runs(folder)
    if len(runs) > 1:
        return [replace(run, unobserved="a demo keeps no models") for run in runs]
    if args.no_models:
        return [replace(runs[0], unobserved="--no_models leaves it out")]
    if runs[0].evaluation is None:
        why = "the run has not come to its end, so there is no model after it"
        return [replace(runs[0], unobserved=why)]
    try:
        answers = args.answers if args.contents else 0
        sources = NamedSources(folder, args.hub, trust_remote_code=args.trust_remote_code)
        observed = observe(sources, args.samples, answers, console)
    except HamuError as error:
        console.print(f"{folder}: left out what the models say: {error}", soft_wrap=True)
        why = "a model or the data cannot be read; the command prints why"
        return [replace(runs[0], unobserved=str(error) if args.contents else why)]
    return [replace(runs[0], observed=observed)]
