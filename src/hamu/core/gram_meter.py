"""`GramMeter`: measures the pair Gram of two gradients.

Near-collinear gradients leave 1 - cos²θ as small as 1e-6, which float32 sums would drown in
rounding; so exact products of the stored values are accumulated in float64. All but the smallest
float32 tensors are summed in short float32 sums first, two to three times as fast, and again in
float64 only where the angle is too small for that, or squares leave float32's range. (The smallest
are cheap, and with few elements small angles are common.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hamu.core.gram import PairGram, combine_dtype

Side = Sequence[Tensor | None]
_ROW = 128  # elements of a packed row
_TINY = 1 << 11  # tensors up to this many elements are packed in float64
_SMALL = 3 << 14  # those up to this many are packed too, in float32 at first
_COARSE_SINE = 0.15  # float32 sums are off by up to 1e-5, a thousandth of its square
_COARSE_FLOOR = 1e-30  # of the mean square: squares below 1e-38 underflow
_COARSE_PIECE = 1 << 17  # a longer float32 sum would lose more digits


class GramMeter:
    """Measures the `PairGram` of two gradient lists of fixed shapes.

    Small tensors are packed into zero-padded rows, so that a network with hundreds of them costs a
    handful of kernels; large ones are summed in place, or widened in pieces. Each device has one
    scratch memory of fixed size for both, which is kept: new memory in every step costs more than
    the sums.

    Args:
        parameters: tensors like the gradients, in order.
        block_of: the block number of each parameter, 0..L-1.
        blocks: L; by default the highest block number plus 1.
    """

    def __init__(
        self, parameters: Sequence[Tensor], block_of: Sequence[int], blocks: int | None = None
    ) -> None:
        self.device = parameters[0].device
        self._num_blocks = int(max(block_of)) + 1 if blocks is None else blocks
        self._eps = max(torch.finfo(combine_dtype(p)).eps for p in parameters)
        self._block_of = block_of
        self._coarse: dict[int, list[int]] = {}  # by block: tensors summed in float32
        self._least: dict[int, float] = {}
        for number, p in enumerate(parameters):
            small_or_float32 = _is_small(p) or p.dtype == torch.float32
            if p.numel() > _TINY and p.dtype != torch.float64 and small_or_float32:
                self._coarse.setdefault(block_of[number], []).append(number)
        for block, members in self._coarse.items():
            self._least[block] = _COARSE_FLOOR * sum(parameters[i].numel() for i in members)
        self._parts: list[_Small | _Large] = []
        for device in dict.fromkeys(p.device for p in parameters):
            scratch = torch.empty(scratch_bytes(device), dtype=torch.uint8, device=device)
            packed: dict[torch.dtype, list[tuple[int, Tensor]]] = {
                torch.float64: [],
                torch.float32: [],
            }
            large: list[int] = []
            for number, p in enumerate(parameters):
                if p.device != device:
                    continue
                if _is_small(p):
                    fine = p.numel() <= _TINY or p.dtype == torch.float64
                    packed[torch.float64 if fine else torch.float32].append((number, p))
                else:
                    large.append(number)
            for dtype, group in packed.items():
                if group:
                    self._parts.append(_Small(scratch, group, block_of, self._num_blocks, dtype))
            if large:
                self._parts.append(_Large(scratch, large, block_of, self._num_blocks))

    def measure(self, retain: Side, forget: Side, *, exact: bool = True) -> PairGram:
        """Measure the Gram without a host synchronisation; None stands for a zero gradient.

        Args:
            retain: gradients of the retain loss, one or None per parameter.
            forget: gradients of the forget loss, likewise.
            exact: whether to sum all tensors in float64; if not, see `blocks_to_refine`.

        Returns:
            The `PairGram` over the blocks, on the device of the first parameter.
        """
        blocks = self._parts[0].sums(retain, forget, exact).to(self.device)
        for part in self._parts[1:]:
            blocks += part.sums(retain, forget, exact).to(self.device)
        return PairGram(blocks[:, 0, 0], blocks[:, 1, 1], blocks[:, 0, 1], self._eps)

    def precision_figures(self, gram: PairGram, sin: Tensor) -> list[Tensor]:
        """Figures for `blocks_to_refine`: three times [L]; [] if all sums are exact.

        Args:
            gram: the Gram, measured with exact=False.
            sin: its sines, or those of a scaled one.
        """
        return [sin, gram.retain_sq, gram.forget_sq] if self._coarse else []

    def blocks_to_refine(
        self, figures: Sequence[float], retain: Side, forget: Side, finite: bool
    ) -> list[int]:
        """Blocks that need exact sums, on the host.

        Args:
            figures: values of `precision_figures`, concatenated.
            retain, forget: the gradients; where there is none, no sum underflowed.
            finite: whether the sums were; if not, only overflowed blocks need another look.
        """
        found: list[int] = []
        count = self._num_blocks
        for block, least in self._least.items() if figures else ():
            sine, retain_sq, forget_sq = (
                figures[block],
                figures[block + count],
                figures[block + 2 * count],
            )
            sides = [(retain, retain_sq), (forget, forget_sq)]
            low = [side for side, square in sides if square < least]
            if (
                math.inf in (retain_sq, forget_sq)
                or (finite and sine < _COARSE_SINE)
                or (
                    finite and any(side[i] is not None for side in low for i in self._coarse[block])
                )
            ):
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
        return PairGram(
            torch.where(again, exact.retain_sq, gram.retain_sq),
            torch.where(again, exact.forget_sq, gram.forget_sq),
            torch.where(again, exact.dot, gram.dot),
            self._eps,
        )


def scratch_bytes(device: torch.device) -> int:
    """Scratch memory of a device: on a CPU little, for its cache, else more, for fewer launches."""
    return 1 << 22 if device.type == "cpu" else 1 << 24


def bucket_bytes(device: torch.device) -> int:
    """Memory that measuring takes, however large the model: scratch and the sums of packed rows.

    Off the CPU also the rows' products, as long as one side's rows. For forecasts of a step's
    memory.
    """
    return scratch_bytes(device) * (9 if device.type == "cpu" else 13) // 8


def _is_small(parameter: Tensor) -> bool:
    return parameter.numel() <= _SMALL


def _rows_of(parameter: Tensor) -> int:
    return -(-parameter.numel() // _ROW)


class _Small:
    """Small parameters of one device in packs, in `coarse` precision, and in float64 on demand."""

    def __init__(
        self,
        scratch: Tensor,
        members: list[tuple[int, Tensor]],
        block_of: Sequence[int],
        num_blocks: int,
        coarse: torch.dtype,
    ) -> None:
        self._arguments = (scratch, members, block_of, num_blocks)
        self._coarse = coarse
        self._packs = {coarse: _packs(*self._arguments, coarse)}

    def sums(self, retain: Side, forget: Side, exact: bool) -> Tensor:
        """Contribution to the Gram matrix of each block, [L, 2, 2]."""
        dtype = torch.float64 if exact else self._coarse
        if dtype not in self._packs:
            self._packs[dtype] = _packs(*self._arguments, dtype)
        first, *others = self._packs[dtype]
        sums = first.sums(retain, forget)
        for pack in others:
            sums += pack.sums(retain, forget)
        return sums


def _packs(
    scratch: Tensor,
    members: list[tuple[int, Tensor]],
    block_of: Sequence[int],
    num_blocks: int,
    dtype: torch.dtype,
) -> list[_Pack]:
    """As few groups of parameters as the scratch memory allows, in their order."""
    buffer = scratch.view(dtype).view(2, -1)  # a row for each side
    most = buffer.shape[1] // _ROW
    groups: list[list[tuple[int, Tensor]]] = [[]]
    taken = 0
    for number, parameter in members:
        rows = _rows_of(parameter)
        if groups[-1] and taken + rows > most:
            groups.append([])
            taken = 0
        groups[-1].append((number, parameter))
        taken += rows
    return [_Pack(buffer, group, block_of, num_blocks) for group in groups]


class _Pack:
    """Parameters packed together, each from a row of its own on, in a buffer shared with others."""

    def __init__(
        self,
        buffer: Tensor,
        members: list[tuple[int, Tensor]],
        block_of: Sequence[int],
        num_blocks: int,
    ) -> None:
        rows = [_rows_of(p) for _, p in members]
        starts = [sum(rows[:k]) for k in range(len(rows))]
        device = buffer.device
        self._buffer = buffer[:, : sum(rows) * _ROW].view(2, -1, _ROW)
        self._indices = [i for i, _ in members]
        self._num_blocks = num_blocks
        self._row_block = torch.repeat_interleave(
            torch.tensor([block_of[i] for i in self._indices], device=device),
            torch.tensor(rows, device=device),
        )
        placed = [(s, n, p) for s, n, (_, p) in zip(starts, rows, members, strict=True)]
        padded = [s + n - 1 for s, n, p in placed if p.numel() < n * _ROW]
        self._padded_rows = torch.tensor(padded, device=device) if padded else None
        self._views = [
            [side[s * _ROW : s * _ROW + p.numel()].view(p.shape) for s, _, p in placed]
            for side in buffer
        ]

    def sums(self, retain: Side, forget: Side) -> Tensor:
        """Contribution to the Gram matrix of each block, [L, 2, 2], in the buffer's precision."""
        if self._padded_rows is not None:
            self._buffer.index_fill_(1, self._padded_rows, 0.0)
        for views, side in zip(self._views, (retain, forget), strict=True):
            pairs = [(v, side[i]) for v, i in zip(views, self._indices, strict=True)]
            absent = [v for v, g in pairs if g is None]
            present = [(v, g) for v, g in pairs if g is not None]
            if absent:
                torch._foreach_zero_(absent)
            if present:
                torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        rows = gram_of_rows(self._buffer, self._buffer.device.type == "cpu").double()
        return rows.new_zeros(self._num_blocks, 2, 2).index_add_(0, self._row_block, rows)


def gram_of_rows(sides: Tensor, by_matmul: bool) -> Tensor:
    """Gram matrix of each row of both sides, [2, rows, n] to [rows, 2, 2].

    Args:
        sides: the rows.
        by_matmul: whether to use a matrix product, faster on a CPU; a GPU may round one to TF32.
    """
    with torch.autocast(sides.device.type, enabled=False):  # would compute in half precision
        if by_matmul:
            pairs = sides.transpose(0, 1)
            return torch.bmm(pairs, pairs.transpose(1, 2))
        return torch.stack(_gram_matrix(torch.linalg.vecdot, *sides), 1).view(-1, 2, 2)


class _Large:
    """Large parameters of one device, widened to float64 in pieces."""

    def __init__(
        self, scratch: Tensor, members: list[int], block_of: Sequence[int], num_blocks: int
    ) -> None:
        self._indices = members
        self._num_blocks = num_blocks
        self._blocks = torch.tensor([block_of[i] for i in members], device=scratch.device)
        self._buffer = scratch.view(torch.float64).view(2, -1)

    def sums(self, retain: Side, forget: Side, exact: bool) -> Tensor:
        """Contribution to the Gram matrix of each block, [L, 2, 2]."""
        entries = [self._of_one(retain[i], forget[i], exact) for i in self._indices]
        sums = torch.stack(entries).view(-1, 2, 2)
        return sums.new_zeros(self._num_blocks, 2, 2).index_add_(0, self._blocks, sums)

    def _of_one(self, retain: Tensor | None, forget: Tensor | None, exact: bool) -> Tensor:
        if retain is None or forget is None:
            only = retain if retain is not None else forget
            square = zero = self._buffer.new_zeros(())
            if only is not None:
                square = torch.stack([dot(x, x) for (x,), dot in self._pieces(only)]).sum()
            sides = [zero if g is None else square for g in (retain, forget)]
            return torch.stack([sides[0], zero, zero, sides[1]])
        if not exact and _sums_in_float32(retain, forget):
            split = [torch.split(g.view(-1), _COARSE_PIECE) for g in (retain, forget)]
            pairs = list(zip(*split, strict=True))
            sums = [entry for r, f in pairs for entry in _gram_matrix(torch.dot, r, f)]
            return torch.stack(sums).view(-1, 4).double().sum(0)
        pieces = self._pieces(retain, forget)
        sums = [entry for (r, f), dot in pieces for entry in _gram_matrix(dot, r, f)]
        return torch.stack(sums).view(-1, 4).sum(0)

    def _pieces(
        self, *grads: Tensor
    ) -> Iterator[tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor]]]:
        """Pieces as flat float64 tensors, valid until the next, and the dot product for them."""
        # torch.dot keeps one long running sum, exact to 1e-12: too little for float64 gradients
        dot = _dot_by_rows if grads[0].dtype == torch.float64 else torch.dot
        most = self._buffer.shape[1]
        if all(g.is_contiguous() for g in grads):
            grads, step = tuple(g.view(-1) for g in grads), most
        else:  # pieces along the first dimension are the same elements whatever the strides
            step = max(1, most * grads[0].shape[0] // grads[0].numel())
        for start in range(0, grads[0].shape[0], step):
            pieces = [g[start : start + step] for g in grads]
            if pieces[0].numel() > most:  # a row of a strided matrix, longer than the buffer
                yield [p.to(self._buffer).reshape(-1) for p in pieces], dot
            else:
                flat = [b[: p.numel()] for b, p in zip(self._buffer, pieces, strict=False)]
                for widened, piece in zip(flat, pieces, strict=True):
                    widened.view(piece.shape).copy_(piece)
                yield flat, dot


def _gram_matrix(dot: Callable[[Tensor, Tensor], Tensor], r: Tensor, f: Tensor) -> list[Tensor]:
    product = dot(r, f)
    return [dot(r, r), product, product, dot(f, f)]


def _sums_in_float32(*grads: Tensor) -> bool:
    alike = len({g.device for g in grads}) == 1
    return alike and all(g.dtype == torch.float32 and g.is_contiguous() for g in grads)


def _dot_by_rows(x: Tensor, y: Tensor) -> Tensor:
    """x·y of flat tensors as a sum of short sums, exact to the last digits."""
    rows = x.numel() // _ROW * _ROW
    whole: Tensor = torch.linalg.vecdot(x[:rows].view(-1, _ROW), y[:rows].view(-1, _ROW)).sum()
    rest: Tensor = torch.linalg.vecdot(x[rows:], y[rows:])
    return whole + rest
