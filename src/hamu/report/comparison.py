"""The table of a comparison as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hamu.unlearning.compare.rows import Comparison, Row, differing_environments
from hamu.unlearning.stop_reason import ALL_DONE


@dataclass(frozen=True)
class Column:
    """One figure of every row.

    Attributes:
        key: in a `Row`.
        head: what stands above it.
        latex: the same for LaTeX.
        form: how a number is written, as for `format`; "" for texts.
    """

    key: str
    head: str
    latex: str
    form: str = ""


def _accuracy(side: str) -> Column:
    return Column(f"{side}_accuracy", f"{side} acc", f"{side} acc.", ".1%")


def _probability(side: str) -> Column:
    return Column(f"{side}_probability", f"{side} prob", f"{side} prob.", ".3f")


SETTINGS = (
    Column("method", "method", "method"),
    Column("constraint", "c", "$c$", "g"),
    Column("learning_rate", "lr", r"$\eta$", "g"),
    Column("seed", "seed", "seed", "d"),
)
COLUMNS = (
    Column("pareto", "", ""),
    *SETTINGS,
    Column("runs", "runs", "runs", "d"),
    Column("forget_gain", "ΔL_f", r"$\Delta L_f$", "+.4g"),
    Column("retain_gain", "-ΔL_r", r"$-\Delta L_r$", "+.4g"),
    Column("forgotten", "forgotten", "forgotten", "g"),
    *(_accuracy(side) for side in ("forget", "retain", "test")),
    *(_probability(side) for side in ("forget", "test")),
    Column("utility", "utility", "utility", ".3f"),
    Column("membership_auc", "AUC", "AUC", ".3f"),
    Column("retain_model_auc", "AUC retrained", "AUC retrained", ".3f"),
    Column("promise_kept", "kept", "kept", ".0%"),
    Column("steps", "steps", "steps", "g"),
    Column("ended", "ended", "ended"),
    Column("seconds", "time, s", "time, s", ".0f"),
)
CAPTION = (
    "* no other row is at least as good in both gains and better in one. ΔL_f: rise of the forget "
    "loss, -ΔL_r: fall of "
    "the retain loss. utility: of texts the mean probability of the answers to retain, of images "
    "the negated retain "
    "loss. AUC: membership inference on the forget set (texts: by Min-K%), 0.5 is ideal; AUC "
    "retrained: that of "
    "the retain model. forgotten: records that are forgotten by the goal."
)
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": "$|$",
    # at the start of a row these would be arguments of the row end before it
    "*": "{*}", "[": "{[}",
}  # fmt: skip


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns that have something in them."""
    return [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows)]


def written(row: Row, column: Column) -> str:
    """One figure as text; a mean with its deviation, a count of records with their number."""
    value = row.get(column.key)
    if column.key == "forgotten" and value is not None:
        return f"{_figure(value, column.form)} of {row['forget_records']}"
    if column.key == "pareto":
        return "*" if value else ""
    return "-" if value is None else _figure(value, column.form)


def _figure(value: Any, form: str) -> str:
    if not isinstance(value, dict):
        return format(value, form)
    if value["deviation"] is None:
        return format(value["mean"], form)
    return f"{value['mean']:{form}} ± {value['deviation']:{form.removeprefix('+')}}"


def notes(comparison: Comparison) -> list[str]:
    """A line for each run that did not come to its end, or to an end before all its steps were done, and one if the
    runs were not all computed by the same versions on the same kind of device.
    """
    failed = [f"{row['run']} failed: {row['failed']}" for row in comparison.rows if row["failed"]]
    ended = [
        f"{row['run']} ended at step {row['ended_at']} because {row['ended_because']}"
        for row in comparison.rows
        if not row["failed"] and row["ended_because"] != ALL_DONE.text
    ]
    differing = differing_environments(
        {row["run"]: row.get("environment") for row in comparison.rows}
    )
    return failed + ended + [f"not all were computed alike: {differing}"] * bool(differing)


def start_line(comparison: Comparison) -> str:
    """The figures of the model that all runs have started from; "" if none is finished."""
    start = comparison.start
    if start is None:
        return ""
    return "before: " + ", ".join(
        f"{column.head} {written(start, column)}" for column in columns_of([start])
    )


def volumes_line(comparison: Comparison) -> str:
    """The hypervolumes in one line, the largest first."""
    volumes = sorted(comparison.hypervolumes.items(), key=lambda item: -item[1])
    seen_from = f"({comparison.reference.forget:g}, {comparison.reference.retain:.4g})"
    return f"hypervolume over {seen_from}: " + ", ".join(
        f"{name} {one:.4g}" for name, one in volumes
    )


def csv_table(rows: Sequence[Row]) -> str:
    """All figures of all runs with all their digits; what there is not is empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, keys, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def markdown_page(comparison: Comparison) -> str:
    """The runs, the means and the notes."""
    parts = [_markdown(comparison.rows)]
    if comparison.means:
        parts += ["Means over seeds ± standard deviation:\n", _markdown(comparison.means)]
    said = (start_line(comparison), CAPTION, volumes_line(comparison))
    parts += [escape_markdown(line) + "\n" for line in said if line]
    parts += ["".join(f"- {escape_markdown(note)}\n" for note in notes(comparison))]
    return "\n".join(part for part in parts if part)


def latex_page(comparison: Comparison) -> str:
    """The runs, the means, and the notes as comments; the tables need the package booktabs."""
    said = (
        "needs \\usepackage{booktabs}",
        start_line(comparison),
        CAPTION,
        volumes_line(comparison),
        *notes(comparison),
    )
    parts = [*(f"% {line}" for line in said if line), _latex(comparison.rows)]
    if comparison.means:
        parts += ["% means over seeds and standard deviations", _latex(comparison.means)]
    return "\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    """A text that LaTeX shows as it is, its numbers with a minus sign in place of a hyphen."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"^-(?=\d)", "$-$", escaped)


def _lines(rows: Sequence[Row], columns: Iterable[Column]) -> list[list[str]]:
    columns = list(columns)
    return [[written(row, column) for column in columns] for row in rows]


def _markdown(rows: Sequence[Row]) -> str:
    columns = columns_of(rows)
    lines = [
        [column.head or " " for column in columns],
        ["---:" if column.form else "---" for column in columns],
        *([escape_markdown(cell) for cell in line] for line in _lines(rows, columns)),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _latex(rows: Sequence[Row]) -> str:
    columns = columns_of(rows)
    align = "".join("r" if column.form else "l" for column in columns)
    head = " & ".join(column.latex for column in columns)
    body = (" & ".join(map(escape_latex, line)) for line in _lines(rows, columns))
    return "\n".join([
        rf"\begin{{tabular}}{{{align}}}", r"\toprule", rf"{head} \\", r"\midrule", *(rf"{line} \\" for line in body),
        r"\bottomrule", r"\end{tabular}",
    ])  # fmt: skip
