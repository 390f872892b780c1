"""From flags, a recipe and a YAML file to dataclasses: flags win over --config, which wins over --recipe."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from transformers import IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from hamu.cli.config_files import read_files, settings_of
from hamu.cli.help import print_help
from hamu.cli.options import NOT_TAKEN, ResumeOptions, settings_by_command
from hamu.cli.parser import Parser
from hamu.cli.refused import check_has_a_place
from hamu.cli.resuming import check_resumed_settings, settings_to_resume
from hamu.errors import HamuError, first_line, unknown

_NOT_OF_A_RUN = ("resume", "overwrite", "trust_remote_code")  # how a command was called
_CHOICES: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType, "optim": OptimizerNames,
}  # fmt: skip
_Options = TypeVar("_Options")


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The options of one command.

    Attributes:
        by_type: an instance of each dataclass that the command fills.
        given: the settings that were given, by flags or in files, by name; no defaults.
    """

    by_type: Mapping[type, Any]
    given: dict[str, Any]

    def of(self, kind: type[_Options]) -> _Options:
        """The options of one of these dataclasses."""
        return self.by_type[kind]


def parse(
    command: str,
    description: str,
    argv: list[str],
    *types: type,
    settle: Callable[[dict[str, Any], dict[str, Any]], None] = lambda values, given: None,
) -> Parsed:
    """Read the options of one command.

    Args:
        command: its name, which is also the section of a YAML file that is for it alone.
        description: one line for --help.
        argv: the flags.
        types: the dataclasses to fill.
        settle: sets what follows from the settings that were given, in all values and among those given.

    Raises:
        HamuError: if a flag or key is unknown, or a value does not fit.
    """
    files = Parser((), prog=f"hamu {command}", add_help=False, allow_abbrev=False)
    files.add_argument("--recipe")
    files.add_argument("--config")
    named, rest = files.parse_known_args(argv)
    resumed = settings_to_resume(command, rest) if ResumeOptions in types else None
    parser = _parser(command, description, types)
    if "--help-all" in rest or "--help" in rest or "-h" in rest:
        print_help(command, parser, everything="--help-all" in rest)
    known = {action.dest for action in parser._actions}
    for word in rest:
        if word.startswith("--"):
            check_has_a_place(word[2:].partition("=")[0].replace("-", "_"), "the command")
    settings: dict[str, Any] = {}
    for name, text in read_files(named) if resumed is None else [resumed]:
        settings |= settings_of(name, text, command, known, settings_by_command())
    settings = {key: value for key, value in settings.items() if value is not None}
    listed, defaults = (
        _listed(parser, settings),
        {action.dest: action.default for action in parser._actions},
    )
    for action in parser._actions:
        action.default = settings.get(action.dest, action.default)
        action.required = False
    values = vars(parser.parse_args([*listed, *rest]))
    was = {} if resumed is None else vars(parser.parse_args(listed))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    from_flags = vars(parser.parse_args(rest))
    if resumed is not None:
        check_resumed_settings(resumed[0], {key: was[key] for key in settings}, from_flags, named)
    for name, why in NOT_TAKEN.get(command, {}).items():
        if name not in known:
            continue
        if name in from_flags or (
            name != "method" and values[name] != defaults[name]
        ):  # a file has unlearn's method
            raise HamuError(f"{command} has no --{name}, {why}; leave it out")
    given = {key: values[key] for key in (*settings, *from_flags) if key not in _NOT_OF_A_RUN}
    _check_choices(values)
    settle(values, given)
    built = {}
    for cls in types:
        names = {f.name for f in dataclasses.fields(cls) if f.init}
        try:
            built[cls] = cls(**{key: value for key, value in values.items() if key in names})
        except HamuError:
            raise
        except (ValueError, TypeError, ImportError, RuntimeError, KeyError) as error:
            raise HamuError(f"the settings do not fit together: {first_line(error)}") from error
    return Parsed(built, given)


def _parser(command: str, description: str, types: tuple[type, ...]) -> Parser:
    parser = Parser(
        prog=f"hamu {command}", description=description, allow_abbrev=False, add_help=False
    )
    for cls in types:
        parser._add_dataclass_arguments(cls)
    for action in parser._actions:
        if action.dest == "output_dir":
            action.default = f"runs/{command}"
    return parser


def _check_choices(values: dict[str, Any]) -> None:
    """What transformers would refuse without the name of the option."""
    for name, kind in _CHOICES.items():
        choices = [str(one.value) for one in kind]
        value = getattr(values.get(name), "value", values.get(name))
        if value is not None and value not in choices:
            raise unknown(name, value, choices)


def _listed(parser: Parser, settings: dict[str, Any]) -> list[str]:
    """The settings that take several values, as flags; a file has them as lists or with commas."""
    actions = [
        action for action in parser._actions if action.nargs == "+" and action.dest in settings
    ]
    return [
        word
        for action in actions
        for word in (f"--{action.dest}", *settings[action.dest].split(","))
    ]
