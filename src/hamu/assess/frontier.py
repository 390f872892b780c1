"""What forgetting costs before any step is taken: the least first-order price of each demand (paper, Theorem 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.methods.base import ConstraintStatus


@dataclass(frozen=True)
class Frontier:
    """The best attainable pairs of changes, per unit of learning rate.

    Attributes:
        demand: the constraint, Q/η or U/η, [P] from 0 to the feasible limit.
        retain_change: change of the retain loss, [P]; negative is an improvement (F_r* of Theorem 4.1 for HAMU-Q).
        forget_change: change of the forget loss, [P]; positive is forgetting.
        feasible_limit: the largest demand that the gradients allow, Σ n_r,i n_f,i.
        free_limit: the largest demand that costs the other side nothing to first order, where the price turns from
            gain to loss; for one block it is n_r n_f sinθ where κ > 0, else all that is feasible (App. B.4).
        criterion_limit: the demand at which the aggregate stopping criterion is met, Σ n_r,i n_f,i sinθ_i (App. C);
            with several blocks of different angles it may be on either side of the free limit, and far below it where
            some are opposed.
    """

    demand: Tensor
    retain_change: Tensor
    forget_change: Tensor
    feasible_limit: float
    free_limit: float
    criterion_limit: float

    def at(self, demand: float) -> tuple[float, float]:
        """(retain_change, forget_change) of a demand, interpolated."""
        right = int(torch.searchsorted(self.demand, demand).clamp(1, len(self.demand) - 1))
        low, high = self.demand[right - 1].item(), self.demand[right].item()
        share = min(1.0, max(0.0, (demand - low) / (high - low))) if high > low else 0.0
        retain, forget = (
            torch.lerp(values[right - 1], values[right], share).item()
            for values in (self.retain_change, self.forget_change)
        )
        return retain, forget


def frontier(gram: PairGram, method: HamuQ | HamuU, points: int = 101) -> Frontier:
    """The frontier of one pair of (clipped) gradients, block by block.

    Args:
        gram: their Gram.
        method: its constrained side, its radius and its distribution over blocks are used, not its constraint.
        points: how many demands to compute, denser towards the feasible limit.
    """

    def at(share: float) -> tuple[Tensor, Tensor, ConstraintStatus]:
        """The changes of both losses, and the constraint, at this share of what is feasible."""
        weights = replace(
            method, constraint=share, constraint_mode="relative", stopping="aggregate"
        ).weigh(gram)
        assert weights.constraint is not None
        return *gram.changes(weights.retain, weights.forget), weights.constraint

    def is_free(share: float) -> bool:
        retain, forget, _ = at(share)
        return bool(retain <= 0 if method.constrained == "forget" else forget >= 0)

    even = torch.linspace(0.0, 1.0, points, dtype=torch.float64)
    shares = (
        1.0 - (1.0 - even).square()
    )  # denser towards the feasible limit, where the price rises steeply
    # a demand of nothing is the limit of small ones: the objective's own best step that does not harm the other side
    found = [at(share) for share in shares.clamp(min=1e-9).tolist()]
    status = found[-1][2]
    low, high = 0.0, 1.0
    if is_free(1.0):
        low = 1.0
    else:  # the price never falls with the demand, so there is one place where it turns
        for _ in range(50):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if is_free(middle) else (low, middle)
    return Frontier(
        demand=torch.stack([constraint.demand for _, _, constraint in found]),
        retain_change=torch.stack([retain for retain, _, _ in found]),
        forget_change=torch.stack([forget for _, forget, _ in found]),
        feasible_limit=status.max_demand.item(),
        free_limit=low * status.max_demand.item(),
        criterion_limit=status.free_limit.item(),
    )
