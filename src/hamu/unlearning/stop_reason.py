"""Stop reasons: a kind, by which runs are told apart, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

StopKind = Literal[
    "all steps",  # nothing ended it before
    "criterion",  # the stopping criterion is met; in a run by goal: no demand is free
    "target",  # the forget loss of a step has reached its target
    "no forgetting",  # the forget loss of a step was too low
    "retain loss",  # the retain loss of a step was too high
    "infeasible",  # the constraint could not be met
    "skips",  # too many steps in a row could not be taken
    "no small step",  # no step was small enough to keep its promise
    "goal",  # a run by goal has reached it
    "budget",  # what it may cost is spent, or every further step costs more than is left of it
    "other",
]


@dataclass(frozen=True)
class StopReason:
    """End of a run: its kind, and the reason as it goes on from "because"."""

    kind: StopKind
    text: str


ALL_DONE = StopReason("all steps", "all its steps are done")  # of a run that nothing ended before


def kind_in(saved: Mapping[str, Any]) -> StopKind:
    """The kind of end that a checkpoint or evaluation.json names; "other" if it names none."""
    kind = saved.get("ended_kind")
    return cast(StopKind, kind) if kind in get_args(StopKind) else "other"
