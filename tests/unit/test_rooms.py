"""The rooms of the package, as CONTRIBUTING.md lists them: each imports only those above it, and none in a circle."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hamu

PACKAGE = Path(hamu.__file__).parent
FRONT_DOOR = {
    "__init__",
    "__main__",
}  # import what they show, and are imported for the version alone
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).with_suffix("").name not in FRONT_DOOR or path.parent != PACKAGE
}


def listed_rooms():
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```text\nsrc/hamu/\n(.*?)```", text, re.DOTALL)
    return re.findall(r"^ {2}(\w+(?:\.py|/)) ", block, re.MULTILINE)


ROOMS = [re.sub(r"\.py$|/$", "", name) for name in listed_rooms()]


def imports_of(path):
    """Names below `hamu` that a module imports, but not for type checkers alone."""
    found, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            nodes += ast.iter_child_nodes(node)
    return {name.removeprefix("hamu.") for name in found if name.startswith("hamu.")}


def test_the_list_names_every_room_once():
    there = {path.name + "/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.name for path in PACKAGE.glob("*.py") if path.stem not in FRONT_DOOR}
    assert sorted(listed_rooms()) == sorted(there)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room):
    may = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
    for name, path in MODULES.items():
        if name.partition(".")[0] == room:
            drawn = {"report"} if name.startswith("unlearning.jobs") else set()
            below = {one.partition(".")[0] for one in imports_of(path)} - may - drawn
            assert not below, f"{name} imports {', '.join(sorted(below))}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {}
    for name, path in MODULES.items():
        found = set()
        for one in imports_of(path):  # a module, or a name of one
            while one and one not in MODULES:
                one = one.rpartition(".")[0]
            found.add(one)
        graph[name] = found - {name, ""}
    TopologicalSorter(graph).prepare()


def test_no_folder_has_more_than_fourteen_modules_and_no_function_more_than_sixty_lines():
    """Lines of a function without those of its docstring."""
    assert len(list(PACKAGE.rglob("*.py"))) <= 80
    assert len(list(PACKAGE.glob("*.py"))) <= 8
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())):
        assert len(list(folder.glob("*.py"))) <= 14, folder.name
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                documented = node.body[0] if ast.get_docstring(node) else None
                shown = documented.end_lineno - documented.lineno + 1 if documented else 0
                assert node.end_lineno - node.lineno + 1 - shown <= 60, f"{name}.{node.name}"


def test_the_lowest_versions_that_are_tried_are_those_that_are_allowed():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    allowed = dict(
        re.match(r"([\w-]+)>=([\d.]+)", one).groups()
        for one in (*project["dependencies"], *extras["quantize"], *extras["test"])
    )
    lines = (root / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()[1:]
    tried = dict(line.split("==") for line in lines)
    assert tried == {name: allowed[name] for name in tried}
    assert {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]} <= tried.keys()
