"""Methods: each computes one weight per block and side from a `PairGram`.

`TABLE` lists the methods of HAMU as plain data, so that listing them needs no torch; classes load
on demand. Other packages add methods through the entry point group `hamu.methods`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hamu.core.plugins import made, plugins
from hamu.errors import HamuError, unknown

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
    """A row of the table of methods: the attributes of a `Method`."""

    name: str
    retain_objective: str | None
    forget_objective: str | None
    source: str
    summary: str


_CE, _KL = "cross_entropy", "kl_to_original"
_ROWS = (  # the order of pictures' colours: add at the end
    ("hamu-q", _CE, _CE, "HAMU, Alg. 1", "raise the forget loss by Q at the least retain cost"),
    ("hamu-u", _CE, _CE, "HAMU, Alg. 2", "lower the retain loss by U, forget as much as it allows"),
    ("ft", _CE, None, "HAMU, App. D", "fine-tune on the retain data"),
    ("ga", None, _CE, "Jang et al. 2023", "gradient ascent on the forget data"),
    ("gdiff", _CE, _CE, "Liu et al. 2022", "mean of retain descent and forget ascent"),
    ("kl", _KL, _CE, "Maini et al. 2024", "forget ascent, retain predictions kept by KL"),
    ("scrub", "scrub_retain", _KL, "Kurmanji et al. 2023", "leave the original on forget data"),
    ("gru", _CE, _CE, "Wang et al. 2025", "forget ascent, made orthogonal to g_r on conflict"),
    ("pcgrad", _CE, _CE, "Yu et al. 2020", "mean of both, projected off each other on conflict"),
    ("cagrad", _CE, _CE, "Liu et al. 2021", "near the mean of both, the best for the worse"),
    ("npo", _CE, "npo", "Zhang et al. 2024", "mean of retain descent and NPO"),
    ("simnpo", _CE, "simnpo", "Fan et al. 2024", "mean of retain descent and SimNPO"),
    ("blur", _CE, _CE, "Reisizadeh et al. 2026", "forget ascent, and g_r projected off it"),
    ("ngdiff", _CE, _CE, "Jin et al. 2025", "both descents, each divided by its norm"),
    ("munba", _CE, _CE, "Wu and Harandi 2025", "Nash bargaining of both descents"),
    ("mgda", _CE, _CE, "Désidéri 2012", "shortest vector between both descents"),
    ("falcon", _CE, _CE, "Hu et al. 2025", "per block: fixed weights, one pair for conflict"),
    ("pcgrad-one-sided", _CE, _CE, "Xiao et al. 2026", "per block: ascent projected on conflict"),
    ("gru-ema", _CE, _CE, "Wang et al. 2025", "gru with a running mean of g_r (a third gradient)"),
    ("pdu", _CE, "logit_margin", "Entesari et al. 2025", "g_r with a weight that L_r steers"),
)
TABLE = {name: MethodRow(name, *rest) for name, *rest in _ROWS}
_CLASSES: dict[str, type[Method]] = {}


def listed(name: str) -> Callable[[C], C]:
    """Class decorator: take objectives, source and summary from the row of this name."""

    def fill(cls: C) -> C:
        for field, value in TABLE[name]._asdict().items():
            setattr(cls, field, value)
        _CLASSES[name] = cls
        return cls

    return fill


def method_rows() -> list[MethodRow]:
    """The table of methods, with those of installed packages; loads torch for the latter alone."""
    others = plugins("method", TABLE).values()
    fields = MethodRow._fields
    return [*TABLE.values(), *(MethodRow(*(getattr(cls, f) for f in fields)) for cls in others)]


def method_classes(asked: str | None = None) -> dict[str, type[Method]]:
    """All methods by name: those of HAMU first, then those of installed packages.

    A HamuError if an installed package has the method `asked` for and it fails to load.
    """
    for module in ("hamu", "baselines"):
        importlib.import_module(f"{__name__}.{module}")
    ours = {name: _CLASSES[name] for name in TABLE}
    return ours | plugins("method", TABLE, asked=asked)


def build_method(name: str, **settings: Any) -> Method:
    """Make a method by name.

    Args:
        name: a key of `method_classes`.
        settings: the method's own settings; it ignores those of other methods, so that one set of
            settings applies to every method of a comparison.

    Raises:
        HamuError: if the name is unknown, its class fails to load, no method has a setting, or one
            is out of range.
    """
    classes = method_classes(name)
    if name not in classes:
        raise unknown("method", name, classes)
    known = dict.fromkeys(key for cls in classes.values() for key in _settings_of(cls))
    for key in settings:
        if key not in known:
            raise unknown("setting", key, known)
    own = _settings_of(classes[name])
    method = made("method", classes[name], **{key: settings[key] for key in settings if key in own})
    if not (method.uses_retain or method.uses_forget):
        raise HamuError(f"{name} has neither a retain nor a forget objective; name at least one")
    if not 0 <= method.retain_decay < 1:
        raise HamuError(f"{name} has retain_decay {method.retain_decay}; it must be in [0, 1)")
    return method


def _settings_of(cls: type[Method]) -> list[str]:
    return [one.name for one in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "hamu" if name in ("HamuQ", "HamuU") else "base"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
