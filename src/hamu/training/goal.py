"""The goal of a run: what must be forgotten, and what that may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hamu.training.config import UnlearnConfig


@dataclass(frozen=True)
class Standing:
    """How a model stands: mean losses on (a sample of) the forget and the retain set, and the forget accuracy."""

    forget_loss: float
    retain_loss: float
    forget_accuracy: float


@dataclass(frozen=True)
class Goal:
    """What must be reached, and at what price.

    Args:
        forget_loss: at least this, None for any.
        forget_accuracy: at most this, None for any; where both are given, both.
        max_retain_increase: how far the retain loss may rise.
    """

    forget_loss: float | None
    forget_accuracy: float | None
    max_retain_increase: float

    @classmethod
    def of(cls, args: UnlearnConfig) -> Goal:
        """The goal that the settings name."""
        assert args.max_retain_increase is not None
        return cls(args.target_forget_loss, args.target_forget_accuracy, args.max_retain_increase)

    def reached(self, now: Standing) -> bool:
        """Whether a model that stands so has reached the goal."""
        if self.forget_loss is not None and not now.forget_loss >= self.forget_loss:
            return False  # also what is no number
        return self.forget_accuracy is None or now.forget_accuracy <= self.forget_accuracy

    def missing(self, now: Standing) -> float:
        """The forget loss that is still to be gained; of an accuracy, what it is likely to take."""
        missing = [0.0]
        if self.forget_loss is not None:
            missing.append(self.forget_loss - now.forget_loss)
        if self.forget_accuracy is not None and now.forget_accuracy > self.forget_accuracy:
            missing.append(max(0.1, -math.log(max(self.forget_accuracy, 0.01)) - now.forget_loss))
        return max(missing)
