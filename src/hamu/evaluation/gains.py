"""Gains of unlearning on both sides, their Pareto front and its hypervolume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hamu.errors import HamuError

Point = tuple[float, float]  # `Gains`, or any two figures of which larger is better


class Gains(NamedTuple):
    """Gains of a model over the one before, in nats; larger is better (paper, Sec. 6)."""

    retain: float  # -ΔL_r, the fall of the retain loss
    forget: float  # ΔL_f, the rise of the forget loss

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Gains:
        """Compute the gains from the losses of both sides before and after, in nats."""
        return cls(before["retain"] - after["retain"], after["forget"] - before["forget"])

    @property
    def joint(self) -> float:
        """The smaller gain: above 0 where both sides have gained."""
        return min(self)


def pareto_optimal(points: Sequence[Point]) -> list[bool]:
    """Mark the points that no other beats: none is at least as good in both and better in one.

    Raises:
        HamuError: if a point is not finite.
    """
    _check_finite(points)
    return [
        not any(other != (x, y) and other[0] >= x and other[1] >= y for other in points)
        for x, y in points
    ]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Area that the points dominate above a reference (Zitzler and Thiele 1998).

    Raises:
        HamuError: if a point or the reference is not finite.
    """
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


def gains_of(evaluation: Mapping[str, Any]) -> Gains:
    """Gains of the saved model, by evaluation.json; a run may have returned to an earlier state."""
    before, after = (
        {side: evaluation[role][side]["loss"] for side in Gains._fields}
        for role in ("before", "after")
    )
    return Gains.between(before, after)


def is_near(one: Gains, other: Gains) -> bool:
    """True for points that differ by no more than two measurements of one model."""
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-7) for a, b in pairs)
