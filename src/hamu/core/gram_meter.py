"""Measures the pair Gram of two gradients.

In:  two lists of gradients, one of the retain loss and one of the forget loss, a tensor per parameter.
Out: their `PairGram`.

Near-collinear gradients leave 1 - cos²θ as small as 1e-6, which float32 sums would drown in rounding; so the sums
are exact products of the stored values accumulated in float64. All but the smallest float32 tensors are summed in short
float32 sums first, which is two to three times as fast, and again in float64 only where the angle turns out to be too
small for that, or the values so small or large that their squares leave float32's range. (The smallest are cheap, and
with few elements small angles are common.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hamu.core.gram import PairGram, combine_dtype

_ROW = 128  # elements of a packed row
_TINY = 1 << 11  # tensors up to this many elements are packed in float64
_SMALL = 3 << 14  # those up to this many are packed too, in float32 at first
_COARSE_SINE = (
    0.15  # float32 sums are off by up to 1e-5, of which the sine squared must be a thousandfold
)
_COARSE_FLOOR = (
    1e-30  # of the mean square: what underflows, below 1e-38 in each square, is nothing to that
)
_COARSE_PIECE = 1 << 17  # a longer float32 sum would lose more digits


class GramMeter:
    """Measures the `PairGram` of two gradient lists of fixed shapes.

    Small tensors are packed into zero-padded rows, so that a network with hundreds of them costs a handful of kernels;
    large ones are summed where they are, or widened a piece at a time. All of that happens in one scratch memory of
    fixed size on each device. It is kept: memory that is taken anew in every step costs more than the sums.

    Args:
        parameters: the tensors whose gradients will be measured, in order.
        block_of: the block number of each parameter, 0..L-1.
        blocks: L; by default the blocks that there are.
    """

    def __init__(
        self, parameters: Sequence[Tensor], block_of: Sequence[int], blocks: int | None = None
    ) -> None:
        self.device = parameters[0].device
        self._num_blocks = int(max(block_of)) + 1 if blocks is None else blocks
        self._eps = max(torch.finfo(combine_dtype(p)).eps for p in parameters)
        self._block_of = block_of
        self._coarse: dict[int, list[int]] = {}  # by block: what is summed in float32
        for number, parameter in enumerate(parameters):
            if _is_coarse(parameter):
                self._coarse.setdefault(block_of[number], []).append(number)
        self._least = {
            b: _COARSE_FLOOR * sum(parameters[i].numel() for i in of)
            for b, of in self._coarse.items()
        }
        self._parts: list[_Small | _Large] = []
        for device in dict.fromkeys(p.device for p in parameters):
            scratch = torch.empty(scratch_bytes(device), dtype=torch.uint8, device=device)
            here = [(i, p) for i, p in enumerate(parameters) if p.device == device]
            tiny = [
                (i, p)
                for i, p in here
                if p.numel() <= _TINY or (_is_small(p) and p.dtype == torch.float64)
            ]
            small = [
                (i, p)
                for i, p in here
                if _is_small(p) and p.numel() > _TINY and p.dtype != torch.float64
            ]
            large = [i for i, p in here if not _is_small(p)]
            self._parts += (
                [_Small(scratch, tiny, block_of, self._num_blocks, torch.float64)] if tiny else []
            )
            self._parts += (
                [_Small(scratch, small, block_of, self._num_blocks, torch.float32)] if small else []
            )
            self._parts += [_Large(scratch, large, block_of, self._num_blocks)] if large else []

    def measure(
        self,
        retain: Sequence[Tensor | None],
        forget: Sequence[Tensor | None],
        *,
        exact: bool = True,
    ) -> PairGram:
        """Measure the Gram; None stands for a parameter that the side does not use (a zero gradient).

        Args:
            retain: gradients of the retain loss, one or None per parameter.
            forget: gradients of the forget loss, likewise.
            exact: whether all tensors are summed in float64; if not, `blocks_to_refine` tells what of the result has to
                be `refined`.

        Returns:
            The `PairGram` over the blocks, on the device of the first parameter. Nothing waits for it.
        """
        blocks = self._parts[0].sums(retain, forget, exact).to(self.device)
        for part in self._parts[1:]:
            blocks += part.sums(retain, forget, exact).to(self.device)
        return PairGram(blocks[:, 0, 0], blocks[:, 1, 1], blocks[:, 0, 1], self._eps)

    def precision_figures(self, gram: PairGram, sin: Tensor) -> list[Tensor]:
        """What tells whether float32 sums were precise enough, for `blocks_to_refine`: three times [L]; [] where all
        sums are exact.

        Args:
            gram: the Gram, measured with exact=False.
            sin: its sines, or those of one that was scaled.
        """
        return [sin, gram.retain_sq, gram.forget_sq] if self._coarse else []

    def blocks_to_refine(
        self,
        figures: Sequence[float],
        retain: Sequence[Tensor | None],
        forget: Sequence[Tensor | None],
        finite: bool,
    ) -> list[int]:
        """The blocks whose sums have to be exact, on the host; see `refined`.

        Args:
            figures: the values of `precision_figures`, one after the other.
            retain, forget: the gradients; where there is none in float32 sums, nothing can have underflowed.
            finite: whether the sums were; if not, only those that overflowed are worth another look.
        """
        if not figures:
            return []
        found: list[int] = []
        sines, *both = (
            figures[start : start + self._num_blocks]
            for start in range(0, len(figures), self._num_blocks)
        )
        for block, least in self._least.items():
            sine, retain_sq, forget_sq = sines[block], both[0][block], both[1][block]
            if math.inf in (retain_sq, forget_sq) or (finite and sine < _COARSE_SINE):
                found.append(block)
            elif finite and min(retain_sq, forget_sq) < least:
                sides = (
                    side
                    for side, square in ((retain, retain_sq), (forget, forget_sq))
                    if square < least
                )
                if any(side[i] is not None for side in sides for i in self._coarse[block]):
                    found.append(block)
        return found

    def refined(
        self,
        gram: PairGram,
        blocks: Sequence[int],
        retain: Sequence[Tensor | None],
        forget: Sequence[Tensor | None],
    ) -> PairGram:
        """The Gram with these blocks measured again, exactly; the others cost nothing."""
        chosen = set(blocks)
        sides = ([g if b in chosen else None for g, b in zip(side, self._block_of, strict=True)]
                 for side in (retain, forget))  # fmt: skip
        exact = self.measure(*sides)
        again = torch.tensor([block in chosen for block in range(self._num_blocks)]).to(self.device)
        return PairGram(
            torch.where(again, exact.retain_sq, gram.retain_sq),
            torch.where(again, exact.forget_sq, gram.forget_sq),
            torch.where(again, exact.dot, gram.dot),
            self._eps,
        )


def scratch_bytes(device: torch.device) -> int:
    """What values are packed or widened into: on a CPU little, for its cache, elsewhere more, for fewer launches."""
    return 1 << 22 if device.type == "cpu" else 1 << 24


def bucket_bytes(device: torch.device) -> int:
    """What measuring takes in all, however large the model is: the sums of packed rows as well.

    Off the CPU their products are there too before they are summed, as long as one side's rows. For forecasts of a
    step's memory, as in `benchmarks/memory.py`.
    """
    return scratch_bytes(device) * (9 if device.type == "cpu" else 13) // 8


def _is_coarse(parameter: Tensor) -> bool:
    """Whether it may be summed in float32."""
    if parameter.numel() <= _TINY or parameter.dtype == torch.float64:
        return False
    return parameter.dtype == torch.float32 or _is_small(parameter)


def _is_small(parameter: Tensor) -> bool:
    return parameter.numel() <= _SMALL


class _Small:
    """Small parameters of one device, packed a group at a time: in `coarse` precision, and in float64 if asked for."""

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

    def sums(
        self, retain: Sequence[Tensor | None], forget: Sequence[Tensor | None], exact: bool
    ) -> Tensor:
        """The Gram matrix of each block, as far as these parameters go, [L, 2, 2]."""
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
    buffer = _two_rows(scratch, dtype)
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
    """Parameters that are packed together, each starting on a row of its own in a buffer that others use as well."""

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
        padded = [
            s + n - 1
            for s, n, (_, p) in zip(starts, rows, members, strict=True)
            if p.numel() < n * _ROW
        ]
        self._padded_rows = torch.tensor(padded, device=device) if padded else None
        self._views = [
            [
                side[s * _ROW : s * _ROW + p.numel()].view(p.shape)
                for s, (_, p) in zip(starts, members, strict=True)
            ]
            for side in buffer
        ]

    def sums(self, retain: Sequence[Tensor | None], forget: Sequence[Tensor | None]) -> Tensor:
        """The Gram matrix of each block, as far as these parameters go, [L, 2, 2]; as exact as the buffer."""
        if self._padded_rows is not None:
            self._buffer.index_fill_(1, self._padded_rows, 0.0)
        for views, side in zip(self._views, (retain, forget), strict=True):
            grads = [side[i] for i in self._indices]
            present = [(v, g) for v, g in zip(views, grads, strict=True) if g is not None]
            if len(present) < len(views):
                torch._foreach_zero_([v for v, g in zip(views, grads, strict=True) if g is None])
            if present:
                torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        rows = gram_of_rows(self._buffer, self._buffer.device.type == "cpu").double()
        return rows.new_zeros(self._num_blocks, 2, 2).index_add_(0, self._row_block, rows)


def gram_of_rows(sides: Tensor, by_matmul: bool) -> Tensor:
    """The Gram matrix of each row of both sides, [2, rows, n] to [rows, 2, 2].

    Args:
        sides: the rows.
        by_matmul: whether to take it as a matrix product, faster on a CPU; other devices may round one to TF32, as
            transformers' Trainer tells them to.
    """
    with torch.autocast(
        sides.device.type, enabled=False
    ):  # which would take either in half precision
        if by_matmul:
            pairs = sides.transpose(0, 1)
            return torch.bmm(pairs, pairs.transpose(1, 2))
        return torch.stack(_gram_matrix(torch.linalg.vecdot, *sides), 1).view(-1, 2, 2)


def _rows_of(parameter: Tensor) -> int:
    return -(-parameter.numel() // _ROW)


def _two_rows(scratch: Tensor, dtype: torch.dtype) -> Tensor:
    """The scratch memory as two rows, one of each side."""
    return scratch.view(dtype).view(2, -1)


class _Large:
    """Large parameters of one device, each widened to float64 a piece at a time."""

    def __init__(
        self, scratch: Tensor, members: list[int], block_of: Sequence[int], num_blocks: int
    ) -> None:
        self._indices = members
        self._num_blocks = num_blocks
        self._blocks = torch.tensor([block_of[i] for i in members], device=scratch.device)
        self._buffer = _two_rows(scratch, torch.float64)

    def sums(
        self, retain: Sequence[Tensor | None], forget: Sequence[Tensor | None], exact: bool
    ) -> Tensor:
        """The Gram matrix of each block, as far as these parameters go, [L, 2, 2]."""
        sums = torch.stack([self._of_one(retain[i], forget[i], exact) for i in self._indices])
        return sums.new_zeros(self._num_blocks, 2, 2).index_add_(
            0, self._blocks, sums.view(-1, 2, 2)
        )

    def _of_one(self, retain: Tensor | None, forget: Tensor | None, exact: bool) -> Tensor:
        if (
            not exact
            and retain is not None
            and forget is not None
            and _sums_in_float32(retain, forget)
        ):
            pairs = list(
                zip(
                    *(torch.split(g.view(-1), _COARSE_PIECE) for g in (retain, forget)), strict=True
                )
            )
            sums = [entry for r, f in pairs for entry in _gram_matrix(torch.dot, r, f)]
            return torch.stack(sums).view(-1, 4).double().sum(0)
        if retain is None or forget is None:
            only = retain if retain is not None else forget
            zero = self._buffer.new_zeros(())
            square = (
                zero
                if only is None
                else torch.stack([dot(x, x) for (x,), dot in self._pieces(only)]).sum()
            )
            return torch.stack(
                [zero if retain is None else square, zero, zero, zero if forget is None else square]
            )
        sums = [
            entry
            for (r, f), dot in self._pieces(retain, forget)
            for entry in _gram_matrix(dot, r, f)
        ]
        return torch.stack(sums).view(-1, 4).sum(0)

    def _pieces(
        self, *grads: Tensor
    ) -> Iterator[tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor]]]:
        """The gradients' pieces as flat float64 tensors, valid until the next, and how to take their dot products."""
        # torch.dot keeps one long running sum, exact to 1e-12: plenty for float32, too little for float64 gradients.
        dot = _dot_by_rows if grads[0].dtype == torch.float64 else torch.dot
        most = self._buffer.shape[1]
        if all(g.is_contiguous() for g in grads):
            grads, step = tuple(g.view(-1) for g in grads), most
        else:  # pieces along the first dimension are the same elements whatever the strides
            step = max(1, most * grads[0].shape[0] // grads[0].numel())
        for start in range(0, grads[0].shape[0], step):
            pieces = [g[start : start + step] for g in grads]
            if (
                pieces[0].numel() > most
            ):  # one row of a strided matrix can be longer than the buffer
                yield [p.to(self._buffer).reshape(-1) for p in pieces], dot
            else:
                flat = [b[: p.numel()] for b, p in zip(self._buffer, pieces, strict=False)]
                for widened, piece in zip(flat, pieces, strict=True):
                    widened.view(piece.shape).copy_(piece)
                yield flat, dot


def _gram_matrix(dot: Callable[[Tensor, Tensor], Tensor], r: Tensor, f: Tensor) -> list[Tensor]:
    """Its four entries, row by row."""
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
