"""a·g_r + b·g_f, tensor by tensor, in the memory of one of the two; and the offload of one side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hamu.core.distributed.layout import Grads, drained
from hamu.core.gram import combine_dtype
from hamu.errors import HamuError


def combined(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """a·retain + b·forget, in the memory of one of them; half precision rounds once, at the end.

    An offloaded side comes back in pieces, into the memory of the other. The result is like `part`.
    """
    if retain is None or forget is None:
        only, weight = (retain, a) if forget is None else (forget, b)
        return None if only is None else only.to(part.device, part.dtype).mul_(weight)
    whole, other, x, y = retain, forget, a, b
    if retain.dtype != part.dtype or retain.device != part.device:
        whole, other, x, y = forget, retain, b, a
    if y == 0.0:
        return whole if x == 1.0 else whole.mul_(x)
    dtype = combine_dtype(part)
    is_flat = whole.is_contiguous() and other.is_contiguous()
    if is_flat and whole.dtype == other.dtype == dtype and whole.device == other.device:
        # the outer product with [1] makes one pass over memory; mul_ and add_ make two
        whole.view(-1, 1).addr_(other.view(-1), _ones(dtype, whole.device), beta=x, alpha=y)
        return whole
    sides, step = (whole, other), widened_at_once(whole.device)
    if is_flat:
        sides = (whole.view(-1), other.view(-1))
    else:  # pieces along the first dimension are the same elements whatever the strides
        step = max(1, step * whole.shape[0] // whole.numel())
    for w, s in zip(*(torch.split(side, step) for side in sides), strict=True):
        w.copy_(w.to(dtype).mul_(x).add_(s.to(w.device), alpha=y))
    return whole


def widened_at_once(device: torch.device) -> int:
    """Elements widened or brought back at once: few for a CPU's cache, else many."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


@lru_cache(maxsize=16)
def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, dtype=dtype, device=device)


class GradOffload:
    """Offloads one side's gradients: "cpu" to host memory, "bf16" to half precision, or "none"."""

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
