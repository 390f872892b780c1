"""Processes of a run, started by torchrun or accelerate; otherwise there is one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hamu.errors import HamuError

T = TypeVar("T")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by element size
_PIECE = 1 << 20  # integers widened at a time
_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ over the golden ratio, signed: odd, with bits of no pattern


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if _is_on() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if _is_on() else int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """True if this process prints and writes."""
    return rank() == 0


def all_reduced(values: Tensor) -> Tensor:
    """Sum of a tensor over all processes; the tensor itself where there is one process."""
    if not _are_several():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def barrier() -> None:
    """Return once every process has called it."""
    if _is_on():
        dist.barrier()


def leave() -> None:
    """Leave the process group at the end of a run.

    Gloo's threads hold tensors of the last collectives. A thread that frees them during interpreter
    shutdown aborts the process ("terminate called without an active exception"), so garbage is
    collected before and after.
    """
    if _is_on():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def from_main(find: Callable[[], T]) -> T:
    """Result of the main process, on every process; its error is raised on every process too."""
    if not _are_several():
        return find()
    found: list[Any] = [None, None]
    if is_main():
        try:
            found[0] = find()
        except Exception as error:  # raised on every process below
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return cast(T, found[0])


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Copy the main process's values to every process, in place."""
    for tensor in tensors if _are_several() else ():
        dist.broadcast(tensor, src=0)


def check_equal(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Compare tensors over all processes by digests of their bits; an error names the first."""
    if not _are_several():
        return
    digests = torch.stack([_digest(t).to(tensors[0].device) for t in tensors])
    ends = torch.stack([digests, -digests])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    differing = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    if differing:
        raise HamuError(
            f"{names[differing[0]]} is not the same on all processes; do all start from the same "
            f"model, with the same libraries?"
        )


def _digest(tensor: Tensor) -> Tensor:
    """Sum, modulo 2⁶⁴, of a tensor's bits times odd random factors of their places, 0-dim int64.

    One different element changes it for certain; several, with a probability of 1 - 2⁻³².
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.Generator().manual_seed(0)
    factors = torch.randint(-(1 << 63), (1 << 63) - 1, (min(len(bits), _PIECE),), generator=places)
    factors = factors.bitwise_or_(1).to(tensor.device)
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(bits, _PIECE):
        digest = digest * _GOLDEN + (piece * factors[: len(piece)]).sum()
    return digest


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` sharded a model; valid while parameters are gathered too."""
    return any(hasattr(value, "device_mesh") for value in model.state_dict().values())


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


def _are_several() -> bool:
    return _is_on() and dist.get_world_size() > 1
