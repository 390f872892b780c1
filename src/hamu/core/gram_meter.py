"""`GramMeter`: measures the pair Gram of two gradients.

Near-collinear gradients leave 1 - cos²θ as small as 1e-6, which float32 sums would drown in
rounding; so exact products of the stored values are accumulated in float64. A GPU's kernels do so
in one pass (`kernels`). Elsewhere all but the smallest tensors are summed in short float32 sums
first, two to three times as fast, and again in float64 only where the angle is too small for that,
or squares leave float32's range. (The smallest are cheap, and with few elements small angles are
common.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hamu.core.gram import PairGram, combine_dtype
from hamu.errors import HamuError

Side = Sequence[Tensor | None]
_ROW = 128  # elements of a packed row
_TINY = 1 << 11  # tensors up to this many elements are packed in float64
SMALL = 3 << 14  # those up to this many are packed too, in float32 at first
# Sums of float32 are off by 1e-6, of entries of one size by 1e-4; the second is 0.5% of this sin²θ
_COARSE_COS_SQ = 1.0 - 0.15**2
_COARSE_FLOOR = 1e-30  # of the mean square: squares below 1e-38 underflow


class GramMeter:
    """Measures the `PairGram` of two gradient lists of fixed shapes.

    Small tensors are packed into zero-padded rows, so that a network with hundreds of them costs a
    handful of kernels, in a scratch memory of fixed size, which is kept: new memory in every step
    costs more than the sums. Large tensors are summed one by one, see `widened_at_once`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], block_of: Sequence[int], blocks: int | None = None
    ) -> None:
        self._parameters, self._block_of = list(parameters), block_of
        self._num_blocks = max(block_of) + 1 if blocks is None else blocks
        self._eps = max(torch.finfo(combine_dtype(p)).eps for p in parameters)
        self.device = parameters[0].device
        if any(p.device.type == "mps" for p in parameters):
            raise HamuError("the model is on mps, which has no float64; move it to the CPU")
        self._places = [(p.device, p.dtype) for p in parameters]
        self.is_exact = True  # all sums of the last Gram are in float64; else see `doubtful`
        self.tables: list[Any] = []  # of the last gradients that a kernel can read
        self._scratch: dict[torch.device, Tensor] = {}
        self._packs: dict[bool, list[_Pack]] = {}  # by whether they are exact
        self._large: dict[torch.device, list[int]] = {}
        self._coarse: dict[int, list[int]] = {}  # by block: tensors summed in float32
        for number, p in enumerate(parameters):
            if p.numel() > SMALL:
                self._large.setdefault(p.device, []).append(number)
            if _is_coarse(p):
                self._coarse.setdefault(block_of[number], []).append(number)
        self._least = {  # square of a block that cannot have underflowed
            block: _COARSE_FLOOR * sum(parameters[n].numel() for n in members)
            for block, members in self._coarse.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """State without scratch memory: pickle would part it from the views into it."""
        return vars(self) | {"_scratch": {}, "_packs": {}, "tables": []}

    def measure(self, retain: Side, forget: Side, *, exact: bool = True) -> PairGram:
        """Measure the Gram without a host synchronisation; None stands for a zero gradient.

        If `exact`, all tensors are summed in float64, also where that takes longer.
        """
        kernels = kernels_on(self.device)
        if kernels is not None:
            of_parts = self._parameters, self._block_of, self._num_blocks
            self.tables = kernels.tables(retain, forget, *of_parts, self.device)
            if sum(len(table.numbers) for table in self.tables) == len(self._parameters):
                self.is_exact = True
                sums = kernels.grams(self.tables, self._num_blocks, self.device)
                return PairGram(sums[:, 0], sums[:, 1], sums[:, 2], self._eps)
        self.is_exact = exact
        if exact not in self._packs:
            self._packs[exact] = self._packed(exact)
        blocks = torch.zeros(self._num_blocks, 2, 2, dtype=torch.float64, device=self.device)
        for pack in self._packs[exact]:
            pack.sums.add(blocks, pack.grams(retain, forget))
        for device, numbers in self._large.items():
            sums = [_gram_of_large(device, exact, retain[n], forget[n]) for n in numbers]
            pieces = zip(numbers, sums, strict=True)
            of_pieces = tuple(self._block_of[n] for n, one in pieces for _ in one[::4])
            grams = torch.stack(list(chain(*sums))).double().view(-1, 2, 2)
            _prepared(of_pieces, self.device).add(blocks, grams)
        return PairGram(blocks[:, 0, 0], blocks[:, 1, 1], blocks[:, 0, 1], self._eps)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """True if these parameters have not moved since, nor changed their precision."""
        return self._places == [(p.device, p.dtype) for p in parameters]

    def doubtful(self, gram: PairGram, retain: Side, forget: Side) -> list[int]:
        """Blocks whose float32 sums overflowed, may have underflowed, or leave too small an angle;
        `gram` is on the host, measured with exact=False.
        """
        sums, found = [sums.tolist() for sums in gram.sums().values()], []
        for block, members in self._coarse.items():
            r, f, dot = (of_blocks[block] for of_blocks in sums)
            is_doubtful = math.inf in (r, f) or dot * dot > _COARSE_COS_SQ * r * f
            for square, side in ((r, retain), (f, forget)):
                if square < self._least[block]:
                    is_doubtful |= any(side[number] is not None for number in members)
            if is_doubtful:
                found.append(block)
        return found

    def refined(
        self, gram: PairGram, blocks: Sequence[int], retain: Side, forget: Side
    ) -> PairGram:
        """Gram with these blocks measured again, exactly; the others cost nothing."""
        chosen = set(blocks)
        sides = [
            [g if b in chosen else None for g, b in zip(side, self._block_of, strict=True)]
            for side in (retain, forget)
        ]
        exact = self.measure(*sides)
        again = torch.tensor([block in chosen for block in range(self._num_blocks)]).to(self.device)
        both = zip(exact.sums().items(), gram.sums().values(), strict=True)
        return gram.like({name: torch.where(again, new, old) for (name, new), old in both})

    def _packed(self, exact: bool) -> list[_Pack]:
        """Small parameters by device and precision, in as few packs as scratch memory allows."""
        packs = []
        for device in dict.fromkeys(p.device for p in self._parameters):
            if device not in self._scratch:
                size = scratch_bytes(device)
                self._scratch[device] = torch.empty(size, dtype=torch.uint8, device=device)
            scratch = self._scratch[device]
            for is_coarse in (False, True):
                dtype = torch.float32 if is_coarse else torch.float64
                buffer = scratch.view(dtype).view(2, -1)  # a row for each side
                rows = {
                    number: _rows_of(p)
                    for number, p in enumerate(self._parameters)
                    if p.numel() <= SMALL
                    and p.device == device
                    and is_coarse == (_is_coarse(p) and not exact)
                }
                for group in in_groups(rows, buffer.shape[1] // _ROW):
                    members = {number: self._parameters[number] for number in group}
                    packs.append(_Pack(buffer, members, self._block_of, self.device))
        return packs


class _Sums:
    """Adds Gram matrices to those of their blocks, in a fixed order, as atomic sums are not."""

    def __init__(self, blocks: Sequence[int], device: torch.device) -> None:
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        starts = [k for k, n in enumerate(order) if not k or blocks[n] != blocks[order[k - 1]]]
        indices = (list(blocks), order, starts, [blocks[order[k]] for k in starts])
        self._all, self._order, self._starts, self._each = (
            torch.tensor(one, dtype=torch.int64).to(device) for one in indices
        )

    def add(self, sums: Tensor, grams: Tensor) -> None:
        """Add these matrices, [n, 2, 2]."""
        grams = grams.to(sums.device)
        if sums.device.type == "cpu":
            sums.index_add_(0, self._all, grams)
        else:
            bags = embedding_bag(self._order, grams.view(-1, 4), self._starts, mode="sum")
            sums.index_add_(0, self._each, bags.view(-1, 2, 2))


_prepared = lru_cache(maxsize=16)(_Sums)  # experts that are not used have no gradients


@lru_cache
def kernels_on(device: torch.device) -> Any:
    """The module `kernels` where it works: on a GPU with Triton and a C compiler; else None."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from hamu.core import kernels

    return kernels if kernels.compile_on(device) else None


def _gram_of_large(
    device: torch.device, exact: bool, retain: Tensor | None, forget: Tensor | None
) -> list[Tensor]:
    """Gram matrix of each piece of one tensor's gradients, entry by entry, 0-dim each."""
    grads = [g for g in (retain, forget) if g is not None]
    if not grads:
        return [torch.zeros((), device=device)] * 4
    is_flat = all(g.is_contiguous() for g in grads)
    is_narrow = all(g.dtype != torch.float64 for g in grads)
    wide = torch.float32 if is_narrow and not exact else torch.float64
    is_wide = device.type == "cpu" or all(g.dtype == wide for g in grads)  # its pieces
    # torch.dot keeps one long running sum: too few digits for float64 gradients
    by_dot = is_flat and is_narrow and is_wide
    dot: Callable[[Any, Any], Tensor] = torch.dot if by_dot else partial(_sum_of_products, wide)
    pieces = _pieces(device, wide, is_flat, grads)
    if len(grads) == 2:
        return [one for r, f in pieces for one in _gram_matrix(dot, r, f)]
    zeros = [torch.zeros((), device=device)] * 3
    squares = [[dot(one, one)] for (one,) in pieces]
    return [x for s in squares for x in (zeros + s if retain is None else s + zeros)]


def _sum_of_products(wide: torch.dtype, x: Tensor, y: Tensor) -> Tensor:
    """Σ x·y, 0-dim; products of half precision are exact in float32."""
    return x.to(wide, copy=True).mul_(y).sum()


def _pieces(
    device: torch.device, wide: torch.dtype, is_flat: bool, grads: Sequence[Tensor]
) -> Iterator[Sequence[Tensor]]:
    """Pieces of the gradients on this device, small enough to widen."""
    step = min(widened_at_once(device, g.device) for g in grads) * 4 // wide.itemsize
    count = -(-grads[0].numel() // step)
    # else along the first dimension, where they are the same elements whatever the strides
    pieces = zip(*((g.view(-1) if is_flat else g).chunk(count) for g in grads), strict=True)
    is_cpu = device.type == "cpu"  # where a piece is widened once for three products
    if all(g.device == device and (g.dtype == wide or not is_cpu) for g in grads):
        yield from pieces
        return
    for both in pieces:
        there = (brought(piece, device) for piece in both)
        yield [p.to(wide) if is_cpu else p for p in there]


def widened_at_once(device: torch.device, source: torch.device) -> int:
    """Elements widened or brought back at once: few for a CPU's cache, many from it to a device,
    most tensors in whole on a device, for the host must not launch by elements.
    """
    if device.type == "cpu":
        return 1 << 17
    return 1 << 24 if source != device else 1 << 27


def brought(grad: Tensor, device: torch.device) -> Tensor:
    """A gradient on this device, in the precision that it has elsewhere: casts are the device's."""
    return grad if grad.device == device else grad.to(device, non_blocking=True)


def in_groups(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Numbers in order, in groups whose sizes add up to `most` or less."""
    groups: list[list[int]] = []
    taken = most
    for number, size in sizes.items():
        if not groups or taken + size > most:
            groups.append([])
            taken = 0
        groups[-1].append(number)
        taken += size
    return groups


def scratch_bytes(device: torch.device) -> int:
    """Scratch memory of a device: on a CPU little, for its cache, else more, for fewer launches."""
    return 1 << 22 if device.type == "cpu" else 1 << 24


class _Pack:
    """Parameters packed together, each from a row of its own on, in a buffer shared with others."""

    def __init__(
        self,
        buffer: Tensor,
        members: dict[int, Tensor],
        block_of: Sequence[int],
        device: torch.device,
    ) -> None:
        self._numbers = list(members)
        self._views: list[list[Tensor]] = [[], []]
        blocks: list[int] = []  # of each row
        padded = []
        for number, p in members.items():
            start = len(blocks) * _ROW
            for side, views in zip(buffer, self._views, strict=True):
                views.append(side[start : start + p.numel()].view(p.shape))
            blocks += [block_of[number]] * _rows_of(p)
            if p.numel() % _ROW:
                padded.append(len(blocks) - 1)
        self.sums = _Sums(blocks, device)
        self._buffer = buffer[:, : len(blocks) * _ROW].view(2, -1, _ROW)
        self._padded_rows = torch.tensor(padded, dtype=torch.int64, device=buffer.device)

    def grams(self, retain: Side, forget: Side) -> Tensor:
        """Gram matrix of each row, [rows, 2, 2] float64."""
        device = self._buffer.device
        self._buffer.index_fill_(1, self._padded_rows, 0.0)
        for views, side in zip(self._views, (retain, forget), strict=True):
            pairs = [(v, side[n]) for v, n in zip(views, self._numbers, strict=True)]
            absent = [v for v, g in pairs if g is None]
            present = [(v, brought(g, device)) for v, g in pairs if g is not None]
            if absent:
                torch._foreach_zero_(absent)
            if present:
                torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        return gram_of_rows(self._buffer, device.type == "cpu").double()


def gram_of_rows(sides: Tensor, by_matmul: bool) -> Tensor:
    """Gram matrix of each row of both sides, [2, rows, n] to [rows, 2, 2].

    A matrix product is faster on a CPU; a GPU may round one to TF32.
    """
    with torch.autocast(sides.device.type, enabled=False):  # would compute in half precision
        if by_matmul:
            pairs = sides.transpose(0, 1)
            return torch.bmm(pairs, pairs.transpose(1, 2))
        return torch.stack(_gram_matrix(torch.linalg.vecdot, *sides), 1).view(-1, 2, 2)


def _gram_matrix(dot: Callable[[Any, Any], Tensor], r: Any, f: Any) -> list[Tensor]:
    product = dot(r, f)
    return [dot(r, r), product, product, dot(f, f)]


def _rows_of(parameter: Tensor) -> int:
    return -(-parameter.numel() // _ROW)


def _is_coarse(parameter: Tensor) -> bool:
    """True if a tensor is summed in float32 at first."""
    return parameter.numel() > _TINY and parameter.dtype != torch.float64
