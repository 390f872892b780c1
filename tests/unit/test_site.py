"""What the documentation's site does beyond mkdocs."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks():
    place = ROOT / "docs/hooks.py"
    spec = importlib.util.spec_from_file_location("hooks", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://cdn.example/x.js">',
        '<script defer src="//cdn.example/x.js">',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<img alt="" src="http://badge.example/x.svg">',
    ],
)
def test_a_page_that_would_load_something_from_elsewhere_is_refused(hooks, element):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    with pytest.raises(hooks.PluginError, match=r"index\.md would load"):
        hooks.on_post_page(f"<html>{element}</html>", page)


def test_a_page_may_link_elsewhere_and_load_its_own(hooks):
    page = '<script src="assets/x.js"></script><a href="https://example.org">there</a><img src="images/x.png">'
    assert hooks.on_post_page(page, None) == page


def test_formulas_become_mathml(hooks):
    inline = hooks.on_page_content(r'<span class="arithmatex">\(a &lt; b\)</span>')
    assert inline.startswith("<math")
    assert "<mo>&#x0003C;</mo>" in inline
    block = hooks.on_page_content('<div class="arithmatex">\n\\[\nx\\\\[2pt] y\n\\]\n</div>')
    assert 'display="block"' in block
    assert "2pt" not in block


def test_links_out_of_the_folder_point_to_copies(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/core.md"))
    assert (
        hooks.on_page_markdown("[x](../../CITATION.cff)", page)
        == "[x](../repository/CITATION.cff.txt)"
    )


def test_the_page_of_options_has_every_option_that_a_command_prints(hooks, capsys):
    from hamu.cli import main

    source = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    page = hooks.on_page_markdown(
        source, SimpleNamespace(file=SimpleNamespace(src_uri="options.md"))
    )
    assert not re.search(r"^\[.*\]$", page, re.MULTILINE), "a table is missing"
    for command in (
        "train",
        "unlearn",
        "assess",
        "compare",
        "evaluate",
        "attack",
        "demo",
        "report",
        "verify",
    ):
        with pytest.raises(SystemExit):
            main([command, "--help-all" if command in hooks._COMMANDS else "--help"])
        printed = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
        assert len(printed) >= 3
        assert [name for name in printed if f"| `{name}` |" not in page] == []


def test_a_command_that_prints_no_options_is_noticed(hooks):
    with pytest.raises(hooks.PluginError, match="prints no options"):
        hooks._help("methods", "--version")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".assess",
        ".core.methods",
        ".data",
        ".evaluation",
        ".models",
        ".unlearning",
        ".unlearning.trainer",
    ],
)
def test_the_api_pages_have_every_public_name(name):
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    package = importlib.import_module(f"hamu{name}")
    public = [getattr(package, one) for one in package.__all__]
    named = [one for one in public if inspect.isclass(one) or inspect.isfunction(one)]
    ends = {entry.rpartition(".")[2] for entry in listed}
    assert [
        one.__name__ for one in named if one.__name__ not in ends and one.__module__ not in listed
    ] == []


def test_no_file_holds_two_versions_of_itself():
    """What a merge leaves where it could not decide."""
    places = [
        *ROOT.glob("*.*"),
        *(
            p
            for name in ("src", "tests", "docs", "examples", "benchmarks")
            for p in (ROOT / name).rglob("*.*")
        ),
    ]
    texts = [
        p
        for p in places
        if p.suffix in {".py", ".md", ".json", ".toml", ".yaml", ".yml", ".j2", ".js", ".css"}
    ]
    assert len(texts) > 300
    marks = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [str(p) for p in texts if marks.search(p.read_text(encoding="utf-8"))] == []
