"""A command: its help, its run, and its result in words, short and aligned."""

import argparse
import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from functools import singledispatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainingArguments

from hamu import files
from hamu.assess import REGIMES, Assessment, plain_answer
from hamu.cli import demo
from hamu.errors import HamuError, percent
from hamu.evaluation.attacks import sentence
from hamu.report import tables
from hamu.unlearning import jobs
from hamu.unlearning.jobs.options import NOT_TAKEN, OF_TRAINING, SHOWN, TYPES, WITH_LINES
from hamu.unlearning.jobs.settings import Parser, parser_of
from hamu.unlearning.record.verify import TOLERANCE

_MANY, _FEW = 64, 16  # retain records that a rate is better suggested by, or at all
_WORDS = {True: "holds", False: "does not hold", None: "cannot be checked"}


def result(found: Any, console: Console) -> int:
    """Print the result of a job; returns the exit code."""
    if getattr(found, "was_complete", False):
        console.print(f"the run in {found.folder} is complete", soft_wrap=True)
        return 0
    for printed in _shown(found):
        is_text = isinstance(printed, str)
        console.print(printed, soft_wrap=is_text, crop=is_text)
    if isinstance(found, jobs.Compared) and not found.finished:
        place = found.folder / files.COMPARISON
        raise HamuError(f"no run finished, of {found.runs}; the reasons are above and in {place}")
    if getattr(found, "merge_failure", ""):
        raise HamuError(found.merge_failure)
    if isinstance(found, jobs.Assessed):
        return int(found.assessment.verdict.code)
    return 1 if isinstance(found, jobs.Verified) and found.count(False) else 0


@singledispatch
def _shown(found: object) -> Iterator[Any]:
    """Lines and tables of a result; none of a demo, which has printed them."""
    return iter(())


@_shown.register
def _page(found: Path) -> Iterator[Any]:
    yield f"the report is in {found} ({found.stat().st_size / 1e6:.1f} MB)"


@_shown.register
def _plan(found: jobs.RunPlan) -> Iterator[Any]:
    table = tables.plain_table("what", "how much", right=(1,))
    for row in found.rows:
        table.add_row(*row)
    yield table
    yield found.note


@_shown.register
def _trained(found: jobs.Trained) -> Iterator[Any]:
    for name in ("train", "test"):
        if f"{name}_loss" in found.figures:
            loss, accuracy = (found.figures[f"{name}_{key}"] for key in ("loss", "accuracy"))
            yield f"{name}: loss {loss:.4f}, accuracy {accuracy:.2%}"
    yield f"the model is in {found.model}"


@_shown.register
def _unlearned(found: jobs.Unlearned) -> Iterator[Any]:
    yield from _reports({role: found.figures[role] for role in ("before", "after")})
    yield from found.lines
    yield f"the model is in {found.model}"
    record = f"the record is in {found.folder / files.READABLE_RECORD}"
    yield f"{record}; the SHA-256 of record.json is {found.record_digest}"
    yield f"to look at it: hamu report {shlex.quote(str(found.folder))}"


@_shown.register
def _evaluated(found: jobs.Evaluated) -> Iterator[Any]:
    yield f"forget set: {found.forget_name}"
    yield from _reports({"": found.report})
    yield from found.lines
    if "tofu" in found.report:
        yield tables.set_table("TOFU", found.report["tofu"])
    if found.attacked is not None:
        yield from list(_attacked(found.attacked))[1:]  # the forget set is named above
    yield f"all figures are in {found.folder / files.EVALUATION}"


@_shown.register
def _attacked(found: jobs.Attacked) -> Iterator[Any]:
    yield f"forget set: {found.forget_name}"
    yield sentence(found.result)
    yield from tables.attack_tables(found.result)
    for name, reason in found.result.skipped.items():
        yield f"{name} is left out: {reason}"
    yield f"all figures are in {found.folder / files.ATTACK}"


@_shown.register
def _compared(found: jobs.Compared) -> Iterator[Any]:
    comparison = found.comparison
    yield tables.Fitted(comparison.shown)
    if comparison.means:
        yield "means over seeds ± standard deviation:"
        yield tables.Fitted(comparison.means)
    yield from tables.remarks(comparison)
    if found.others:
        yield f"not in this table: {found.others} more in {found.folder}; name their settings too"
    if found.finished:
        yield f"tables and picture are in {found.folder} as comparison.md, .tex, .csv, .json, .png"


@_shown.register
def _verified(found: jobs.Verified) -> Iterator[Any]:
    for finding in found.findings:
        why = f": {finding.why}" if finding.why else ""
        yield f"{_WORDS[finding.holds]:18} {finding.statement}{why}"
    near = " and ".join(f"{value:g} ({precision})" for precision, value in TOLERANCE.items())
    yield (
        f"\n{found.count(True)} hold, {found.count(False)} do not hold, {found.count(None)} cannot "
        f"be checked; figures may differ by {near}, relatively if above 1\nthe SHA-256 of "
        f"record.json is {found.record_digest}"
    )


def _reports(by_name: dict[str, dict[str, Any]]) -> Iterator[Any]:
    last = list(by_name.values())[-1]
    is_text = "probability" in last["retain"]
    theirs = {"retain model": last["retain_model"]} if is_text and "retain_model" in last else {}
    yield tables.report_table(by_name | theirs)
    yield tables.further_table(by_name)
    if "against_retain_model" in last:
        yield tables.set_table("against the retain model", last["against_retain_model"])


@_shown.register
def _assessed(found: jobs.Assessed) -> Iterator[Any]:
    result, verdict = found.assessment, found.assessment.verdict
    yield Text(plain_answer(result), "bold")
    yield _hardness_table(result)
    other = {"forget": "retain", "retain": "forget"}
    for side, records in result.conflicts.items():
        worst = ", ".join(f"{row['row']} ({row['value']:+.3g})" for row in records.top(5))
        of = f" of {found.forget_file}" if side == "forget" and found.forget_file else ""
        against = f"{side} records hardest against the {other[side]} gradient, by row{of}: {worst}"
        tenth = f"; a tenth of them makes up {records.top_share:.0%} of the conflict"
        yield against + tenth * (len(records.values) >= 10 and records.top_share > 0)
    yield f"\n{verdict.reason}"
    if 0 < result.curvature_samples < min(_MANY, result.records["retain"]):
        few = f"{result.curvature_samples} records tend to overstate the curvature, and with it"
        yield f"{few} how small the rate must be; --curvature_samples {_MANY} is surer"
    if verdict.suggestion:
        yield f"suggested: {verdict.suggestion}"
    yield f"this took {result.epochs:.2f} epochs' worth of passes; the model is unchanged"
    yield f"\nall figures and the frontier are in {found.folder}"


def _hardness_table(found: Assessment) -> Table:
    hard = found.hardness
    sure: Any = found.intervals  # None where there are too few records
    table = tables.plain_table(
        "", "value", f"95% interval ({sure.parts} parts)" if sure else "", right=(1,)
    )

    def row(name: str, value: str, ends: Any = None) -> None:
        """A line; `ends` of an interval has the whole model's in row 0."""
        table.add_row(name, value, "" if ends is None else "{:+.4g} to {:+.4g}".format(*ends[0]))

    row("‖g_r‖, ‖g_f‖ before clipping", "{:.4g}, {:.4g}".format(*found.gradient_norms))
    row("κ = g_r·g_f, clipped", f"{hard.kappa:+.4g}", sure and sure.kappa)
    row("cosθ", f"{hard.cos:+.4f}", sure and sure.cos)
    for name, one, labels in (
        ("hamu-q", found.hamu_q, ("κ1", "κ2")),
        ("hamu-u", found.hamu_u, ("κ3", "κ4")),
    ):
        for label, key in zip(labels, ("direct_threshold", "stop_threshold"), strict=True):
            interval = sure and getattr(sure.variants[name], key)
            row(f"{label} ({name})", f"{getattr(one, key):+.4g}", interval)
    often = "" if found.agreement is None else f"in {percent(found.agreement)} of resamples"
    table.add_row("regime", hard.regime, often)
    reached = found.gram.retain_sq + found.gram.forget_sq > 0  # not the A of a fresh adapter
    regimes = found.blocks.regime[reached]
    blocks = [int((regimes == number).sum()) for number in range(len(REGIMES))]
    row("blocks that are " + ", ".join(REGIMES), ", ".join(map(str, blocks)))
    for name, frontier in found.frontiers.items():
        limits = f"{frontier.free_limit:.4g} of {frontier.feasible_limit:.4g}"
        row(f"{name}: free of feasible, per η", limits)
    scales = [None if n is None else f"{n:,.1f}" for n in found.noise_scales.values()]
    if None not in scales:
        row("noise scale, retain and forget records", ", ".join(map(str, scales)))
        row("largest batch that is worth its price, records", f"{found.worthwhile_batch:,}")
    for name, value in _curvature(found):
        row(name, value)
    return table


def _curvature(found: Assessment) -> Iterator[tuple[str, str]]:
    curvature, second = found.curvature, found.second_order
    if curvature is None or second is None:
        few = min(_FEW, found.records["retain"])
        yield f"curvature: not measured, so no rate suggested; --curvature_samples {few}", ""
        return
    of = f"{found.curvature_samples:,} of {found.records['retain']:,} records"
    yield f"λ_max of the retain loss, {of}", f"{curvature.largest:.4g}"
    yield f"second order of first, at rate {found.learning_rate:g}", f"{found.error_ratio:.2%}"
    for share in (0.01, 0.1):
        yield f"rate trusted up to {share:.0%}", f"{found.trusted_rate(share):.3g}"
    # without the damping there may be a free step all the same, if a long one
    damped = f" for H + {second.damping:.3g}·I" if second.damping else ""
    words = {True: f"unavoidable{damped}", False: "avoidable", None: "undecided"}
    name = f"collateral forgetting at Q = {second.demand:.3g}"
    yield name, words[second.unavoidable]


def run(command: str, argv: list[str], console: Console) -> int:
    """Run a command, or print its help; returns the exit code."""
    if {"-h", "--help", "--help-all"} & {*argv}:
        console.print(_help(command, everything="--help-all" in argv), soft_wrap=True)
        return 0
    options = given_flags(command, argv)
    if command == "verify":
        return result(jobs.verify(**options), console)
    return result(_function(command)(console=console, **options), console)


def given_flags(command: str, argv: list[str]) -> dict[str, Any]:
    """The options that the flags of a command give, by name."""
    parser = _parser(command)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found = dict(vars(parser.parse_args(argv)))
    for name in found.keys() & {*WITH_LINES}:  # typed as --help shows them
        found[name] = found[name].replace("\\n", "\n")
    return found


def _function(command: str) -> Callable[..., Any]:
    """The function that a command calls; its docstring is the help."""
    return demo.demo if command == "demo" else getattr(jobs, command)


def _parser(command: str) -> Parser:
    """The parser of a job's options, or of the arguments of a function that has its own."""
    if command in TYPES:
        return parser_of(command)
    function = _function(command)
    parser = Parser(prog=f"hamu {command}", allow_abbrev=False, add_help=False)
    helps = dict(re.findall(r"^ {4}(\w+): (.*)$", inspect.getdoc(function) or "", re.MULTILINE))
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if default is parameter.empty:
            how = {"nargs": "+", "metavar": "RUN"} if name == "runs" else {}
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        elif default == ():
            how = {"action": "append"}
        elif default is None:
            how = {}
        if name != "console":
            flag = name if default is parameter.empty else f"--{name}"
            parser.add_argument(flag, help=helps[name].removesuffix("."), **how)
    return parser


def _help(command: str, *, everything: bool) -> str:
    """The usage and purpose of a command; each option with its default, and its help below."""
    parser, is_job, hidden = _parser(command), command in TYPES, {*NOT_TAKEN.get(command, ())}
    if is_job and not everything:
        hidden |= {f.name for f in dataclasses.fields(TrainingArguments)} - SHOWN - {"output_dir"}
    hidden |= OF_TRAINING if command in ("evaluate", "attack") and not everything else set()
    words = ["[--recipe NAME] [--config FILE.yaml]"] if is_job else []
    options = []
    for action in parser._actions:
        if action.dest in hidden or isinstance(action, argparse._StoreFalseAction):  # --no_...
            continue
        name, value = f"--{action.dest}", f" {action.metavar}" if action.metavar else ""
        if not action.option_strings:
            name, value = str(action.metavar or action.dest), ""
            words.append(f"{name}{' ...' if action.nargs else ''}")
        shown = str(action.default).replace("\n", "\\n")
        default = "" if action.default in (None, False) else f" [{shown}]"
        text = " ".join((action.help or "").split())
        options.append(f"  {name}{value}{default}\n        {text}")
    if is_job and not everything:
        options.append("\n--help-all shows the other training arguments too.")
    documented = inspect.getdoc(_function(command)) or ""
    about = " ".join(re.split(r"\n\n(?:Args|Raises):", documented)[0].split())
    usage = " ".join(["usage:", parser.prog, *words, "[--flag value ...]"])
    return "\n".join([f"{usage}\n\n{about}\n", *options])
