"""Parts of a method: its weights, the standing of its constraint, its stopping rule.

A method is a pure function from the `PairGram` of the (clipped) batch gradients, [L] float64, to
`Weights` (a, b) of the equivalent gradient g* = a_i·g_r,i + b_i·g_f,i. It is vectorised over blocks
and works on the host, where a few numbers cost less than a GPU takes to start.

The stopping criterion is that of the paper (Theorem 4.4, App. C), made robust to noisy batches.
Each step has a headroom: the largest demand that costs the other objective nothing, over the demand
made. Below 1, any step that meets this demand raises the other loss, if the objectives are in
conflict at all; a smaller demand may still be free (`ConstraintStatus.some_demand_is_free`).
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from hamu.core.gram import PairGram, Side
from hamu.errors import HamuError, unknown

OnInfeasible = Literal["stop", "clamp", "skip"]
Criterion = Literal["aggregate", "any", "global", "off"]


@dataclass(frozen=True)
class StoppingRule:
    """Stop once the headroom has fallen below 1 + margin.

    Args:
        criterion: source of the headroom. "aggregate": the sum over blocks (App. C, the paper's
            choice), met only by a step that has a price; "any": the worst block; "global": the
            whole model as one vector (Theorem 4.4); "off".
        margin: stop this much earlier, as a share of the demand (ε of Sec. 6.1, made relative).
        patience: number of consecutive steps that must meet the criterion (App. G.3).
        window: number of steps over which to average the headroom (App. G.3).

    With running means over batches both count their estimates, up to 23 in a half-life, not steps.

    Raises:
        HamuError: if a value is out of range.
    """

    criterion: Criterion = "aggregate"
    margin: float = 0.0
    patience: int = 1
    window: int = 1

    def __post_init__(self) -> None:
        if self.criterion not in get_args(Criterion):
            raise unknown("stopping criterion", self.criterion, get_args(Criterion))
        if not self.margin >= 0:
            raise HamuError(f"stopping margin {self.margin} is negative; use 0 or more")
        if not all(isinstance(n, int) and n >= 1 for n in (self.patience, self.window)):
            raise HamuError(
                f"patience {self.patience} and window {self.window} must be whole numbers from 1 on"
            )


class StoppingMemory:
    """Memory of a `StoppingRule` from step to step, on the host."""

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self._headrooms: deque[float] = deque(maxlen=rule.window)
        self._met_in_a_row = 0

    def update(self, headroom: float, conflict: bool = True) -> bool:
        """Add one step's headroom; return whether to stop before that step.

        Args:
            headroom: `free_limit` over `clipped_demand`.
            conflict: see `ConstraintStatus.conflict`; without it the step has no price.
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
        """Name the rule met and its figures; for the arguments see `ConstraintStatus`."""
        if not some_demand_is_free or free_limit <= 0:
            where = "in a block " * (self.rule.criterion == "any")
            return (
                f"{where}the demand {clipped_demand:.4g} has a price ({self.rule.criterion}), and "
                f"so has every smaller one"
            )
        enough, criterion = 1.0 + self.rule.margin, self.rule.criterion
        if self.rule.window > 1:
            mean, steps = sum(self._headrooms) / len(self._headrooms), len(self._headrooms)
            return (
                f"the mean of the last {steps} headrooms, {mean:.4g}, is below {enough:g} "
                f"({criterion}); a demand small enough still gains on both sides"
            )
        left = math.floor(100 * free_limit / (demand * enough))
        share = f"{left}%" if left else "less than 1%"
        at = f": the criterion is not met at {share} of the constraint"
        is_cut = criterion == "any" and clipped_demand < demand  # by block, each in its own way
        margin = f" with its margin, {clipped_demand * enough:.4g}," if enough > 1 else ""
        return (
            f"the demand {clipped_demand:.4g}{margin} leaves no room below {free_limit:.4g}, the "
            f"most that the gradients sustain for free ({criterion}); a demand small enough still "
            f"gains on both sides{'' if is_cut else at}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"headrooms": list(self._headrooms), "met_in_a_row": self._met_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._headrooms = deque(state["headrooms"], maxlen=self.rule.window)
        self._met_in_a_row = state["met_in_a_row"]


@dataclass(frozen=True)
class ConstraintStatus:
    """Standing of the constraint at a step. Units: loss change per unit of learning rate.

    Attributes:
        fraction: φ_i, the demanded share of block i's reach, [L]; above 1 it is infeasible.
        direct: [L] bool, where the objective's own gradient meets the constraint (κ ≤ κ1).
        demand: 0-dim, the demanded loss change q = Q/η (or U/η).
        clipped_demand: 0-dim, the demand, in each block at most its reach.
        max_demand: 0-dim, the largest demand that the gradients allow: Σ R_i/η ‖g_c,i‖ if divided
            in proportion to reach, less otherwise.
        free_limit: 0-dim, the largest demand that costs the other objective nothing, by the
            stopping criterion (right-hand side in App. C).
        conflict: 0-dim bool, whether κ > 0 ("any": in a block), and for the criteria "aggregate"
            and "off" also whether a step that promises 1 + margin times the demand has a price,
            summed over all blocks. The criterion requires it.
        feasible: 0-dim bool, whether every block can meet its share, and any change is possible.
        gram: the Gram that all this derives from.
        radius: R_i/η, [L].
        constrained: the side of the demand: "forget" (HAMU-Q) or "retain" (HAMU-U).
        margin: of the stopping rule.
    """

    fraction: Tensor
    direct: Tensor
    demand: Tensor
    clipped_demand: Tensor
    max_demand: Tensor
    free_limit: Tensor
    conflict: Tensor
    feasible: Tensor
    gram: PairGram
    radius: Tensor
    constrained: Side
    margin: float = 0.0

    @property
    def headroom(self) -> float:
        """`free_limit` over `clipped_demand`; infinite without a demand."""
        demand = self.clipped_demand.item()
        return self.free_limit.item() / demand if demand > 0 else math.inf

    @cached_property
    def criterion_met(self) -> Tensor:
        """True if this step alone meets the stopping criterion, 0-dim bool."""
        return self.conflict & (self.clipped_demand * (1.0 + self.margin) > self.free_limit)

    @cached_property
    def some_demand_is_free(self) -> Tensor:
        """True if a small enough demand is free to first order, 0-dim bool.

        As the demand goes to 0, the step becomes the objective's best step that spares the other
        side: block i gains ‖g_o,i‖ R_i/η sinθ_i (without the sine where the gradients are opposed).
        So no demand is free exactly where the gradients point the same way in all blocks.
        """
        objective_sq = self.gram.forget_sq if self.constrained == "retain" else self.gram.retain_sq
        same_way = self.gram.collinear & (self.gram.dot > 0)
        return ((objective_sq > 0) & ~same_way).any()

    @cached_property
    def kappa(self) -> Tensor:
        """κ = g_r·g_f of the whole model, 0-dim (Theorem 4.1)."""
        return self.gram.dot.sum()

    @cached_property
    def direct_threshold(self) -> Tensor:
        """κ1 (HAMU-Q, Theorem 4.1) or κ3 (HAMU-U, App. B.6) of the whole model, 0-dim."""
        return -self._share * self._norms

    @cached_property
    def stop_threshold(self) -> Tensor:
        """κ2 (HAMU-Q, Theorem 4.4) or κ4 (HAMU-U, App. B.6) of the whole model, 0-dim."""
        return ((1.0 - self._share) * (1.0 + self._share)).sqrt() * self._norms

    @cached_property
    def regime(self) -> Tensor:
        """The whole model's regime (Fig. 1), 0-dim; see `regime_at`."""
        return regime_at(self.kappa, self.direct_threshold, self.stop_threshold)

    @cached_property
    def _norms(self) -> Tensor:
        return (self.gram.retain_sq.sum() * self.gram.forget_sq.sum()).sqrt()

    @cached_property
    def _share(self) -> Tensor:
        """Demanded share of the whole model's reach, at most 1."""
        gram, demand = self.gram, self.demand
        constrained_sq = gram.retain_sq if self.constrained == "retain" else gram.forget_sq
        reach = (self.radius * self.radius).sum().sqrt() * constrained_sq.sum().sqrt()
        return torch.where(demand > 0, demand / reach, torch.zeros_like(reach)).clamp(max=1.0)


def regime_at(kappa: Tensor, direct_threshold: Tensor, stop_threshold: Tensor) -> Tensor:
    """The regime of each κ: 0 direct, 1 rectified, 2 collateral forgetting unavoidable."""
    return (kappa > direct_threshold).long() + (kappa > stop_threshold).long()


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator/denominator, 0 where the denominator is 0."""
    return (numerator / denominator).masked_fill(denominator == 0, 0.0)


@dataclass(frozen=True)
class Weights:
    """Weights of the two gradients by block: g* = retain·g_r + forget·g_f.

    Attributes:
        retain: a_i, shape [L], float64.
        forget: b_i, shape [L], float64; negative where the step raises the forget loss.
        constraint: standing of the constraint, None for methods without.
        memory: [M], for the `PairGram.memory` of the next step if this one is taken.
    """

    retain: Tensor
    forget: Tensor
    constraint: ConstraintStatus | None = None
    memory: Tensor | None = None


class Method(ABC):
    """Way of combining the two gradients.

    Attributes:
        name: on the command line.
        summary: one line for the table of methods.
        source: the publication that defines it.
        retain_objective: name of the objective whose gradient is g_r, None without a retain pass.
        forget_objective: name of the objective whose gradient is g_f (to be raised), None likewise.
        constrained: the side of the demand, None for methods without a constraint.
        first_memory: numbers that the first step's Gram has as its memory; a method with any needs
            the losses too, and returns the next step's memory with its weights.
        retain_decay: share of the running mean of g_r that each step keeps; the mean takes the
            place of g_r. 0 for g_r itself.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    retain_objective: ClassVar[str | None] = "cross_entropy"
    forget_objective: ClassVar[str | None] = "cross_entropy"
    constrained: ClassVar[Side | None] = None
    first_memory: ClassVar[tuple[float, ...]] = ()
    retain_decay: ClassVar[float] = 0.0

    on_infeasible: OnInfeasible = "stop"

    @abstractmethod
    def weigh(self, gram: PairGram) -> Weights:
        """Weigh the two sides of every block of the Gram of clipped gradients."""

    @property
    def stopping_rule(self) -> StoppingRule:
        """Stopping rule; off for methods without a criterion."""
        return StoppingRule("off")

    @property
    def remembers(self) -> bool:
        """True if a step depends on those before it."""
        return bool(self.first_memory or self.retain_decay)

    @property
    def uses_retain(self) -> bool:
        """True if the method needs a backward pass over retain data."""
        return self.retain_objective is not None

    @property
    def uses_forget(self) -> bool:
        """True if the method needs a backward pass over forget data."""
        return self.forget_objective is not None
