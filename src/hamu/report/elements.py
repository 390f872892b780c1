"""What a report is made of: charts, tables and pictures as plain data, which the page's template and script draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hamu.report.answers import AnsweredRecord

FORGET, RETAIN, TEST = "#D55E00", "#0072B2", "#009E73"
BEFORE, AFTER = "#7F7F7F", "#D55E00"
COLOR_OF_SET = {"forget": FORGET, "retain": RETAIN, "test": TEST}
BUCKETS = 400
_DIGITS = 5


@dataclass(frozen=True)
class Chart:
    """One figure.

    Attributes:
        title: above it.
        says: what it shows, in words, for those who do not see it and as its caption.
        spec: for the script; see report.js.
        wide: takes the whole width.
    """

    title: str
    says: str
    spec: Mapping[str, Any]
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of texts; all columns but the first `texts` ones are numbers and stand at the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    texts: int = 1


@dataclass(frozen=True)
class Picture:
    """An image from the data.

    Attributes:
        source: a data URI.
        alt: what it is, in words.
        lines: what stands below it.
    """

    source: str
    alt: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        title: above it.
        intro: a sentence or two.
        charts, tables: in their order.
        pictures: by what they have in common.
        answers: by set, what was answered before and after.
        missing: what is not there and why.
        folded: whether its tables are shown on demand.
    """

    title: str
    intro: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    folded: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.tables or self.pictures or self.answers or self.missing)


def short(value: Any) -> float | None:
    """A number with the digits that a picture can show; None for what is not finite."""
    return float(f"{value:.{_DIGITS}g}") if value is not None and math.isfinite(value) else None


def shorts(values: Iterable[Any]) -> list[float | None]:
    """Numbers with the digits that a picture can show, see `short`."""
    return [short(value) for value in values]


def line(name: str, color: str, x: np.ndarray, y: np.ndarray, **more: Any) -> dict[str, Any]:
    """A series of a chart, no longer than a screen is wide; see `extremes`. Whole numbers of x, as of steps, stay.

    Args:
        name: of the series.
        color: of its line.
        x, y: its points.
        more: of its looks; "hints", if given, one for each point.
    """
    kept = extremes(y)
    xs = [value if float(value).is_integer() else short(value) for value in x[kept].tolist()]
    if "hints" in more:
        more["hints"] = [more["hints"][place] for place in kept]
    return {"name": name, "color": color, "x": xs, "y": shorts(y[kept]), **more}


def extremes(values: np.ndarray) -> np.ndarray:
    """Positions of at most 2·BUCKETS + 2 values: the first, the last, the lowest and highest of each bucket.

    So no peak is lost, however long the series is. Values that are not finite are left out.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * BUCKETS:
        return finite
    kept = {int(finite[0]), int(finite[-1])}
    for part in np.array_split(finite, BUCKETS):
        found = values[part]
        kept |= {int(part[found.argmin()]), int(part[found.argmax()])}
    return np.array(sorted(kept))


def number(value: float | None, form: str = ".4g") -> str:
    """A figure as text: "-" for none, "not finite" for what is not."""
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else "not finite"


def course(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Describe in words how a series goes."""
    finite = np.flatnonzero(np.isfinite(y))
    if not len(finite):
        return f"{name} is nowhere finite."
    first, last = finite[0], finite[-1]
    name = name[0].upper() + name[1:] if name.isascii() else name
    return (
        f"{name} goes from {y[first]:.3g} at step {x[first]:.0f} to {y[last]:.3g} at step {x[last]:.0f} (lowest "
        f"{np.nanmin(y[finite]):.3g}, highest {np.nanmax(y[finite]):.3g})."
    )


def counted(count: int, noun: str) -> str:
    """Write how many things there are, with the noun in the right number."""
    return f"{count:,} {noun}" if count != 1 else f"1 {noun.removesuffix('s')}"


def were(count: int) -> str:
    """The verb that goes with a number of things: "was" for one, else "were"."""
    return "were" if count != 1 else "was"
