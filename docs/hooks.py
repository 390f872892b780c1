"""Additions to mkdocs: formulas without a script, tables of options, linked files, no other host.

Options of the API come from the dataclasses, those of the commands are what `--help` prints.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# files outside docs/ that pages link to; they are copied into the site
LINKED = ("CITATION.cff", "CONTRIBUTING.md", "src/hamu/unlearning/record/schema.json")
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_ROW_SPACE = re.compile(r"\\\\\[\w+\]")  # the converter would print it
_OPTIONS = re.compile(r"^\[options of (\w+)\]$", re.MULTILINE)
_OF_A_COMMAND = re.compile(r"^\[options of hamu (\w+)\]$", re.MULTILINE)
_OF_COMMANDS = "[options of the commands]"
_INHERITED = "[inherited options]"
_COMMANDS = ("train", "unlearn", "assess", "compare", "evaluate", "attack")
_HELP = re.compile(
    r"^  (--\w+|[\w ]+?)(?: ([A-Za-z][\w:/.]*))?(?: \[(.*)\])?\n {8}(.*)$", re.MULTILINE
)
_LOADED = re.compile(
    r'<(?:(?:script|img|iframe|source)[^>]+src|link[^>]+href)="(?:https?:)?//[^"]*"'
)


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files."""
    for name in LINKED:
        files.append(
            File.generated(
                config, f"repository/{Path(name).name}.txt", abs_src_path=str(ROOT / name)
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Point links out of docs/ to their copies."""
    up = "../" * page.file.src_uri.count("/")
    for name in LINKED:
        markdown = markdown.replace(f"](../{up}{name})", f"]({up}repository/{Path(name).name}.txt)")
    if _OF_COMMANDS in markdown:
        markdown = markdown.replace(_OF_COMMANDS, _shared_options())
    if _INHERITED in markdown:
        shown = {option[0] for command in _COMMANDS for option in _help(command, "--help")}
        rest = [option for option in _help("unlearn", "--help-all") if option[0] not in shown]
        markdown = markdown.replace(_INHERITED, _table(rest))
    markdown = _OF_A_COMMAND.sub(lambda found: _table(_help(found[1], "--help")), markdown)
    return _OPTIONS.sub(lambda found: _options(found[1]), markdown)


@cache
def _help(command: str, flag: str) -> list[tuple[str, str, str]]:
    """Each option that a command prints: its name, its default, and what it is."""
    from hamu.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([command, flag])
    found = [(name, default, text) for name, _, default, text in _HELP.findall(printed.getvalue())]
    if not found:
        raise PluginError(f"hamu {command} {flag} prints no options")
    return found


def _shared_options() -> str:
    """Of the commands that take many options in common: a table for each set of commands."""
    takers: dict[tuple[str, str, str], list[str]] = {}
    for command in _COMMANDS:
        for name, default, text in _help(command, "--help"):
            default = default.replace(f"runs/{command}", "runs/COMMAND")
            takers.setdefault((name, default, text), []).append(command)
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for option, commands in takers.items():
        groups.setdefault(tuple(commands), []).append(option)
    sections = [
        f"**{', '.join(f'`{command}`' for command in commands)}**\n\n{_table(options)}"
        for commands, options in sorted(groups.items(), key=lambda group: -len(group[0]))
    ]
    return "\n\n".join(sections)


def _table(options: list[tuple[str, str, str]]) -> str:
    """Of names, defaults and texts, which are no Markdown but for their backticks."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, default, text in options:
        parts = [
            part if part.startswith("`") else html.escape(part, False)
            for part in re.split(r"(`[^`]*`)", text)
        ]
        meaning = "".join(parts).replace("|", "\\|")
        rows.append(f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |")
    return "\n".join(rows)


def _options(name: str) -> str:
    """Table of the settings that a class adds."""
    from hamu.unlearning.trainer import config

    cls = getattr(config, name)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{one.name}` | `{one.default}` | {one.metadata['help']} |"
        for one in fields(cls)
        if one.name in vars(cls)["__annotations__"] and "help" in one.metadata
    ]
    return "\n".join(rows)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Turn formulas into MathML, which browsers show by themselves."""
    content = _INLINE.sub(lambda found: _mathml(found[1], "inline"), content)
    return _BLOCK.sub(
        lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', content
    )


def _mathml(formula: str, display: str) -> str:
    return convert(_ROW_SPACE.sub(r"\\\\", html.unescape(formula)).strip(), display=display)


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Refuse a page that would load something from another host."""
    found = _LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load {found[0]} from another host")
    return output
