"""What the documentation's site does beyond mkdocs."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")


@pytest.fixture
def hooks():
    place = Path(__file__).parents[2] / "docs/hooks.py"
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
    assert hooks.on_page_markdown("[x](../../CITATION.cff)", page) == "[x](../repository/CITATION.cff.txt)"


def test_no_file_holds_two_versions_of_itself():
    """What a merge leaves where it could not decide."""
    root = Path(__file__).parents[2]
    places = [
        *root.glob("*.*"),
        *(p for name in ("src", "tests", "docs", "examples", "benchmarks") for p in (root / name).rglob("*.*")),
    ]
    texts = [p for p in places if p.suffix in {".py", ".md", ".json", ".toml", ".yaml", ".yml", ".j2", ".js", ".css"}]
    assert len(texts) > 300
    marks = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [str(p) for p in texts if marks.search(p.read_text(encoding="utf-8"))] == []
