"""What the steps of a run log of each side: the mean loss, or another objective that the method has for that side."""

from __future__ import annotations

from hamu.core.methods import method_classes
from hamu.core.objectives import CrossEntropy
from hamu.report.run import Run


def objective_of(run: Run, side: str) -> str | None:
    """The name of what the passes over a side are taken of; None if that is not known here.

    It is known of methods that are installed, in runs whose settings can be read.
    """
    method = method_classes().get(run.method)
    if method is None or not run.settings:
        return None
    if side == "forget":
        return run.settings.get("forget_objective") or method.forget_objective
    return method.retain_objective


def is_loss(run: Run, side: str) -> bool:
    """Whether what the steps log of a side is the mean loss, which compares with that of whole sets and of others."""
    return objective_of(run, side) == CrossEntropy.name


def name_of(run: Run, side: str) -> str:
    """What the figures that are logged of a side are called: its loss, or else its objective."""
    return f"{side} {'loss' if is_loss(run, side) else 'objective'}"
