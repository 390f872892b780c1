"""The commands: flags in, one call of a job, its result in words; and the help of each."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import TrainingArguments

from hamu.cli import demo, printed
from hamu.cli.screen import say
from hamu.errors import HamuError
from hamu.files import REPORT
from hamu.unlearning import jobs
from hamu.unlearning.jobs.options import NOT_TAKEN, SHOWN
from hamu.unlearning.jobs.settings import Parser, check_has_a_place, parser_of

_ABOUT = {
    "train": "Train the original model; with --without_forget, the retain model.",
    "unlearn": "Unlearn the forget set from a model.",
    "assess": "Say before a run how hard it is, what it will cost, and whether to start: exit code "
    "0, 3 (it costs) or 4 (next to nothing is free, or no step is possible). Takes the options of "
    "unlearn, but for a goal, --dry_run and --resume.",
    "evaluate": "Measure a model on the retain, forget and test data.",
    "attack": "Fine-tune copies of a model and look whether what was forgotten comes back.",
    "compare": "Unlearn by several methods, with several constraints, learning rates and seeds, "
    "and compare what comes out. Takes the options of unlearn, but for --method, a goal, --dry_run "
    "and --resume. The same command again goes on where it was.",
}
_VERIFY = """Check the record of a run against its files, its model, and the data and models that
its config.yaml names, as far as they are still there. Prints a line for each statement of the
record: holds, does not hold, or cannot be checked. Exit code 1 if something does not hold. Nothing
is written."""
_REPORT = """Make one HTML page of a run, finished or not, or of several side by side. It needs no
network and nothing beside it. What the models say about the data is measured again, as far as both
are still where the config.yaml of the run says; what is not there is named on the page. Only the
page is written."""
# of options that transformers describes by its own versions
_OWN_WORDS = {
    "gradient_checkpointing": "Compute activations again in the backward pass: less memory, about "
    "a third more time."
}


def run(command: str, argv: list[str], console: Console) -> int:
    """Run a command and print its result; returns the exit code."""
    if command in _OWN:
        return _OWN[command](argv, console)
    if command == "compare" and any(word.startswith("--resume") for word in argv):
        raise HamuError("compare needs no --resume: the same command again goes on where it was")
    options = given_flags(command, _ABOUT[command], argv)
    return printed.result(getattr(jobs, command)(console=console, **options), console)


def given_flags(command: str, about: str, argv: list[str]) -> dict[str, Any]:
    """The options that the flags of a job's command give, by name.

    Raises:
        SystemExit: if they ask for help, once it is printed.
        HamuError: if a flag is unknown or has no place, or a value does not fit.
    """
    parser = parser_of(command)
    everything = "--help-all" in argv
    if everything or "--help" in argv or "-h" in argv:
        inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - SHOWN - {"output_dir"}
        hidden = {*NOT_TAKEN.get(command, ()), *(() if everything else inherited)}
        usage = f"usage: {parser.prog} [--recipe NAME] [--config FILE.yaml] [--flag value ...]"
        lines = [f"{usage}\n\n{about}\n"]
        for action in parser._actions:
            is_negation = max(action.option_strings, key=len).startswith("--no_")
            if action.dest not in hidden and not is_negation:
                lines.append(_described(action))
        if not everything:
            lines.append("\n--help-all shows the other training arguments too.")
        say("\n".join(lines))
        sys.exit(0)
    for word in argv:
        if word.startswith("--"):
            check_has_a_place(word[2:].partition("=")[0].replace("-", "_"), "the command")
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return dict(vars(parser.parse_args(argv)))


class OwnParser(Parser):
    """Parser of a command with flags of its own."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__((), prog=f"hamu {command}", description=about, allow_abbrev=False)

    def print_help(self, file: Any = None) -> None:
        """Print the help, even if nobody reads to its end."""
        say(self.format_help())

    def format_help(self) -> str:
        """Arguments without a flag first, then every option."""
        named = [
            f"{_called(action)}{' ...' if action.nargs else ''}"
            for action in self._actions
            if not action.option_strings
        ]
        usage = " ".join(["usage:", self.prog, *named, "[--flag value ...]"])
        actions = [_described(action) for action in self._actions if action.dest != "help"]
        return "\n".join([f"{usage}\n\n{(self.description or '').strip()}\n", *actions])


def _called(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest


def _described(action: argparse.Action) -> str:
    """An option with its default, and its help below."""
    name = f"--{action.dest}" if action.option_strings else _called(action)
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    shown = str(action.default).replace("\n", "\\n")
    default = "" if action.default in (None, argparse.SUPPRESS, False, []) else f" [{shown}]"
    help_ = " ".join(_OWN_WORDS.get(action.dest, action.help or "").split())
    return f"  {name}{value}{default}\n        {help_}"


def _parser_of_runs(command: str, about: str) -> OwnParser:
    """The parser of a command that reads runs again: permissions, and no_models."""
    parser = OwnParser(command, about)
    add = parser.add_argument
    if command == "verify":
        add("run", help="the --output_dir of a `hamu unlearn`")
    add(
        "--no_models",
        action="store_true",
        help="do not ask the models again, which takes most of the time",
    )
    add(
        "--hub",
        action="append",
        default=[],
        metavar="hub:OWNER/NAME",
        help="a data set or model of the run that may be read from the hub, by the name that it "
        "has in config.yaml; may be given several times. Without it what is of the hub is not "
        "looked at",
    )
    add(
        "--trust_remote_code",
        action="store_true",
        help="run the code that comes with a model, which can do anything",
    )
    return parser


def _verify(argv: list[str], console: Console) -> int:
    options = vars(_parser_of_runs("verify", _VERIFY).parse_args(argv))
    return printed.result(jobs.verify(**options), console)


def _report(argv: list[str], console: Console) -> int:
    parser = _parser_of_runs("report", _REPORT)
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the --output_dir of a `hamu unlearn`, or that of a `hamu compare`, which stands for "
        "all its runs",
    )
    add(
        "--output",
        metavar="FILE.html",
        help=f"where the page goes; by default {REPORT} in the folder that is named",
    )
    add(
        "--contents",
        action="store_true",
        help="also show what the data say: images, prompts, answers, names of classes, numbers of "
        "rows",
    )
    add("--samples", type=int, default=5000, help="ask about at most this many records of a set")
    add(
        "--answers",
        type=int,
        default=20,
        help="text, with --contents: show this many answers of each set",
    )
    page = jobs.report(console=console, **vars(parser.parse_args(argv)))
    size = page.stat().st_size / 1e6
    console.print(f"the report is in {page} ({size:.1f} MB)", soft_wrap=True)
    return 0


def _demo(argv: list[str], console: Console) -> int:
    parser = OwnParser("demo", demo.__doc__ or "")
    add = parser.add_argument
    add("--task", default="image", help="image (digits) or text (fictitious authors)")
    add("--output_dir", default="runs/demo", help="where the results go")
    add("--seed", type=int, default=42, help="seed of everything")
    add("--overwrite", action="store_true", help="replace an earlier demo in --output_dir")
    demo.demo(console=console, **vars(parser.parse_args(argv)))
    return 0


_OWN: dict[str, Callable[[list[str], Console], int]] = {
    "verify": _verify,
    "report": _report,
    "demo": _demo,
}
