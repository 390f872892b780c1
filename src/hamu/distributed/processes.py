"""The processes of a run, as torchrun or accelerate started them; a run without either is one process."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_on() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if _is_on() else int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; the tensor itself where there is one process."""
    if not _is_on() or dist.get_world_size() == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def _is_on() -> bool:
    return dist.is_available() and dist.is_initialized()
