"""Methods: each computes one weight per block and side from a `PairGram`.

`TABLE` lists the methods of HAMU as plain data, so that listing them needs no torch; a class loads
on demand. Other packages add methods through the entry point group `hamu.methods`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hamu.core.plugins import made, plugins, points_of
from hamu.errors import unknown

if TYPE_CHECKING:
    from hamu.core.methods.base import (
        ConstraintStatus,
        Method,
        StoppingMemory,
        StoppingRule,
        Weights,
        regime_at,
    )
    from hamu.core.methods.hamu import HamuQ, HamuU

__all__ = [
    "TABLE",
    "ConstraintStatus",
    "HamuQ",
    "HamuU",
    "Method",
    "MethodRow",
    "StoppingMemory",
    "StoppingRule",
    "Weights",
    "build_method",
    "method_classes",
    "method_rows",
    "regime_at",
]
C = TypeVar("C", bound="type[Method]")


class MethodRow(NamedTuple):
    """A row of the table of methods: the attributes of a `Method`.

    Attributes:
        place: module of this package and class, for methods of HAMU.
    """

    name: str
    retain_objective: str | None
    forget_objective: str | None
    summary: str
    source: str
    place: str = ""


_CE, _KL = "cross_entropy", "kl_to_original"
_SUMMARIES = {
    "hamu-q": "raise the forget loss by Q per step at the least retain cost",
    "hamu-u": "lower the retain loss by U per step, forget as much as that allows",
    "ft": "fine-tune on the retain data",
    "ga": "gradient ascent on the forget data",
    "gdiff": "mean of retain descent and forget ascent",
    "kl": "forget ascent, retain predictions kept by KL to the original",
    "scrub": "leave the original's predictions on forget, keep them on retain",
    "gru": "forget ascent made orthogonal to the retain gradient on conflict",
    "pcgrad": "mean of both descents, each projected off the other on conflict",
    "cagrad": "near the mean of both descents, the best for the worse of the two",
    "npo": "mean of retain descent and negative preference optimization",
    "simnpo": "mean of retain descent and length-normalised NPO, without the original",
}
_ROWS = (
    ("hamu-q", _CE, _CE, "HAMU, Alg. 1", "hamu.HamuQ"),
    ("hamu-u", _CE, _CE, "HAMU, Alg. 2", "hamu.HamuU"),
    ("ft", _CE, None, "HAMU, App. D", "baselines.FineTune"),
    ("ga", None, _CE, "Jang et al. 2023", "baselines.GradientAscent"),
    ("gdiff", _CE, _CE, "Liu et al. 2022", "baselines.GradientDifference"),
    ("kl", _KL, _CE, "Maini et al. 2024", "baselines.KLMinimization"),
    ("scrub", "scrub_retain", _KL, "Kurmanji et al. 2023", "baselines.Scrub"),
    ("gru", _CE, _CE, "Wang et al. 2025", "baselines.GradientRectified"),
    ("pcgrad", _CE, _CE, "Yu et al. 2020", "baselines.ProjectConflicting"),
    ("cagrad", _CE, _CE, "Liu et al. 2021", "baselines.ConflictAverse"),
    ("npo", _CE, "npo", "Zhang et al. 2024", "baselines.NegativePreference"),
    ("simnpo", _CE, "simnpo", "Fan et al. 2024", "baselines.SimpleNegativePreference"),
)
TABLE = {
    name: MethodRow(name, retain, forget, _SUMMARIES[name], source, place)
    for name, retain, forget, source, place in _ROWS
}


def listed(name: str) -> Callable[[C], C]:
    """Class decorator: take name, objectives, summary and source from a row of the table."""

    def fill(cls: C) -> C:
        for field in MethodRow._fields[:-1]:
            setattr(cls, field, getattr(TABLE[name], field))
        return cls

    return fill


def method_rows() -> list[MethodRow]:
    """The table of methods, with those of installed packages; loads torch for the latter alone."""
    added = plugins("hamu.methods", "method", TABLE) if points_of("hamu.methods") else {}
    fields = MethodRow._fields[:-1]
    return [*TABLE.values(), *(MethodRow(*(getattr(c, f) for f in fields)) for c in added.values())]


def method_classes(asked: str | None = None) -> dict[str, type[Method]]:
    """All methods by name: those of HAMU first, then those of installed packages.

    A HamuError if an installed package has the method `asked` for and it fails to load.
    """
    ours: dict[str, type[Method]] = {}
    for row in TABLE.values():
        module, cls = row.place.split(".")
        ours[row.name] = getattr(importlib.import_module(f"{__name__}.{module}"), cls)
    return ours | plugins("hamu.methods", "method", TABLE, asked=asked)


def build_method(name: str, **settings: Any) -> Method:
    """Make a method by name.

    Args:
        name: a key of `method_classes`.
        settings: the method's own settings; it ignores others, so that one set of settings applies
            to every method of a comparison.

    Raises:
        HamuError: if the name is unknown, its class fails to load, or a setting is out of range.
    """
    classes = method_classes(name)
    if name not in classes:
        raise unknown("method", name, classes)
    cls = classes[name]
    own = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else ()
    return made("method", cls, **{key: value for key, value in settings.items() if key in own})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "hamu" if name in ("HamuQ", "HamuU") else "base"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
