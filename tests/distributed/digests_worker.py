"""What check_equal says of tensors that differ on the last process: a line of JSON, by case."""

import json
import math

import torch
import torch.distributed as dist

import hamu.core.distributed as module
from hamu import HamuError
from hamu.core.distributed import check_equal, leave


def moved(tensor, place, ulps):
    """An entry of a float tensor by so many of its last digits."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits.view(-1)[place] += ulps


def swapped(tensor, one, other):
    flat = tensor.view(-1)
    flat[[one, other]] = flat[[other, one]]


CHANGES = {
    "nothing": lambda t: None,
    "opposite digits": lambda t: (moved(t, 2, 1), moved(t, 7, -1)),
    "three digits": lambda t: (moved(t, 2, 1), moved(t, 3, -2), moved(t, 4, 1)),
    "swapped": lambda t: swapped(t, 0, 11),
    "swapped pieces": lambda t: swapped(t, 1, 9),
    "two signs": lambda t: t.view(-1)[3:5].neg_(),
}


def answer(check, *given):
    try:
        check(*given)
    except HamuError as error:
        return str(error).split(" ")[0]
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    last, found = dist.get_rank() == dist.get_world_size() - 1, {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        start = torch.randn(
            4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).to(dtype)
        for piece in (1 << 20, 8):
            module._PIECE = piece
            for name, change in CHANGES.items():
                tensor = start.clone()
                if last:
                    change(tensor)
                key = f"{name}, {dtype}, pieces of {piece}"
                found[key] = answer(check_equal, ["same", "other"], [start, tensor])
        scalar = start[0, 0].clone()
        if last:
            scalar += 2 * torch.finfo(dtype).eps * scalar.abs()
        found[f"a scalar, {dtype}"] = answer(check_equal, ["other"], [scalar])
    module._PIECE = 8
    turned = torch.arange(12.0).reshape(4, 3)
    if last:  # the same values in another order of memory
        turned = turned.t().contiguous().t()
    empty, nan = torch.empty(0, 3), torch.tensor(math.nan)
    found["nothing, other strides, empty, not a number"] = answer(
        check_equal, list("abc"), [turned, empty, nan]
    )
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave()
