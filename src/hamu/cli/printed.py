"""Results in words: aligned, short, with the digits that mean something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from hamu.assess import REGIMES, Assessment, plain_answer
from hamu.assess.assessment import ERROR_RATIO
from hamu.evaluation.attack_results import AttackResult, sentence
from hamu.report.tables import (
    attack_tables,
    membership_line,
    plain_table,
    privleak_line,
    reference_table,
    remarks,
    report_table,
    screen_table,
    tofu_table,
)
from hamu.unlearning.compare import Comparison
from hamu.unlearning.compare.rows import Row

__all__ = ["assessment", "attacks", "comparison", "reports", "tofu_table"]


def reports(by_name: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the figures of models side by side, of images or of texts."""
    last = list(by_name.values())[-1]
    is_text = "probability" in last["retain"]
    theirs = {"retain model": last["retain_model"]} if is_text and "retain_model" in last else {}
    console.print(report_table(by_name | theirs))
    for name, report in by_name.items():
        lines = [membership_line(report)]
        if "privleak" in report:
            lines.append(privleak_line(report))
        for line in lines:
            console.print(f"{name}: {line}" if name else line)
        for metric, value in report.get("metrics", {}).items():
            measured = "not measured" if value is None else f"{value:.4g}"
            console.print(f"{metric}: {measured}")
    if "against_retain_model" in last:
        console.print(reference_table(last))


def attacks(result: AttackResult, figures: Path, console: Console) -> None:
    """Print the verdict and the curves of attacks."""
    console.print(sentence(result), soft_wrap=True)
    for table in attack_tables(result):
        console.print(table)
    for name, reason in result.skipped.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)
    console.print(f"all figures are in {figures}", soft_wrap=True)


def assessment(found: Assessment, console: Console) -> None:
    """Print an assessment: the answer in a sentence, then a screen of figures."""
    console.print(Text(plain_answer(found), "bold"), soft_wrap=True)
    hard, sure = found.hardness, found.intervals
    table = plain_table(
        "", "value", f"95% interval ({sure.parts} parts)" if sure else "", right=(1,)
    )

    def row(name: str, value: str, ends: Tensor | None = None) -> None:
        """A line; `ends` of an interval has the whole model's in row 0."""
        interval = "" if ends is None else f"{ends[0, 0]:+.4g} to {ends[0, 1]:+.4g}"
        table.add_row(name, value, interval)

    row("‖g_r‖, ‖g_f‖ before clipping", "{:.4g}, {:.4g}".format(*found.gradient_norms))
    row("κ = g_r·g_f, clipped", f"{hard.kappa:+.4g}", sure and sure.kappa)
    row("cosθ", f"{hard.cos:+.4f}", sure and sure.cos)
    for name, one, names in (
        ("hamu-q", found.hamu_q, ("κ1", "κ2")),
        ("hamu-u", found.hamu_u, ("κ3", "κ4")),
    ):
        of_variant = sure and sure.variants[name]
        row(
            f"{names[0]} ({name})",
            f"{one.direct_threshold:+.4g}",
            of_variant and of_variant.direct_threshold,
        )
        row(
            f"{names[1]} ({name})",
            f"{one.stop_threshold:+.4g}",
            of_variant and of_variant.stop_threshold,
        )
    often = "" if found.agreement is None else f"in {found.agreement:.0%} of resamples"
    table.add_row("regime", hard.regime, often)
    blocks = [int((found.blocks.regime == number).sum()) for number in range(len(REGIMES))]
    row("blocks that are " + ", ".join(REGIMES), ", ".join(map(str, blocks)))
    for name, frontier in found.frontiers.items():
        row(
            f"{name}: free of feasible, per η",
            f"{frontier.free_limit:.4g} of {frontier.feasible_limit:.4g}",
        )
    console.print(table)
    _show_curvature(found, console)
    _show_conflicts(found, console)
    verdict, ratio = found.verdict, found.error_ratio
    console.print(Text.assemble("\n", (verdict.headline, "bold"), f": {verdict.reason}"))
    if ratio is not None and ratio > ERROR_RATIO:
        console.print(
            f"But all of this is first order, and at learning rate {found.learning_rate:g} second order may be "
            f"{ratio:.0%} of it."
        )
    rate = "" if verdict.learning_rate is None else f" --learning_rate {verdict.learning_rate:g}"
    if verdict.constraint > 0:
        console.print(
            f"suggested: --constraint_mode relative --constraint {verdict.constraint:g}{rate}"
        )
    console.print(f"this took {found.epochs:.2f} epochs' worth of passes; the model is unchanged")


def _show_curvature(found: Assessment, console: Console) -> None:
    curvature, condition = found.curvature, found.second_order
    if curvature is None or condition is None:
        console.print(
            "curvature: not measured; --curvature_samples N takes N records whatever they cost"
        )
        return
    rates = ", ".join(f"{found.trusted_rate(share):.3g} ({share:.0%})" for share in (0.01, 0.1))
    console.print(
        f"curvature of the retain loss: λ_max {curvature.largest:.4g} on {found.curvature_samples} records; "
        f"at learning rate {found.learning_rate:g} second order is up to {found.error_ratio:.2%} of first order; "
        f"trusted up to {rates}"
    )
    definite = (
        "positive definite"
        if condition.positive_definite
        else "not positive definite, as it assumes"
    )
    general = (
        f"cannot be told with the Hessian: {condition.undecided}"
        if condition.unavoidable is None
        else f"{'unavoidable' if condition.unavoidable else 'avoidable'}, least retain change "
        f"{condition.least_retain_change:+.3g} with the Hessian"
    )
    console.print(
        f"second order, for Q = {condition.demand:.3g}: collateral forgetting "
        f"{'unavoidable' if condition.spherical_unavoidable else 'avoidable'} on a sphere of λ_max; {general} "
        f"({definite}; damping {condition.damping:.3g}, residual {condition.residual:.2g})"
    )


def _show_conflicts(found: Assessment, console: Console) -> None:
    for side, other in (("forget", "retain"), ("retain", "forget")):
        if side not in found.conflicts:
            continue
        records = found.conflicts[side]
        worst = ", ".join(f"{row['row']} ({row['value']:+.3g})" for row in records.top(5))
        console.print(
            f"{side} records hardest against the {other} gradient, by row: {worst}; a tenth of "
            f"them makes up {records.top_share:.0%} of the conflict"
        )


def comparison(found: Comparison, console: Console) -> None:
    """Print the table, the means over seeds, the hypervolumes, and the runs that ended before their last step."""
    _show_table(found.rows, console)
    if found.means:
        console.print("means over seeds ± standard deviation:")
        _show_table(found.means, console)
    for line in remarks(found):
        console.print(line, soft_wrap=True)


def _show_table(rows: Sequence[Row], console: Console) -> None:
    """Print a table as wide as it must be; a setting that is the same in all rows is left out."""
    table = screen_table(rows)
    table.width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table, crop=False)
