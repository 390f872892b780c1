"""What a step promised against what it did: both losses of its own batches, before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

KEPT = 0.95  # of what was demanded


@dataclass(frozen=True)
class StepOutcome:
    """One step, in loss. Keys are "retain" and "forget"; a side that the method does not use is not there.

    Attributes:
        promised: first-order change, g·Δw.
        realised: the change of the loss of the step's own batches.
        reach: ‖g‖‖Δw‖, the most that a step of this length can change to first order.
        constrained: the side that something is demanded of, None for methods without a constraint.
        demand: what was demanded of it, 0 without.
        noise: changes below this are rounding.
    """

    promised: dict[str, float]
    realised: dict[str, float]
    reach: dict[str, float]
    constrained: str | None
    demand: float
    noise: float

    def ratio(self, side: str) -> float | None:
        """Realised over promised; None where what was promised is rounding."""
        promised = self.promised[side]
        return self.realised[side] / promised if abs(promised) > self.noise else None

    @property
    def kept(self) -> bool | None:
        """Whether at least 95% of the demand was realised, as far as rounding lets that be told; None where nothing was
        demanded, or only rounding.
        """
        if self.constrained is None or self.demand <= self.noise:
            return None
        return (
            _good(self.constrained) * self.realised[self.constrained] + self.noise
            >= KEPT * self.demand
        )

    @property
    def is_told(self) -> bool:
        """Whether anything is more than rounding: what was promised, or what came in its place."""
        return any(self._weight(side) > self.noise for side in self.promised)

    def _weight(self, side: str) -> float:
        """The larger of a side's scale and |realised - promised|; infinite where that is not a number."""
        off = abs(self.realised[side] - self.promised[side])
        return math.inf if math.isnan(off) else max(self._scale(side), off)

    @property
    def trust(self) -> float:
        """How far the first-order model holds: 1 if it is exact, 0 or less if the step brought nothing of its promise.

        For the constrained side it is realised over promised. The other may rightly be promised next to nothing: there
        what is missing is measured by what was promised of the constrained side, in proportion to the gradients' norms,
        if that is more than its own promise. The worse side counts.
        """
        found = []
        for side, promised in self.promised.items():
            missing = _good(side) * (promised - self.realised[side])
            whole = self._scale(side)
            if math.isnan(missing):
                found.append(math.nan)
            elif self._weight(side) > self.noise:
                found.append(min(1.0, 1.0 - missing / max(whole, self.noise)))
        return math.nan if any(map(math.isnan, found)) else min(found, default=1.0)

    def _scale(self, side: str) -> float:
        own = abs(self.promised[side])
        if self.constrained is None:
            return self.reach[side]
        if side == self.constrained or not self.reach[self.constrained] > 0:
            return own
        return max(
            own,
            abs(self.promised[self.constrained]) * self.reach[side] / self.reach[self.constrained],
        )


def _good(side: str) -> float:
    return 1.0 if side == "forget" else -1.0


class PromiseRecord:
    """Sums up the steps that were checked."""

    def __init__(self) -> None:
        self._ratios: dict[str, list[float]] = {"retain": [], "forget": []}
        self._kept: list[bool] = []
        self._checked = 0

    def add(self, outcome: StepOutcome) -> None:
        """Add what one step promised and did."""
        self._checked += 1
        for side in outcome.promised:
            ratio = outcome.ratio(side)
            if ratio is not None and math.isfinite(ratio):
                self._ratios[side].append(ratio)
        if outcome.kept is not None:
            self._kept.append(outcome.kept)

    def summary(self) -> dict[str, Any] | None:
        """Steps that were checked and those whose demand was above rounding, the share of these that kept the promise,
        median realised/promised; None without any.
        """
        if not self._checked:
            return None
        return {
            "checked": self._checked,
            "judged": len(self._kept),
            "kept": sum(self._kept) / len(self._kept) if self._kept else None,
            "median_ratio": {
                side: median(values) for side, values in self._ratios.items() if values
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {
            "checked": self._checked,
            "kept": list(self._kept),
            "ratios": {s: list(r) for s, r in self._ratios.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._checked, self._kept = state["checked"], state["kept"]
        for side in self._ratios:  # in their order, which a file may have changed
            self._ratios[side] = state["ratios"][side]


def describe(summary: dict[str, Any]) -> str:
    """What a summary of checked steps says, in one line for the screen."""
    ratios = ", ".join(f"{value:.3g} ({side})" for side, value in summary["median_ratio"].items())
    told = f"median realised/promised {ratios}" if ratios else "what was promised is below rounding"
    return f"{kept_in_words(summary)}; {told}"


def kept_in_words(summary: dict[str, Any]) -> str:
    """How many of the checked steps realised what was demanded of them, the beginning of a sentence."""
    checked, judged, kept = summary["checked"], summary["judged"], summary["kept"]
    steps = f"of {checked:,} checked {'step' if checked == 1 else 'steps'}"
    if kept is None:
        return f"{steps} none had a demand above rounding"
    if judged == checked:
        return f"{steps} {kept:.0%} realised at least {KEPT:.0%} of what was demanded"
    return f"{steps} {judged:,} had a demand above rounding, of which {kept:.0%} realised at least {KEPT:.0%} of it"
