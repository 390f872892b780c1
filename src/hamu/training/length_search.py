"""How long a step of a run by goal is to be.

What a step promised and what it did to the losses of its own batches make a parabola of each loss along the step. They
tell how much longer the step may be made until it reaches the goal or costs more than is allowed, or how much shorter
it must be; the losses there are then measured, which takes two forward passes and no gradient (a line search, Nocedal
and Wright 2006, section 3.5).

A step is made of its own batches' gradients, and the noise in these moves their losses alone: of the fall of the
retain loss that the part -a g_r brings, a‖g_r‖² to first order, the data see only what is not noise. Which share is
noise is learned wherever the losses are measured on the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hamu.training.promise import Outcome

TRIALS = 4  # lengths of one step that are measured after its own
_FACTORS = tuple(2.0**k for k in range(-3, 4))
_MORE_THAN_PROMISED = 1.5  # what a step that has its price may cost
_NOISE = 0.5  # until it is known
_MEMORY = 0.5


@dataclass(frozen=True)
class Taken:
    """Changes of losses, of a step or of several.

    Attributes:
        gained: forget loss, on the steps' own batches.
        paid: retain loss, on their own batches.
        flattery: how far the retain loss of their own batches fell for their own gradients' sake, to first order.
    """

    gained: float = 0.0
    paid: float = 0.0
    flattery: float = 0.0

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.gained + other.gained, self.paid + other.paid, self.flattery + other.flattery)


class LengthSearch:
    """Judges lengths of steps by what is still to be gained and what may still be paid.

    Attributes:
        noise: the share of a batch's ‖g_r‖² that is taken for noise.
        taken: what the step at hand did; zeros until it is taken.
    """

    def __init__(self) -> None:
        self.noise = _NOISE
        self.taken = Taken()
        self._missing, self._allowed, self._flattery = math.inf, 0.0, 0.0
        self._seen = 0.0

    def aim(self, missing: float, allowed: float, flattery: float) -> None:
        """Before a step.

        Args:
            missing: forget loss that is to be gained, above 0.
            allowed: retain loss that all of it may cost.
            flattery: η Σ a_i ‖g_r,i‖² of the step, at a scale of 1.
        """
        self._missing, self._allowed, self._flattery = missing, allowed, flattery

    def factor(self, outcome: Outcome, scale: float, most: float) -> float:
        """How many times as long a step of this scale should be, up to the scale `most`; 1 if nothing is better."""
        gain, cost = outcome.promised["forget"], outcome.promised["retain"]
        gain_bend, cost_bend = outcome.realised["forget"] - gain, outcome.realised["retain"] - cost
        chosen, best = 1.0, 0.0
        for factor in _FACTORS:
            gained = factor * gain + factor**2 * gain_bend
            paid = factor * cost + factor**2 * cost_bend
            if factor > 1 and factor * scale > most:
                break
            if gained > best and self._is_worth(gained, paid, factor * cost, factor * scale):
                chosen, best = factor, gained
                if gained >= self._missing and factor >= 1:
                    break
        return chosen

    def fits(self, outcome: Outcome, scale: float) -> bool:
        """Whether the step as it is costs no more than may be paid for what it gained."""
        realised = outcome.realised
        return self._is_worth(realised["forget"], realised["retain"], outcome.promised["retain"], scale)

    def _is_worth(self, gained: float, paid: float, promised: float, scale: float) -> bool:
        unseen = self.price_of_noise(scale * self._flattery)
        allowed = max(self._allowed * min(1.0, gained / self._missing), _MORE_THAN_PROMISED * (promised + unseen))
        return gained > 0 and paid + unseen <= allowed

    def price_of_noise(self, flattery: float) -> float:
        """What steps cost the data beyond what their own batches show."""
        return self.noise * flattery

    def take(self, outcome: Outcome, scale: float) -> None:
        """The step stays."""
        self.taken = Taken(outcome.realised["forget"], outcome.realised["retain"], scale * self._flattery)

    def learn(self, taken: Taken, paid: float) -> None:
        """Steps that did this to their own batches cost the data so much retain loss."""
        if not (taken.flattery > 0 and math.isfinite(paid)):
            return
        seen = min(1.0, max(0.0, (paid - taken.paid) / taken.flattery))
        weight = taken.flattery / (taken.flattery + self._seen)
        self.noise += weight * (seen - self.noise)
        self._seen = taken.flattery + _MEMORY * self._seen

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"noise": self.noise, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.noise, self._seen = state["noise"], state["seen"]
