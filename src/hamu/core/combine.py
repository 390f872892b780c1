"""a·g_r + b·g_f, tensor by tensor, in the memory of one of the two; and the offload of one side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hamu.core.distributed.layout import Grads, drained
from hamu.core.gram import combine_dtype
from hamu.errors import HamuError

_PIECE = 1 << 20  # elements that come back from the offload at once


def combined(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """a·retain + b·forget, in the memory of one of them; half precision rounds once, at the end."""
    dtype = combine_dtype(part)
    if retain is None or forget is None:
        only, weight = (retain, a) if forget is None else (forget, b)
        return None if only is None else only.mul_(weight)
    if b == 0.0:
        return retain if a == 1.0 else retain.mul_(a)
    contiguous = retain.is_contiguous() and forget.is_contiguous()
    if retain.dtype == dtype:
        if not contiguous:
            return retain.mul_(a).add_(forget, alpha=b)
        # the outer product with [1] makes one pass over memory; mul_ and add_ make two
        retain.view(-1, 1).addr_(forget.view(-1), _ones(dtype, retain.device), beta=a, alpha=b)
        return retain
    pieces = [(retain, forget)]
    if contiguous:
        most = widened_at_once(retain.device)
        pieces = list(zip(*(torch.split(g.view(-1), most) for g in (retain, forget)), strict=True))
    for r, f in pieces:
        r.copy_(r.to(dtype).mul_(a).add_(f, alpha=b))
    return retain


def combined_with_offloaded(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """The same with one side offloaded, in the memory of the other; it comes back in pieces."""
    whole, away, x, y = retain, forget, a, b
    if retain is not None and (retain.dtype != part.dtype or retain.device != part.device):
        whole, away, x, y = forget, retain, b, a
    if whole is None:
        return None if away is None else away.to(part.device, part.dtype).mul_(y)
    if away is None:
        return whole.mul_(x)
    dtype = combine_dtype(part)
    pairs = [(whole, away)]
    if whole.dim() > 0:
        rows = max(1, _PIECE * whole.shape[0] // max(1, whole.numel()))
        pairs = list(zip(torch.split(whole, rows), torch.split(away, rows), strict=True))
    for w, s in pairs:
        w.copy_(w.to(dtype).mul_(x).add_(s.to(w.device, dtype), alpha=y))
    return whole


def widened_at_once(device: torch.device) -> int:
    """Elements of half precision widened at once: few for a CPU's cache, else many."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


@lru_cache(maxsize=16)
def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, dtype=dtype, device=device)


class GradOffload:
    """Offloads one side's gradients: "cpu" to host memory, "bf16" to half precision.

    Args:
        name: "none", "bf16" or "cpu".

    Attributes:
        is_used: whether the name is not "none".

    Raises:
        HamuError: if the name is unknown.
    """

    def __init__(self, name: str) -> None:
        if name not in ("none", "bf16", "cpu"):
            raise HamuError(f"offload_grads {name!r} is unknown; choose none, bf16 or cpu")
        self.name = name
        self.is_used = name != "none"
        self._sent: dict[torch.device, torch.cuda.Event] = {}

    def put(self, grads: Grads) -> Grads:
        """Offload gradients; those already offloaded stay as they are. Empties the list."""
        if not self.is_used:
            return grads
        devices = {g.device for g in grads if g is not None and g.device.type == "cuda"}
        put = [None if g is None else self._put(g) for g in drained(grads)]
        if self.name == "cpu":
            for device in devices:
                self._sent[device] = torch.cuda.current_stream(device).record_event()
        return put

    def wait(self) -> None:
        """Return once every copy has arrived; the host would read it before."""
        for event in self._sent.values():
            event.synchronize()
        self._sent.clear()

    def take(self, grads: Grads, parameters: Sequence[Tensor]) -> Grads:
        """Whole gradients on their device again, to accumulate into."""
        if not self.is_used:
            return grads
        self.wait()
        both = zip(drained(grads), parameters, strict=True)
        return [None if g is None else g.to(p.device, p.dtype) for g, p in both]

    def _put(self, grad: Tensor) -> Tensor:
        if self.name == "bf16":
            return grad.to(torch.bfloat16)
        if grad.device.type == "cpu":
            return grad
        # pinned, so that neither copy keeps the host waiting
        return torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)
