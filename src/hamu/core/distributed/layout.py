"""Who holds which part of a gradient while two of them are combined.

A layout says which parts of both gradients this process measures and combines, how the Gram of the parts becomes that
of the whole, and how the combined parts become the gradient that the optimizer sees. In `Replicated`, the default,
every process holds everything (one process, or gradients that were averaged before); `DataParallelLayout` is that for
several processes, which all take the first one's sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hamu.core.gram import SIDES, PairGram

Grads = list[Tensor | None]


def is_flattened(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is wrapped in FullyShardedDataParallel (FSDP1)."""
    fsdp = sys.modules.get(
        "torch.distributed.fsdp"
    )  # where it was not loaded, nothing is wrapped in it
    if fsdp is None:
        return False
    wrapped = any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
    return wrapped or any(
        getattr(p, "_fsdp_flattened", False) for p in model.parameters()
    )  # what it wraps, by itself


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has sharded a model; its parameters may be gathered just now, what it saves is not."""
    return any(hasattr(value, "device_mesh") for value in model.state_dict().values())


class Layout(Protocol):
    """What this process holds of both gradients, and how the parts of all processes become the whole.

    Attributes:
        sides: whose gradient this process collects.
        parts: a tensor like each part that this process measures and combines.
        block_of: the block of each part.
        is_whole: whether the parts are all there is, so that no other process needs to be asked.
    """

    sides: tuple[str, ...]
    parts: Sequence[Tensor]
    block_of: Sequence[int]
    is_whole: bool

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """The parts of the retain and of the forget gradient, from what this process collected; uses it up."""

    def total(self, gram: PairGram) -> PairGram:
        """The Gram of the whole gradients from that of the parts."""

    def give(self, combined: Grads) -> Grads:
        """The gradient of each parameter from the combined parts; uses them up."""

    def agree(self, numbers: Tensor) -> Tensor:
        """What each process has summed up over whole tensors, as all are to take it."""


def drained(grads: Grads) -> Iterator[Tensor | None]:
    """Each in turn; the list lets go of it, so that it is freed once it has been used."""
    for number, grad in enumerate(grads):
        grads[number] = None
        yield grad


class Replicated:
    """A layout in which this process holds everything: all parts, and their whole gradients."""

    sides: tuple[str, ...] = SIDES
    is_whole = True

    def __init__(self, parameters: Sequence[Tensor], block_of: Sequence[int]) -> None:
        self.parts, self.block_of = parameters, block_of

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """Both gradients as they are."""
        return grads["retain"], grads["forget"]

    def total(self, gram: PairGram) -> PairGram:
        """The Gram as it is: that of the parts is that of the whole."""
        return gram

    def give(self, combined: Grads) -> Grads:
        """The combined gradients as they are."""
        return combined

    def agree(self, numbers: Tensor) -> Tensor:
        """The numbers as they are: they are of whole tensors already."""
        return numbers


class DataParallelLayout(Replicated):
    """A layout in which every process holds everything; all take the sums of the first one.

    Other processors, or another number of threads, round sums otherwise. A step that is taken, clipped or ended by a
    hair in one process alone would part them.
    """

    def total(self, gram: PairGram) -> PairGram:
        """The Gram that the first process has summed up."""
        retain_sq, forget_sq, dot = self.agree(
            torch.stack([gram.retain_sq, gram.forget_sq, gram.dot])
        )
        return replace(gram, retain_sq=retain_sq, forget_sq=forget_sq, dot=dot)

    def agree(self, numbers: Tensor) -> Tensor:
        """The numbers of the first process."""
        dist.broadcast(numbers, src=0)
        return numbers
