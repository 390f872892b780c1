"""Processes of a run, started by torchrun or accelerate, and the part of the gradients of each.

A layout maps collected gradients to local parts, the Gram of the parts to that of the whole, and
the combined parts to the gradient that the optimizer steps on. With `Layout`, the default, every
process holds everything. `sharded.Sharded` is the layout of FSDP2.

`SplitPairing` (paper, App. G.1) gives half of the processes retain data and half forget data. No
process ever holds two gradients, at the traffic of plain data-parallel training:

    1. each half sums and scatters its gradients: process h of a half has shard h of its side
    2. partners (h of either half) swap halves of their shards: each has both sides of its own part
    3. Gram of the part, summed over all processes: 3·L numbers
    4. the part is combined where it is
    5. all gather the combined parts

Over d numbers and W processes each sends (1 - 2/W)·d + d/W + (1 - 1/W)·d = 2(W-1)/W·d.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hamu.core.gram import SIDES, PairGram
from hamu.errors import HamuError

T = TypeVar("T")
Grads = list[Tensor | None]
# as torch 2.13 calls them, and as it did before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BUCKET = 1 << 22  # elements exchanged at once, unless one tensor is larger


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if _is_on() else launched("WORLD_SIZE", 1)


def rank() -> int:
    """Number of this process, from 0; a RANK that no launcher has set counts nothing."""
    if _is_on():
        return dist.get_rank()
    return launched("RANK", 0) if world_size() > 1 else 0


def launched(name: str, least: int) -> int:
    """A launcher's variable, the least number without one; a HamuError if it is no number."""
    value = os.environ.get(name) or str(least)
    if not value.isdecimal() or int(value) < least:
        which = f"{name} is {value!r}, no whole number from {least} on"
        raise HamuError(f"{which}; start by torchrun, which sets it, or unset it")
    return int(value)


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
    """Compare the bits of tensors with those of the main process; an error names the first."""
    if not _are_several():
        return
    differ = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        own = tensor.detach().reshape(-1)
        of_main = own.clone()
        dist.broadcast(of_main, src=0)
        differ[number] = (own.view(torch.uint8) != of_main.view(torch.uint8)).any()
    dist.all_reduce(differ, op=dist.ReduceOp.MAX)
    differing = differ.nonzero().flatten().tolist()
    if differing:
        raise HamuError(
            f"{names[differing[0]]} is not the same on all processes; do all start from the same "
            f"model, with the same libraries?"
        )


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` sharded a model; valid while parameters are gathered too."""
    return any(hasattr(value, "device_mesh") for value in model.state_dict().values())


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


def _are_several() -> bool:
    return _is_on() and dist.get_world_size() > 1


def drained(grads: Grads) -> Iterator[Tensor | None]:
    """Each in turn; the list drops it, so that its memory is freed after use."""
    for number, grad in enumerate(grads):
        grads[number] = None
        yield grad


class Layout:
    """Local part of both gradients, and its relation to the whole; here they are the same.

    `sides` are collected here, `parts` are tensors like the parts that this process measures and
    combines, in the blocks `block_of`; they are everything if `is_whole`.
    """

    sides: tuple[str, ...] = SIDES
    is_whole = True
    is_checked = False  # in an own loop: whether `total` compares the processes
    gap: Tensor | None = None  # between the Grams of the processes, 0-dim, where they are compared

    def __init__(self, parameters: Sequence[Tensor], block_of: Sequence[int]) -> None:
        self.parts, self.block_of = parameters, block_of

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """Parts of the retain and of the forget gradient; uses the collected gradients up."""
        return grads["retain"], grads["forget"]

    def total(self, gram: PairGram) -> PairGram:
        """Gram of the whole gradients from that of the parts."""
        if not _are_several():
            return gram
        agreed = self.agree(torch.stack([*gram.sums().values()]))
        return gram.like(dict(zip(gram.sums(), agreed, strict=True)))

    def give(self, combined: Grads) -> Grads:
        """Gradient of each parameter from the combined parts; uses them up."""
        return combined

    def agree(self, numbers: Tensor) -> Tensor:
        """Sums over the parts to sums over all, equal on all processes; may work in place."""
        return numbers


class DataParallelLayout(Layout):
    """Every process holds both whole gradients and takes the sums of the first process.

    Other processors, or another number of threads, round sums otherwise; a decision taken by a hair
    on one process alone would part them. In an own loop a process may lack what the others have:
    DistributedDataParallel sums up one backward pass after each forward pass.
    """

    def total(self, gram: PairGram) -> PairGram:
        """Gram of the first process; the norms of another differ by `gap` of the larger."""
        whole = super().total(gram)
        if self.is_checked:
            own, first = (torch.stack([g.retain_sq, g.forget_sq]).sum(1) for g in (gram, whole))
            self.gap = ((own - first).abs() / torch.maximum(own, first)).nan_to_num_(0.0, 0.0).max()
            dist.all_reduce(self.gap, op=dist.ReduceOp.MAX)
        return whole

    def agree(self, numbers: Tensor) -> Tensor:
        """Numbers of the first process."""
        dist.broadcast(numbers, src=0)
        return numbers


def check_even(count: int) -> None:
    """Check that split pairing can divide so many processes into two halves."""
    if count % 2:
        raise HamuError(
            f"split pairing needs an even number of processes; there are {count}: start one more, "
            f"or give --pairing sequential"
        )


def side_of_process(rank: int, count: int) -> str:
    """Side of a process's data: retain in the first half of the processes, forget in the second."""
    return SIDES[rank // (count // 2)]


class _Bucket(NamedTuple):
    """Parameters exchanged together, as one flat tensor of a size that the processes divide."""

    members: list[tuple[int, int, int]]  # number of the parameter, start, end in the flat tensor
    size: int
    own: list[tuple[int, int, int]]  # likewise, in this process's part


class SplitPairing(Layout):
    """Split pairing, see above; `half` is the number of processes of a half."""

    is_whole = False

    def __init__(self, parameters: Sequence[Tensor], block_of: Sequence[int]) -> None:
        self._world, rank = dist.get_world_size(), dist.get_rank()
        self.half = self._world // 2
        self._place = rank % self.half  # within it
        self._partner = (rank + self.half) % self._world
        self.sides = (side_of_process(rank, self._world),)
        self._is_retain = self.sides == ("retain",)
        groups = [dist.new_group(list(range(start, start + self.half))) for start in (0, self.half)]
        self._group = groups[0 if self._is_retain else 1]
        self._parameters = parameters
        self._buckets = self._bucketed()
        own = [piece for bucket in self._buckets for piece in bucket.own]
        self.block_of = [block_of[number] for number, _, _ in own]
        self.parts = [  # expanded, so that they take no memory
            parameters[number].detach().new_empty(1).expand(end - start)
            for number, start, end in own
        ]
        self._present: list[bool] = []

    def _bucketed(self) -> list[_Bucket]:
        """Parameters in order, with like precision together, up to `BUCKET` elements each."""
        groups: list[list[tuple[int, int, int]]] = []
        end, dtype = 0, None
        for number, parameter in enumerate(self._parameters):
            if parameter.dtype != dtype or end + parameter.numel() > BUCKET:
                groups.append([])
                end, dtype = 0, parameter.dtype
            groups[-1].append((number, end, end + parameter.numel()))
            end += parameter.numel()
        return [self._bucket(members) for members in groups]

    def _bucket(self, members: list[tuple[int, int, int]]) -> _Bucket:
        part = -(-members[-1][2] // self._world)
        # the retain side keeps the first half of a shard; the last member gets the padding
        start = (2 * self._place + (not self._is_retain)) * part
        filled = [*members[:-1], (*members[-1][:2], part * self._world)]
        own = [
            (number, max(a, start) - start, min(b, start + part) - start)
            for number, a, b in filled
            if a < start + part and b > start
        ]
        return _Bucket(members, part * self._world, own)

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """Steps 1 and 2, a bucket at a time; each gradient is freed once it is on its way."""
        mine = grads[self.sides[0]]
        device = self._parameters[0].device
        present = torch.tensor([g is not None for g in mine], dtype=torch.int32, device=device)
        dist.all_reduce(present)
        self._present = (present > 0).tolist()
        retain: Grads = []
        forget: Grads = []
        for bucket in self._buckets:
            r, f = self._swapped(self._scattered(bucket, mine))
            for _, start, end in bucket.own:
                retain.append(r[start:end])
                forget.append(f[start:end])
        return retain, forget

    def _scattered(self, bucket: _Bucket, grads: Grads) -> Tensor:
        """The shard of its half's sum that this process keeps."""
        flat = self._parameters[bucket.members[0][0]].new_zeros(bucket.size)
        for number, start, end in bucket.members:
            if (grad := grads[number]) is not None:
                flat[start:end].view(grad.shape).copy_(grad)
                grads[number] = grad = None
        if self.half == 1:
            return flat
        shard = flat.new_empty(len(flat) // self.half)
        _reduce_scatter(shard, flat, group=self._group)
        return shard

    def _swapped(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """The retain and the forget side of this process's part, half a shard each."""
        first, second = shard.chunk(2)
        kept, sent = (first, second) if self._is_retain else (second, first)
        received = torch.empty_like(sent)
        send = dist.P2POp(dist.isend, sent.contiguous(), self._partner)
        receive = dist.P2POp(dist.irecv, received, self._partner)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        kept = kept.clone()  # so that the other half of the shard is freed
        return (kept, received) if self._is_retain else (received, kept)

    def agree(self, numbers: Tensor) -> Tensor:
        """Step 3."""
        dist.all_reduce(numbers)
        return numbers

    def give(self, combined: Grads) -> Grads:
        """Step 5; the gradients are views of one buffer per bucket."""
        whole: Grads = [None] * len(self._parameters)
        parts = drained(combined)
        for bucket in self._buckets:
            flat = self._gathered(bucket, parts)
            for number, start, end in bucket.members:
                if self._present[number]:
                    whole[number] = flat[start:end].view(self._parameters[number].shape)
        return whole

    def _gathered(self, bucket: _Bucket, parts: Iterator[Tensor | None]) -> Tensor:
        like = self._parameters[bucket.members[0][0]]
        part = like.new_zeros(bucket.size // self._world)
        for (_, start, end), piece in zip(bucket.own, parts, strict=False):
            if piece is not None:
                part[start:end].copy_(piece)
        gathered = like.new_empty(bucket.size)
        _all_gather(gathered, part)
        # all first halves come before all second halves
        return gathered.view(2, self.half, -1).transpose(0, 1).reshape(-1)
