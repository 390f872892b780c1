"""The radius of a step, steered by how well the last steps did what they promised (Conn, Gould and Toint 2000)."""

from __future__ import annotations

from typing import Any

from hamu.errors import HamuError

SHRINK_BELOW, GROW_ABOVE, LEAP_ABOVE = 0.25, 0.75, 0.95


class TrustRegion:
    """A factor on the learning rate, and with it on the radius and on what is demanded.

    It is halved after a step whose realised change is under a quarter of what was promised, doubled after one over
    three quarters, and quadrupled after one that realises all but 5%. A step that realises nothing (a ratio of 0 or
    less) is to be undone.

    Args:
        most: the factor never exceeds this.
        least: nor falls below this; a run that gets there cannot go on.

    Attributes:
        scale: the factor for the next step.
        most: see above.
    """

    def __init__(self, most: float = 8.0, least: float = 2.0**-20) -> None:
        if not most >= 1:
            raise HamuError(
                f"trust_region_growth {most} must be at least 1, the learning rate as it is given"
            )
        self.most, self._least = most, least
        self.scale = 1.0

    def update(self, ratio: float) -> bool:
        """Take a step's ratio of realised to promised; return whether the step is good enough to stay."""
        if not ratio >= SHRINK_BELOW:  # NaN too
            self.scale = max(0.5 * self.scale, self._least)
        elif ratio > GROW_ABOVE:
            self.scale = min((4.0 if ratio > LEAP_ABOVE else 2.0) * self.scale, self.most)
        return ratio > 0

    @property
    def exhausted(self) -> bool:
        """Whether steps are as small as they may be, so that none smaller can be tried."""
        return self.scale <= self._least

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = state["scale"]
