"""Records in conflict: the slope of each record's loss along the other side's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.assess.gradients import norm
from hamu.errors import HamuError


@dataclass(frozen=True)
class Conflicts:
    """The records of one side by how their loss changes along the other side's gradient.

    Attributes:
        values: ∇L(z)·g of each record, unclipped, [N]; their mean is κ.
        rows: the record of each: its row in the source if the data set has `rows`, else its
            position in the set.
        top_share: see `share_of_top`.
    """

    values: Tensor
    rows: Tensor
    top_share: float

    def top(self, count: int = 20) -> list[dict[str, float]]:
        """The records in the hardest conflict, worst first."""
        order = self.values.argsort(descending=True)[:count]
        pairs = zip(self.rows[order].tolist(), self.values[order].tolist(), strict=True)
        return [{"row": row, "value": value} for row, value in pairs]


@torch.no_grad()
def gradient_alignment(
    losses: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    precision: float | None = None,
) -> Tensor:
    """∇L(z)·g of every record z, by two forward passes with the weights moved ±ε along g.

    With g the retain gradient and z the forget records, the mean over records is κ (unclipped):
    forgetting the records at the top raises the retain loss most. Restores the weights bit for bit.

    Args:
        losses: computes each record's loss at the current weights, [N] float64, in evaluation mode.
        parameters: the weights to move.
        gradient: g, a tensor (or None for zero) like each of them.
        precision: machine epsilon of the forward passes; by default that of the parameters.

    Returns:
        [N] float64.

    Raises:
        HamuError: if the gradient is zero or not finite.
    """
    pairs = [(p, g) for p, g in zip(parameters, gradient, strict=True) if g is not None]
    slope = norm([g for _, g in pairs])
    if not 0 < slope < float("inf"):
        raise HamuError(
            f"the gradient to move the weights along has length {slope}; "
            f"it must be positive and finite"
        )
    # The third root of the machine's precision would balance the rounding of the losses against a
    # third derivative of like size. A trained network bends far more than that: the step must be
    # much shorter.
    eps = max(torch.finfo(p.dtype).eps for p, _ in pairs) if precision is None else precision
    epsilon = eps**0.5 / 64 * max(norm([p for p, _ in pairs]), eps) / slope
    kept = [p.clone() for p, _ in pairs]
    moved = []
    try:
        for sign in (1.0, -1.0):
            for (p, g), original in zip(pairs, kept, strict=True):
                p.copy_(original).add_(g.to(p.dtype), alpha=sign * epsilon)
            moved.append(losses())
    finally:
        for (p, _), original in zip(pairs, kept, strict=True):
            p.copy_(original)
    difference = moved[0].sub(moved[1])
    return difference.div(2.0 * epsilon)


def share_of_top(values: Tensor, share: float = 0.1) -> float:
    """The part of all conflict (Σ∇L(z)·g above zero) in the top share of the records."""
    positive = values.clamp(min=0.0).sort(descending=True).values
    whole = positive.sum()
    return (positive[: max(1, int(share * len(values)))].sum() / whole).item() if whole > 0 else 0.0
