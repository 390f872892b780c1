"""What unlearning has gained on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LARGEST_RETAIN_LOSS = (
    1.0  # in nats: a rise of the retain loss beyond it counts no more than this in a hypervolume
)


class Gains(NamedTuple):
    """The gains of a model over the one it started from, in nats; of both larger is better (paper, Sec. 6).

    Attributes:
        retain: -ΔL_r, the fall of the retain loss.
        forget: ΔL_f, the rise of the forget loss.
    """

    retain: float
    forget: float

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Gains:
        """The gains from one model to another.

        Args:
            before, after: the loss on each side of either, in nats.
        """
        return cls(
            retain=before["retain"] - after["retain"], forget=after["forget"] - before["forget"]
        )

    @property
    def joint(self) -> float:
        """The smaller of the two: above 0 where both sides have gained."""
        return min(self.forget, self.retain)


def hypervolume_reference(worst_retain: float) -> Gains:
    """Where hypervolumes are seen from: nothing is forgotten, at the worst retain loss.

    Args:
        worst_retain: the lowest retain gain of all that is compared; below -`LARGEST_RETAIN_LOSS` it counts as that,
            above 0 as 0, the start.
    """
    return Gains(retain=max(-LARGEST_RETAIN_LOSS, min(0.0, worst_retain)), forget=0.0)
