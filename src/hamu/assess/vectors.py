"""A list of tensors, one per parameter, read as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hamu.core.gram import WIDENED


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Tensors (None for zero) as one vector, [P]."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t).flatten() for t, p in pairs])


def shaped(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The reverse of `flat`."""
    parts = vector.split([p.numel() for p in like])
    return [part.view(p.shape).to(p.dtype) for part, p in zip(parts, like, strict=True)]


def length(tensors: Sequence[Tensor]) -> float:
    """‖x‖, summed in float64 a piece at a time."""
    return _norm([piece for t in tensors for piece in t.reshape(-1).split(WIDENED)], 2.0)


def largest(tensors: Sequence[Tensor]) -> float:
    """The largest |x_i|: not finite if any entry is not, 0 only if all are."""
    return _norm([t for t in tensors if t.numel()], float("inf"))


def _norm(tensors: list[Tensor], order: float) -> float:
    """The norm of all, read from the device once."""
    norms = torch._foreach_norm(tensors, order, dtype=torch.float64) if tensors else ()
    return (
        torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), order).item()
        if norms
        else 0.0
    )
