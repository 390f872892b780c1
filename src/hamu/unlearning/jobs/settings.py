"""Settings of a job: options by name over a YAML file over a recipe, or those of a resumed run.

Every value becomes what it would be as a flag, and is checked alike.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

from hamu.errors import HamuError, closest, first_line, reading, unknown
from hamu.files import CONFIG, INPUTS
from hamu.unlearning.jobs import options as tables
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.record.inputs import edited, read_inputs, recorded
from hamu.unlearning.run_folder import READS
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import own_options, without_effect

_Options = TypeVar("_Options")
_RECIPES = resources.files("hamu.unlearning.jobs") / "recipes"
_AS_UNLEARN = ("assess", "compare")  # they take what unlearn takes, and so its section too
_NOT_OF_A_RUN = ("resume", "overwrite", "trust_remote_code", "recipe", "config")
_SEVERAL = {"constraint": "constraints", "learning_rate": "learning_rates", "seed": "seeds"}
_NULL = "tag:yaml.org,2002:null"


class Parser(HfArgumentParser):
    """Argument parser that raises HamuError, suggests the closest flag, and expands ~ in paths."""

    def error(self, message: str) -> NoReturn:
        """Raise a HamuError instead of leaving the program."""
        end = "" if message.endswith("?") else ";"
        raise HamuError(f"{message}{end} {self.prog} --help lists the options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags, several values of one with blanks or commas; an unknown one is an error."""
        found, rest = self.parse_known_args(self._divided(args), namespace)
        typed = [word.partition("=")[0].lstrip("-") for word in rest if word.startswith("-")]
        for name in typed:
            check_has_a_place(name.replace("-", "_"), "the command")
        if rest:
            flags = [flag.lstrip("-") for action in self._actions for flag in action.option_strings]
            close = closest(typed[0], flags) if typed else None
            hint = "" if close is None else f"; did you mean --{close}?"
            if not typed:
                hint = "; join several values of one option by commas"
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        for name, value in vars(found).items():
            if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
                raise HamuError(f"{name} {value!r} has a character that no text may have")
            if name in tables.PATHS and value is not None:
                several = value if isinstance(value, list) else [value]
                if "" in several:
                    raise HamuError(f"{name} is empty; is a shell variable unset?")
                expanded = [os.path.expanduser(one) for one in several]
                setattr(found, name, expanded if isinstance(value, list) else expanded[0])
        return found

    def typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values, which may be texts, as they would be as flags."""
        words = []
        for name, value in values.items():
            several = value if isinstance(value, list | tuple) else [value]
            is_named = all(isinstance(one, str | os.PathLike) for one in several)
            if name in tables.PATHS - {"forget_rows"} and not is_named:
                raise HamuError(
                    f"{name} is a {type(value).__name__}; name a file or folder (objects are for "
                    f"hamu.UnlearnTrainer)"
                )
            value = getattr(value, "value", value)
            value = value.tolist() if hasattr(value, "tolist") else value  # numpy's and torch's
            if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
                value = ",".join("" if one is None else str(one) for one in value)
            if isinstance(value, Mapping):
                value = json.dumps(dict(value))
            words.append(f"--{name}={value}")
        found = vars(self.parse_args(words))
        return {name: found[name] for name in values}

    def _divided(self, words: Iterable[str]) -> list[str]:
        """Words with a value of its own in each, of options that take several."""
        found, divides = list[str](), False
        for word in words:
            if word.startswith("--"):
                flag, equals, word = word.partition("=")
                kinds = [a.nargs for a in self._actions if flag in a.option_strings]
                divides = kinds == ["+"]
                found.append(flag if divides else flag + equals + word)
                if not (divides and equals):
                    continue
            found += [one for one in re.split(r"[\s,]+", word) if one] if divides else [word]
        return found

    @staticmethod
    def _parse_dataclass_field(
        parser: argparse.ArgumentParser, field: dataclasses.Field[Any]
    ) -> None:
        if field.name not in tables.REFUSED:
            HfArgumentParser._parse_dataclass_field(parser, field)


def parser_of(command: str) -> Parser:
    """Parser of a job's options; those that are not given have the defaults of the dataclasses."""
    parser = Parser(prog=f"hamu {command}", allow_abbrev=False, add_help=False)
    names = ", ".join(recipes())
    parser.add_argument("--recipe", metavar="NAME", help=f"Start from a recipe: {names}.")
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="Read settings from a file; flags win."
    )
    cls: Any
    for cls in tables.TYPES[command]:
        parser._add_dataclass_arguments(cls)
    for action in parser._actions:
        action.required = False
        if action.dest == "output_dir":
            action.default = f"runs/{command}"
    return parser


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of one job: its dataclasses, and the settings given by name, without defaults."""

    options: tuple[Any, ...]
    given: dict[str, Any]

    def of(self, kind: type[_Options]) -> _Options:
        """The options of one of these dataclasses, or of a subclass."""
        return next(one for one in self.options if isinstance(one, kind))

    def value(self, name: str) -> Any:
        """The value of an option; None if the job has none of this name."""
        return next((getattr(one, name) for one in self.options if hasattr(one, name)), None)


def settings_of(command: str, options: Mapping[str, Any]) -> Settings:
    """Check and complete the options of a job, given by name, into its dataclasses."""
    parser = parser_of(command)
    defaults = {action.dest: action.default for action in parser._actions}
    options = parser.typed({name: value for name, value in options.items() if value is not None})
    resumed = None
    if options.get("resume") and command in READS:
        resumed = _config_to_resume(command, options)
    texts = _texts(command, options, resumed)
    settings = parser.typed({name: text for name, text in texts.items() if name in defaults})
    if resumed is not None:
        _check_resumed(resumed, settings, options)
        settings["output_dir"] = str(resumed.parent)  # it may have been moved
    for name, why in tables.NOT_TAKEN.get(command, {}).items():
        differs = name != "method" and name in settings and settings[name] != defaults[name]
        if name in defaults and (name in options or differs):
            raise HamuError(f"{command} has no --{name}, {why}; leave it out")
    for one, several in _SEVERAL.items() if command == "compare" else ():
        if one in options and several in options:
            raise HamuError(f"--{several} takes the place of --{one}; leave out one of them")
        if one in options:  # the flag wins over a file
            settings.pop(several, None)
    values = {"output_dir": f"runs/{command}"} | settings | options
    given = {n: value for n, value in (settings | options).items() if n not in _NOT_OF_A_RUN}
    by_hand = [name for name in options if name in tables.BY_HAND]
    if options.get("auto") and by_hand:
        raise HamuError(f"auto sets {by_hand[0]} itself; leave out --{by_hand[0]}, or --auto")
    if command == "unlearn" and not given.keys() & {"auto", *tables.BY_HAND}:
        given["auto"] = True
    return Settings(tuple(_built(cls, values | given) for cls in tables.TYPES[command]), given)


def settings_of_run(config: Path, **changes: Any) -> Settings:
    """Settings of a run of unlearning, by its config.yaml."""
    return settings_of("unlearn", {"config": str(config), **changes})


def every_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option of unlearn, given or not."""
    found = settings_of("unlearn", options)
    return {f.name: getattr(one, f.name) for one in found.options for f in dataclasses.fields(one)}


def recorded_settings(settings: Settings) -> dict[str, Any]:
    """The settings of a run in the form that its record holds."""
    run, args = settings.of(RunOptions), settings.of(UnlearnConfig)
    own = {**vars(settings.of(DataOptions)), **vars(run), "resume": None}
    own |= {name: getattr(args, name) for name in {*own_options(type(args)), *tables.SHOWN}}
    # without what had no effect
    own |= {} if run.lora else dict.fromkeys(tables.OF_AN_ADAPTER)
    own |= dict.fromkeys(without_effect(args))
    return recorded(own, {name: getattr(args, name) for name in settings.given if name not in own})


def check_has_a_place(name: str, where: str) -> None:
    """Refuse an option of TrainingArguments that has no place in a job; the message says why."""
    if name in tables.REFUSED:
        raise HamuError(f"{where} has {name}, which has no place here: {tables.REFUSED[name]}")


def recipes() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(f.name[: -len(".yaml")] for f in _RECIPES.iterdir() if f.name.endswith(".yaml"))


def _built(cls: type, values: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    for name in names & tables.BOUNDS.keys():
        (least, most), value = tables.BOUNDS[name], values.get(name)
        if value is not None and not least <= value < most:
            below = "" if most > value else f" and below {most}"
            raise HamuError(f"{name} {value} must be at least {least}{below}")
    with reading("the settings do not fit together"):
        return cls(**{key: value for key, value in values.items() if key in names})


class _Texts(yaml.BaseLoader):
    """Reads every scalar but null as a text, so that `no` is no truth value and 010 no eight."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is there twice."""
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            mark = [key.start_mark for key, _ in node.value if key.value == twice][-1]
            raise yaml.MarkedYAMLError(problem=f"{twice} is there twice", problem_mark=mark)
        return found


_Texts.add_implicit_resolver(_NULL, re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Texts.add_constructor(_NULL, lambda loader, node: None)


def _texts(command: str, options: Mapping[str, Any], resumed: Path | None) -> dict[str, Any]:
    """Settings of the recipe and the file that the options name, or of the run to resume."""
    found: dict[str, Any] = {}
    if "recipe" in options and resumed is None:
        name = options["recipe"]
        if name not in recipes():
            raise unknown("recipe", name, recipes())
        found = _of_file(f"recipe {name}", (_RECIPES / f"{name}.yaml").read_bytes(), command)
    path = resumed or ("config" in options and Path(options["config"]))
    if path:
        if not path.is_file():
            raise HamuError(f"the config file {path} does not exist")
        found |= _of_file(str(path), path.read_bytes(), command)
    return {name: value for name, value in found.items() if value is not None}


def _of_file(name: str, content: bytes, command: str) -> dict[str, Any]:
    """Settings for one command, as texts; null takes back what an earlier file set."""
    try:
        parsed = yaml.load(content, _Texts)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or first_line(error)
        raise HamuError(f"{name} is not valid YAML{line}: {problem}") from error
    found, anywhere = _mapping(name, parsed), set().union(*tables.IN_FILES.values())
    sections = {
        key: _mapping(f"{key} in {name}", found.pop(key))
        for key in tables.IN_FILES.keys() & found.keys()
    }
    parts = [("", found, anywhere)]
    parts += [(f" under {key}", one, tables.IN_FILES[key]) for key, one in sections.items()]
    for place, settings, known in parts:
        for key in settings:
            check_has_a_place(key, name)
            if key == "trust_remote_code":
                raise HamuError(f"{name} has {key}, which runs code; give it as a flag only")
            if key not in known:
                close = closest(key, [*sorted(known), *tables.IN_FILES])
                way = f"did you mean {close}?" if close else f"see hamu {command} --help-all"
                raise HamuError(f"{name} has the unknown setting {key!r}{place}; {way}")
    for section in ("unlearn", command) if command in _AS_UNLEARN else (command,):
        found |= sections.get(section, {})
    return {key: _as_flag(name, key, value) for key, value in found.items()}


def _mapping(name: str, content: Any) -> dict[str, Any]:
    if content is not None and not isinstance(content, dict):
        raise HamuError(f"{name} holds no settings; expected lines of `key: value`")
    return {str(key): value for key, value in (content or {}).items()}


def _as_flag(name: str, key: str, value: Any) -> Any:
    """A YAML value, a list or a mapping of such; those of a mapping with its numbers."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list) and any(isinstance(one, list | dict) for one in parts):
        raise HamuError(f"{name} has nested values under {key}; give one value, or a list")
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


def _config_to_resume(command: str, options: Mapping[str, Any]) -> Path:
    folder = Path(options.get("output_dir", f"runs/{command}"))
    if not (folder / CONFIG).is_file():
        raise HamuError(
            f"there is no run to resume in {folder}: it has no {CONFIG}; "
            f"leave --resume out to begin one"
        )
    inputs = read_inputs(folder) if (folder / INPUTS).is_file() else {}
    for other, of_it in READS.items():
        if other != command and of_it in inputs:
            raise HamuError(f"{folder} holds a run of hamu {other}; resume it by that")
    return folder / CONFIG


def _check_resumed(path: Path, settings: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Check that nothing changes that would change a result."""
    changed = sorted(edited(path.parent, settings) - tables.MAY_CHANGE - tables.PATHS)
    if changed:
        began = f"{path} has another {changed[0]} than the run began with"
        raise HamuError(f"{began}; put back what it was, or start a new run elsewhere")
    for key, value in options.items():
        if key not in tables.MAY_CHANGE and (key not in settings or settings[key] != value):
            own = f"with {key} {settings[key]}" if key in settings else f"without {key}"
            was = f"a run is resumed by its own settings, {path}, {own}"
            raise HamuError(f"{was}; leave out --{key} {value}, or start a new run")
