"""a·g_r + b·g_f, tensor by tensor, in the memory of one of the two; and the offload of one side."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hamu.core.distributed import Grads, drained
from hamu.core.gram import combine_dtype
from hamu.core.gram_meter import (
    SMALL,
    brought,
    in_groups,
    kernels_on,
    scratch_bytes,
    widened_at_once,
)


def combine_all(
    retain: Grads,
    forget: Grads,
    a: Sequence[float],
    b: Sequence[float],
    parts: Sequence[Tensor],
    *,
    is_kept: bool,
    tables: Sequence[Any] = (),
) -> Grads:
    """a_n·retain_n + b_n·forget_n for each tensor, all small ones together; empties both lists.

    Uses up the retain gradients' memory, and that of the forget gradients unless they are kept.
    `GramMeter.tables` of the same gradients save looking for them again.
    """
    written: Grads = [None] * len(parts)
    _combine_by_kernel(retain, forget, a, b, parts, tables, written)
    alike: dict[tuple[torch.device, torch.dtype], dict[int, int]] = {}  # sizes by number
    for number, (r, f, part) in enumerate(zip(retain, forget, parts, strict=True)):
        if r is not None and f is not None and part.numel() <= SMALL:
            kind = part.device, part.dtype
            if kind == (r.device, r.dtype) == (f.device, f.dtype):
                alike.setdefault(kind, {})[number] = part.numel()
    for (device, dtype), sizes in alike.items():
        is_in_place = dtype in (torch.float32, torch.float64) and not is_kept
        most = sum(sizes.values()) if is_in_place else scratch_bytes(device) // 8
        for numbers in in_groups(sizes, most):
            few, others = ([side[n] for n in numbers] for side in (retain, forget))
            group = _combine_group(few, others, [(a[n], b[n]) for n in numbers], is_kept)
            for number, tensor in zip(numbers, group, strict=True):
                written[number], retain[number], forget[number] = tensor, None, None
    for number in reversed(range(len(parts))):  # those measured last are in the cache
        r, f, retain[number], forget[number] = retain[number], forget[number], None, None
        if written[number] is None:
            written[number] = combined(r, f, a[number], b[number], parts[number])
    return written


def _combine_by_kernel(
    retain: Grads,
    forget: Grads,
    a: Sequence[float],
    b: Sequence[float],
    parts: Sequence[Tensor],
    tables: Sequence[Any],
    written: Grads,
) -> None:
    """Combine all tensors on a GPU that its kernel can take; empties their places in both lists."""
    for device in dict.fromkeys(part.device for part in parts):
        kernels = kernels_on(device)
        if kernels is None:
            continue
        if not tables or not all(table.is_of(retain, forget) for table in tables):
            tables = kernels.tables(retain, forget, parts, [0] * len(parts), 1, device)
        for n in kernels.combine(tables, a, b):
            written[n], retain[n], forget[n] = retain[n], None, None
        tables = ()


def _combine_group(
    retain: list[Any], forget: list[Any], weights: list[tuple[float, float]], is_kept: bool
) -> list[Tensor]:
    """a_n·retain_n + b_n·forget_n in the memory of the first, in a handful of launches."""
    dtype, sides = combine_dtype(retain[0]), [retain, forget]
    for place, factors in enumerate(zip(*weights, strict=True)):
        side = sides[place]
        if side[0].dtype != dtype or (is_kept and place == 1):
            sides[place] = [torch.empty_like(g, dtype=dtype) for g in side]
            torch._foreach_copy_(sides[place], side)
        torch._foreach_mul_(sides[place], factors)
    torch._foreach_add_(*sides)
    if sides[0] is not retain:
        torch._foreach_copy_(retain, sides[0])
    return retain


def combined(
    retain: Tensor | None, forget: Tensor | None, a: float, b: float, part: Tensor
) -> Tensor | None:
    """a·retain + b·forget, in the memory of one of them; half precision rounds once, at the end.

    An offloaded side comes back in pieces, into the memory of the other. The result is like `part`.
    """
    if retain is None or forget is None:
        only, weight = (retain, a) if forget is None else (forget, b)
        return None if only is None else brought(only, part.device).to(part.dtype).mul_(weight)
    whole, other, x, y = retain, forget, a, b
    if retain.dtype != part.dtype or retain.device != part.device:
        whole, other, x, y = forget, retain, b, a
    if y == 0.0:
        return whole if x == 1.0 else whole.mul_(x)
    dtype = combine_dtype(part)
    is_flat = whole.is_contiguous() and other.is_contiguous()
    if is_flat and whole.dtype == other.dtype == dtype and whole.device == other.device:
        # the outer product with [1] makes one pass over memory; mul_ and add_ make two
        one = whole.new_ones(1)
        whole.view(-1, 1).addr_(other.view(-1), one, beta=x, alpha=y)
        return whole
    count = -(-whole.numel() // widened_at_once(whole.device, other.device)) or 1
    # if not flat, pieces along the first dimension, the same elements whatever the strides
    sides = (whole.view(-1), other.view(-1)) if is_flat else (whole, other)
    for w, s in zip(*(side.chunk(count) for side in sides), strict=True):
        torch.add(w.to(dtype).mul_(x), brought(s, w.device), alpha=y, out=w)
    return whole


def offloaded(grads: Grads, place: str) -> Grads:
    """Gradients in host memory ("cpu") or half precision ("bf16"); empties the list. Those already
    there stay as they are.
    """
    return [None if g is None else _offloaded(g, place) for g in drained(grads)]


def _offloaded(grad: Tensor, place: str) -> Tensor:
    if place == "bf16":
        return grad.to(torch.bfloat16)
    if grad.device.type == "cpu":
        return grad
    # pinned, so that neither copy keeps the host waiting
    return torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)


def back(grads: Grads, parameters: Sequence[Tensor]) -> Grads:
    """Whole gradients where their parameters are, to accumulate into; empties the list."""
    both = zip(drained(grads), parameters, strict=True)
    return [None if g is None else brought(g, p.device).to(p.dtype) for g, p in both]
