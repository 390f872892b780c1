"""Tables of figures for the screen, the page, Markdown, LaTeX and CSV.

A `Column` describes a figure once: its key in a row, its label, its digits.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as ScreenTable
from rich.text import Text

from hamu.errors import percent
from hamu.evaluation import attacks
from hamu.unlearning.compare.runs import METRIC, Comparison, Row, differing_environments
from hamu.unlearning.goals import ALL_DONE, LEVEL

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


@dataclass(frozen=True)
class Table:
    """Rows under their columns, of which those without any figure are left out."""

    every: Sequence[Column]
    figures: Sequence[Row]
    caption: str = ""

    @property
    def columns(self) -> list[Column]:
        """The columns that have a figure."""
        rows = self.figures
        return [c for c in self.every if any(row.get(c.key) is not None for row in rows)]

    @property
    def rows(self) -> list[list[str]]:
        """The rows as texts."""
        columns = self.columns
        return [[one.text(row.get(one.key)) for one in columns] for row in self.figures]

    def __rich__(self) -> ScreenTable:
        right = tuple(n for n, column in enumerate(self.columns) if column.form)
        heads = (c.label.replace(" ", "\n") if c.form else c.label for c in self.columns)
        found = plain_table(*heads, right=right)
        found.caption, found.caption_justify = self.caption or None, "left"
        for row in self.rows:
            found.add_row(*map(Text, row))
        return found

    def markdown(self) -> str:
        """Table in Markdown."""
        lines = [[column.label or " " for column in self.columns]]
        lines += [["---:" if column.form else "---" for column in self.columns]]
        lines += [[escape_markdown(cell) for cell in row] for row in self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """Table in LaTeX; needs the package booktabs."""
        align = "".join("r" if column.form else "l" for column in self.columns)
        heads = [column.latex or column.label for column in self.columns]
        cells = pd.DataFrame([map(escape_latex, row) for row in self.rows], columns=heads)
        return str(cells.style.hide(axis="index").to_latex(column_format=align, hrules=True))


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """Table of texts, the first on the left and the others on the right."""
    columns = [Column(head, head, "s" if n else "") for n, head in enumerate(heads)]
    return Table(columns, [dict(zip(heads, row, strict=True)) for row in rows], caption)


def plain_table(*columns: str, right: tuple[int, ...] = ()) -> ScreenTable:
    """Empty table of the screen with a line under its head."""
    table = ScreenTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left", overflow="fold")
    return table


def number(value: float | None, form: str = ".4g", none: str = "-") -> str:
    """Write a number; NaN and infinity as "not finite", whole percents by `percent`."""
    if value is None:
        return none
    if form == ".0%" and math.isfinite(value):
        return percent(value)
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
_OF_SETS = (
    Column("records", "records", ","),
    FIGURES[-1],
    Column("rouge", "ROUGE-L", ".3f"),
    Column("truth_ratio", "truth ratio", ".3f"),
    Column("value", "value", ".4g"),
    Column("loss_difference", "loss", "+.4g"),
    Column("accuracy_difference", "accuracy", "+.1%"),
    Column("kl", "KL", ".4g"),
    Column("agreement", "agreement", ".1%"),
)
_INFERENCE = (
    "Membership inference: 0.5 is ideal; it needs test data never trained on, of images five of "
    "the classes forgotten."
)
_PRIVLEAK = " PrivLeak: 0 is ideal; it needs the AUC of both models, the retain model's below 1."


def report_table(reports: Mapping[str, Report], record: Mapping[str, Any] | None = None) -> Table:
    """Figures of each set, with a column per report and the intervals of a record in brackets."""
    last = [*reports.values()][-1]
    recorded = (record or {}).get("figures", {})
    rows = []
    for key in (one for one in SETS if one in last):
        size = number(last[key].get("samples", last[key].get("records")), ",")
        for figure in (one for one in FIGURES if one.key in last[key]):
            cells = [f"{key.replace('_', ' ')} {figure.label}", size]
            for name, report in reports.items():
                intervals = recorded.get(name, {}).get("sets", {}).get(key, {})
                ends = ", ".join(map(figure.text, intervals.get(f"{figure.key}_interval") or ()))
                value = figure.text(report.get(key, {}).get(figure.key))
                cells.append(f"{value} [{ends}]" if ends else value)
            rows.append(cells)
    note = "In brackets: 95% bootstrap intervals over records." if recorded else ""
    return text_table(["figure", "records", *(name or "value" for name in reports)], rows, note)


def set_table(title: str, found: Mapping[str, Any]) -> Table:
    """Further figures of sets, or a single figure, by their names."""
    rows = []
    for name, figures in found.items():
        figures = figures if isinstance(figures, Mapping) else {"value": figures}
        rows.append({"set": name.replace("_", " "), **figures})
    return Table((Column("set", title), *_OF_SETS), rows)


def further_table(reports: Mapping[str, Report]) -> Table:
    """Membership inference, PrivLeak and further metrics of models and of the retain model."""
    theirs = [one["retain_model"] for one in reports.values() if "retain_model" in one]
    found = {**reports, "retain model": theirs[-1]} if theirs else dict(reports)
    columns = {role or "value": _further(report) for role, report in found.items()}
    names = dict.fromkeys(name for one in columns.values() for name in one)
    rows = [
        [name, *(number(one.get(name), none="not measured") for one in columns.values())]
        for name in names
    ]
    note = _INFERENCE + (_PRIVLEAK if "PrivLeak" in names else "")
    return text_table(["further metric", *columns], rows, note)


def _further(report: Report) -> dict[str, Any]:
    inference = report.get("membership_inference") or {"auc": None}
    names = {name: name.replace("auc", "AUC").replace("_", " ") for name in inference}
    found = {f"membership {names[one]}": inference[one] for one in names if one != "samples"}
    found |= {"PrivLeak": report["privleak"]} if "privleak" in report else {}
    return {**found, **report.get("metrics", {})}


# Attacks


def attack_figure(attack: str, result: attacks.AttackResult) -> Column:
    """Figure that shows an attack's success."""
    if attack in (attacks.PREFILL, attacks.SAMPLE):
        return Column("rouge_l_recall", "ROUGE-L recall of forgotten answers", ".3f")
    if result.kind == "image":
        return Column("recognised", "forgotten records recognised", ".0%")
    if attack == attacks.QUANTIZE:
        return Column("exact_memorization", "exact memorization of forgotten records", ".0%")
    return Column("loss", "mean of the forgotten records' losses, nats a token", ".2f")


def strengths(attack: str, outcome: attacks.Outcome) -> list[str]:
    """Names of an attack's strengths."""
    if attack == attacks.QUANTIZE:
        return [f"{bits} bits" if bits else "as saved" for bits in outcome.at]
    if attack == attacks.SAMPLE:
        return [f"leak@{k}" for k in outcome.at]
    unit = "words" if attack == attacks.PREFILL else "steps"
    return [f"{outcome.at[0]} {unit}", *map(str, outcome.at[1:])]


def attack_tables(result: attacks.AttackResult) -> list[Table]:
    """Means over seeds of each attack, a row for each model, then the figures of robustness."""
    tables = []
    for attack, by_model in result.outcomes.items():
        figure, heads, rows = attack_figure(attack, result), [attack], []
        heads += strengths(attack, by_model[attacks.UNLEARNED])
        for role, outcome in by_model.items():
            rows.append([role, *(figure.text(outcome.mean(figure.key, at)) for at in outcome.at)])
            if attack in attacks.RELEARNING:
                rows[-1].append(f"{fmean(outcome.retain_accuracy):.1%}")
        heads += ["retain accuracy"] * (attack in attacks.RELEARNING)
        over = ", mean over seeds" * (attack in attacks.RELEARNING)
        tables.append(text_table(heads, rows, f"{figure.label}{over}"))
    kinds = {"Q": "quantization", "R": "relearning"}
    found = [
        [f"{name[0]}: {kinds[name[0]]}, by {name[2:].replace('_', ' ')}", f"{value:.3f}"]
        for name, value in attacks.robustness(result).items()
    ]
    return tables + [text_table(["robustness, 1 is best", "value"], found)] * bool(found)


# Comparisons

SETTINGS = (
    Column("method", "method"),
    Column("constraint", "c", "g", "$c$"),
    Column("forget_weight", "w", "g", "$w$"),
    Column("learning_rate", "lr", "g", r"$\eta$"),
    Column("seed", "seed", "d"),
)
RESULTS = (
    Column("at_gain", "gain there", "+.4g"),
    Column("at_step", "step there", ",.1f"),
    Column("at_test_accuracy", "test acc there", ".1%"),
    Column("relearned", "relearned", ".3g"),
    Column("forget_gain", "ΔL_f", "+.4g", r"$\Delta L_f$"),
    Column("retain_gain", "-ΔL_r", "+.4g", r"$-\Delta L_r$"),
    Column("forgotten", "forgotten", "g"),
    *(Column(f"{s}_accuracy", f"{s} acc", ".1%") for s in ("forget", "retain", "test")),
    *(Column(f"{s}_probability", f"{s} prob", ".3f") for s in ("forget", "test")),
    Column("utility", "utility", ".3g"),
    Column("membership_auc", "AUC", ".3f"),
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
    "that are forgotten by the goal; too high: of these, losses that stand out above it."
)


def comparison_table(rows: Sequence[Row], columns: Sequence[Column] = COLUMNS) -> Table:
    """Table of the runs of a comparison, or of their means, with a star for the Pareto front."""
    written = []
    for row in rows:
        written.append({**row, "pareto": "*" if row.get("pareto") else ""})
        if row.get("forgotten") is not None:
            is_mean = isinstance(row["forgotten"], Mapping)
            form = Column("", "", ",.1f" if is_mean else ",")
            of, high = row["forget_records"], row.get("too_high") or 0
            least = high["mean"] if isinstance(high, Mapping) else high
            is_high = isinstance(of, int) and least > LEVEL * of
            stand_out = f", {form.text(high)} too high" if is_high else ""
            written[-1]["forgotten"] = f"{form.text(row['forgotten'])} of {of}{stand_out}"
    return Table(columns, written)


def _in_files(rows: Sequence[Row]) -> Table:
    """Table with the further metrics too, for which a screen is too narrow."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(METRIC))
    labels = {key: key.removeprefix(METRIC) for key in names}
    further = [Column(key, label, ".3g", escape_latex(label)) for key, label in labels.items()]
    return comparison_table(rows, [*COLUMNS[:-2], *further, *COLUMNS[-2:]])


# columns that a narrow screen goes without
_LEFT_OUT = {one.key for one in RESULTS} - {"at_gain", "relearned", "forget_gain", "retain_gain"}
_LEFT_OUT |= {"ended", "seconds"}


@dataclass(frozen=True)
class Fitted:
    """A comparison on the screen, without settings that all rows share."""

    rows: Sequence[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        same = [one for one in SETTINGS[1:] if len({row.get(one.key) for row in self.rows}) == 1]
        found = comparison_table(self.rows, [one for one in COLUMNS if one not in same])
        without = [one for one in found.columns if one.key in _LEFT_OUT]
        table = found.__rich__()
        table.width = Measurement.get(console, options.update(width=10**6), table).maximum
        if not options.is_terminal or table.width <= options.max_width:
            yield table
        else:
            yield replace(found, every=[c for c in found.columns if c not in without])
            yield f"no room for {'; '.join(one.label for one in without)}"


def csv_table(rows: Sequence[Row]) -> str:
    """All figures of all runs with all their digits; missing ones are empty."""
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


def markdown_page(comparison: Comparison) -> str:
    """Runs, means and remarks."""
    parts = [_in_files(comparison.shown).markdown()]
    if comparison.means:
        parts += [
            "Means over seeds ± standard deviation:\n",
            _in_files(comparison.means).markdown(),
        ]
    return "\n".join([*parts, *(f"{escape_markdown(line)}\n" for line in remarks(comparison))])


def latex_page(comparison: Comparison) -> str:
    """Runs, means, and remarks as comments; the tables need the package booktabs."""
    lines = ["needs \\usepackage{booktabs}", *remarks(comparison)]
    page = "".join(f"% {line}\n" for line in lines) + _in_files(comparison.shown).latex()
    if comparison.means:
        page += "% means over seeds and standard deviations\n" + _in_files(comparison.means).latex()
    return page


def remarks(comparison: Comparison) -> list[str]:
    """Lines below a comparison: its start, columns, hypervolumes, failures and environments."""
    lines, reference = [], comparison.reference
    if comparison.start is not None:
        start = comparison_table([comparison.start])
        cells = zip(start.columns[1:], start.rows[0][1:], strict=True)
        lines.append("before: " + ", ".join(f"{one.label} {text}" for one, text in cells))
    volumes = sorted(comparison.hypervolumes.items(), key=lambda item: -item[1])
    found = ", ".join(f"{name} {one:.4g}" for name, one in volumes)
    origin = f"({reference.forget:g}, {reference.retain:.4g})"
    all_runs = [row for row in comparison.rows if not row["failed"]]
    of = f" of all {len(all_runs)} runs" if len(comparison.shown) < len(comparison.rows) else ""
    lines += [CAPTION, *([f"hypervolume{of} over {origin}: {found}"] * bool(comparison.start))]
    if (level := comparison.level) is not None:
        other, beyond = ("-ΔL_r", "more") if level.side == "forget" else ("ΔL_f", "less")
        _, rise = comparison.level_gain or ("", 1.0)
        if level.side == "forget" and rise <= 0:
            lines.append(
                f"the forget loss was {level.loss:g} or more before the runs, so this level "
                f"compares nothing; give a higher --at"
            )
        lines.append(
            f"there: where the {level.side} loss is {level.loss:g} (by interpolation) or {beyond}, "
            f"whichever is better; the gain is {other}. relearned: share of forgotten images "
            f"recognised, or mean over forgotten texts of their loss, after the attack "
            f"{attacks.RELEARN_RETAIN} on the first evaluated state there"
        )
        never = {row["method"] for row in all_runs} - comparison.best_settings().keys()
        lines += [f"never there: {', '.join(sorted(never))}"] * bool(never)
    lines += [f"{row['run']} failed: {row['failed']}" for row in comparison.rows if row["failed"]]
    lines += [
        f"{row['run']} ended at step {row['ended_at']} because {row['ended_because']}"
        for row in comparison.shown
        if not row["failed"] and row["ended_because"] != ALL_DONE.text
    ]
    environments = {row["run"]: row.get("environment") for row in comparison.shown}
    differing = differing_environments(environments)
    return lines + [f"not all were computed alike: {differing}"] * bool(differing)
