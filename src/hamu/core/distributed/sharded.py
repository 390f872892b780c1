"""Models sharded by PyTorch's `fully_shard` (FSDP2): sharding, gathering, and the layout."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from hamu.core.distributed import Grads, Layout, is_main, world_size
from hamu.core.gram import SIDES
from hamu.errors import HamuError


def shard(model: nn.Module, device_type: str) -> None:
    """Shard a model's parameters over all processes, in place.

    A forward pass gathers one transformer block at a time, so a process holds its shard and one
    block. Blocks move to the device ("cuda" or "cpu") one at a time, when they are sharded.
    """
    mesh = init_device_mesh(device_type, (world_size(),))
    units = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    for module in model.modules():
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _local_part(tensor: Tensor) -> Tensor:
    """Local shard of a tensor, without a graph; all of it if it is not sharded."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _gathered(tensor: Tensor) -> Tensor | None:
    """Whole tensor on the CPU of the main process, None elsewhere; all processes must call it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # a copy into memory of its own waits until all has arrived
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole.detach()) if is_main() else None


def whole_state(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """State dict (of these names) on the main process's CPU, tensor by tensor; collective.

    Tied names share one tensor, of which a file then holds one.
    """
    state = model.state_dict(keep_vars=True)
    wanted = {name: v for name, v in state.items() if names is None or name in names}
    found = {id(v): _gathered(v) for v in {id(v): v for v in wanted.values()}.values()}
    by_name = {name: found[id(v)] for name, v in wanted.items()}
    return {name: value for name, value in by_name.items() if value is not None}


def whole_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """State dict of an optimizer as one process would have it, on the main process; collective."""
    return _with_slots(optimizer.state_dict(), lambda slot, number: _gathered(slot))


def shard_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Result of `whole_optimizer_state` with each tensor sharded like its parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _with_slots(state, lambda slot, number: shard_like(slot, parameters[number]))


def _with_slots(
    state: dict[str, Any], change: Callable[[Tensor, int], Tensor | None]
) -> dict[str, Any]:
    """State of an optimizer after a change of each tensor, given with its parameter's number."""
    slots = {
        number: {name: change(v, number) if isinstance(v, Tensor) else v for name, v in one.items()}
        for number, one in state["state"].items()
    }
    return {**state, "state": slots}


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Whole tensor sharded like a parameter of the same shape; unchanged for other parameters."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    placed = tensor.to(parameter.to_local().device, parameter.dtype)
    return distribute_tensor(
        placed, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


@contextmanager
def swapped(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Swap values by name, sharded alike, into a model between a backward and a forward pass."""
    reshard(model)  # until then a name may stand for a gathered copy
    named = model.state_dict(keep_vars=True)
    parameters = [named[name] for name in values]
    kept = [_local_part(p).clone() for p in parameters]
    _put(model, parameters, list(values.values()))
    try:
        yield
    finally:
        _put(model, parameters, kept)


def _put(model: nn.Module, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # autograd has nothing of these parameters that a backward pass is yet to use
    preserved: Any = torch.autograd
    with torch.no_grad(), preserved._unsafe_preserve_version_counter(tuple(parameters)):
        for parameter, value in zip(parameters, values, strict=True):
            _local_part(parameter).copy_(_local_part(value))
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Drop what was gathered for the last pass, which the root keeps until a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Sharded(Layout):
    """Layout of DTensors sharded over the same processes, which exchange 3·L numbers only."""

    is_whole = False

    def __init__(self, parameters: Sequence[Tensor], block_of: Sequence[int]) -> None:
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
        mesh = next(iter(meshes))
        kinds = {type(one) for p in parameters if isinstance(p, DTensor) for one in p.placements}
        if len(meshes) != 1 or mesh is None or mesh.ndim != 1 or kinds != {Shard}:
            raise HamuError(
                "shard all trainable parameters over the same processes, with fully_shard on one "
                "mesh"
            )
        self._group = mesh.get_group()
        self._parameters = [p for p in parameters if isinstance(p, DTensor)]
        super().__init__([_local_part(p) for p in parameters], block_of)

    def take(self, grads: Mapping[str, Grads]) -> tuple[Grads, Grads]:
        """The local shards."""
        retain, forget = (
            [None if g is None else _local_part(g) for g in grads[side]] for side in SIDES
        )
        return retain, forget

    def agree(self, numbers: Tensor) -> Tensor:
        """Numbers summed over the processes that hold the shards."""
        dist.all_reduce(numbers, group=self._group)
        return numbers

    def give(self, combined: Grads) -> Grads:
        """Shards of the whole gradient."""
        return [
            None
            if part is None
            else DTensor.from_local(
                part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
            for part, p in zip(combined, self._parameters, strict=True)
        ]
