"""How the runs of a report look: each in a colour of its own, or dashed where there are more runs than colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from hamu.report.trajectories import STYLES

_COLORS = {method: color for method, (color, _) in STYLES.items()}


@dataclass(frozen=True)
class Look:
    """How the lines of one run look.

    Attributes:
        color: as CSS has it.
        dash: lengths of dashes and gaps, as SVG has them; "" for a line without gaps.
    """

    color: str
    dash: str = ""


def looks_of(methods: Sequence[str]) -> list[Look]:
    """Give each run a look, no two alike.

    A method that stands alone has its own colour, and so has the first of several runs of a method. The others get the
    colours that no method in the report has, then these and that of their method again, dashed.

    Args:
        methods: that of each run.
    """
    free = [color for method, color in _COLORS.items() if method not in methods]
    found: list[Look] = []
    for method in methods:
        found.append(next(look for look in _candidates(method, free) if look not in found))
    return found


def _candidates(method: str, free: Sequence[str]) -> Iterator[Look]:
    colors = [_COLORS[method], *free] if method in _COLORS else free or list(_COLORS.values())
    for dots in count():
        for color in colors:
            yield Look(color, " ".join(["7 3", *["2 3"] * (dots - 1)]) if dots else "")
