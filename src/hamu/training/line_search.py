"""The line search of a run by goal: how long a step is to be.

What a step promised and what it did to the losses of its own batches make a parabola of each loss along the step. They
tell how much longer the step may be made until it reaches the goal or costs more than is allowed, or how much shorter
it must be; the losses there are then measured, which takes two forward passes and no gradient (Nocedal and Wright
2006, section 3.5).

Both are judged by what the data are likely to see of them (`Unseen`), as a step flatters its own batches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hamu.gram import SIDES
from hamu.training.promise import StepOutcome
from hamu.training.unseen import Change, Unseen

TRIALS = 4  # lengths of one step that are measured after its own
_FACTORS = tuple(2.0**k for k in range(-3, 4))
_MORE_THAN_PROMISED = 1.5  # what a step that has its price may cost


class LineSearch:
    """A line search: judges lengths of a step by what is still to be gained and what may still be paid.

    Attributes:
        unseen: by side.
        taken: the changes of both sides' losses by the step at hand; zeros until it is taken.
    """

    def __init__(self) -> None:
        self.unseen = {side: Unseen() for side in SIDES}
        self.taken = {side: Change() for side in SIDES}
        self._missing, self._allowed = math.inf, 0.0
        self._own = dict.fromkeys(SIDES, 0.0)

    def aim(self, missing: float, allowed: float, own: dict[str, float]) -> None:
        """Set what a step is judged by, before it is taken.

        Args:
            missing: forget loss that is to be gained, above 0.
            allowed: retain loss that all of it may cost.
            own: by side, how far the step at a scale of 1 changes the loss for the sake of the side's own gradient.
        """
        self._missing, self._allowed, self._own = missing, allowed, own

    def factor(self, outcome: StepOutcome, scale: float, most: float) -> float:
        """How many times as long a step of this scale should be, up to the scale `most`; 1 if nothing is better."""
        step = self._changes(outcome, scale)
        chosen, best = 1.0, 0.0
        for factor in _FACTORS:
            if factor > 1 and factor * scale > most:
                break
            tried = {side: step[side].stretched(factor) for side in SIDES}
            gained = self.unseen["forget"].on_data(tried["forget"])
            if gained > best and self._is_worth(tried):
                chosen, best = factor, gained
                if gained >= self._missing and factor >= 1:
                    break
        return chosen

    def fits(self, outcome: StepOutcome, scale: float) -> bool:
        """Whether the step as it is costs no more than may be paid for what it gained."""
        return self._is_worth(self._changes(outcome, scale))

    def _is_worth(self, step: dict[str, Change]) -> bool:
        gained, paid = self.on_data(step)
        _, price = self.on_data({**step, "retain": replace(step["retain"], bend=0.0)})
        allowed = max(self._allowed * min(1.0, gained / self._missing), _MORE_THAN_PROMISED * price)
        return gained > 0 and paid <= allowed

    def _changes(self, outcome: StepOutcome, scale: float) -> dict[str, Change]:
        promised, bend = outcome.promised, {side: outcome.realised[side] - outcome.promised[side] for side in SIDES}
        bend = {side: 0.0 if abs(value) <= outcome.noise else value for side, value in bend.items()}  # only rounding
        return {side: Change(promised[side], scale * self._own[side], bend[side]) for side in SIDES}

    def on_data(self, changes: dict[str, Change]) -> tuple[float, float]:
        """The forget loss gained and the retain loss paid that the data are likely to see."""
        gained, paid = (self.unseen[side].on_data(changes[side]) for side in ("forget", "retain"))
        return gained, paid

    def take(self, outcome: StepOutcome, scale: float) -> None:
        """Keep the changes of both sides' losses by a step that stays, as `taken`."""
        self.taken = self._changes(outcome, scale)

    def learn(self, changes: dict[str, Change], measured: dict[str, float]) -> None:
        """Learn what the data see of steps, once they were measured there.

        Args:
            changes: by side, what the steps did to the losses of their own batches.
            measured: by side, what they did to those of the data.
        """
        for side in SIDES:
            self.unseen[side].learn(changes[side], measured[side])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: both sides' `Unseen`."""
        return {side: self.unseen[side].state_dict() for side in SIDES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for side in SIDES:
            self.unseen[side].load_state_dict(state[side])
