"""A model sharded over all processes by PyTorch's `fully_shard` (FSDP2), and how its tensors are put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from hamu.core.distributed.processes import is_main, world_size


def shard(model: nn.Module, device_type: str) -> None:
    """Shard a model's parameters over all processes, in place.

    Each of its transformer blocks, as the model names them, is gathered when it is needed and given back after; so a
    process holds its shard and one block. Blocks move to the device one at a time, when they are sharded.

    Args:
        model: the whole model, the same on all processes.
        device_type: of the devices that it will be on: "cuda" or "cpu".
    """
    mesh = init_device_mesh(device_type, (world_size(),))
    units = _block_classes(model)
    for module in model.modules():
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without a graph; all of it if it is not sharded."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def gathered(tensor: Tensor) -> Tensor | None:
    """The whole of a tensor, on the CPU of the main process, None elsewhere; all processes must ask for it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # a copy into memory of its own waits until all has arrived
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole.detach()) if is_main() else None


def whole_state(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """A sharded model's state dict (of these names) on the CPU of the main process; all processes must ask.

    One tensor is gathered at a time.
    """
    state = model.state_dict()
    found = {
        name: gathered(value) for name, value in state.items() if names is None or name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def whole_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer as one process would have it, full on the main process; all must ask."""
    state: dict[str, Any] = optimizer.state_dict()
    slots = {
        number: {name: gathered(v) if isinstance(v, Tensor) else v for name, v in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": slots}


def shard_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What `whole_optimizer_state` gave, with each tensor sharded as the parameter that it belongs to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots = {
        number: {
            name: shard_like(v, parameters[number]) if isinstance(v, Tensor) else v
            for name, v in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": slots}


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A process's part of a whole tensor, sharded as a parameter of the same shape is; as it is if that is whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    placed = tensor.to(parameter.to_local().device, parameter.dtype)
    return distribute_tensor(
        placed, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


@contextmanager
def swapped(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give tensors of a sharded model other values for a while, between a backward and the next forward pass.

    Args:
        model: the model.
        values: by name of the parameter or buffer, sharded alike.
    """
    _give_back(model)  # until then a name may stand for a gathered copy
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    parameters = [named[name] for name in values]
    kept = [local_part(p).clone() for p in parameters]
    _put(model, parameters, list(values.values()))
    try:
        yield
    finally:
        _put(model, parameters, kept)


def _put(model: nn.Module, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # autograd has nothing of these parameters that a backward pass is yet to use
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
        for parameter, value in zip(parameters, values, strict=True):
            local_part(parameter).copy_(local_part(value))
    _give_back(model)


def _give_back(model: nn.Module) -> None:
    """Drop what was gathered for the last pass; the next gathers anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _block_classes(model: nn.Module) -> set[str]:
    """Names of the classes of a Hugging Face model's blocks; none for other models."""
    found: set[str] = set()
    for module in model.modules():
        found |= set(getattr(module, "_no_split_modules", None) or ())
    return found
