"""Where one side's gradient waits while the other's is collected: see `PairedGradients`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hamu.core.distributed.layout import drained
from hamu.errors import HamuError


class GradOffload:
    """Offloads one side's gradients: to the host's memory ("cpu"), or to half precision where they are ("bf16").

    `put` offloads them and `take` brings them back whole; `combined_with_waiting` brings back a piece at a time.

    Args:
        name: "none", "bf16" or "cpu".

    Attributes:
        is_used: whether anything is put away.

    Raises:
        HamuError: if the name is unknown.
    """

    def __init__(self, name: str) -> None:
        if name not in ("none", "bf16", "cpu"):
            raise HamuError(f"stash {name!r} is unknown; choose none, bf16 or cpu")
        self.name = name
        self.is_used = name != "none"
        self._sent: dict[torch.device, torch.cuda.Event] = {}

    def put(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients as they wait; those that wait already stay as they are. Uses the list up."""
        if not self.is_used:
            return grads
        devices = {g.device for g in grads if g is not None and g.device.type == "cuda"}
        put = [None if g is None else self._put(g) for g in drained(grads)]
        if self.name == "cpu":
            self._sent |= {
                device: torch.cuda.current_stream(device).record_event() for device in devices
            }
        return put

    def wait(self) -> None:
        """Return once all that was put away has arrived: the host would read it before."""
        for event in self._sent.values():
            event.synchronize()
        self._sent.clear()

    def take(self, grads: list[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients as they were collected, to be added to."""
        if not self.is_used:
            return grads
        self.wait()
        return [
            None if g is None else g.to(p.device, p.dtype)
            for g, p in zip(drained(grads), parameters, strict=True)
        ]

    def _put(self, grad: Tensor) -> Tensor:
        if self.name == "bf16":
            return grad.to(torch.bfloat16)
        if grad.device.type == "cpu":
            return grad
        # pinned, so that neither this copy nor the one back keeps the host waiting
        return torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)
