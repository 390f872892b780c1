"""What other packages add to ours: classes that their entry points name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from hamu.errors import HamuError, first_line

Named = TypeVar("Named", bound=type[Any])
Made = TypeVar("Made")
GROUPS = ("hamu.methods", "hamu.objectives", "hamu.metrics")
_logger = logging.getLogger(__name__)


def with_plugins(
    ours: Iterable[Named],
    group: str,
    kind: str,
    *,
    asked: str | None = None,
    needs_all: bool = False,
) -> dict[str, Named]:
    """Classes by their attribute `name`: ours first, then those of installed packages.

    What cannot be loaded and is not asked for is skipped with a warning.

    Args:
        ours: what there is in any case.
        group: of the entry points.
        kind: what an error calls such a class.
        asked: the name of the class that is looked for.
        needs_all: whether all are looked for.

    Raises:
        HamuError: if two have the same name, or what is asked for cannot be loaded.
    """
    classes = {cls.name: cls for cls in ours}
    broken: dict[str, HamuError] = {}
    for point in points_of(group):
        try:
            cls = _loaded(point, kind)
        except HamuError as error:
            broken[point.name] = error
            continue
        if cls.name in classes:
            raise HamuError(
                f"the {kind} {cls.name!r} of {point.value} has a name that is taken; rename it"
            )
        classes[cls.name] = cls
    for name, damage in broken.items():
        if needs_all or (name == asked and asked not in classes):
            raise damage
        _warn(f"warning: {damage}; it is skipped")
    return classes


def providers() -> dict[str, str]:
    """The version of each installed package that adds something, by name."""
    points = [point for group in GROUPS for point in points_of(group)]
    return {point.dist.name: point.dist.version for point in points if point.dist is not None}


@cache
def points_of(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, looked for once: what is installed later counts from the next start on."""
    return tuple(entry_points(group=group))


def made(kind: str, cls: type[Made], **settings: Any) -> Made:
    """An instance of a class that a package may have added.

    Raises:
        HamuError: if it cannot be made; one that the class itself raises says what is wrong with the settings.
    """
    try:
        return cls(**settings)
    except HamuError:
        raise
    except Exception as error:  # whatever the code of others does; the cause is kept
        raise HamuError(
            f"the {kind} {cls.name} of {cls.__module__} cannot be made: {type(error).__name__}: "  # type: ignore[attr-defined]
            f"{first_line(error)}; repair its package, or uninstall it"
        ) from error


def _loaded(point: EntryPoint, kind: str) -> Any:
    """The class of an entry point, which has a name.

    Raises:
        HamuError: if it has none, or is not there; the message says in which package.
    """
    package = (
        "a package without a name"
        if point.dist is None
        else f"{point.dist.name} {point.dist.version}"
    )
    what = f"the {kind} {point.name} ({point.value})"
    try:
        cls = point.load()
        name = getattr(cls, "name", None)
    except (
        Exception
    ) as error:  # whatever the code of others does when it is imported; the cause is kept
        raise HamuError(
            f"{what} of {package} cannot be loaded: {type(error).__name__}: {first_line(error)}; repair the package, "
            f"or uninstall it"
        ) from error
    if not isinstance(cls, type) or not isinstance(name, str):
        raise HamuError(
            f"{what} of {package} is not a class with a name; repair the package, or uninstall it"
        )
    if kind == "method" and (
        name in ("", "..") or Path(name).name != name
    ):  # a run's folder is called by it
        raise HamuError(
            f"{what} of {package} has the name {name!r}, which a folder cannot have; rename it"
        )
    return cls


@cache
def _warn(text: str) -> None:
    """Once, however often names are looked up."""
    _logger.warning("%s", text)
