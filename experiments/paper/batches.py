"""Batch sizes that give an epoch as many steps as the paper's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Batches:
    """Steps of an epoch over the retain data.

    Attributes:
        size: records of a side in a forward and backward pass.
        passes: in a step.
        steps: in an epoch; the last may be of fewer records.
    """

    size: int
    passes: int
    steps: int

    @property
    def records(self) -> int:
        """Records of a side in a step."""
        return self.size * self.passes

    @classmethod
    def of(cls, retain: int, steps: int, most: int) -> Batches:
        """The batches that come nearest to a number of steps from below.

        Args:
            retain: records to retain.
            steps: an epoch.
            most: records in a pass.
        """
        whole = math.ceil(retain / steps)
        passes = math.ceil(whole / most)
        size = math.ceil(whole / passes)
        return cls(size, passes, math.ceil(retain / (size * passes)))

    def over(self, retain: int) -> Batches:
        """Batches of this size over so many records to retain."""
        return replace(self, steps=math.ceil(retain / self.records))
