"""Flags of the commands, and their help."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from transformers import TrainingArguments

from hamu.cli.screen import say
from hamu.unlearning.jobs.options import NOT_TAKEN, SHOWN
from hamu.unlearning.jobs.settings import Parser, check_has_a_place, parser_of

_HELP = ("--help", "-h", "--help-all")
# what transformers says of them is about its own versions
_OWN_WORDS = {
    "gradient_checkpointing": "Compute activations again in the backward pass: less memory, about a third more time."
}


def given_flags(command: str, about: str, argv: list[str]) -> dict[str, Any]:
    """The options that the flags of a job's command give, by name.

    Raises:
        SystemExit: if they ask for help, once it is printed.
        HamuError: if a flag is unknown or has no place, or a value does not fit.
    """
    parser = parser_of(command)
    if any(word in _HELP for word in argv):
        _print_help(command, about, parser, everything="--help-all" in argv)
        sys.exit(0)
    for word in argv:
        if word.startswith("--"):
            check_has_a_place(word[2:].partition("=")[0].replace("-", "_"), "the command")
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(argv))


def _print_help(command: str, about: str, parser: Parser, *, everything: bool) -> None:
    """Print the options of a job; the less important training arguments only on demand."""
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - SHOWN - {"output_dir"}
    lines = [
        f"usage: {parser.prog} [--recipe NAME] [--config FILE.yaml] [--flag value ...]\n\n{about}\n"
    ]
    for action in parser._actions:
        flag = max(action.option_strings, key=len)
        hidden = action.dest in inherited and not everything
        if not (hidden or flag.startswith("--no_") or action.dest in NOT_TAKEN.get(command, ())):
            lines.append(_described(action))
    if not everything:
        lines.append("\n--help-all shows the other training arguments too.")
    say("\n".join(lines))


class OwnParser(Parser):
    """Parser of a command with flags of its own."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__((), prog=f"hamu {command}", description=about, allow_abbrev=False)

    def print_help(self, file: Any = None) -> None:
        """Print the help, even if nobody reads to its end."""
        say(self.format_help().rstrip("\n"))

    def format_help(self) -> str:
        """Arguments without a flag first, then every option."""
        named = [
            f"{_called(action)} ..." if action.nargs else _called(action)
            for action in self._actions
            if not action.option_strings
        ]
        usage = " ".join(["usage:", self.prog, *named, "[--flag value ...]"])
        actions = [_described(action) for action in self._actions if action.dest != "help"]
        return "\n".join([f"{usage}\n\n{(self.description or '').strip()}\n", *actions]) + "\n"


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
