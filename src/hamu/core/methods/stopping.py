"""When to stop: the stopping criterion of the paper (Theorem 4.4, App. C) made robust to noisy batches.

Each step has a headroom: the largest demand that costs the other objective nothing by the criterion in use, over the
demand made. At or above 1 both objectives can still improve; below 1 every step that meets this demand must hurt, if
the objectives are in conflict at all (`ConstraintStatus.conflict`), though one that meets a smaller demand may not
(`ConstraintStatus.some_demand_is_free`). The rule watches that number on the host; the memory that it needs is in
`StoppingMemory`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hamu.errors import HamuError

Criterion = Literal["aggregate", "any", "global", "off"]


@dataclass(frozen=True)
class StoppingRule:
    """Stop once the headroom has fallen below 1 + margin.

    Args:
        criterion: what the headroom is computed from. "aggregate": the sum over blocks (App. C, the paper's
            choice), met only by a step that has a price; "any": the worst block; "global": the whole model as one
            vector (Theorem 4.4); "off".
        margin: stop this much earlier, as a share of the demand (the paper's ε of Sec. 6.1, made relative).
        patience: the number of steps in a row that must meet the criterion (App. G.3).
        window: the number of steps over which the headroom is averaged (App. G.3).

    Raises:
        HamuError: if a value is out of range.
    """

    criterion: Criterion = "aggregate"
    margin: float = 0.0
    patience: int = 1
    window: int = 1

    def __post_init__(self) -> None:
        if self.criterion not in get_args(Criterion):
            raise HamuError(
                f"stopping criterion {self.criterion!r} is unknown; choose aggregate, any, global or off"
            )
        if not self.margin >= 0:
            raise HamuError(f"stopping margin {self.margin} is negative; use 0 or more")
        if self.patience < 1 or self.window < 1:
            raise HamuError(
                f"patience {self.patience} and window {self.window} must be at least 1 step"
            )


class StoppingMemory:
    """What a `StoppingRule` remembers from step to step."""

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self._headrooms: deque[float] = deque(maxlen=rule.window)
        self._met_in_a_row = 0

    def update(self, headroom: float, conflict: bool = True) -> bool:
        """Take one step's headroom; return whether to stop before that step is taken.

        Args:
            headroom: the largest sustainable demand over the demand made.
            conflict: see `ConstraintStatus.conflict`; without it nothing must hurt, whatever the headroom.
        """
        if self.rule.criterion == "off":
            return False
        enough = 1.0 + self.rule.margin
        self._headrooms.append(headroom if conflict else max(headroom, enough))
        mean = sum(self._headrooms) / len(self._headrooms)
        full = len(self._headrooms) == self.rule.window
        met = conflict and full and mean < enough
        self._met_in_a_row = self._met_in_a_row + 1 if met else 0
        return self._met_in_a_row >= self.rule.patience

    def explain(
        self, demand: float, clipped_demand: float, free_limit: float, some_demand_is_free: bool
    ) -> str:
        """Name the rule that was met and its figures, and say whether a smaller demand would be free.

        Args:
            demand, granted, sustainable, some_demand_is_free: see `ConstraintStatus`.
        """
        rule = self.rule
        how: list[str] = [rule.criterion]
        how += [f"margin {rule.margin:g}"] if rule.margin else []
        how += [f"mean of {rule.window} steps"] if rule.window > 1 else []
        how += [f"{rule.patience} steps in a row"] if rule.patience > 1 else []
        criterion = ", ".join(how)
        if not some_demand_is_free:
            return (
                f"the demand {clipped_demand:.4g} has a price ({criterion}), and so has every smaller one: every further step "
                f"must hurt"
            )
        relation = "exceeds" if clipped_demand > free_limit else "comes too near to"
        left = math.floor(100 * free_limit / (demand * (1.0 + rule.margin)))
        to = f"at most {left}%" if left >= 1 else "less than 1%"
        return (
            f"the demand {clipped_demand:.4g} {relation} {free_limit:.4g}, the most that the gradients sustain for free "
            f"({criterion}); a demand small enough still gains on both sides: lower the constraint to {to} of its value"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"headrooms": list(self._headrooms), "met_in_a_row": self._met_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._headrooms = deque(state["headrooms"], maxlen=self.rule.window)
        self._met_in_a_row = state["met_in_a_row"]
