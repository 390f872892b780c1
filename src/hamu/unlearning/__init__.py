"""The job itself: what must be forgotten, how a run gets there, and how it lasts."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hamu.unlearning.goals import Goal, Standing, Targets

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns when PEFT imports it
__all__ = ["Goal", "Standing", "Targets"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from hamu.unlearning import goals

        return getattr(goals, name)
    raise AttributeError(f"module 'hamu.unlearning' has no attribute {name!r}")
