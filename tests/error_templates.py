"""The messages of all errors in the source, as templates: what changes from case to case is a `GAP`."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hamu

SOURCE = Path(hamu.__file__).parent
GAP = "<>"
# the exceptions whose messages a user reads
ERRORS = ("HamuError", "CannotMerge", "NeedsCode", "Unavailable", "Interrupted")


@dataclass(frozen=True)
class Raised:
    """One place that makes an error.

    Attributes:
        template: its message, with a `GAP` for each value.
        file: relative to the source.
        first, last: the lines of the call.
    """

    template: str
    file: str
    first: int
    last: int


@cache
def raised_errors() -> tuple[Raised, ...]:
    """Every place in the source that makes an error.

    Raises:
        AssertionError: if a message is no text that stands there, or a class of errors is not in `ERRORS`.
    """
    return tuple(one for path in sorted(SOURCE.rglob("*.py")) for one in _in_file(path))


def _in_file(path: Path) -> Iterator[Raised]:
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    file = str(path.relative_to(SOURCE))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_name(base) in ERRORS for base in node.bases):
            assert node.name in ERRORS, f"{file}:{node.lineno}: {node.name} is an error too; add it to ERRORS"
        if isinstance(node, ast.Call) and _name(node.func) in ERRORS:
            message = node.args[0]
            if isinstance(message, ast.Name):
                message = constants.get(message.id, message)
            yield Raised(_template(message, f"{file}:{node.lineno}"), file, node.lineno, node.end_lineno)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _template(message: ast.expr, place: str) -> str:
    if isinstance(message, ast.Constant):
        return message.value
    assert isinstance(message, ast.JoinedStr), f"{place}: the message is put together elsewhere; write it out there"
    assert not any(isinstance(node, ast.IfExp) for node in ast.walk(message)), f"{place}: raise two messages"
    return "".join(GAP if isinstance(part, ast.FormattedValue) else part.value for part in message.values)
