"""Classes that other packages add through entry points."""

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from hamu.errors import HamuError, first_line

Made = TypeVar("Made")
_KINDS = ("method", "objective", "metric")  # the group of a kind is hamu.methods and so on
_INHERITED = {"method": "stopping_rule", "objective": "needs_original"}  # from the base class
_logger = logging.getLogger(__name__)


def plugins(
    kind: str, taken: Container[str] = (), *, asked: str | None = None, needs_all: bool = False
) -> dict[str, Any]:
    """Classes of installed packages by name. Skips those that fail to load, with a warning.

    A HamuError if two have the same name (`taken` has those of HAMU itself), or if one that is
    `asked` for, or any with `needs_all`, fails to load.
    """
    classes: dict[str, Any] = {}
    for point in points_of(kind):
        try:
            cls = _loaded(point, kind)
        except HamuError as error:
            if needs_all or (point.name == asked and asked not in taken):
                raise
            _warn(f"warning: {error}; it is skipped")
            continue
        if cls.name in taken or cls.name in classes:
            raise HamuError(
                f"the {kind} {cls.name!r} of {point.value} has a name that is taken; rename it"
            )
        classes[cls.name] = cls
    return classes


def providers() -> dict[str, str]:
    """Version of each installed package that adds a class, by name."""
    points = [point for kind in _KINDS for point in points_of(kind)]
    return {point.dist.name: point.dist.version for point in points if point.dist is not None}


@cache
def points_of(kind: str) -> tuple[EntryPoint, ...]:
    """Entry points of a kind of class, searched once per process."""
    return tuple(entry_points(group=f"hamu.{kind}s"))


def made(kind: str, cls: type[Made], **settings: Any) -> Made:
    """Instance of a class that a package may have added; a HamuError if its constructor fails."""
    try:
        return cls(**settings)
    except HamuError:
        raise
    except Exception as error:  # foreign code may raise anything
        what = f"the {kind} {cls.name}"  # type: ignore[attr-defined]
        if cls.__module__.startswith("hamu."):
            given = ", ".join(f"{name} {value!r}" for name, value in settings.items())
            raise HamuError(f"{what} cannot be made with {given}: {first_line(error)}") from error
        raise _failed(f"{what} of {cls.__module__} cannot be made", error) from error


@contextmanager
def naming(kind: str, called: Any) -> Iterator[None]:
    """Note in an exception which package's class raised it; those of HAMU need no note."""
    try:
        yield
    except Exception as error:
        module = type(called).__module__
        if not isinstance(error, HamuError) and not module.startswith("hamu."):
            error.add_note(f"in the {kind} {called.name} of {module}")
        raise


def _loaded(point: EntryPoint, kind: str) -> Any:
    dist = point.dist
    package = "a package without a name" if dist is None else f"{dist.name} {dist.version}"
    what = f"the {kind} {point.name} ({point.value}) of {package}"
    try:
        cls = point.load()
        name = getattr(cls, "name", None)
    except Exception as error:  # foreign code may raise anything
        raise _failed(f"{what} cannot be loaded", error) from error
    if not isinstance(cls, type) or not isinstance(name, str):
        raise HamuError(f"{what} is not a class with a name; repair the package, or uninstall it")
    if kind == "method" and (name in ("", "..") or Path(name).name != name):  # names a run's folder
        raise HamuError(f"{what} has the name {name!r}, which a folder cannot have; rename it")
    if not hasattr(cls, _INHERITED.get(kind, "name")):
        raise HamuError(f"{what} does not inherit from hamu's {kind.capitalize()}; let it do so")
    return cls


def _failed(what: str, error: Exception) -> HamuError:
    return HamuError(
        f"{what}: {type(error).__name__}: {first_line(error)}; repair its package, or uninstall it"
    )


@cache  # one warning each
def _warn(text: str) -> None:
    _logger.warning("%s", text)
