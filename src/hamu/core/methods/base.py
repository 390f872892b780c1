"""What a method is: a pure function from a `PairGram` to one weight per block and side.

In:  the Gram of the (clipped) batch gradients, [L] float64.
Out: `Weights` (a, b), with which the equivalent gradient is g* = a_i·g_r,i + b_i·g_f,i.

A method sees no gradient, no model and no optimizer. It is vectorised over the blocks, takes no decision on
the host, and so costs the same for one block and for a thousand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hamu.core.gram import PairGram, Side
from hamu.core.methods.stopping import StoppingRule

OnInfeasible = Literal["stop", "clamp", "skip"]


@dataclass(frozen=True)
class ConstraintStatus:
    """How the constraint stands at this step. Units: loss change per unit of learning rate.

    The whole model's κ and thresholds are computed when they are read.

    Attributes:
        fraction: φ_i, the demanded share of what block i can reach, [L]; above 1 it is infeasible.
        direct: [L] bool, where the objective's own gradient already meets the constraint (κ ≤ κ1).
        demand: 0-dim, the demanded loss change q = Q/η (or U/η).
        granted: 0-dim, the demand cut in each block to what it can reach, as on_infeasible="clamp" does.
        capacity: 0-dim, the largest demand that the gradients allow: Σ R_i/η ‖g_c,i‖ if it is divided by what each
            block can reach, less if it is divided otherwise.
        sustainable: 0-dim, the largest demand that costs the other objective nothing, by the stopping
            criterion in use (the right-hand side in App. C).
        conflict: 0-dim bool, whether the objectives are in conflict: κ > 0, and for the aggregate criterion (and where
            none is obeyed) also that a step that promises 1 + margin times the demand has a price, by the sum of all
            blocks. If not, the criterion cannot be met.
        feasible: 0-dim bool, whether every block can meet its share, and any change can be demanded at all.
        gram: the Gram it was computed from.
        radius: R_i/η, [L].
        constrained: the side that the change is demanded of: "forget" (HAMU-Q) or "retain" (HAMU-U).
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

    @cached_property
    def criterion_met(self) -> Tensor:
        """Whether this step meets the stopping criterion, 0-dim bool; several may have to, see `StoppingRule`."""
        return self.conflict & (self.clipped_demand * (1.0 + self.margin) > self.free_limit)

    @cached_property
    def some_demand_is_free(self) -> Tensor:
        """Whether a demand that is small enough costs the other objective nothing to first order, 0-dim bool.

        As the demand goes to 0 the step becomes the objective's own best step that does not harm the other side. In
        block i it gains ‖g_o,i‖ R_i/η sinθ_i (without the sine where the gradients are opposed), and nothing where
        they point the same way. So no demand is free exactly where all blocks do.
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
        """The demanded share of the whole model's reach, at most 1."""
        constrained_sq = (
            self.gram.retain_sq if self.constrained == "retain" else self.gram.forget_sq
        )
        reach = (self.radius * self.radius).sum().sqrt() * constrained_sq.sum().sqrt()
        return torch.where(self.demand > 0, self.demand / reach, torch.zeros_like(reach)).clamp(
            max=1.0
        )


def regime_at(kappa: Tensor, direct_threshold: Tensor, stop_threshold: Tensor) -> Tensor:
    """The regime of each κ: 0 direct, 1 rectified, 2 collateral forgetting unavoidable."""
    return (kappa > direct_threshold).long() + (kappa > stop_threshold).long()


@dataclass(frozen=True)
class Weights:
    """The weights of the two gradients, block by block: g* = retain·g_r + forget·g_f.

    Attributes:
        retain: a_i, shape [L], float64.
        forget: b_i, shape [L], float64; negative where the step raises the forget loss.
        constraint: how the constraint stands, for methods that have one.
    """

    retain: Tensor
    forget: Tensor
    constraint: ConstraintStatus | None = None


class Method(ABC):
    """One way of combining the two gradients. Subclass it, add a line to the registry, done.

    Attributes:
        name: what the command line and the registry call it.
        summary: one line for the table of methods.
        source: the publication that defines it.
        retain_objective: name of the objective whose gradient is g_r, None if the method has no retain pass.
        forget_objective: name of the objective whose gradient is g_f (to be raised), None likewise.
        constrained: the side that a change is demanded of, None for methods without a constraint.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    retain_objective: ClassVar[str | None] = "cross_entropy"
    forget_objective: ClassVar[str | None] = "cross_entropy"
    constrained: ClassVar[Side | None] = None

    on_infeasible: OnInfeasible = "stop"

    @abstractmethod
    def weigh(self, gram: PairGram) -> Weights:
        """Weigh the two sides of every block.

        Args:
            gram: the Gram of the gradients as they will be combined (clipped), L blocks.

        Returns:
            The weights, on the device of the Gram, float64.
        """

    @property
    def stopping_rule(self) -> StoppingRule:
        """When the method asks to stop; methods without a criterion never do."""
        return StoppingRule("off")

    @property
    def uses_retain(self) -> bool:
        """Whether a backward pass over retain data is needed."""
        return self.retain_objective is not None

    @property
    def uses_forget(self) -> bool:
        """Whether a backward pass over forget data is needed."""
        return self.forget_objective is not None
