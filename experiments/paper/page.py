"""The page of all experiments that have been run, made from their JSON alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paper.experiment import Experiment
from hamu.errors import HamuError
from hamu.files import read_json
from hamu.report.tables import escape_markdown
from hamu.unlearning.compare.runs import differing_environments

Result = dict[str, Any]
PAGE = "README.md"
VERDICTS = {True: "agrees", False: "differs", None: "open"}
_TITLE = "# The paper's figures and tables, run again"
_ABOUT = """
Made by `python -m experiments NAME` from the JSON files beside this page. Claims are the paper's or this project's;
explanations are opinions. A trend is the sign of a correlation. A claim is open if runs are missing, failed or do not
suffice.

Runs do not enforce the stopping criterion, shuffle the data once, clamp infeasible constraints, and shrink batches with
the data. FT and GA read one batch per step, where the paper doubles their data.
"""
_HEAD = (
    "",
    *VERDICTS.values(),
    "share of data (retained)",
    "epochs",
    "original: retain loss (right), forget loss",
)


def check_output(folder: Path, experiments: Iterable[str]) -> None:
    """Refuse a folder in which a file of somebody else has the name of the page, a result or a picture."""
    path = folder / PAGE
    if path.is_file() and path.read_bytes().startswith(_TITLE.encode()):
        return
    files = [path] if path.exists() else []
    for name in experiments:
        result = folder / f"{name}.json"
        if not _is_result(result):
            files += [file for file in (result, folder / f"{name}.png") if file.exists()]
    if files:
        raise HamuError(
            f"{files[0]} is there and is not of `python -m experiments`; choose another --output_dir"
        )


def _is_result(path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.keys() >= {"name", "claims", "figures"}


def results_in(folder: Path, experiments: Mapping[str, Experiment]) -> dict[str, Result]:
    """Results of some experiments that a folder has, in the paper's order."""
    files = {name: folder / f"{name}.json" for name in experiments}
    return {name: read_json(file) for name, file in files.items() if file.is_file()}


def page(results: Mapping[str, Result], experiments: Mapping[str, Experiment]) -> str:
    """Markdown: an overview, then every experiment with its picture and its claims.

    Raises:
        HamuError: if a result is not as this version writes it.
    """
    shown = [_shown(name, result) for name, result in results.items()]
    lines = [_TITLE, _ABOUT, _row(_HEAD), _rule(_HEAD)]
    lines += [overview for overview, _ in shown]
    lines += _notes(results.values())
    missing = [f"`{name}`" for name in experiments if name not in results]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    for _, section in shown:
        lines += ["", *section]
    return "\n".join(lines) + "\n"


def _shown(name: str, result: Result) -> tuple[str, list[str]]:
    """The line of the overview and the section of a result."""
    try:
        return _overview(name, result), _section(name, result)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise HamuError(
            f"{name}.json is not as this version writes it ({type(error).__name__}: {error}); make it anew, or "
            f"remove it"
        ) from error


def _overview(name: str, result: Result) -> str:
    verdicts = [claim["holds"] for claim in result["claims"]]
    counts = [str(verdicts.count(verdict)) for verdict in VERDICTS]
    return _row([f"[{result['reference']}](#{name})", *counts, *_conditions(result)])


def _conditions(result: Result) -> list[str]:
    """The cells that say how a result was made."""
    scale, runs = result["scale"], list(result["runs"].values())
    if scale is None:
        return [""] * 3
    steps = {(run["steps_per_epoch"], run["paper_steps_per_epoch"]) for run in runs}
    changed = sorted(f"{here} steps, {paper} in full" for here, paper in steps if here != paper)
    epochs = _each(f"{run['epochs']:g}" for run in runs)
    full = _each(f"{run['paper_epochs']:g}" for run in runs)
    epochs += f" of {full}" if full != epochs else ""
    epochs += f" ({', '.join(changed)})" if changed else ""
    start = result.get("start")
    original = "" if start is None else (
        f"{start['retain_loss']:.3g} ({start['retain_accuracy']:.1%}), {start['forget_loss']:.3g}"
    )  # fmt: skip
    return [
        f"{scale['fraction']:.4g} ({scale['retain']})",
        epochs,
        original,
    ]


def _each(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _notes(results: Iterable[Result]) -> list[str]:
    """List settings and substitutes of results, each once for all that share them."""
    references: dict[str, list[str]] = {}
    for result in results:
        parts = (_settings(result), stands_for(result), _computed_by(result))
        reference = result["reference"].partition(" (")[0]
        references.setdefault("; ".join(filter(None, parts)), []).append(reference)
    return [
        line
        for note, of in references.items()
        for line in ("", f"{', '.join(of)}: {escape_markdown(note)}.")
    ]


def _settings(result: Result) -> str:
    scale = result["scale"]
    if scale is None:
        return "computed from the formulas"
    return (
        f"settings {scale['recipe']}, seed {scale['seed']}, {scale['device']}, "
        f"original model {scale['model']}"
    )


def stands_for(result: Result) -> str:
    """Data and model that replace the paper's; "" if they are the paper's."""
    scale = result["scale"]
    if scale is not None and scale["recipe"] == "tofu-tiny":
        return "texts of TOFU and a tiny Llama in place of WaterDrum-TOFU and Llama-2-7b"
    if scale is not None and result["task"] == "text" and not scale["is_text"]:
        return "images in place of the paper's texts"
    return ""


def _computed_by(result: Result) -> str:
    """Say where runs of different versions or devices stand side by side; their files name them."""
    known = {key: run.get("environment") for key, run in result["runs"].items()}
    differing = differing_environments(known)
    return f"not all runs were computed alike: {differing}" if differing else ""


def _section(name: str, result: Result) -> list[str]:
    lines = [f'<a id="{name}"></a>', "", f"## {result['reference']}: {result['title']}", ""]
    if result["about"]:
        lines += [result["about"], ""]
    lines += [f"![{name}]({name}.png)", ""]
    if result["table"]:
        head, *rows = [[escape_markdown(cell) for cell in row] for row in result["table"]]
        lines += [_row(head), _rule(head), *map(_row, rows), ""]
    reasons: dict[str, list[str]] = {}
    for number, claim in enumerate(result["claims"], 1):
        paper = "" if claim["paper"] is None else f" (paper {_written(claim['paper'])})"
        said = escape_markdown(f"{claim['text']}: {_written(claim['ours'])}{paper}")
        lines.append(f"{number}. **{VERDICTS[claim['holds']]}**: {said}")
        if claim["holds"] is False and claim["otherwise"]:
            reasons.setdefault(claim["otherwise"], []).append(str(number))
    for reason, numbers in reasons.items():
        lines += ["", f"Explanation of {', '.join(numbers)}: {reason}"]
    for run, reason in result["failed"].items():
        lines += ["", f"Failed: {escape_markdown(run)}: {escape_markdown(reason)}."]
    return lines


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(head: Sequence[str]) -> str:
    return f"|---|{'---:|' * (len(head) - 1)}"


def _written(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
