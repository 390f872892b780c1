"""Comparing results that have two aims: which of them no other beats, and how much of the plane they cover."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hamu.errors import HamuError

Point = tuple[float, float]  # `Gains`, or any two figures of which larger is better


def pareto_optimal(points: Sequence[Point]) -> list[bool]:
    """Of each point whether no other beats it: is at least as good in both, and better in one.

    Raises:
        HamuError: if a point is not finite.
    """
    _check_finite(points)
    return [not any(_beats(other, point) for other in points) for point in points]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The area between a reference and the points (Zitzler and Thiele 1998).

    It is that of all that is better than the reference in both and that some point is at least as good as.

    Args:
        points: in any order; those that are not better than the reference in both add nothing.
        reference: what is just not good enough any more.

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


def _beats(one: Point, other: Point) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def _check_finite(points: Sequence[Point]) -> None:
    for point in points:
        if not all(map(math.isfinite, point)):
            raise HamuError(f"the point {point} is not finite; leave out what diverged")
