"""Settings of a job: options by name, a recipe, a YAML file, or the config.yaml of the run that goes on.

Every value becomes what it would be as a flag, and is checked alike. Options win over `config`, which wins over `recipe`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser, IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from hamu.errors import HamuError, closest, first_line, unknown
from hamu.files import CONFIG, INPUTS
from hamu.unlearning.jobs.options import (
    BY_HAND,
    MAY_CHANGE,
    NOT_TAKEN,
    OF_AN_ADAPTER,
    PATHS,
    REFUSED,
    SHOWN,
    TYPES,
    DataOptions,
    RunOptions,
    settings_by_command,
)
from hamu.unlearning.record.inputs import edited, read_inputs, recorded
from hamu.unlearning.run_folder import READS
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import own_options

_Options = TypeVar("_Options")
_RESUMABLE = ("train", "unlearn")
_AS_UNLEARN = ("assess", "compare")  # they take what unlearn takes, and so its section too
_NOT_OF_A_RUN = ("resume", "overwrite", "trust_remote_code", "recipe", "config")
_FILES = ("recipe", "config")
_SEVERAL = {"constraint": "constraints", "learning_rate": "learning_rates", "seed": "seeds"}
_CHOICES: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType, "optim": OptimizerNames,
}  # fmt: skip


class Parser(HfArgumentParser):
    """Argument parser that raises HamuError, and suggests the closest flag."""

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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check texts, and expand ~ in paths."""
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
        if field.name not in REFUSED:
            HfArgumentParser._parse_dataclass_field(parser, field)


def parser_of(command: str, types: Iterable[type] = ()) -> Parser:
    """Parser of a command's options without defaults: what it returns was given."""
    parser = Parser(prog=f"hamu {command}", allow_abbrev=False, add_help=False)
    parser.add_argument(
        "--recipe", metavar="NAME", help=f"Start from a recipe: {', '.join(recipes())}."
    )
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="Read settings from a file; flags win."
    )
    for cls in types or TYPES[command]:
        parser._add_dataclass_arguments(cls)
    for action in parser._actions:
        action.required = False
        if action.dest == "output_dir":
            action.default = f"runs/{command}"
    return parser


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of one job.

    Attributes:
        by_type: an instance of each dataclass that the job takes.
        given: the settings that were given, by name; no defaults.
    """

    by_type: Mapping[type, Any]
    given: dict[str, Any]

    def of(self, kind: type[_Options]) -> _Options:
        """The options of one of these dataclasses."""
        found: _Options = self.by_type[kind]
        return found


def settings_of(command: str, options: Mapping[str, Any], types: Iterable[type] = ()) -> Settings:
    """Check and complete the options of a job.

    Args:
        command: its name, which is also the section of a YAML file that is for it alone.
        options: values by name, None for one that is not given; also recipe and config.
        types: the dataclasses to fill, by default those of the command.

    Raises:
        HamuError: if a name is unknown, has no place or does not belong to the command, or values do not fit.
    """
    parser, types = parser_of(command, types), tuple(types) or TYPES[command]
    known = {action.dest: action for action in parser._actions}
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        check_has_a_place(name, "the command")
        if name not in known:
            close = closest(name, known)
            hint = "" if close is None else f"; did you mean {close}?"
            raise HamuError(f"{command} has no option {name}{hint}")
    options = _typed(parser, options)
    resumed = None
    if options.get("resume") and command in _RESUMABLE:
        resumed = _config_to_resume(command, options.get("output_dir", f"runs/{command}"))
    files = _named_files(options) if resumed is None else [(str(resumed), _text_of(resumed))]
    texts: dict[str, Any] = {}
    for name, text in files:
        texts |= _of_file(name, text, command, known)
    settings = _typed(parser, {name: value for name, value in texts.items() if value is not None})
    if resumed is not None:
        _check_resumed(resumed, settings, options)
    given = settings | options
    for name, why in NOT_TAKEN.get(command, {}).items():
        differs = name != "method" and name in settings and settings[name] != known[name].default
        if name in known and (name in options or differs):
            raise HamuError(f"{command} has no --{name}, {why}; leave it out")
    for one, several in _SEVERAL.items() if command == "compare" else ():
        if one in options and several in options:
            raise HamuError(f"--{several} takes the place of --{one}; leave out one of them")
    for name, kind in _CHOICES.items():
        choices = [str(one.value) for one in kind]
        if name in given and given[name] not in choices:
            raise unknown(name, given[name], choices)
    given = {name: value for name, value in given.items() if name not in _NOT_OF_A_RUN}
    if command == "unlearn" and "auto" not in given and not any(name in given for name in BY_HAND):
        given["auto"] = True
    values = {"output_dir": f"runs/{command}"} | settings | options | given
    return Settings({cls: _built(cls, values) for cls in types}, given)


def settings_of_run(config: Path) -> Settings:
    """Settings of a run of unlearning, by its config.yaml."""
    return settings_of("unlearn", {"config": str(config)}, (DataOptions, RunOptions, UnlearnConfig))


def every_option(config: Path) -> dict[str, Any]:
    """The value of every option of unlearn by a config.yaml, given or not: what makes two runs the same."""
    found = settings_of_run(config)
    args = found.of(UnlearnConfig)
    of_training = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    return {**vars(found.of(DataOptions)), **vars(found.of(RunOptions)), **of_training}


def recorded_settings(
    data: DataOptions, run: RunOptions, args: UnlearnConfig, given: Iterable[str]
) -> dict[str, Any]:
    """The settings of a run in the form that its record holds."""
    names = {*own_options(type(args)), *SHOWN}
    own = {**vars(data), **vars(run), **{name: getattr(args, name) for name in names}}
    if not run.lora:
        own |= dict.fromkeys(OF_AN_ADAPTER)  # they had no effect
    return recorded(own, {name: getattr(args, name) for name in given if name not in own})


def check_has_a_place(name: str, where: str) -> None:
    """Refuse an option of TrainingArguments that has no place in a job; the message says why."""
    if name in REFUSED:
        raise HamuError(f"{where} has {name}, which has no place here: {REFUSED[name]}")


def recipes() -> list[str]:
    """Names of the bundled recipes."""
    found = resources.files("hamu.unlearning.jobs.recipes").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in found if f.name.endswith(".yaml"))


def _built(cls: type, values: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    try:
        return cls(**{key: value for key, value in values.items() if key in names})
    except HamuError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError, KeyError) as error:
        raise HamuError(f"the settings do not fit together: {first_line(error)}") from error


def _typed(parser: Parser, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the parser makes them of flags; values may be texts."""
    words = []
    actions = {action.dest: action for action in parser._actions}
    for name, value in values.items():
        value = getattr(value, "value", value)
        if actions[name].nargs == "+":
            several = value.split(",") if isinstance(value, str) else value
            several = several if isinstance(several, Iterable) else [several]
            words += [f"--{name}", *map(str, several)]
        else:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    found = vars(parser.parse_args(words))
    return {name: found[name] for name in values}


def _expanded(name: str, value: Any) -> Any:
    """A path, or several, with homes in place of ~."""
    if isinstance(value, list):
        return [_expanded(name, one) for one in value]
    if value == "":
        raise HamuError(f"{name} is empty; is a shell variable unset?")
    return os.path.expanduser(value) if isinstance(value, str) else value


class _Texts(yaml.SafeLoader):
    """Reads every scalar but null as a text, so that `no` is no truth value and 010 no eight."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is there twice."""
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_Texts.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.endswith(":null")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Texts.yaml_constructors = {  # of explicit tags too: null, texts, lists and mappings alone
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "str", "seq", "map")
}


def _named_files(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of the recipe and of the file that are named."""
    found = []
    if "recipe" in options:
        name = options["recipe"]
        if name not in recipes():
            raise unknown("recipe", name, recipes())
        place = resources.files("hamu.unlearning.jobs.recipes") / f"{name}.yaml"
        found.append((f"recipe {name}", place.read_text("utf-8")))
    if "config" in options:
        path = Path(options["config"])
        if not path.is_file():
            raise HamuError(f"the config file {path} does not exist")
        found.append((str(path), _text_of(path)))
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise HamuError(f"{path} is not a text file; expected YAML") from None


def _of_file(name: str, text: str, command: str, known: Iterable[str]) -> dict[str, Any]:
    """Settings for one command: the keys at the top, then those of its own section, as texts; None for null."""
    every = settings_by_command()
    content = _mapping(name, _parsed(name, text))
    sections = {
        key: _mapping(f"{key} in {name}", content.pop(key))
        for key in every
        if key != "attack" and key in content
    }
    all_keys = set().union(*every.values())
    for key in map(str, (*content, *(key for one in sections.values() for key in one))):
        check_has_a_place(key, name)
        if key == "trust_remote_code":
            raise HamuError(
                f"{name} has {key}, which lets the code of a model do anything; give it as a flag only"
            )
        if key not in all_keys:
            close = closest(key, [*all_keys, *every])
            way = (
                f"hamu {command} --help-all lists those there are"
                if close is None
                else f"did you mean {close}?"
            )
            raise HamuError(f"{name} has the unknown setting {key!r}; {way}")
    for section, settings in sections.items():
        for key in settings:
            if key not in every[section]:
                raise HamuError(
                    f"{name} has {key} under {section}, but hamu {section} takes no such setting"
                )
    merged = dict(content)
    for section in ("unlearn", command) if command in _AS_UNLEARN else (command,):
        merged |= sections.get(section, {})
    return {key: _as_flag(name, key, value) for key, value in merged.items() if key in known}


def _parsed(name: str, text: str) -> Any:
    try:
        return yaml.load(text, _Texts)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise HamuError(f"{name} is not valid YAML, line {line}: {error.problem}") from error
    except yaml.YAMLError as error:  # a character that YAML has not
        raise HamuError(f"{name} is not valid YAML: {first_line(error)}") from error
    except RecursionError:
        raise HamuError(f"{name} is nested too deeply; expected settings as `key: value`") from None


def _mapping(name: str, content: Any) -> dict[str, Any]:
    if content is not None and not isinstance(content, dict):
        kind = "list" if isinstance(content, list) else "single value"
        raise HamuError(f"{name} is a {kind}; expected settings as `key: value`")
    return content or {}


def _as_flag(name: str, key: str, value: Any) -> Any:
    """A YAML value as a flag has it: lists with commas, the arguments of a library as they are."""
    parts = {list: lambda: value, dict: lambda: list(value.values())}.get(type(value), list)()
    if any(isinstance(one, list | dict) for one in parts):
        raise HamuError(
            f"{name} has nested values under {key}; expected one value, or a list of them"
        )
    if isinstance(value, list):
        return ",".join(one or "" for one in value)
    if isinstance(value, dict):
        return {one: text and _of_json(text) for one, text in value.items()}
    return value


def _of_json(text: str) -> Any:
    """The number or truth value that a text is in JSON; a library takes no text in its place."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, bool | int | float) else text


def _config_to_resume(command: str, output_dir: str) -> Path:
    """The config.yaml of the run that is to go on."""
    path = Path(output_dir) / CONFIG
    if not path.is_file():
        raise HamuError(
            f"there is no run to resume in {path.parent}: it has no {path.name}; start it without --resume"
        )
    for other, of_it in READS.items():
        if (
            other != command
            and (path.parent / INPUTS).is_file()
            and of_it in read_inputs(path.parent)
        ):
            raise HamuError(f"{path.parent} holds a run of hamu {other}; resume it by that")
    return path


def _check_resumed(path: Path, settings: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Check that nothing changes that would change a result."""
    if any(name in options for name in _FILES):
        raise HamuError(
            f"a run is resumed by its own settings, {path}; leave out --recipe and --config"
        )
    changed = sorted(edited(path.parent, settings) - MAY_CHANGE - PATHS)
    if changed:
        raise HamuError(
            f"{path} has another {changed[0]} than the run began with; put back what it was, or start a new run in "
            f"another --output_dir"
        )
    for key, value in options.items():
        if key in MAY_CHANGE or (key in settings and settings[key] == value):
            continue
        was = f"has {key} {settings[key]}" if key in settings else f"was started without --{key}"
        raise HamuError(f"the run of {path} {was}; leave out --{key} {value}, or start a new run")
