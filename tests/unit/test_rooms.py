"""The rooms of the package, as CONTRIBUTING.md lists them: each imports only those above it."""

import ast
import re
from pathlib import Path

import pytest

import hamu

PACKAGE = Path(hamu.__file__).parent
FRONT_DOOR = {
    "__init__",
    "__main__",
}  # import what they show, and are imported for the version alone


def listed_rooms():
    """The names in the list, in its order, with .py or / at their ends."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```text\nsrc/hamu/\n(.*?)```", text, re.DOTALL)
    return re.findall(r"^ {2}(\w+(?:\.py|/)) ", block, re.MULTILINE)


ROOMS = [re.sub(r"\.py$|/$", "", name) for name in listed_rooms()]


def imported_rooms(tree):
    """The rooms that a module imports, at once or in a function, but not for type checkers alone."""
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (parts[1] for parts in names if parts[0] == "hamu" and len(parts) > 1)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            first, *below = (node.module or "").split(".")
            if first == "hamu":
                yield from below[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)


def test_the_list_names_every_room_once():
    there = {path.name + "/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.name for path in PACKAGE.glob("*.py") if path.stem not in FRONT_DOOR}
    assert sorted(listed_rooms()) == sorted(there)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room):
    may = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
    folder = PACKAGE / room
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        below = set(imported_rooms(ast.parse(path.read_text(encoding="utf-8")))) - may
        assert not below, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(below))}"


@pytest.mark.parametrize(("code", "rooms"), [
    ("from hamu.data.images import ImageData\nimport hamu.core.gram", ["data", "gram"]),
    ("from hamu import HamuError, cli", ["HamuError", "cli"]),
    ("import hamu, torch\nfrom torch import nn", []),
    ("try:\n    import hamu.cli\nexcept ImportError:\n    import hamu.core.gram", ["cli", "gram"]),
    ("class A:\n    import hamu.cli\n    def f(self):\n        import experiments.paper", ["cli", "paper"]),
    ("if TYPE_CHECKING:\n    from hamu.cli import main\nelse:\n    from experiments.paper import page", ["paper"]),
])  # fmt: skip
def test_an_import_is_seen_wherever_it_stands(code, rooms):
    assert sorted(imported_rooms(ast.parse(code))) == rooms
