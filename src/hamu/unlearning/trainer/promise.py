"""Figures of a step: losses and hardness, its promise against what it did, and the trust region steered by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hamu.core.gram import SIDES
from hamu.core.pair import PairStep
from hamu.errors import HamuError

KEPT = 0.95  # of the demand
SHRINK_BELOW, GROW_ABOVE, LEAP_ABOVE = 0.25, 0.75, 0.95  # realised over promised


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
        """True if at least 95% of the demand was realised, as far as rounding lets that be told; None where nothing was
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
        """True if anything is more than rounding: what was promised, or what came in its place."""
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
        """True if steps are as small as they may be, so that none smaller can be tried."""
        return self.scale <= self._least

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = state["scale"]


def read_at_once(values: Sequence[Tensor]) -> list[float]:
    """Tensors of one shape as numbers; whatever of them lies on the device comes in one transfer, and nothing goes."""
    found: dict[int, float] = {}
    for on_host in (True, False):
        there = [
            (place, v) for place, v in enumerate(values) if (v.device.type == "cpu") is on_host
        ]
        if there:
            device = there[0][1].device
            read = torch.stack([v.detach().to(device, torch.float64) for _, v in there]).tolist()
            found |= dict(zip((place for place, _ in there), read, strict=True))
    return [found[place] for place in range(len(values))]


def step_figures(
    step: PairStep | None, losses: Mapping[str, Tensor], sides: Sequence[str]
) -> dict[str, float]:
    """The figures of a step by name.

    Args:
        step: what was found and decided; None if the run ended before, which leaves the losses.
        losses: by side, 0-dim.
        sides: those that the method uses.
    """
    tensors = {f"{side}_loss": losses[side] for side in sides}
    if step is not None:
        tensors |= _found(step, sides)
    return dict(zip(tensors, read_at_once(list(tensors.values())), strict=True))


def _found(step: PairStep, sides: Sequence[str]) -> dict[str, Tensor]:
    norms = step.gradient_norms
    tensors = {f"{side}_norm": norms[SIDES.index(side)] for side in sides}
    if len(sides) == 2:
        tensors |= {"kappa": step.kappa, "cos": step.cos}
    tensors |= {
        "promised_retain_change": step.promised_retain_change,
        "promised_forget_change": step.promised_forget_change,
    }
    constraint, direct_share = step.weights.constraint, step.direct_share
    if constraint is not None and direct_share is not None:
        tensors |= {
            "direct_threshold": constraint.direct_threshold,
            "stop_threshold": constraint.stop_threshold,
            "demand": constraint.demand,
            "clipped_demand": constraint.clipped_demand,
            "free_limit": constraint.free_limit,
            "max_demand": constraint.max_demand,
            "direct_share": direct_share,
            "criterion_met": constraint.criterion_met,
        }
    return tensors


def layer_figures(
    step: PairStep | None, lengths: Tensor | None, sides: Sequence[str]
) -> dict[str, list[float] | None]:
    """cosθ_i and ‖Δw_i‖ of a step by block; None for what is not known.

    Args:
        step: None if there was none.
        lengths: ‖Δw_i‖, [L], if they are known.
        sides: those that the method uses.
    """
    if step is None:
        return {"cos": None, "change": None}
    known = {"cos": step.gram.cos if len(sides) == 2 else None, "change": lengths}
    there = {name: values for name, values in known.items() if values is not None}
    if not there:
        return dict.fromkeys(known)
    return dict.fromkeys(known) | dict(zip(there, read_at_once(list(there.values())), strict=True))
