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
from hamu.unlearning.compare.rows import differing_environments

Result = dict[str, Any]
PAGE = "README.md"
_TITLE = "# The paper's figures and tables, run again"
VERDICTS = {True: "agrees", False: "does not agree", None: "cannot be told"}


def check_output(folder: Path, experiments: Iterable[str]) -> None:
    """Check that nothing of somebody else is in the place of the page, of results and of their pictures.

    Args:
        folder: where they go.
        experiments: those whose results and pictures are written or shown.

    Raises:
        HamuError: if it has.
    """
    path = folder / PAGE
    has_page = path.is_file() and path.read_bytes().startswith(_TITLE.encode())
    if path.exists() and not has_page:
        raise HamuError(
            f"{path} is there and is not a page of `python -m experiments`; choose another --output_dir"
        )
    for name in experiments:
        result, picture = folder / f"{name}.json", folder / f"{name}.png"
        if _is_result(result, damaged=has_page):
            continue
        for file in (result, picture) if not has_page else (result,):
            if file.exists():
                raise HamuError(
                    f"{file} is there and is not of `python -m experiments`; choose another --output_dir"
                )


def _is_result(path: Path, damaged: bool) -> bool:
    """True if a file has the result of an experiment.

    Args:
        path: the file.
        damaged: what to take one for that is no JSON.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError:
        return False
    except (ValueError, RecursionError):
        return damaged
    return isinstance(found, dict) and found.keys() >= {"name", "claims", "figures"}


def results_in(folder: Path, experiments: Mapping[str, Experiment]) -> dict[str, Result]:
    """The results that a folder has of some experiments, by name, in the paper's order.

    Raises:
        HamuError: if a file is damaged.
    """
    files = {name: folder / f"{name}.json" for name in experiments}
    return {name: read_json(file) for name, file in files.items() if file.is_file()}


def page(results: Mapping[str, Result], experiments: Mapping[str, Experiment]) -> str:
    """Markdown: an overview, then every experiment with its picture, its claims and why they hold or not.

    Raises:
        HamuError: if a result is not as this version writes it.
    """
    shown = [_shown(name, result) for name, result in results.items()]
    lines = [
        _TITLE,
        "",
        "Made by `python -m experiments NAME` from the JSON files beside this page. Claims are "
        "the paper's or this project's; explanations of claims that do not hold are opinions. "
        "Trends are signs of correlations. \"Cannot be told\": runs are missing, failed or do not "
        "suffice.",
        "",
        "All runs record the stopping criterion without enforcing it, shuffle the data once, "
        "clamp infeasible constraints (`--on_infeasible clamp`), shrink batches with the data and "
        "keep the paper's steps per epoch unless stated. FT and GA read one batch per step, "
        "where the paper doubles their data. Figures share runs.",
        "",
        "| | agrees | does not | cannot be told |",
        "|---|---:|---:|---:|",
    ]  # fmt: skip
    lines += [overview for overview, _ in shown]
    computed: dict[str, list[str]] = {}
    for result in results.values():
        computed.setdefault(_computed_by(result), []).append(result["reference"])
    for by, references in computed.items():
        if by:
            lines += ["", f"{', '.join(references)}: {escape_markdown(by)}"]
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
    counts = " | ".join(str(verdicts.count(verdict)) for verdict in (True, False, None))
    return f"| [{result['reference']}](#{name}) | {counts} |"


def _section(name: str, result: Result) -> list[str]:
    lines = [f'<a id="{name}"></a>', "", f"## {result['reference']}: {result['title']}", ""]
    lines += [_conditions(result), ""]
    if result["about"]:
        lines += [result["about"], ""]
    lines += [f"![{result['reference']}]({name}.png)", ""]
    if result["table"]:
        head, *rows = [[escape_markdown(cell) for cell in row] for row in result["table"]]
        lines += [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows), ""]
    for number, claim in enumerate(result["claims"], 1):
        paper = "" if claim["paper"] is None else f" (paper {_written(claim['paper'])})"
        said = escape_markdown(f"{claim['text']}: {_written(claim['ours'])}{paper}")
        lines.append(f"{number}. **{VERDICTS[claim['holds']]}**: {said}")
    reasons: dict[str, list[str]] = {}
    for number, claim in enumerate(result["claims"], 1):
        if claim["holds"] is False and claim["otherwise"]:
            reasons.setdefault(claim["otherwise"], []).append(str(number))
    for reason, numbers in reasons.items():
        lines += ["", f"Explanation of {', '.join(numbers)}: {reason}"]
    for run, reason in result["failed"].items():
        lines += ["", f"Failed: {escape_markdown(run)}: {escape_markdown(reason)}."]
    return lines


def _share(fraction: float) -> str:
    return "all" if fraction == 1 else f"{fraction:.4g}"


def _conditions(result: Result) -> str:
    scale = result["scale"]
    if scale is None:
        return "Computed, nothing is trained."
    runs = list(result["runs"].values())
    epochs = sorted({run["epochs"] for run in runs})
    papers = sorted({run["paper_epochs"] for run in runs})
    length = (
        f", {' and '.join(f'{e:g}' for e in epochs)} {'epoch' if epochs == [1] else 'epochs'}"
        if epochs
        else ""
    )
    if papers != epochs:
        length += f" (in full {' and '.join(f'{e:g}' for e in papers)})"
    rates = sorted({run["learning_rate"] for run in runs})
    rate = f", learning rate {' and '.join(f'{r:g}' for r in rates)}" if rates else ""
    seconds = [run["seconds"] for run in runs]
    time = "" if None in seconds else f", {sum(seconds) / 60:.1f} min"
    count = f", {len(runs)} runs{time}" if runs else ""
    stands = stands_for(result)
    start = result.get("start")
    original = (
        ""
        if start is None
        else (
            f"; original model {scale['model']}: retain loss {start['retain_loss']:.3g} "
            f"({start['retain_accuracy']:.1%} right), forget loss {start['forget_loss']:.3g}"
        )
    )
    return (
        f"Settings `{scale['recipe']}`, {_share(scale['fraction'])} of the data ({scale['retain']} to retain), "
        f"seed {scale['seed']}, {scale['device']}{_batches(runs)}{length}{rate}{count}{original}"
        f"{stands and f'; {stands}'}."
    )


def _computed_by(result: Result) -> str:
    """Which versions on which device have computed it, and when; "" where the file does not say."""
    made = result["runs"] or {"": result.get("measured") or {}}
    known = {key: run["environment"] for key, run in made.items() if run.get("environment")}
    dates = sorted({run["date"] for run in made.values() if run.get("date")})
    if not known:
        return ""
    when = f" ({' to '.join(dict.fromkeys((dates[0], dates[-1])))})" if dates else ""
    differing = differing_environments(known)
    if differing:
        return f"Not all runs were computed alike{when}: {differing}."
    return f"Computed by {next(iter(known.values()))}{when}."


def stands_for(result: Result) -> str:
    """What data and model stand in place of the paper's; "" if they are the paper's."""
    scale = result["scale"]
    if scale is None:
        return ""
    if scale["recipe"] == "tofu-tiny":
        return "texts of TOFU and a tiny Llama in place of WaterDrum-TOFU and Llama-2-7b"
    return (
        "images in place of the paper's texts"
        if result["task"] == "text" and not scale["is_text"]
        else ""
    )


def _batches(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many steps an epoch has here, and how many it has in the paper."""
    steps = sorted({(run["paper_steps_per_epoch"], run["steps_per_epoch"]) for run in runs})
    if not steps:
        return ""
    if all(paper == here for paper, here in steps):
        return ""
    each = " and ".join(
        f"{here}" if paper == here else f"{here} (the paper's: {paper})" for paper, here in steps
    )
    return f"; an epoch has {each} steps"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _written(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
