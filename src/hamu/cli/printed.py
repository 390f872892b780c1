"""Results in words: aligned, short, with the digits that mean something."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hamu import files
from hamu.assess import REGIMES, Assessment, plain_answer
from hamu.assess.assessment import ERROR_RATIO
from hamu.errors import HamuError
from hamu.evaluation.attack_results import sentence
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
from hamu.unlearning import jobs
from hamu.unlearning.record.verify import TOLERANCE

_WORDS = {True: "holds", False: "does not hold", None: "cannot be checked"}


def result(found: Any, console: Console) -> int:
    """Print the result of a job; returns the exit code."""
    if getattr(found, "was_complete", False):
        console.print(f"the run in {found.folder} is complete", soft_wrap=True)
        return 0
    code = _PRINT[type(found)](found, console) or 0
    if getattr(found, "merge_failure", ""):
        raise HamuError(found.merge_failure)
    return code


def _plan(found: jobs.RunPlan, console: Console) -> None:
    table = plain_table("what", "how much", right=(1,))
    for row in found.rows:
        table.add_row(*row)
    console.print(table)
    console.print(found.note)


def _trained(found: jobs.Trained, console: Console) -> None:
    for name in ("train", "test"):
        if f"{name}_loss" in found.figures:
            loss, accuracy = (found.figures[f"{name}_{key}"] for key in ("loss", "accuracy"))
            console.print(f"{name}: loss {loss:.4f}, accuracy {accuracy:.2%}")
    console.print(f"the model is in {found.model}", soft_wrap=True)


def _unlearned(found: jobs.Unlearned, console: Console) -> None:
    _reports({role: found.figures[role] for role in ("before", "after")}, console)
    for line in found.lines:
        console.print(line)
    console.print(f"the model is in {found.model}", soft_wrap=True)
    console.print(
        f"the record is in {found.folder / files.READABLE_RECORD}; the SHA-256 of record.json is "
        f"{found.record_digest}",
        soft_wrap=True,
    )
    console.print(f"to look at it: hamu report {shlex.quote(str(found.folder))}", soft_wrap=True)


def _evaluated(found: jobs.Evaluated, console: Console) -> None:
    console.print(f"forget set: {found.forget_name}")
    _reports({"": found.report}, console)
    for line in found.lines:
        console.print(line, soft_wrap=True)
    if "tofu" in found.report:
        console.print(tofu_table(found.report["tofu"]))
    if found.attacked is not None:
        _attacked(found.attacked, console, named=True)
    console.print(f"all figures are in {found.folder / files.EVALUATION}", soft_wrap=True)


def _attacked(found: jobs.Attacked, console: Console, *, named: bool = False) -> None:
    """Print the verdict and the curves of attacks."""
    if not named:
        console.print(f"forget set: {found.forget_name}")
    console.print(sentence(found.result), soft_wrap=True)
    for table in attack_tables(found.result):
        console.print(table)
    for name, reason in found.result.skipped.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)
    console.print(f"all figures are in {found.folder / files.ATTACK}", soft_wrap=True)


def _compared(found: jobs.Compared, console: Console) -> None:
    comparison = found.comparison
    for rows in filter(None, (comparison.rows, comparison.means)):
        if rows is comparison.means:
            console.print("means over seeds ± standard deviation:")
        table = screen_table(rows)  # as wide as it must be
        table.width = console.measure(table, options=console.options.update(width=1000)).maximum
        console.print(table, crop=False)
    for line in remarks(comparison):
        console.print(line, soft_wrap=True)
    if found.others:
        console.print(
            f"not in this table: {found.others} more in {found.folder}; name their settings too to "
            f"have all in one",
            soft_wrap=True,
        )
    if not found.finished:
        raise HamuError(
            f"no run finished, of {found.runs}; the reasons are printed above and in "
            f"{found.folder / 'comparison.json'}"
        )
    console.print(
        f"the table is in {found.folder} as comparison.md, .tex, .csv and .json, the picture in "
        f"{found.folder / files.COMPARISON_PICTURE}",
        soft_wrap=True,
    )


def _verified(found: jobs.Verified, console: Console) -> int:
    for finding in found.findings:
        why = f": {finding.why}" if finding.why else ""
        console.print(f"{_WORDS[finding.holds]:18} {finding.statement}{why}", soft_wrap=True)
    near = " and ".join(f"{value:g} ({precision})" for precision, value in TOLERANCE.items())
    console.print(
        f"\n{found.count(True)} hold, {found.count(False)} do not hold, {found.count(None)} cannot "
        f"be checked; figures may differ by {near}, relatively if above 1\nthe SHA-256 of "
        f"record.json is {found.record_digest}",
        soft_wrap=True,
    )
    return 1 if found.count(False) else 0


def _reports(by_name: dict[str, dict[str, Any]], console: Console) -> None:
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


def _assessed(found: jobs.Assessed, console: Console) -> int:
    """Print an assessment: the answer in a sentence, then a screen of figures."""
    result = found.assessment
    verdict, ratio = result.verdict, result.error_ratio
    console.print(Text(plain_answer(result), "bold"), soft_wrap=True)
    console.print(_hardness_table(result))
    for line in (*_curvature(result), *_conflicts(result)):
        console.print(line)
    console.print(Text.assemble("\n", (verdict.headline, "bold"), f": {verdict.reason}"))
    if ratio is not None and ratio > ERROR_RATIO:
        console.print(
            f"But all of this is first order, and at learning rate {result.learning_rate:g} second "
            f"order may be {ratio:.0%} of it."
        )
    rate = "" if verdict.learning_rate is None else f" --learning_rate {verdict.learning_rate:g}"
    if verdict.constraint > 0:
        console.print(
            f"suggested: --constraint_mode relative --constraint {verdict.constraint:g}{rate}"
        )
    console.print(f"this took {result.epochs:.2f} epochs' worth of passes; the model is unchanged")
    console.print(
        f"\nall figures are in {found.folder / files.ASSESSMENT}, the frontier in "
        f"{found.folder / files.FRONTIER}",
        soft_wrap=True,
    )
    return int(verdict.code)


def _hardness_table(found: Assessment) -> Table:
    hard = found.hardness
    sure: Any = found.intervals  # None where there are too few records
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
    for name, one, direct, stop in (
        ("hamu-q", found.hamu_q, "κ1", "κ2"),
        ("hamu-u", found.hamu_u, "κ3", "κ4"),
    ):
        of_one = sure and sure.variants[name]
        for label, key in ((direct, "direct_threshold"), (stop, "stop_threshold")):
            interval = of_one and getattr(of_one, key)
            row(f"{label} ({name})", f"{getattr(one, key):+.4g}", interval)
    often = "" if found.agreement is None else f"in {found.agreement:.0%} of resamples"
    table.add_row("regime", hard.regime, often)
    blocks = [int((found.blocks.regime == number).sum()) for number in range(len(REGIMES))]
    row("blocks that are " + ", ".join(REGIMES), ", ".join(map(str, blocks)))
    for name, frontier in found.frontiers.items():
        limits = f"{frontier.free_limit:.4g} of {frontier.feasible_limit:.4g}"
        row(f"{name}: free of feasible, per η", limits)
    return table


def _curvature(found: Assessment) -> list[str]:
    curvature, second = found.curvature, found.second_order
    if curvature is None or second is None:
        return ["curvature: not measured; --curvature_samples N takes N records whatever they cost"]
    rates = ", ".join(f"{found.trusted_rate(share):.3g} ({share:.0%})" for share in (0.01, 0.1))
    words = {True: "unavoidable", False: "avoidable"}
    definite = "" if second.positive_definite else "not "
    assumes = "" if second.positive_definite else ", as it assumes"
    general = f"cannot be told with the Hessian: {second.undecided}"
    if second.unavoidable is not None:
        general = (
            f"{words[second.unavoidable]}, least retain change {second.least_retain_change:+.3g} "
            f"with the Hessian"
        )
    return [
        f"curvature of the retain loss: λ_max {curvature.largest:.4g} on {found.curvature_samples} "
        f"records; at learning rate {found.learning_rate:g} second order is up to "
        f"{found.error_ratio:.2%} of first order; trusted up to {rates}",
        f"second order, for Q = {second.demand:.3g}: collateral forgetting "
        f"{words[second.spherical_unavoidable]} on a sphere of λ_max; {general} "
        f"({definite}positive definite{assumes}; "
        f"damping {second.damping:.3g}, residual {second.residual:.2g})",
    ]


def _conflicts(found: Assessment) -> Iterator[str]:
    other = {"forget": "retain", "retain": "forget"}
    for side, records in found.conflicts.items():
        worst = ", ".join(f"{row['row']} ({row['value']:+.3g})" for row in records.top(5))
        yield (
            f"{side} records hardest against the {other[side]} gradient, by row: {worst}; a tenth "
            f"of them makes up {records.top_share:.0%} of the conflict"
        )


_PRINT: dict[type, Callable[[Any, Console], int | None]] = {
    jobs.RunPlan: _plan,
    jobs.Trained: _trained,
    jobs.Unlearned: _unlearned,
    jobs.Assessed: _assessed,
    jobs.Evaluated: _evaluated,
    jobs.Attacked: _attacked,
    jobs.Compared: _compared,
    jobs.Verified: _verified,
}
