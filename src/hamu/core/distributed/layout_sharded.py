"""Sharded parameters (FSDP2's DTensors): each process measures and combines the shards that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hamu.core.distributed.layout import Grads
from hamu.core.distributed.sharding import local_part
from hamu.core.gram import SIDES, PairGram
from hamu.errors import HamuError


class Sharded:
    """The layout of parameters that `fully_shard` has sharded; see `Layout`. Nothing is gathered but 3·L numbers.

    Args:
        parameters: DTensors, all sharded over the same processes.
        block_of: the block of each.

    Raises:
        HamuError: if only some of them are sharded, or not all over the same processes.
    """

    sides: tuple[str, ...] = SIDES
    is_whole = False

    def __init__(self, parameters: Sequence[Tensor], block_of: Sequence[int]) -> None:
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
        mesh = next(iter(meshes))
        if len(meshes) != 1 or mesh is None or mesh.ndim != 1:
            raise HamuError(
                "shard all trainable parameters over the same processes, with fully_shard on one mesh"
            )
        self._group = mesh.get_group()
        self._parameters = parameters
        self.parts: Sequence[Tensor] = [local_part(p) for p in parameters]
        self.block_of: Sequence[int] = block_of

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """The local shards."""
        retain, forget = (
            [None if g is None else local_part(g) for g in grads[side]] for side in SIDES
        )
        return retain, forget

    def total(self, gram: PairGram) -> PairGram:
        """Summed over the processes that hold the shards."""
        sums = torch.stack([gram.retain_sq, gram.forget_sq, gram.dot])
        dist.all_reduce(sums, group=self._group)
        return PairGram(sums[0], sums[1], sums[2], gram.eps)

    def agree(self, numbers: Tensor) -> Tensor:
        """As they are: nothing is summed over whole tensors."""
        return numbers

    def give(self, combined: Grads) -> Grads:
        """As shards of the whole gradient again."""
        return [
            None
            if part is None
            else DTensor.from_local(
                part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
            for part, p in zip(combined, self._parameters, strict=True)
        ]
