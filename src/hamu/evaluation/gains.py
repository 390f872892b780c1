"""Gains of unlearning on both sides, their Pareto front and its hypervolume."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, Self

from hamu.errors import HamuError

Point = tuple[float, float]  # `Gains`, or any two figures of which larger is better


class Gains(NamedTuple):
    """Gains of a model over the one before, in nats; larger is better (paper, Sec. 6)."""

    retain: float  # -ΔL_r, the fall of the retain loss
    forget: float  # ΔL_f, the rise of the forget loss

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Self:
        """Compute the gains from the losses of both sides before and after, in nats."""
        return cls(before["retain"] - after["retain"], after["forget"] - before["forget"])

    @property
    def joint(self) -> float:
        """The smaller gain: above 0 where both sides have gained; NaN if one is NaN."""
        return math.nan if any(map(math.isnan, self)) else min(self)


def pareto_optimal(points: Sequence[Point]) -> list[bool]:
    """Mark the points that no other beats: none is at least as good in both and better in one."""
    _check_finite(points)
    return [
        not any(other != (x, y) and other[0] >= x and other[1] >= y for other in points)
        for x, y in points
    ]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Area that the points dominate above a reference (Zitzler and Thiele 1998)."""
    _check_finite([*points, reference])
    area, reached = 0.0, reference[0]
    for x, y in sorted(points, key=lambda point: (point[1], point[0]), reverse=True):
        if x > reached and y > reference[1]:
            area += (y - reference[1]) * (x - reached)
            reached = x
    return area


def hypervolume_reference(worst_retain: float) -> Gains:
    """Reference of hypervolumes: no forget gain, and the worst retain gain, clamped to [-1, 0]."""
    return Gains(retain=max(-1.0, min(0.0, worst_retain)), forget=0.0)


def _check_finite(points: Sequence[Point]) -> None:
    for point in points:
        if not all(map(math.isfinite, point)):
            raise HamuError(f"the point {point} is not finite; leave out what diverged")


def trajectory_of(entries: Iterable[Mapping[str, Any]]) -> list[Gains]:
    """Gains at each entry of "trajectory" in evaluation.json with finite ones, from the origin."""
    return [Gains(0.0, 0.0), *map(_gains_at, drawn_entries(entries))]


def drawn_entries(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Logged evaluations after the start with finite gains."""
    return [e for e in entries if e["step"] and all(math.isfinite(g) for g in _gains_at(e))]


def _gains_at(entry: Mapping[str, Any]) -> Gains:
    """Gains at a logged evaluation; NaN for one that is not there."""
    gains = (entry[f"eval_{side}_gain"] for side in Gains._fields)
    return Gains(*(math.nan if gain is None else gain for gain in gains))


class Level(NamedTuple):
    """A loss of one side at which runs are compared by the gain of the other, in nats."""

    side: str
    loss: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read forget=LOSS or retain=LOSS."""
        side, _, value = text.partition("=")
        try:
            found = cls(side, float(value))
        except ValueError:
            found = cls("", 0.0)
        if found.side not in Gains._fields or not 0 < found.loss < math.inf:
            raise HamuError(f"at {text!r} must be forget=LOSS or retain=LOSS, in nats")
        return found


def state_at(entries: Iterable[Mapping[str, Any]], level: Level) -> dict[str, float] | None:
    """Figures of the best state of a run at a level (docs/compare.md); None if it never gets there.

    States between two evaluations count, linearly, unless the larger loss is more than twice the
    level. `evaluated` is the next evaluated step that is there. A run that diverged ends before.
    """
    key, sign = f"eval_{level.side}_loss", 1.0 if level.side == "forget" else -1.0
    names = [f"eval_{side}_{figure}" for side in Gains._fields for figure in ("loss", "gain")]
    names += ["step", "eval_test_accuracy"]
    known = [
        {name: math.nan if e.get(name) is None else float(e[name]) for name in names}
        for e in takewhile(lambda e: all(math.isfinite(g) for g in _gains_at(e)), entries)
    ]
    beyond = [sign * (entry[key] - level.loss) for entry in known]
    pairs = zip(known, beyond, strict=True)
    states = [{**entry, "evaluated": entry["step"]} for entry, by in pairs if by >= 0]
    for (a, before), (b, after) in pairwise(zip(known, beyond, strict=True)):
        if before * after < 0 and max(a[key], b[key]) <= 2 * level.loss:
            share = before / (before - after)
            between = {name: a[name] + share * (b[name] - a[name]) for name in names}
            states.append({**between, "evaluated": (a if before > 0 else b)["step"]})
    other = "retain" if level.side == "forget" else "forget"
    return max(states, key=lambda state: state[f"eval_{other}_gain"], default=None)


def gains_of(evaluation: Mapping[str, Any]) -> Gains:
    """Gains of the saved model, by evaluation.json; a run may have returned to an earlier state."""
    models = (evaluation[role] for role in ("before", "after"))
    return Gains.between(*({s: one[s]["loss"] for s in Gains._fields} for one in models))
