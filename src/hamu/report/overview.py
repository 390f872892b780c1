"""Several runs in one table and the same pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hamu.report.course import over_steps, trajectories
from hamu.report.elements import Chart, Section, course, line
from hamu.report.looks import Look
from hamu.report.objectives import is_loss
from hamu.report.run import Run
from hamu.report.tables import several
from hamu.unlearning.record.inputs import differing, without_order

_SIDES = ("forget", "retain")


def overview(runs: Sequence[Run], looks: Sequence[Look]) -> Section:
    """Show the figures of several runs, their trajectories, and the losses of their steps.

    Args:
        runs: at least two.
        looks: how each is drawn.
    """
    path = trajectories(runs, looks)
    charts = [path and replace(path, wide=True), *(overlaid(runs, looks, side) for side in _SIDES)]
    missing = [reason for side in _SIDES if (reason := _own_objectives(runs, side))]
    others = [reason for run in runs if (reason := _read_otherwise(runs[0], run))]
    alone = [run.name for run in runs if run.is_trajectory_alone]
    if alone:
        missing.append(f"more of {', '.join(alone)}: a demo keeps trajectories alone")
    intro = f"These runs do not all compare: {'; '.join(others)}." if others else ""
    return Section(
        "All runs",
        intro,
        charts=[c for c in charts if c is not None],
        tables=[several(runs)],
        missing=missing,
    )


def _read_otherwise(first: Run, run: Run) -> str:
    """Name what a run began with that is not what the first one began with; "" if there is nothing."""
    if not (first.inputs and run.inputs):
        return ""
    name = differing(without_order(first.inputs), without_order(run.inputs))
    return "" if name is None else f"{run.name} had another {name} than {first.name}"


def overlaid(runs: Sequence[Run], looks: Sequence[Look], side: str) -> Chart | None:
    """The loss of one side in those runs whose steps log it, rather than another objective."""
    key = f"{side}_loss"
    drawn = [
        (run, look)
        for run, look in zip(runs, looks, strict=True)
        if key in run.steps and is_loss(run, side)
    ]
    if not drawn:
        return None
    series = [
        line(run.name, look.color, run.steps["step"], run.steps[key], dash=look.dash)
        for run, look in drawn
    ]
    says = " ".join(
        course(f"run {run.name}", run.steps["step"], run.steps[key]) for run, _ in drawn
    )
    return Chart(f"The {side} loss of the steps' batches", says, over_steps(series, "loss, nats"))


def _own_objectives(runs: Sequence[Run], side: str) -> str:
    """Name the runs whose steps log another objective than the loss of a side, and why; "" if there are none."""
    names = [run.name for run in runs if f"{side}_loss" in run.steps and not is_loss(run, side)]
    if not names:
        return ""
    return (
        f"the {side} loss of the steps' batches of {', '.join(names)}: what is logged there is the objective of the "
        f"method, which is not the loss, or not known to be"
    )
