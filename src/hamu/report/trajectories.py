"""What every picture of trajectories shares, printed or on a page: points, colours, limits, labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hamu.core.gram import SIDES
from hamu.evaluation.gains import Gains

# Colours that stay apart in print and for colour-blind readers (Okabe and Ito); ours are solid and thick.
STYLES: dict[str, tuple[str, str]] = {
    "hamu-q": ("#D55E00", "o"),
    "hamu-u": ("#0072B2", "s"),
    "ft": ("#009E73", "^"),
    "ga": ("#000000", "v"),
    "gdiff": ("#CC79A7", "D"),
    "kl": ("#E69F00", "P"),
    "scrub": ("#56B4E9", "X"),
    "gru": ("#7F7F7F", "<"),
    "pcgrad": ("#8C6D31", ">"),
    "cagrad": ("#882255", "d"),
    "npo": ("#332288", "p"),
    "simnpo": ("#999933", "h"),
}
Trajectory = Sequence[Gains]
Limits = tuple[tuple[float, float], tuple[float, float]]


def trajectory_of(entries: Iterable[Mapping[str, Any]]) -> list[Gains]:
    """The gains at each of a run's evaluations, from the origin on, as far as they are finite.

    Args:
        entries: what a run has logged of its evaluations, "trajectory" in its evaluation.json.
    """
    return [Gains(0.0, 0.0), *map(gains_at, drawn_entries(entries))]


def drawn_entries(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations after the start with finite gains: the points of a trajectory but its first."""
    return [entry for entry in entries if entry["step"] and all(map(_is_finite, gains_at(entry)))]


def gains_at(entry: Mapping[str, Any]) -> Gains:
    """The gains at an evaluation."""
    return Gains(entry["eval_retain_gain"], entry["eval_forget_gain"])


def gains_of(evaluation: Mapping[str, Any]) -> Gains:
    """The gains of the model that a run has saved, by its evaluation.json.

    That is where its trajectory ends, unless the run went back to an earlier state at its end.
    """
    before, after = (
        {side: evaluation[role][side]["loss"] for side in SIDES} for role in ("before", "after")
    )
    return Gains.between(before, after)


def limits_of(trajectories: Sequence[Trajectory]) -> Limits:
    """Limits that show two thirds of the trajectories whole, with room to spare; what goes farther off is cut."""
    limits = []
    for axis in (0, 1):
        ends = sorted(max(abs(point[axis]) for point in points) for points in trajectories)
        bound = 1.6 * ends[max(0, (2 * len(ends)) // 3 - 1)] or 1.0
        values = [
            point[axis] for points in trajectories for point in points if abs(point[axis]) <= bound
        ]
        low, high = min(values, default=0.0), max(values, default=0.0)
        margin = 0.08 * (high - low) or bound
        limits.append((low - margin, high + margin))
    return limits[0], limits[1]


def label_of(name: str, end: Gains, limits: Limits) -> str:
    """Name of a method, and where it ended if that is not to be seen."""
    retain, forget = end
    inside = all(low <= value <= high for value, (low, high) in zip(end, limits, strict=True))
    return name if inside else f"{name} (ends at {retain:.2g}, {forget:.2g})"


def is_near(one: Gains, other: Gains) -> bool:
    """Whether two points are the same but for what one model measured twice may differ by."""
    return all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-7) for a, b in zip(one, other, strict=True)
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
