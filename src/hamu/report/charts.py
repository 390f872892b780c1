"""Elements of a report: plotly charts, tables, pictures and the sections that hold them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

if TYPE_CHECKING:
    from hamu.report.records import AnsweredRecord

FORGET, RETAIN, TEST = "#D55E00", "#0072B2", "#009E73"
BEFORE, AFTER = "#7F7F7F", FORGET
COLOR_OF_SET = {"forget": FORGET, "retain": RETAIN, "test": TEST}
BUCKETS = 400
_ROWS, _COLUMNS = 160, 200  # cells of a heat map that a screen can show


@dataclass(frozen=True)
class Chart:
    """A chart with its title and a caption that states in words what it shows."""

    title: str
    says: str
    figure: go.Figure
    wide: bool = False

    @property
    def content(self) -> dict[str, Any]:
        """The figure as plotly.js reads it."""
        found: dict[str, Any] = self.figure.to_plotly_json()
        return found


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first `texts` columns are left-aligned, the others are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    texts: int = 1


@dataclass(frozen=True)
class Picture:
    """An image from the data: a data URI, its alternative text and the lines below it."""

    source: str
    alt: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Section:
    """Part of a report.

    Attributes:
        title, intro: heading and introduction.
        charts, tables: in order.
        pictures: by heading.
        answers: by set, answers before and after.
        missing: what the section lacks, and why.
        folded: tables unfold on demand.
    """

    title: str
    intro: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    folded: bool = False


def series(
    name: str,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    color: str,
    *,
    mode: str = "lines",
    hints: Sequence[str] = (),
    line: Mapping[str, Any] | None = None,
    **more: Any,
) -> go.Scatter:
    """Series of a chart, thinned by `extremes`; plotly renders markup, so texts are escaped.

    Args:
        name: in the legend.
        x, y: [N]; values that are not finite are left out.
        color: of line and markers.
        mode: plotly's.
        hints: [N], shown at a point.
        line: width, dash and shape, as plotly has them.
        more: other properties of plotly's scatter trace.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    kept = extremes(ys)
    if hints:
        more["hovertext"] = [html.escape(hints[place], quote=False) for place in kept]
    return go.Scatter(
        name=html.escape(name, quote=False),
        x=shorts(xs[kept]),
        y=shorts(ys[kept]),
        mode="lines+markers" if len(kept) == 1 else mode,
        line={"color": color, **(line or {})},
        marker={"color": color, "size": 5 if mode == "markers" else 7},
        **more,
    )


def axis(label: str, limits: Sequence[float] | None = None, **more: Any) -> dict[str, Any]:
    """Axis of a chart, with plotly's properties in `more`."""
    return {"title": {"text": label}, **({"range": limits} if limits else {}), **more}


def plane(
    drawn: Sequence[go.Scatter],
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    *,
    diagonal: int = 0,
    nearest: bool = False,
    square: bool = False,
) -> go.Figure:
    """Chart of series over two axes.

    Args:
        drawn: the series.
        x, y: see `axis`.
        diagonal: slope of a dotted line through the origin, 1 or -1; 0 for none.
        nearest: the pointer shows the nearest point instead of all series at its x.
        square: taller, for axes with one unit.
    """
    figure = go.Figure(
        drawn,
        {
            "template": {},
            "xaxis": x,
            "yaxis": y,
            "height": 400 if square else 320,
            "hovermode": "closest" if nearest else "x unified",
            "showlegend": len(drawn) > 1,
        },
    )
    if diagonal:
        values = [v for one in drawn for part in (one.x, one.y) for v in part]
        low, high = (
            (*x["range"],) if "range" in x else (min(values, default=0), max(values, default=1))
        )
        figure.add_shape(
            type="line", x0=low, x1=high, y0=diagonal * low, y1=diagonal * high, layer="below",
            line={"dash": "dot", "color": BEFORE, "width": 1},
        )  # fmt: skip
    return figure


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    *,
    scale: str,
    hover: str,
    height: int,
    limits: tuple[float, float] | None = None,
    numbers: bool = False,
    x: str = "step",
) -> go.Figure:
    """Heat map of [rows, columns], the first row on top; NaN leaves a cell empty.

    Cells that a screen cannot show are merged into the one of the largest magnitude.

    Args:
        rows, columns: names.
        values: [R, C].
        scale: plotly's name of the colour scale.
        hover: plotly's template of a cell's text.
        height: in CSS pixels.
        limits: of the colours; None for powers of ten, at most six of them.
        numbers: percentages stand in the cells.
        x: label of the columns.
    """
    values, rows = _merged(values, rows, _ROWS)
    values, columns = _merged(values.T, columns, _COLUMNS)
    names = [[html.escape(name, quote=False) for name in part] for part in (rows, columns)]
    if limits is None:
        values = np.log10(np.where(values > 0, values, np.nan))
        known = values[np.isfinite(values)]
        high = float(known.max()) if len(known) else 0.0
        limits = max(float(known.min()), high - 6) if len(known) else -6.0, high
    cells = go.Heatmap(
        y=names[0], x=names[1], z=[shorts(row) for row in values.T], zmin=limits[0], zmax=limits[1],
        colorscale=scale, hovertemplate=f"{hover}<extra></extra>", hoverongaps=False,
        texttemplate="%{z:.0%}" if numbers else None, colorbar={"thickness": 12},
    )  # fmt: skip
    return go.Figure(
        cells,
        {
            "template": {},
            "height": height,
            "xaxis": axis(x, type="category"),
            "yaxis": {"type": "category", "autorange": "reversed"},
        },
    )


def bars(categories: Sequence[str], values: Mapping[str, tuple[str, Sequence[float]]]) -> go.Figure:
    """Horizontal bars of shares: for each category one bar per name with its colour and values."""
    names = [html.escape(one, quote=False) for one in categories]
    drawn = [
        go.Bar(name=name, y=names, x=shorts(shares), orientation="h", marker={"color": color},
               hovertemplate="%{y}: %{x:.1%}")
        for name, (color, shares) in values.items()
    ]  # fmt: skip
    return go.Figure(
        drawn,
        {
            "template": {},
            "height": 80 + 30 * len(categories),
            "barmode": "group",
            "hovermode": "closest",
            "xaxis": {"range": [0, 1], "tickformat": ".0%"},
            "yaxis": {"type": "category", "autorange": "reversed"},
        },
    )


def shorts(values: Iterable[Any]) -> list[float | None]:
    """Numbers with five digits, whole ones unchanged; None for those that are not finite."""
    return [None if v is None or not math.isfinite(v) else _short(float(v)) for v in values]


def _short(value: float) -> float:
    return value if value.is_integer() else float(f"{value:.5g}")


def extremes(values: np.ndarray) -> np.ndarray:
    """Positions of at most 2·BUCKETS + 2 finite values, so that no peak of a long series is lost.

    These are the first, the last, and the lowest and highest of each bucket.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * BUCKETS:
        return finite
    kept = {int(finite[0]), int(finite[-1])}
    for part in np.array_split(finite, BUCKETS):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    return np.array(sorted(kept))


def _merged(
    values: np.ndarray, names: Sequence[str], most: int
) -> tuple[np.ndarray, Sequence[str]]:
    """Merge rows into at most this many, each the largest magnitude of its part."""
    if len(values) <= most:
        return values, names
    rows, joined = [], []
    for part in np.array_split(np.arange(len(values)), most):
        magnitude = np.where(np.isfinite(values[part]), np.abs(values[part]), -1.0)
        rows.append(np.take_along_axis(values[part], magnitude.argmax(0)[None], 0)[0])
        ends = names[part[0]], names[part[-1]]
        joined.append(ends[0] if len(part) == 1 else " … ".join(ends))
    return np.array(rows), joined


def number(value: float | None, form: str = ".4g") -> str:
    """Figure as text: "-" for none, "not finite" for NaN and infinity."""
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else "not finite"


def course(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Describe a series in words: its ends and extremes."""
    finite = np.flatnonzero(np.isfinite(y))
    if not len(finite):
        return f"{name} is nowhere finite."
    first, last = finite[0], finite[-1]
    name = name[0].upper() + name[1:] if name.isascii() else name
    return (
        f"{name} goes from {y[first]:.3g} at step {x[first]:.0f} to {y[last]:.3g} at step "
        f"{x[last]:.0f} (lowest {y[finite].min():.3g}, highest {y[finite].max():.3g})."
    )


def counted(count: int, noun: str) -> str:
    """Write a count with its noun, singular for one."""
    return f"{count:,} {noun}" if count != 1 else f"1 {noun.removesuffix('s')}"
