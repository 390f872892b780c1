"""Settings from recipes and YAML files, as texts: a value is what it would be as a flag, and is checked alike."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hamu.cli.refused import check_has_a_place
from hamu.errors import HamuError, closest, first_line, unknown

_SECTIONS = ("train", "assess", "unlearn", "compare", "evaluate")
_AS_UNLEARN = ("assess", "compare")  # they take what unlearn takes, and so its section too
_MEANT = ("null", "str", "seq", "map")  # the tags of YAML that mean something here


_VALUE = re.compile(r"true|false|-?(0|[1-9]\d{0,300})(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)


class _Quoted(str):
    """A text that stood in quotes, and so is no number."""


class _AsWritten(yaml.SafeLoader):
    """Reads every scalar but null as a text: so `no` is no truth value, and 010 no eight. No key may be there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping as it is written, once it is sure that no key is there twice."""
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """The text as it is written, as a `_Quoted` if it stood in quotes."""
        text = super().construct_scalar(node)
        return _Quoted(text) if node.style in ("'", '"') else text


_AsWritten.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.endswith(":null")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_AsWritten.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _MEANT  # None: what is said of every other tag
}


def recipes() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(
        f.name.removesuffix(".yaml")
        for f in resources.files("hamu.cli.recipes").iterdir()
        if f.name.endswith(".yaml")
    )


def read_files(named: Namespace) -> list[tuple[str, str]]:
    """Name and text of the recipe and of the file that were named.

    Raises:
        HamuError: if one does not exist or is no text.
    """
    found = []
    if named.recipe:
        if named.recipe not in recipes():
            raise unknown("recipe", named.recipe, recipes())
        text = (resources.files("hamu.cli.recipes") / f"{named.recipe}.yaml").read_text("utf-8")
        found.append((f"recipe {named.recipe}", text))
    if named.config:
        if not Path(named.config).is_file():
            raise HamuError(f"the config file {named.config} does not exist")
        found.append((named.config, read_config(Path(named.config))))
    return found


def read_config(path: Path) -> str:
    """The text of a file of settings.

    Raises:
        HamuError: if it is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise HamuError(f"{path} is not a text file; expected YAML") from None


def settings_of(
    name: str, text: str, command: str, known: Collection[str], every: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """Settings for one command: the keys at the top, then those of its own section; null for what is not to be set.

    Args:
        name: of the file, for messages.
        text: YAML.
        command: the command.
        known: the settings that it has.
        every: the settings of each command that a section may be for.

    Raises:
        HamuError: if the text is not YAML, or a key is unknown, is not one of the command whose section it is in, or
            has no value that a flag could have.
    """
    content = _mapping(name, _parsed(name, text))
    sections = {
        key: _mapping(f"{key} in {name}", content.pop(key)) for key in _SECTIONS if key in content
    }
    all_keys = set().union(*every.values())
    for key in (*content, *(key for section in sections.values() for key in section)):
        check_has_a_place(str(key), name)
        if key == "trust_remote_code":
            raise HamuError(
                f"{name} has {key}, which lets the code of a model do anything; give it as a flag only"
            )
        if key not in all_keys:
            close = closest(str(key), [*all_keys, *_SECTIONS])
            if close is not None:
                raise HamuError(f"{name} has the unknown setting {key!r}; did you mean {close}?")
            raise HamuError(
                f"{name} has the unknown setting {key!r}; hamu {command} --help-all lists those there are"
            )
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
        return yaml.load(text, _AsWritten)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise HamuError(f"{name} is not valid YAML, line {line}: {error.problem}") from error
    except yaml.YAMLError as error:  # a character that YAML has not
        raise HamuError(f"{name} is not valid YAML: {first_line(error)}") from error
    except RecursionError:
        raise HamuError(f"{name} is nested too deeply; expected settings as `key: value`") from None


def _mapping(name: str, content: Any) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = "list" if isinstance(content, list) else "single value"
        raise HamuError(f"{name} is a {kind}; expected settings as `key: value`")
    return content


def _as_flag(name: str, key: str, value: Any) -> str | None:
    """A YAML value as a flag has it: lists with commas, the arguments of a library as JSON."""
    inner = (
        value
        if isinstance(value, list)
        else list(value.values())
        if isinstance(value, dict)
        else []
    )
    if any(isinstance(one, list | dict) for one in inner):
        raise HamuError(
            f"{name} has nested values under {key}; expected one value, or a list of them"
        )
    if isinstance(value, list):
        return ",".join("" if one is None else one for one in value)
    if isinstance(value, dict):
        return json.dumps({one: _of_json(text) for one, text in value.items()})
    return None if value is None else str(value)


def _of_json(text: Any) -> Any:
    """What a text is if it is a number or a truth value of JSON; a library takes no text in its place."""
    if not isinstance(text, str) or isinstance(text, _Quoted) or not _VALUE.fullmatch(text):
        return text
    return json.loads(text)
