"""`hamu assess`: how hard it is, what it will cost, and whether to start, before any step is taken."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import set_seed

from hamu.assess import (
    ERROR_RATIO,
    REGIMES,
    Assessment,
    assess_model,
    check_settings,
    plain_answer,
)
from hamu.cli.options import AssessOptions, DataOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.problem import fitted_problem, open_problem
from hamu.cli.progress import task_bar
from hamu.cli.tasks import Task
from hamu.core.methods import HamuQ, HamuU
from hamu.core.objectives import CrossEntropy
from hamu.data import UnlearningData
from hamu.files import ASSESSMENT, FRONTIER
from hamu.report import plot_frontiers
from hamu.report.tables import plain_table
from hamu.unlearning.trainer import UnlearnConfig


def run(argv: list[str], console: Console) -> int:
    """Assess, print a screen of text, save assess.json and the plot; the exit code is the verdict's."""
    parsed = parse(
        "assess",
        "Say before a run how hard it is, what it will cost, and whether to start: exit code 0, 3 (it costs) or 4 "
        "(next to nothing is free, or no step is possible). Takes the options of unlearn, but for a goal, "
        "--dry_run and --resume.",
        argv,
        DataOptions,
        RunOptions,
        AssessOptions,
        UnlearnConfig,
    )
    run_options, options, args = (
        parsed.of(RunOptions),
        parsed.of(AssessOptions),
        parsed.of(UnlearnConfig),
    )
    check_settings(
        learning_rate=args.learning_rate,
        max_grad_norm=args.clip_norm,
        batch_size=args.per_device_train_batch_size,
        most_batches=options.assess_batches,
        curvature_samples=options.curvature_samples,
        bootstrap_memory=options.bootstrap_memory,
    )
    task, folder, problem = open_problem(
        parsed.of(DataOptions), run_options, args, parsed.given, console
    )
    task.check_models()
    task.settle_adapter(parsed.given)
    set_seed(args.seed)  # of a new adapter
    model = task.start_model(str(run_options.model)).to(args.device)
    problem = fitted_problem(task, model, problem)
    method = _method(args)
    _announce(task, problem, method, args, console)
    with task_bar(console) as bar:
        shown = bar.add_task("assess", total=None)
        found = assess_model(
            model,
            problem.retain,
            problem.forget,
            collate=task.collator(),
            method=method,
            learning_rate=args.learning_rate,
            max_grad_norm=args.clip_norm,
            blocks=args.blocks,  # type: ignore[arg-type]
            batch_size=args.per_device_train_batch_size,
            most_batches=options.assess_batches,
            curvature_samples=options.curvature_samples,
            bootstrap_memory=options.bootstrap_memory,
            conflicts=options.conflicts,
            seed=args.seed,
            progress=lambda done, total: bar.update(
                shown, completed=round(done), total=round(total)
            ),
        )
    with folder:
        said = {"forget_set": problem.forget_name, "objectives_of_the_run": args.objectives()}
        path = folder.write_json(
            ASSESSMENT, said | found.record()
        )  # first: it shows whose folder this is
        folder.write_config(parsed.given)
        plot_frontiers(found.frontiers, found.method, folder.path / FRONTIER)
    show(found, console)
    console.print(
        f"\nall figures are in {path}, the frontier in {folder.path / FRONTIER}", soft_wrap=True
    )
    return found.verdict.code


def _announce(
    task: Task,
    problem: UnlearningData[Any],
    method: HamuQ | HamuU,
    args: UnlearnConfig,
    console: Console,
) -> None:
    """Say what is assessed, and how the run to come differs from it."""
    instead = "" if method.name == args.method else f", as {args.method} has no constraint"
    console.print(
        f"forget {len(problem.forget)} {task.noun} ({problem.forget_name}), retain {len(problem.retain)}: assessed for "
        f"{method.name}{instead}"
    )
    others = [
        f"{name} to {side}"
        for side, name in args.objectives().items()
        if name not in (None, CrossEntropy.name)
    ]
    if others:
        console.print(
            f"assessed with cross-entropy on both sides, but {args.method} has another loss: {', '.join(others)}. How "
            f"hard that is, and what it costs, may differ",
            soft_wrap=True,
        )


def _method(args: UnlearnConfig) -> HamuQ | HamuU:
    """The HAMU method of the run to come; HAMU-Q with its constraint, for other methods."""
    method = args.build_method()
    if isinstance(method, HamuQ | HamuU):
        return method
    return HamuQ(args.constraint, args.constraint_mode)  # type: ignore[arg-type]


def show(found: Assessment, console: Console) -> None:
    """Print an assessment: the answer in a sentence, then a screen of figures."""
    console.print(Text(plain_answer(found), "bold"), soft_wrap=True)
    hard, sure = found.hardness, found.intervals
    table = plain_table(
        "", "value", f"95% interval ({sure.parts} parts)" if sure else "", right=(1,)
    )

    def row(name: str, value: str, interval: tuple[float, float] | None = None) -> None:
        table.add_row(name, value, f"{interval[0]:+.4g} to {interval[1]:+.4g}" if interval else "")

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
    often = "" if sure is None else f"in {sure.regimes[hard.regime]:.0%} of resamples"
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
