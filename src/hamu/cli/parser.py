"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hamu.cli.help import called, described
from hamu.cli.options import PATHS
from hamu.cli.refused import has_a_place
from hamu.cli.screen import say
from hamu.errors import HamuError, closest


class Parser(HfArgumentParser):
    """An argument parser whose mistakes are HamuErrors, and whose texts can be written to any file."""

    def error(self, message: str) -> NoReturn:
        """Raise a HamuError instead of leaving the program."""
        end = "" if message.endswith("?") else ";"
        raise HamuError(f"{message}{end} {self.prog} --help lists the options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags; an unknown one is an error that names the closest known one."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [flag.lstrip("-") for action in self._actions for flag in action.option_strings]
            typed = (word.partition("=")[0].lstrip("-") for word in rest if word.startswith("-"))
            close = next(filter(None, (closest(word, flags) for word in typed)), None)
            hint = "" if close is None else f"; did you mean --{close}?"
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found

    def print_help(self, file: Any = None) -> None:
        """Print the help, even if nobody reads to its end."""
        say(self.format_help().rstrip("\n"))

    def format_help(self) -> str:
        """The layout of all commands: what is named first, then every option."""
        named = [action for action in self._actions if not action.option_strings]
        usage = " ".join(["usage:", self.prog, *(f"{called(action)} ..." if action.nargs else called(action)
                                                 for action in named)])  # fmt: skip
        actions = [action for action in self._actions if action.dest != "help"]
        about = (self.description or "").strip()
        return (
            "\n".join([f"{usage} [--flag value ...]\n\n{about}\n", *map(described, actions)]) + "\n"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check the texts too, wherever they come from; in paths ~ is the home of a user."""
        found, rest = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if isinstance(value, str) and any(
                c == "\0" or "\ud800" <= c <= "\udfff" for c in value
            ):
                raise HamuError(
                    f"{name} {value!r} has a character that no name or text may have; leave it out"
                )
            if name in PATHS:
                setattr(found, name, _expanded(name, value))
        return found, rest

    @staticmethod
    def _parse_dataclass_field(
        parser: argparse.ArgumentParser, field: dataclasses.Field[Any]
    ) -> None:
        if has_a_place(field.name):
            HfArgumentParser._parse_dataclass_field(parser, field)


def _expanded(name: str, value: Any) -> Any:
    """A path, or several, with homes in place of ~.

    Raises:
        HamuError: if one is empty.
    """
    if isinstance(value, list):
        return [_expanded(name, one) for one in value]
    if value == "":
        raise HamuError(f"{name} is empty; is a shell variable unset?")
    return os.path.expanduser(value) if isinstance(value, str) else value
