"""The table of methods: name -> class. Other packages add theirs with an entry point in group `hamu.methods`."""

from __future__ import annotations

import dataclasses
from typing import Any

from hamu.core.methods.base import Method
from hamu.core.methods.baselines import (
    ConflictAverse,
    FineTune,
    GradientAscent,
    GradientDifference,
    GradientRectified,
    KLMinimization,
    NegativePreferenceOptimization,
    ProjectConflicting,
    Scrub,
    SimpleNegativePreferenceOptimization,
)
from hamu.core.methods.hamu import HamuQ, HamuU
from hamu.core.plugins import made, with_plugins
from hamu.errors import unknown

_OURS: tuple[type[Method], ...] = (
    HamuQ,
    HamuU,
    FineTune,
    GradientAscent,
    GradientDifference,
    KLMinimization,
    Scrub,
    GradientRectified,
    ProjectConflicting,
    ConflictAverse,
    NegativePreferenceOptimization,
    SimpleNegativePreferenceOptimization,
)


def method_classes(asked: str | None = None) -> dict[str, type[Method]]:
    """All known methods by name: ours first, then those of installed packages.

    Args:
        asked: the one that is looked for; if an installed package has it and cannot be loaded, that is an error.
    """
    return with_plugins(_OURS, "hamu.methods", "method", asked=asked)


def build_method(name: str, **settings: Any) -> Method:
    """Make a method by name.

    Args:
        name: a key of `method_classes`.
        settings: the method's own settings; those that it does not have are ignored, so that one set of
            settings can be applied to every method in a comparison.

    Raises:
        HamuError: if the name is unknown, its class cannot be loaded or made, or a setting is out of range.
    """
    classes = method_classes(name)
    if name not in classes:
        raise unknown("method", name, classes)
    cls = classes[name]
    own: set[str] = set()
    if dataclasses.is_dataclass(cls):
        own = {field.name for field in dataclasses.fields(cls)}
    return made("method", cls, **{key: value for key, value in settings.items() if key in own})
