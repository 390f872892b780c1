"""Tables of figures for the screen, the page, Markdown, LaTeX and CSV.

A `Column` describes a figure once: its name, its label, its digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table as ScreenTable
from rich.text import Text

from hamu.evaluation.attack_results import (
    PREFILL,
    QUANTIZE,
    RELEARNING,
    SAMPLE,
    UNLEARNED,
    AttackResult,
    Outcome,
    robustness,
)
from hamu.evaluation.membership import auc_of
from hamu.unlearning.compare.rows import Comparison, Row, differing_environments
from hamu.unlearning.stop_reason import ALL_DONE

Report = Mapping[str, Any]  # figures of a model, as `hamu evaluate` writes them
SETS = ("retain", "forget", "test", "test_without_class")
_LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {sign: f"${sign}$" for sign in "<>|"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"±": r"$\pm$", "*": "{*}", "[": "{[}"}  # * and [ could be arguments of a row end


@dataclass(frozen=True)
class Column:
    """A figure of a table: its key in rows, its label, its digits ("" for texts, on the left)."""

    key: str
    label: str
    form: str = ""
    latex: str = ""  # the label, where it is another

    def text(self, value: Any) -> str:
        """Write a value: a text, a number, or a mean with its deviation."""
        if isinstance(value, Mapping):
            mean, deviation = self.text(value["mean"]), value["deviation"]
            return mean if deviation is None else f"{mean} ± {deviation:{self.form.lstrip('+')}}"
        return value if isinstance(value, str) else number(value, self.form)

    def of(self, row: Row) -> str:
        """Write the figure of a row."""
        value = row.get(self.key)
        if self.key == "pareto":
            return "*" if value else ""
        counted = self.key == "forgotten" and value is not None
        return self.text(value) + (f" of {row['forget_records']}" if counted else "")


@dataclass(frozen=True)
class Table:
    """Rows of texts under their columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @classmethod
    def of(cls, columns: Iterable[Column], rows: Sequence[Row], caption: str = "") -> Table:
        """Write rows of figures, without the columns that none of them has."""
        used = [one for one in columns if any(row.get(one.key) is not None for row in rows)]
        return cls(used, [[one.of(row) for one in used] for row in rows], caption)

    @classmethod
    def plain(
        cls, heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", texts: int = 1
    ) -> Table:
        """Table of texts; the columns after the first `texts` are right-aligned."""
        columns = [Column("", head, "s" if n >= texts else "") for n, head in enumerate(heads)]
        return cls(columns, rows, caption)

    def __rich__(self) -> ScreenTable:
        """Table for the screen."""
        right = tuple(n for n, column in enumerate(self.columns) if column.form)
        found = plain_table(*(column.label for column in self.columns), right=right)
        found.caption, found.caption_justify = self.caption or None, "left"
        for row in self.rows:
            found.add_row(*map(Text, row))
        return found

    def markdown(self) -> str:
        """Table in Markdown."""
        lines = [
            [column.label or " " for column in self.columns],
            ["---:" if column.form else "---" for column in self.columns],
            *([escape_markdown(cell) for cell in row] for row in self.rows),
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """Table in LaTeX; needs the package booktabs."""
        align = "".join("r" if column.form else "l" for column in self.columns)
        head = " & ".join(column.latex or column.label for column in self.columns)
        body = [" & ".join(map(escape_latex, row)) + r" \\" for row in self.rows]
        lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", rf"{head} \\", r"\midrule"]
        return "\n".join([*lines, *body, r"\bottomrule", r"\end{tabular}"])


def plain_table(*columns: str, right: tuple[int, ...] = ()) -> ScreenTable:
    """Empty table of the screen with a line under its head."""
    table = ScreenTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left")
    return table


def number(value: float | None, form: str = ".4g", none: str = "-") -> str:
    """Write a number; NaN and infinity as "not finite"."""
    if value is None:
        return none
    return format(value, form) if math.isfinite(value) else "not finite"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is, its numbers with a minus sign in place of a hyphen."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"^-(?=\d)", "$-$", escaped)


# Reports: the figures of models

FIGURES = (
    Column("loss", "loss", ".4g"),
    Column("accuracy", "accuracy", ".1%"),
    Column("probability", "probability", ".3f"),
)
AUC = Column("membership_auc", "AUC", ".3f")
_AGAINST = (
    Column("set", "against the retain model"),
    Column("loss_difference", "loss", "+.4g"),
    Column("accuracy_difference", "accuracy", "+.1%"),
    Column("kl", "KL", ".4g"),
    Column("agreement", "agreement", ".1%"),
)
_TOFU = (
    Column("set", "TOFU"),
    Column("records", "records", ","),
    Column("probability", "probability", ".3f"),
    Column("rouge", "ROUGE-L", ".3f"),
    Column("truth_ratio", "truth ratio", ".3f"),
    Column("value", "value", ".4g"),
)


def report_table(reports: Mapping[str, Report], record: Mapping[str, Any] | None = None) -> Table:
    """Figures of each set, with a column per report and the intervals of a record in brackets."""
    last = [*reports.values()][-1]
    figures = [one for one in FIGURES if one.key in last["retain"]]
    recorded = (record or {}).get("figures", {})

    def cell(name: str, key: str, figure: Column) -> str:
        text = figure.text(reports[name].get(key, {}).get(figure.key))
        found = recorded.get(name, {}).get("sets", {}).get(key, {})
        ends = [figure.text(end) for end in found.get(f"{figure.key}_interval") or ()]
        return f"{text} [{', '.join(ends)}]" if ends else text

    rows = [
        [key.replace("_", " "), number(last[key].get("samples", last[key].get("records")), ",")]
        + [cell(name, key, figure) for figure in figures for name in reports]
        for key in SETS
        if key in last
    ]
    heads = [f"{figure.label} {name}".strip() for figure in figures for name in reports]
    note = "In brackets: 95% bootstrap intervals over records." if recorded else ""
    return Table.plain(["set", "records", *heads], rows, note)


def reference_table(report: Report) -> Table:
    """Distances to the retain model."""
    found = report["against_retain_model"]
    return Table.of(_AGAINST, [{"set": n.replace("_", " "), **row} for n, row in found.items()])


def tofu_table(report: Report) -> Table:
    """TOFU's figures: a row for each set, then the aggregates."""
    sets = [key for key in ("forget", "retain", "real_authors", "world_facts") if key in report]
    rows = [{"set": key.replace("_", " "), **report[key]} for key in sets]
    aggregates = ("model_utility", "model_utility_probability", "forget_quality", "privleak")
    known = [key for key in aggregates if report.get(key) is not None]
    rows += [{"set": key.replace("_", " "), "value": report[key]} for key in known]
    return Table.of(_TOFU, rows)


def membership_line(report: Report) -> str:
    """Line on membership inference of images or texts, with the retain model's figures."""
    inference = report["membership_inference"]
    if inference is None:
        return (
            "membership inference: not measured (it needs test data never trained on, for images "
            "at least five of the classes that are forgotten, and finite losses)"
        )
    theirs = report.get("retain_model", {}).get("membership_inference") or {}
    found = []
    for name in (one for one in inference if one != "samples"):
        other = theirs.get(name)
        beside = "" if other is None else f" [retain model {other:.3f}]"
        own = number(inference[name], ".3f", "not measured")
        found.append(f"{name.replace('_', ' ').replace('auc', 'AUC')} {own}{beside}")
    return f"membership inference: {', '.join(found)} (0.5 is ideal)"


def privleak_line(report: Report) -> str:
    """Line on PrivLeak."""
    value = report["privleak"]
    if value is not None:
        return f"PrivLeak (0 is ideal): {value:+.4f}"
    if auc_of(report) is None or auc_of(report["retain_model"]) is None:
        return "PrivLeak: not measured (it needs membership inference of both models)"
    return "PrivLeak: not measured (it divides by 1 - min k of the retain model, which is 0)"


# Attacks

_ATTACK_FIGURES = {
    one.key: one
    for one in (
        Column("recognised", "forgotten records recognised", ".0%"),
        Column("loss", "loss of forgotten records, nats a token", ".2f"),
        Column("exact_memorization", "exact memorization of forgotten records", ".0%"),
        Column("rouge_l_recall", "ROUGE-L recall of forgotten answers", ".3f"),
    )
}


def attack_figure(attack: str, result: AttackResult) -> Column:
    """Figure that shows an attack's success."""
    if attack in (PREFILL, SAMPLE):
        return _ATTACK_FIGURES["rouge_l_recall"]
    if attack == QUANTIZE and result.kind == "text":
        return _ATTACK_FIGURES["exact_memorization"]
    return _ATTACK_FIGURES[result.figure]


def strengths(attack: str, outcome: Outcome) -> list[str]:
    """Names of an attack's strengths."""
    if attack == QUANTIZE:
        return [f"{bits} bits" if bits else "as saved" for bits in outcome.at]
    if attack == SAMPLE:
        return [f"leak@{k}" for k in outcome.at]
    unit = "words" if attack == PREFILL else "steps"
    return [f"{at} {unit}" if place == 0 else str(at) for place, at in enumerate(outcome.at)]


def attack_tables(result: AttackResult) -> list[Table]:
    """Means over seeds of each attack, a row for each model, then the figures of robustness."""
    tables = []
    for attack, by_model in result.outcomes.items():
        figure, relearns = attack_figure(attack, result), attack in RELEARNING
        heads = [attack, *strengths(attack, by_model[UNLEARNED]), *["retain accuracy"] * relearns]
        rows = []
        for role, outcome in by_model.items():
            cells = [figure.text(outcome.mean(figure.key, at)) for at in outcome.at]
            ends = [f"{fmean(outcome.retain_accuracy):.1%}"] if relearns else []
            rows.append([role, *cells, *ends])
        tables.append(Table.plain(heads, rows, f"{figure.label}, mean over seeds"))
    kinds = {"Q": "quantization", "R": "relearning"}
    found = [
        [f"{name[0]}: {kinds[name[0]]}, by {name[2:].replace('_', ' ')}", f"{value:.3f}"]
        for name, value in robustness(result).items()
    ]
    return tables + [Table.plain(["robustness, 1 is best", "value"], found)] * bool(found)


# Comparisons

SETTINGS = (
    Column("method", "method"),
    Column("constraint", "c", "g", "$c$"),
    Column("learning_rate", "lr", "g", r"$\eta$"),
    Column("seed", "seed", "d"),
)
RESULTS = (
    Column("forget_gain", "ΔL_f", "+.4g", r"$\Delta L_f$"),
    Column("retain_gain", "-ΔL_r", "+.4g", r"$-\Delta L_r$"),
    Column("forgotten", "forgotten", "g"),
    *(
        Column(f"{s}_accuracy", f"{s} acc", ".1%", f"{s} acc.")
        for s in ("forget", "retain", "test")
    ),
    *(Column(f"{s}_probability", f"{s} prob", ".3f", f"{s} prob.") for s in ("forget", "test")),
    Column("utility", "utility", ".3f"),
    AUC,
    Column("retain_model_auc", "AUC retrained", ".3f"),
    Column("promise_kept", "kept", ".0%"),
    Column("steps", "steps", "g"),
)
COLUMNS = (
    Column("pareto", ""),
    *SETTINGS,
    Column("runs", "runs", "d"),
    *RESULTS,
    Column("ended", "ended"),
    Column("seconds", "time, s", ".0f"),
)
CAPTION = (
    "* no other row is at least as good in both gains and better in one. ΔL_f: rise of the forget "
    "loss, -ΔL_r: fall of the retain loss. utility: of texts the mean probability of the answers "
    "to retain, of images the negated retain loss. AUC: membership inference on the forget set "
    "(texts: by Min-K%), 0.5 is ideal; AUC retrained: that of the retain model. forgotten: records "
    "that are forgotten by the goal."
)


def screen_table(rows: Sequence[Row]) -> ScreenTable:
    """Table of a comparison for the screen, without the settings that all rows share."""
    same = [one for one in SETTINGS[1:] if len({row.get(one.key) for row in rows}) == 1]
    table = Table.of([one for one in COLUMNS if one not in same], rows).__rich__()
    table.collapse_padding = True
    return table


def csv_table(rows: Sequence[Row]) -> str:
    """All figures of all runs with all their digits; missing ones are empty."""
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


def markdown_page(comparison: Comparison) -> str:
    """Runs, means and remarks."""
    parts = [Table.of(COLUMNS, comparison.rows).markdown()]
    if comparison.means:
        parts.append("Means over seeds ± standard deviation:\n")
        parts.append(Table.of(COLUMNS, comparison.means).markdown())
    return "\n".join([*parts, *(f"{escape_markdown(line)}\n" for line in remarks(comparison))])


def latex_page(comparison: Comparison) -> str:
    """Runs, means, and remarks as comments; the tables need the package booktabs."""
    lines = ["needs \\usepackage{booktabs}", *remarks(comparison)]
    parts = [*(f"% {line}" for line in lines), Table.of(COLUMNS, comparison.rows).latex()]
    if comparison.means:
        parts.append("% means over seeds and standard deviations")
        parts.append(Table.of(COLUMNS, comparison.means).latex())
    return "\n".join(parts) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """Lines below a comparison: its start, columns, hypervolumes, failures and environments."""
    start, reference = comparison.start, comparison.reference
    lines = []
    if start is not None:
        used = [one for one in COLUMNS if start.get(one.key) is not None]
        lines.append("before: " + ", ".join(f"{one.label} {one.of(start)}" for one in used))
    volumes = sorted(comparison.hypervolumes.items(), key=lambda item: -item[1])
    found = ", ".join(f"{name} {one:.4g}" for name, one in volumes)
    origin = f"({reference.forget:g}, {reference.retain:.4g})"
    lines += [CAPTION, f"hypervolume over {origin}: {found}"]
    rows = comparison.rows
    lines += [f"{row['run']} failed: {row['failed']}" for row in rows if row["failed"]]
    lines += [
        f"{row['run']} ended at step {row['ended_at']} because {row['ended_because']}"
        for row in rows
        if not row["failed"] and row["ended_because"] != ALL_DONE.text
    ]
    differing = differing_environments({row["run"]: row.get("environment") for row in rows})
    return lines + [f"not all were computed alike: {differing}"] * bool(differing)
