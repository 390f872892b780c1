"""Triton kernels for GPUs: Gram and combination of all tensors, in a launch or two, each read once.

Tensors are given by address and cut into chunks, one for each program. Both kernels of a step read
the same `Table`. PyTorch brings Triton along where it has CUDA or ROCm; without it, and on other
devices, `gram_meter` and `combine` use torch.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hamu.errors import first_line

Side = Sequence[Tensor | None]
_CHUNK = 1 << 14  # elements of a program
_BLOCK = 1 << 10  # elements that it reads at once
_ROWS = 1 << 8  # sums of chunks that are added at once
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_ALIGNED = 16  # bytes of the widest load


@triton.jit
def _pointer(addresses, number, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    found = tl.load(addresses + number).to(tl.pointer_type(TYPE))
    return tl.multiple_of(found, 16) if IS_ALIGNED else found  # _ALIGNED


@triton.jit(do_not_specialize=["count"])
def _gram_kernel(
    addresses, tensors, indices, sizes, out, count,
    OF_RETAIN: tl.constexpr, OF_FORGET: tl.constexpr, IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Three sums of each chunk in float64, in which products of float32 are exact."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(tensors + chunk), tl.load(indices + chunk).to(tl.int64) * CHUNK
    retain = _pointer(addresses, tensor, OF_RETAIN, IS_ALIGNED)
    forget = _pointer(addresses, count + tensor, OF_FORGET, IS_ALIGNED)
    size = tl.load(sizes + tensor)
    has_retain = tl.load(addresses + tensor) != 0
    has_forget = tl.load(addresses + count + tensor) != 0
    rr = tl.zeros([BLOCK], tl.float64)
    ff = tl.zeros([BLOCK], tl.float64)
    rf = tl.zeros([BLOCK], tl.float64)
    if (start + CHUNK <= size) & has_retain & has_forget:  # loads without a mask are wide
        for step in range(0, CHUNK, BLOCK):
            at = start + step + tl.arange(0, BLOCK)
            r = tl.load(retain + at).to(tl.float64)
            f = tl.load(forget + at).to(tl.float64)
            rr += r * r
            ff += f * f
            rf += r * f
    else:
        end = tl.minimum(start + CHUNK, size)
        of_retain, of_forget = tl.where(has_retain, end, 0), tl.where(has_forget, end, 0)
        while start < end:
            at = start + tl.arange(0, BLOCK)
            r = tl.load(retain + at, mask=at < of_retain, other=0.0).to(tl.float64)
            f = tl.load(forget + at, mask=at < of_forget, other=0.0).to(tl.float64)
            rr += r * r
            ff += f * f
            rf += r * f
            start += BLOCK
    tl.store(out + chunk * 3, tl.sum(rr, 0))
    tl.store(out + chunk * 3 + 1, tl.sum(ff, 0))
    tl.store(out + chunk * 3 + 2, tl.sum(rf, 0))


@triton.jit
def _sum_kernel(of_chunks, starts, out, ROWS: tl.constexpr):
    """Add the sums of its chunks, which follow one another, to those of a block."""
    block = tl.program_id(0)
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    for number in range(3):
        total = tl.zeros([ROWS], tl.float64)
        first = begin
        while first < end:
            at = first + tl.arange(0, ROWS)
            total += tl.load(of_chunks + at * 3 + number, mask=at < end, other=0.0)
            first += ROWS
        place = out + block * 3 + number
        tl.store(place, tl.load(place) + tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(
    addresses, weights, tensors, indices, sizes, count,
    TYPE: tl.constexpr, WIDE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a·retain + b·forget of each chunk into the retain gradient, where both are; rounds once."""
    chunk = tl.program_id(0)
    tensor, start = tl.load(tensors + chunk), tl.load(indices + chunk).to(tl.int64) * CHUNK
    retain = _pointer(addresses, tensor, TYPE, IS_ALIGNED)
    forget = _pointer(addresses, count + tensor, TYPE, IS_ALIGNED)
    has_both = (tl.load(addresses + tensor) != 0) & (tl.load(addresses + count + tensor) != 0)
    size = tl.where(has_both, tl.load(sizes + tensor), 0)
    a = tl.load(weights + tensor).to(WIDE)
    b = tl.load(weights + count + tensor).to(WIDE)
    if start + CHUNK <= size:
        for step in range(0, CHUNK, BLOCK):
            at = start + step + tl.arange(0, BLOCK)
            r, f = tl.load(retain + at).to(WIDE), tl.load(forget + at).to(WIDE)
            tl.store(retain + at, (a * r + b * f).to(TYPE))
    else:
        end = tl.minimum(start + CHUNK, size)
        while start < end:
            at = start + tl.arange(0, BLOCK)
            r = tl.load(retain + at, mask=at < end).to(WIDE)
            f = tl.load(forget + at, mask=at < end).to(WIDE)
            tl.store(retain + at, (a * r + b * f).to(TYPE), mask=at < end)
            start += BLOCK


@lru_cache(maxsize=32)
def _chunks(
    sizes: tuple[int, ...], block_of: tuple[int, ...], blocks: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Tensor and place in it of each chunk, sizes, and the first chunk of each block, on a device.

    Chunks are in the order of their blocks.
    """
    tensors: list[int] = []
    indices: list[int] = []
    starts = [0] * (blocks + 1)
    for number in sorted(range(len(sizes)), key=block_of.__getitem__):
        count = -(-sizes[number] // _CHUNK)
        tensors += [number] * count
        indices += range(count)
        starts[block_of[number] + 1] = len(tensors)
    found = (tensors, indices, sizes, [*accumulate(starts, max)])  # of blocks without chunks too
    return tuple(torch.tensor(one, dtype=torch.int64, device=device) for one in found)


def _sent(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a device, without keeping the host waiting; only what is on the host can be pinned."""
    there = torch.tensor(numbers, dtype=dtype, device="cpu")
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Table:
    """Addresses of both gradients of some tensors; no memory of theirs is held."""

    numbers: list[int]  # of the tensors
    types: tuple[torch.dtype, torch.dtype, torch.dtype]  # of retain, forget, and the tensors
    addresses: list[int]  # of the retain gradients, then of the forget gradients; 0 for none
    sent: Tensor  # the addresses on the device
    chunks: tuple[Tensor, ...]  # tensor and place in it of each chunk, and sizes
    starts: Tensor  # the first chunk of each block

    def is_of(self, retain: Side, forget: Side) -> bool:
        """True if these gradients lie there."""
        return self.addresses == _addresses(retain, forget, self.numbers)

    @property
    def options(self) -> tuple[Any, ...]:
        """The last arguments of a kernel."""
        is_aligned = not any(address % _ALIGNED for address in self.addresses)
        return is_aligned, _CHUNK, _BLOCK


def tables(
    retain: Side, forget: Side, parts: Sequence[Tensor], block_of: Sequence[int], blocks: int,
    device: torch.device,
) -> list[Table]:  # fmt: skip
    """Of all gradients on a device that a kernel can read; both of a tensor must lie alike.

    Tables hold the parts that have no gradient too: experts take turns.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
    for number, (r, f, part) in enumerate(zip(retain, forget, parts, strict=True)):
        if part.device == device and _fit(r, f, device):
            dtype = part.dtype
            types = dtype if r is None else r.dtype, dtype if f is None else f.dtype, dtype
            alike.setdefault(types, []).append(number)
    found = []
    for types, numbers in alike.items():
        if all(dtype in _TYPES for dtype in types):
            sizes = tuple(parts[n].numel() for n in numbers)
            *chunks, starts = _chunks(sizes, tuple(block_of[n] for n in numbers), blocks, device)
            addresses = _addresses(retain, forget, numbers)
            sent = _sent(addresses, torch.int64, device)
            found.append(Table(numbers, types, addresses, sent, tuple(chunks), starts))
    return found


def _addresses(retain: Side, forget: Side, numbers: Sequence[int]) -> list[int]:
    grads = [side[number] for side in (retain, forget) for number in numbers]
    return [0 if g is None else g.data_ptr() for g in grads]


def _fit(r: Tensor | None, f: Tensor | None, device: torch.device) -> bool:
    """True if a kernel can read both: there, without gaps, their elements in the same order."""
    one = f if r is None else r
    if one is None:
        return True
    is_dense = one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or one.device != device:
        return False
    return r is None or f is None or (f.device == device and r.stride() == f.stride())


def grams(found: Sequence[Table], blocks: int, device: torch.device) -> Tensor:
    """Exact sums of each block, ‖g_r‖², ‖g_f‖² and g_r·g_f, [L, 3] float64 on the device."""
    out = torch.zeros(blocks, 3, dtype=torch.float64, device=device)
    for table in found:
        of_chunks = torch.empty(len(table.chunks[0]), 3, dtype=torch.float64, device=device)
        types = (_TYPES[dtype] for dtype in table.types[:2])
        if len(of_chunks):
            count = len(table.numbers)
            with torch.cuda.device_of(out):
                _gram_kernel[(len(of_chunks),)](
                    table.sent, *table.chunks, of_chunks, count, *types, *table.options
                )
                _sum_kernel[(blocks,)](of_chunks, table.starts, out, _ROWS)
    return out


def combine(found: Sequence[Table], a: Sequence[float], b: Sequence[float]) -> list[int]:
    """a_n·retain_n + b_n·forget_n in the memory of each retain gradient, where both are there and
    of the tensor's precision; returns the numbers of these tensors.
    """
    written: list[int] = []
    for table in found:
        numbers, programs, count = table.numbers, len(table.chunks[0]), len(table.numbers)
        if not programs or len(set(table.types)) > 1:
            continue
        weights = [one[number] for one in (a, b) for number in numbers]
        sent = _sent(weights, torch.float64, table.sent.device)
        own = _TYPES[table.types[0]]
        types = own, tl.float64 if own == tl.float64 else tl.float32
        with torch.cuda.device_of(sent):
            _combine_kernel[(programs,)](
                table.sent, sent, *table.chunks, count, *types, *table.options
            )
        both = zip(numbers, table.addresses, table.addresses[count:], strict=False)
        written += [number for number, r, f in both if r and f]
    return written


def compile_on(device: torch.device) -> bool:
    """True if the kernels can be compiled there, which needs a C compiler; else a warning."""
    try:
        ones = [torch.ones(1, device=device)]
        combine(tables(ones, ones, ones, [0], 1, device), [1.0], [1.0])
    except Exception as error:  # of the compiler, the driver or Triton
        warnings.warn(
            f"Triton cannot compile a kernel ({first_line(error)}); gradients are combined by "
            f"torch, which takes longer",
            stacklevel=2,
        )
        return False
    return True
