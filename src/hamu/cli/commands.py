"""The commands: flags in, one call of a job, its result in words; and the help of each."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import TrainingArguments

from hamu.cli import demo, printed, say
from hamu.unlearning import jobs
from hamu.unlearning.jobs.options import NOT_TAKEN, SHOWN
from hamu.unlearning.jobs.settings import Parser, parser_of

# Commands that are no job of options: the arguments of their functions are their own.
_OWN: dict[str, Callable[..., Any]] = {
    "verify": jobs.verify,
    "report": jobs.report,
    "demo": demo.demo,
}


def run(command: str, argv: list[str], console: Console) -> int:
    """Run a command and print its result; returns the exit code."""
    if command not in _OWN:
        found = getattr(jobs, command)(console=console, **given_flags(command, argv))
        return printed.result(found, console)
    options = vars(own_parser(command).parse_args(argv))
    if command == "verify":
        return printed.result(jobs.verify(**options), console)
    page = _OWN[command](console=console, **options)
    if page is not None:
        size = page.stat().st_size / 1e6
        console.print(f"the report is in {page} ({size:.1f} MB)", soft_wrap=True)
    return 0


def given_flags(command: str, argv: list[str]) -> dict[str, Any]:
    """The options that the flags of a job's command give, by name; help is printed, and exits."""
    parser = parser_of(command)
    everything = "--help-all" in argv
    if everything or "--help" in argv or "-h" in argv:
        inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - SHOWN - {"output_dir"}
        hidden = {*NOT_TAKEN.get(command, ()), *(() if everything else inherited)}
        usage = f"usage: {parser.prog} [--recipe NAME] [--config FILE.yaml] [--flag value ...]"
        actions = [action for action in parser._actions if action.dest not in hidden]
        more = "" if everything else "\n\n--help-all shows the other training arguments too."
        say(_help(usage, _about(getattr(jobs, command)), actions) + more)
        sys.exit(0)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return dict(vars(parser.parse_args(argv)))


class OwnParser(Parser):
    """Parser of a command with arguments of its own."""

    def __init__(self, prog: str, about: str) -> None:
        super().__init__((), prog=prog, description=about, allow_abbrev=False)

    def print_help(self, file: Any = None) -> None:
        """Print the help, even if nobody reads to its end."""
        named = [action for action in self._actions if not action.option_strings]
        words = [f"{_called(action)}{' ...' if action.nargs else ''}" for action in named]
        usage = " ".join(["usage:", self.prog, *words, "[--flag value ...]"])
        say(_help(usage, self.description or "", self._actions))


def own_parser(command: str) -> OwnParser:
    """The parser of verify, report or demo; its help is that of the function's docstring."""
    function = _OWN[command]
    parser = OwnParser(f"hamu {command}", _about(function))
    helps = dict(re.findall(r"^ {4}(\w+): (.*)$", inspect.getdoc(function) or "", re.MULTILINE))
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if default is parameter.empty:
            how = {"nargs": "+", "metavar": "RUN"} if name == "runs" else {}
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        elif default == ():
            how = {"action": "append", "default": []}
        elif default is None:
            how = {}
        if name != "console":
            flag = name if parameter.default is parameter.empty else f"--{name}"
            parser.add_argument(flag, help=helps[name].removesuffix("."), **how)
    return parser


def _about(function: Callable[..., Any]) -> str:
    """A function's docstring up to its arguments and errors."""
    told = re.split(r"\n\n(?:Args|Raises):", inspect.getdoc(function) or "")[0]
    return " ".join(told.split())


def _help(usage: str, about: str, actions: list[argparse.Action]) -> str:
    """Each option with its default, and its help below."""
    lines = [f"{usage}\n\n{about}\n"]
    for action in actions:
        negates = any(word.startswith("--no_") for word in action.option_strings[1:])
        if action.dest == "help" or negates:
            continue
        name = f"--{action.dest}" if action.option_strings else _called(action)
        value = f" {action.metavar}" if action.option_strings and action.metavar else ""
        shown = str(action.default).replace("\n", "\\n")
        default = "" if action.default in (None, False, []) else f" [{shown}]"
        lines.append(f"  {name}{value}{default}\n        {' '.join((action.help or '').split())}")
    return "\n".join(lines)


def _called(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest
