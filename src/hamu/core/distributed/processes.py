"""Processes of a run, started by torchrun or accelerate; otherwise there is one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hamu.errors import HamuError

T = TypeVar("T")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
_PIECE = 1 << 20  # elements widened at a time
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
    if not _is_on() or dist.get_world_size() == 1:
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
    if not _is_on():
        return
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def from_main(find: Callable[[], T]) -> T:
    """Result of the main process, on every process; its error is raised on every process too."""
    if not _is_on() or dist.get_world_size() == 1:
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
    if not _is_on() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def check_equal(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Compare tensors over all processes by their `digest_of_bits`.

    Raises:
        HamuError: on every process, naming the first tensor that differs.
    """
    if not _is_on() or dist.get_world_size() == 1:
        return
    digests = torch.stack([digest_of_bits(t).to(tensors[0].device) for t in tensors])
    ends = torch.stack([digests, -digests])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    differing = (ends[0] != -ends[1]).nonzero().flatten().tolist()
    if differing:
        raise HamuError(
            f"{names[differing[0]]} is not the same on all processes; do all start from the same "
            f"model, with the same libraries?"
        )


def digest_of_bits(tensor: Tensor) -> Tensor:
    """Digest of a tensor's bits, 0-dim int64 on its device, without a host synchronisation.

    The sum, modulo 2⁶⁴, of each element's bits scrambled by a factor of its place. One different
    element changes it for certain; several, or permuted ones, with a probability of about 1 - 2⁻⁶⁴.
    Strides do not count.
    """
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    rows = bits.reshape(1) if bits.dim() == 0 else bits
    at_once = max(1, _PIECE // max(1, rows[:1].numel()))
    factors = _odd_factors(min(rows.numel(), _PIECE), tensor.device)
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for some in torch.split(rows, at_once):
        for piece in torch.split(some.reshape(-1), _PIECE):
            places = factors[: len(piece)]
            scrambled = _folded(piece * places).mul_(places)
            digest = digest * _GOLDEN + _folded(scrambled).sum()  # so that pieces have places too
    return digest


def _odd_factors(count: int, device: torch.device) -> Tensor:
    """Odd int64 without a pattern, one per place."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_GOLDEN)
    return _folded(_folded(mixed).mul_(_GOLDEN)).bitwise_or_(1)


def _folded(values: Tensor) -> Tensor:
    """XOR of the upper half into the lower, in place: products carry differences upwards only."""
    return values.bitwise_xor_((values >> 32).bitwise_and_(0xFFFFFFFF))


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()
