"""The documentation's site beyond mkdocs."""

import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")

ROOT = Path(__file__).parents[2]
API = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(uri):
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri))


def test_a_page_loads_nothing_from_other_hosts(hooks):
    for element in (
        '<script src="https://cdn.example/x.js">',
        '<script defer src="//cdn.example/x.js">',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<img alt="" src="http://badge.example/x.svg">',
    ):
        with pytest.raises(hooks.PluginError, match=r"index\.md would load"):
            hooks.on_post_page(f"<html>{element}</html>", page("index.md"))
    own = '<script src="assets/x.js"></script><a href="https://example.org">there</a>'
    assert hooks.on_post_page(own, None) == own


def test_formulas_become_mathml(hooks):
    inline = hooks.on_page_content(r'<span class="arithmatex">\(a &lt; b\)</span>')
    assert inline.startswith("<math")
    assert "<mo>&#x0003C;</mo>" in inline
    block = hooks.on_page_content('<div class="arithmatex">\n\\[\nx\\\\[2pt] y\n\\]\n</div>')
    assert 'display="block"' in block
    assert "2pt" not in block


def test_links_out_of_the_folder_point_to_copies(hooks):
    text = hooks.on_page_markdown("[x](../../CITATION.cff)", page("api/core.md"))
    assert text == "[x](../repository/CITATION.cff.txt)"


def test_the_page_of_options_has_every_option_that_a_command_prints(hooks, capsys):
    from hamu.cli import main

    source = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    text = hooks.on_page_markdown(source, page("options.md"))
    assert not re.search(r"^\[.*\]$", text, re.MULTILINE), "a table is missing"
    for command in (*hooks._COMMANDS, "demo", "report", "verify"):
        assert not main([command, "--help-all" if command in hooks._COMMANDS else "--help"])
        printed = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
        assert len(printed) >= 3
        assert [name for name in printed if f"| `{name}` |" not in text] == []
    with pytest.raises(hooks.PluginError, match="prints no options"):
        hooks._help("methods", "--version")


def test_the_page_of_the_trainer_has_every_setting(hooks):
    source = (ROOT / "docs/api/trainer.md").read_text(encoding="utf-8")
    text = hooks.on_page_markdown(source, page("api/trainer.md"))
    assert all(
        f"| `{name}` |" in text for name in ("constraint", "trust_region", "freeze_batchnorm")
    )


@pytest.mark.parametrize(
    "name",
    [
        "hamu", "hamu.assess", "hamu.core.methods", "hamu.data", "hamu.evaluation", "hamu.models",
        "hamu.unlearning.trainer",
    ],
)  # fmt: skip
def test_the_api_pages_have_every_public_name(name):
    """A package that is listed is shown with all names that it exports."""
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"members: \[(.*)\]", API))))
    for entry in re.findall(r"^::: (\S+)$", API, re.MULTILINE):
        found = pkgutil.resolve_name(entry)
        own = {one for one, x in vars(found).items() if getattr(x, "__module__", "") == entry}
        shown |= set(getattr(found, "__all__", own)) | {entry.rpartition(".")[2]}
    package = importlib.import_module(name)
    kinds = (type, FunctionType)
    public = {one for one in package.__all__ if isinstance(getattr(package, one), kinds)}
    assert public <= shown


def test_the_readme_and_the_docs_stay_short():
    """Words as `wc -w` counts them."""
    readme = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert readme < 900
    assert readme + sum(len(page.split()) for page in pages) <= 25_000
