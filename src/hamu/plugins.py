"""What other packages add to ours: classes that their entry points name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hamu.errors import HamuError

Named = TypeVar("Named", bound=type[Any])


def with_plugins(ours: Iterable[Named], group: str, kind: str) -> dict[str, Named]:
    """Classes by their attribute `name`: ours first, then those of installed packages.

    Args:
        ours: what there is in any case.
        group: of the entry points.
        kind: what an error calls such a class.

    Raises:
        HamuError: if two have the same name.
    """
    classes = {cls.name: cls for cls in ours}
    for point in entry_points(group=group):
        cls = point.load()
        if cls.name in classes:
            raise HamuError(f"the {kind} {cls.name!r} of {point.value} has a name that is taken; rename it")
        classes[cls.name] = cls
    return classes
