"""The promise of a step against its outcome, their sum over a run, and a trust region by them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

KEPT = 0.95  # of the demand
_SHRINK_BELOW, _GROW_ABOVE, _LEAP_ABOVE = 0.25, 0.75, 0.95  # realised over promised
_LEAST_SCALE = 2.0**-20
_GOOD = {"forget": 1.0, "retain": -1.0}  # sign of a change of loss that is wanted


@dataclass(frozen=True)
class StepOutcome:
    """One step, in loss, by side; a side that the method does not use is not there.

    Attributes:
        promised: first-order change, g·Δw.
        realised: the change of the loss of the step's own batches.
        reach: ‖g‖‖Δw‖, the most that a step of this length can change to first order.
        constrained: the side with a demand, None for methods without a constraint.
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
        """True if 95% of the demand was realised, within rounding; None without such a demand."""
        if self.constrained is None or self.demand <= self.noise:
            return None
        realised = _GOOD[self.constrained] * self.realised[self.constrained]
        return realised + self.noise >= KEPT * self.demand

    @property
    def is_told(self) -> bool:
        """True if anything is more than rounding: what was promised, or what came instead."""
        return any(self._is_above_rounding(side) for side in self.promised)

    @property
    def trust(self) -> float:
        """Trust in the first-order model: 1 if exact, 0 or less if the step brought nothing.

        For the constrained side it is realised over promised. The other may rightly be promised
        next to nothing: there what is missing is measured by what was promised of the constrained
        side, in proportion to the gradients' norms, if that is more than its own promise. The worse
        side counts.
        """
        found = [1.0]
        for side, promised in self.promised.items():
            missing = _GOOD[side] * (promised - self.realised[side])
            if math.isnan(missing):
                return math.nan
            if self._is_above_rounding(side):
                found.append(1.0 - missing / max(self._scale(side), self.noise))
        return min(found)

    def _is_above_rounding(self, side: str) -> bool:
        off = abs(self.realised[side] - self.promised[side])
        return math.isnan(off) or max(self._scale(side), off) > self.noise

    def _scale(self, side: str) -> float:
        own, constrained = abs(self.promised[side]), self.constrained
        if constrained is None:
            return self.reach[side]
        if side == constrained or not self.reach[constrained] > 0:
            return own
        share = self.reach[side] / self.reach[constrained]
        return max(own, abs(self.promised[constrained]) * share)


@dataclass
class PromiseRecord:
    """Sum of the steps that were checked."""

    checked: int = 0
    kept: list[bool] = field(default_factory=list)  # of each with a demand above rounding
    ratios: dict[str, list[float]] = field(default_factory=lambda: {"retain": [], "forget": []})

    def add(self, outcome: StepOutcome) -> None:
        """Add what one step promised and did."""
        self.checked += 1
        for side in outcome.promised:
            ratio = outcome.ratio(side)
            if ratio is not None and math.isfinite(ratio):
                self.ratios[side].append(ratio)
        if outcome.kept is not None:
            self.kept.append(outcome.kept)

    def summary(self) -> dict[str, Any] | None:
        """Steps checked, those judged by a demand, the share that kept it, median ratios by side;
        None without any.
        """
        if not self.checked:
            return None
        return {
            "checked": self.checked,
            "judged": len(self.kept),
            "kept": sum(self.kept) / len(self.kept) if self.kept else None,
            "median_ratio": {side: median(found) for side, found in self.ratios.items() if found},
        }


def describe(summary: dict[str, Any]) -> str:
    """Put a summary of checked steps into one line for the screen."""
    ratios = ", ".join(f"{value:.3g} ({side})" for side, value in summary["median_ratio"].items())
    told = f"median realised/promised {ratios}" if ratios else "what was promised is below rounding"
    return f"{kept_in_words(summary)}; {told}"


def kept_in_words(summary: dict[str, Any]) -> str:
    """Begin a sentence with the share of checked steps that realised their demand."""
    checked, judged, kept = summary["checked"], summary["judged"], summary["kept"]
    steps = f"of {checked:,} checked {'step' if checked == 1 else 'steps'}"
    if kept is None:
        return f"{steps} none had a demand above rounding"
    realised = f"{kept:.0%} realised at least {KEPT:.0%} of"
    if judged == checked:
        return f"{steps} {realised} what was demanded"
    return f"{steps} {judged:,} had a demand above rounding, of which {realised} it"


class TrustRegion:
    """A factor on the learning rate, and with it on the radius and on what is demanded.

    It is halved after a step whose realised change is under a quarter of what was promised, doubled
    after one over three quarters, and quadrupled after one that realises all but 5%. A step that
    realises nothing (a ratio of 0 or less) is to be undone.

    Attributes:
        scale: the factor for the next step, from `least`, where a run cannot go on, to `most`.
    """

    def __init__(self, most: float = 8.0, least: float = _LEAST_SCALE) -> None:
        self._most, self._least = most, least
        self.scale = 1.0

    def update(self, ratio: float) -> bool:
        """Take a step's realised over promised; return True if the step is good enough to stay."""
        if not ratio >= _SHRINK_BELOW:  # NaN too
            self.scale = max(0.5 * self.scale, self._least)
        elif ratio > _GROW_ABOVE:
            self.scale = min((4.0 if ratio > _LEAP_ABOVE else 2.0) * self.scale, self._most)
        return ratio > 0

    @property
    def exhausted(self) -> bool:
        """True if steps are as small as they may be, so that none smaller can be tried."""
        return self.scale <= self._least
