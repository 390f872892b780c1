"""a·g_r + b·g_f, tensor by tensor, in the memory of one of the two gradients."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hamu.core.gram import combine_dtype

_PIECE = 1 << 20  # elements that come back from a stash at once


def combined(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """a·retain + b·forget, in the memory of one of them; rounded once, in the end, for half precisions."""
    dtype = combine_dtype(part)
    if retain is None or forget is None:
        only, weight = (retain, a) if forget is None else (forget, b)
        return None if only is None else only.mul_(weight)
    if b == 0.0:
        return retain if a == 1.0 else retain.mul_(a)
    if retain.dtype == dtype and retain.is_contiguous() and forget.is_contiguous():
        # The outer product with [1] is a·retain + b·forget in one pass over memory, which mul_ and add_ are not.
        retain.view(-1, 1).addr_(forget.view(-1), _ones(dtype, retain.device), beta=a, alpha=b)
        return retain
    if retain.dtype == dtype:
        return retain.mul_(a).add_(forget, alpha=b)
    pieces = [(retain, forget)]
    if retain.is_contiguous() and forget.is_contiguous():
        most = widened_at_once(retain.device)
        pieces = list(zip(*(torch.split(g.view(-1), most) for g in (retain, forget)), strict=True))
    for r, f in pieces:
        r.copy_(r.to(dtype).mul_(a).add_(f, alpha=b))
    return retain


def combined_with_waiting(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """The same where one of them waits in a `GradOffload`, in the memory of the other; it comes back a piece at a time."""
    waits = [
        g is not None and (g.dtype != part.dtype or g.device != part.device)
        for g in (retain, forget)
    ]
    whole, away, x, y = (forget, retain, b, a) if waits[0] else (retain, forget, a, b)
    if whole is None:
        return None if away is None else away.to(part.device, part.dtype).mul_(y)
    if away is None:
        return whole.mul_(x)
    dtype = combine_dtype(part)
    rows = (
        whole.numel()
        if whole.dim() == 0
        else max(1, _PIECE * whole.shape[0] // max(1, whole.numel()))
    )
    pairs = (
        [(whole, away)]
        if whole.dim() == 0
        else zip(torch.split(whole, rows), torch.split(away, rows), strict=True)
    )
    for w, s in pairs:
        w.copy_(w.to(dtype).mul_(x).add_(s.to(w.device, dtype), alpha=y))
    return whole


def widened_at_once(device: torch.device) -> int:
    """Elements of half precision: on a CPU as many as stay in its cache, elsewhere so many that launches are few."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


@lru_cache(maxsize=16)
def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, dtype=dtype, device=device)
