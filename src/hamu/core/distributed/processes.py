"""The processes of a run, as torchrun or accelerate started them; a run without either is one process."""

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
_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by size of an element in bytes
_PIECE = 1 << 20  # elements that are widened at a time
_GOLDEN = (
    -0x61C8864680B583EB
)  # 2⁶⁴ over the golden ratio, as a signed number: odd, with bits of no pattern


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_on() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if _is_on() else int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def all_reduced(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; the tensor itself where there is one process."""
    if not _is_on() or dist.get_world_size() == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def barrier() -> None:
    """Return once every process has come here."""
    if _is_on():
        dist.barrier()


def leave() -> None:
    """Leave the other processes, at the end; does nothing where there are none.

    Gloo's threads hold tensors of the last collectives. One that lets go of them while the interpreter is being taken
    down aborts a process whose work is done ("terminate called without an active exception"). So what still refers to
    these tensors is collected before, and the groups themselves after, as long as there is an interpreter.
    """
    if not _is_on():
        return
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def from_main(find: Callable[[], T]) -> T:
    """What the main process finds, on every process; an error of it is raised on every process too."""
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
    """Give every process the main one's values, in place."""
    if not _is_on() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def check_equal(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Compare tensors over all processes, bit by bit, by a digest of 64 bits of each; see `digest_of_bits`.

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
            f"{names[differing[0]]} is not the same on all processes; do all start from the same model, with the same "
            f"libraries?"
        )


def digest_of_bits(tensor: Tensor) -> Tensor:
    """A number that tells apart tensors of one shape and type, 0-dim int64, on their device; nothing waits for it.

    The sum, modulo 2⁶⁴, of each element's bits scrambled by a factor of its place. One element that differs changes it
    for certain; several that do, or stand in each other's places, by all but a chance of about 2⁻⁶⁴. Strides do not
    count. Of a large tensor a piece at a time is widened.
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
    """Odd int64 without a pattern, one for each place."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_GOLDEN)
    return _folded(_folded(mixed).mul_(_GOLDEN)).bitwise_or_(1)


def _folded(values: Tensor) -> Tensor:
    """The upper half of int64 bits joined to the lower, in place: products carry differences upwards alone."""
    return values.bitwise_xor_((values >> 32).bitwise_and_(0xFFFFFFFF))


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()
