"""What the site needs beyond mkdocs: formulas without a script, tables of options, linked files, no other host."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# files outside docs/ that pages link to; they are copied into the site
LINKED = ("CITATION.cff", "CONTRIBUTING.md", "src/hamu/record/schema.json")
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_ROW_SPACE = re.compile(r"\\\\\[\w+\]")  # the converter would print it
_OPTIONS = re.compile(r"^\[options of (\w+)\]$", re.MULTILINE)
_LOADED = re.compile(r'<(?:(?:script|img|iframe|source)[^>]+src|link[^>]+href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files."""
    for name in LINKED:
        files.append(File.generated(config, f"repository/{Path(name).name}.txt", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Point links out of docs/ to their copies."""
    up = "../" * page.file.src_uri.count("/")
    for name in LINKED:
        markdown = markdown.replace(f"](../{up}{name})", f"]({up}repository/{Path(name).name}.txt)")
    return _OPTIONS.sub(lambda found: _options(found[1]), markdown)


def _options(name: str) -> str:
    """A table of what a class of settings adds, read from its source: nothing has to be imported for it."""
    module = ast.parse((ROOT / "src/hamu/training/config.py").read_text(encoding="utf-8"))
    [settings] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for node in settings.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            default, text = (ast.literal_eval(argument) for argument in node.value.args)
            rows.append(f"| `{ast.unparse(node.target)}` | `{default}` | {text} |")
    return "\n".join(rows)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Turn formulas into MathML, which browsers show by themselves."""
    content = _INLINE.sub(lambda found: _mathml(found[1], "inline"), content)
    return _BLOCK.sub(lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', content)


def _mathml(formula: str, display: str) -> str:
    return convert(_ROW_SPACE.sub(r"\\\\", html.unescape(formula)).strip(), display=display)


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Refuse a page that would load something from another host."""
    found = _LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load {found[0]} from another host")
    return output
