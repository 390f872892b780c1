"""What forgetting costs before any step is taken: the least first-order price of each demand (paper, Theorem 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.gram import PairGram
from hamu.methods import HamuQ, HamuU


@dataclass(frozen=True)
class Frontier:
    """The best attainable pairs of changes, per unit of learning rate.

    Attributes:
        demand: the constraint, Q/η or U/η, [P] from 0 to the feasible limit.
        retain_change: change of the retain loss, [P]; negative is an improvement (F_r* of Theorem 4.1 for HAMU-Q).
        forget_change: change of the forget loss, [P]; positive is forgetting.
        feasible_limit: the largest demand that the gradients allow, Σ n_r,i n_f,i.
        free_limit: the largest demand that costs the other side nothing to first order, Σ n_r,i n_f,i sinθ_i where
            κ > 0, else all that is feasible (App. B.4, C).
    """

    demand: Tensor
    retain_change: Tensor
    forget_change: Tensor
    feasible_limit: float
    free_limit: float

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


def frontier(gram: PairGram, variant: str = "hamu-q", points: int = 101) -> Frontier:
    """The frontier of one pair of (clipped) gradients, block by block with norm-proportional demands.

    Args:
        gram: their Gram.
        variant: "hamu-q" demands of the forget loss, "hamu-u" of the retain loss.
        points: how many demands to compute, denser towards the feasible limit.
    """
    method = {"hamu-q": HamuQ, "hamu-u": HamuU}[variant]
    demands, retain, forget = [], [], []
    even = torch.linspace(0.0, 1.0, points, dtype=torch.float64)
    shares = 1.0 - (1.0 - even).square()  # denser towards the feasible limit, where the price rises steeply
    # a demand of nothing is the limit of small ones: the objective's own best step that does not harm the other side
    for share in shares.clamp(min=1e-9).tolist():
        weights = method(share, constraint_mode="relative", stopping="aggregate").weigh(gram)
        status = weights.constraint
        assert status is not None
        demands.append(status.demand)
        retain.append(-(weights.retain * gram.retain_sq + weights.forget * gram.dot).sum())
        forget.append(-(weights.retain * gram.dot + weights.forget * gram.forget_sq).sum())
    return Frontier(
        torch.stack(demands),
        torch.stack(retain),
        torch.stack(forget),
        status.capacity.item(),
        status.sustainable.item(),
    )
