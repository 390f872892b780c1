"""Which records fight hardest against the other side: the slope of each record's loss along a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hamu.assess.vectors import length
from hamu.errors import HamuError


@torch.no_grad()
def influences(
    losses: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    precision: float | None = None,
) -> Tensor:
    """∇L(z)·g of every record z, from two forward passes with the weights moved ±ε along g, no backward pass.

    With g the retain gradient and z the forget records, the mean over records is κ (unclipped): the records at the top
    are those whose forgetting pulls the retain loss up with it. The weights are as before afterwards, bit for bit.

    Args:
        losses: computes the loss of each record at the weights as they are, [N] float64; with the model in
            evaluation mode, so that both passes see the same model.
        parameters: what is moved.
        gradient: g, a tensor (or None for zero) like each of them.
        precision: the machine epsilon of the forward passes; by default that of the parameters.

    Returns:
        [N] float64.

    Raises:
        HamuError: if the gradient is zero or not finite.
    """
    pairs = [(p, g) for p, g in zip(parameters, gradient, strict=True) if g is not None]
    slope = length([g for _, g in pairs])
    if not 0 < slope < float("inf"):
        raise HamuError(
            f"the gradient to move the weights along has length {slope}; it must be positive and finite"
        )
    # The third root of the machine's precision would balance the rounding of the losses against a third derivative of
    # like size. A trained network bends far more than that: the step must be much shorter.
    eps = max(torch.finfo(p.dtype).eps for p, _ in pairs) if precision is None else precision
    epsilon = eps**0.5 / 64 * max(length([p for p, _ in pairs]), eps) / slope
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
    return (moved[0] - moved[1]) / (2.0 * epsilon)


def share_of_top(values: Tensor, share: float = 0.1) -> float:
    """The part of Σ|∇L(z)·g| over the records above zero that the top share of all records makes up."""
    positive = values.clamp(min=0.0).sort(descending=True).values
    whole = positive.sum()
    return (positive[: max(1, int(share * len(values)))].sum() / whole).item() if whole > 0 else 0.0
