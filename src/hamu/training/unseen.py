"""What the data do not see of a step.

A step is made of its own batches' gradients, and these flatter it: of the fall of the retain loss that the part -a g_r
brings, a‖g_r‖² to first order, and of the rise of the forget loss that the part -b g_f brings, |b|‖g_f‖², the data see
only what is not noise. Neither do they see all of the bend of the losses along the step, as a batch's loss bends most
along its own gradient. Both shares are learned wherever the losses are measured on the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_NOISE = 0.5  # until anything is known
_MEMORY = 0.8  # of what was learned before, at each measurement
_ALIKE = 0.1  # how firmly the two shares are held together until several measurements tell them apart
_DOUBT = 1e-3  # how firmly both to the half, so that there always is a solution


@dataclass(frozen=True)
class Change:
    """A change of one side's loss on the batches that the steps were made of.

    Attributes:
        first_order: as promised.
        own: how much of that is for the sake of the side's own gradients: -η Σ a_i ‖g_r,i‖² or -η Σ b_i ‖g_f,i‖².
        bend: realised less promised.
    """

    first_order: float = 0.0
    own: float = 0.0
    bend: float = 0.0

    def __add__(self, other: Change) -> Change:
        return Change(self.first_order + other.first_order, self.own + other.own, self.bend + other.bend)

    def stretched(self, factor: float) -> Change:
        """The change by a step this many times as long; its bend grows with the square."""
        return Change(factor * self.first_order, factor * self.own, factor**2 * self.bend)


class Unseen:
    """Two shares of one side's changes that the data do not see.

    Attributes:
        noise: of what is for its own gradients' sake.
        bend: of the bend. As long as nothing is known the batches' word is taken for it.
    """

    def __init__(self) -> None:
        self.noise, self.bend = _NOISE, 0.0
        self._sums = [0.0] * 5

    def on_data(self, change: Change) -> float:
        """The change that the data are likely to see."""
        return change.first_order - self.noise * change.own + (1.0 - self.bend) * change.bend

    def learn(self, change: Change, measured: float) -> None:
        """Learn both shares from a change that the data saw this much of.

        With the bend in units of what is the gradients' own as x and what was not seen as y, the shares are the least
        squares of y = noise + bend·x over all measurements, the latest counting most and each by what was its own. One
        measurement does not tell them apart, and makes them equal. Nothing is learned where nothing was the own.
        """
        own = abs(change.own)
        if not (own > 0 and math.isfinite(measured) and math.isfinite(change.bend)):
            return
        x, y = change.bend / change.own, (change.first_order + change.bend - measured) / change.own
        new = (1.0, x, x * x, y, x * y)
        self._sums = [_MEMORY * s + own * n for s, n in zip(self._sums, new, strict=True)]
        one, sum_x, sum_xx, sum_y, sum_xy = self._sums
        held, doubt = _ALIKE * one, _DOUBT * one
        top, across, bottom = one + held + doubt, sum_x - held, sum_xx + held + doubt
        right, lower = sum_y + doubt * _NOISE, sum_xy + doubt * _NOISE
        self.noise = _share((right * bottom - lower * across) / (top * bottom - across * across))
        self.bend = _share((lower - across * self.noise) / bottom)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {"noise": self.noise, "bend": self.bend, "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.noise, self.bend, self._sums = state["noise"], state["bend"], list(state["sums"])


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
