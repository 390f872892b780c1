"""Models to files and back: whole files, whether a process holds the whole model or a part."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hamu.core.distributed import is_main, is_sharded
from hamu.errors import HamuError

_REST = "rest.safetensors"
_SAVES_EMBEDDINGS = "_hamu_saves_embeddings"  # of a model: whether its adapter's file had them


def save_model(model: Any, folder: Path) -> None:
    """Write a model so that `from_pretrained` reads it; of a module of the user's own, the tensors.

    All processes must call it; the main one writes.
    """
    is_adapter, embeddings = hasattr(model, "peft_config"), getattr(model, _SAVES_EMBEDDINGS, False)
    state = _whole_state(model, _names_of_adapter(model, embeddings) if is_adapter else None)
    if not is_main():
        return
    if not hasattr(model, "save_pretrained"):
        save_file(
            _apart(model.state_dict() if state is None else state), folder / "model.safetensors"
        )
        return
    # not "auto": PEFT would ask the hub whether the base model's embeddings have changed
    more = {"save_embedding_layers": embeddings} if is_adapter else {}
    model.save_pretrained(folder, safe_serialization=True, state_dict=state, **more)


def set_saves_embeddings(model: nn.Module, does: bool) -> None:
    """Say whether `save_model` is to write an adapter with its base's embeddings, as one that was read had them."""
    setattr(model, _SAVES_EMBEDDINGS, does)


def save_rest(model: Any, folder: Path) -> None:
    """After `save_model`, write what of the trainable tensors and buffers is not there by its own name.

    An adapter's files, for one, leave out its name. All processes must call it.
    """
    own = _own(model)
    written = _names(folder) if is_main() else set()
    state = _whole_state(model, own)
    if is_main():
        rest = {
            name: (own if state is None else state)[name] for name in own if name not in written
        }
        if rest:
            save_file(_apart(rest), folder / _REST)


@torch.no_grad()
def load_tensors(model: Any, folder: Path) -> None:
    """Put what `save_model` and `save_rest` wrote into a model, whole or sharded, bit by bit.

    Raises:
        HamuError: if a trainable tensor is not there or has another shape.
    """
    own = _own(model)
    left = set(own)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(left & set(file.keys())):
                value = file.get_tensor(name)
                if value.shape != own[name].shape:
                    raise HamuError(
                        f"{folder} has {name} as {tuple(value.shape)}, the model as {tuple(own[name].shape)}; resume "
                        f"with the model that the run was started with"
                    )
                _put(own[name], value)
                left.discard(name)
    if left:
        raise HamuError(
            f"{folder} lacks {sorted(left)[0]}; resume with the model that the run was started with"
        )


def _own(model: nn.Module) -> dict[str, Tensor]:
    """What a run changes: trainable parameters, and the buffers that a model saves."""
    saved = model.state_dict(keep_vars=True)  # of a sharded model: its shards
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in saved.items() if name in trainable | buffers}


def _names_of_adapter(model: Any, embeddings: bool) -> set[str]:
    """What of an adapter's model its file may hold."""
    ends = (
        {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
        if embeddings
        else ()
    )
    inside = tuple(f"{name}." for name, module in model.named_modules() if id(module) in ends)
    return {
        *_own(model),
        *(name for name in model.state_dict() if inside and name.startswith(inside)),
    }


def _whole_state(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor] | None:
    """What `save_pretrained` cannot ask a sharded model for; None for others."""
    if not is_sharded(model):
        return None
    from hamu.core.distributed.sharded import whole_state  # loads what only sharded models need

    return whole_state(model, names)


def _put(target: Tensor, value: Tensor) -> None:
    if hasattr(target, "device_mesh"):
        from hamu.core.distributed.sharded import shard_like

        value = shard_like(value, target)
    target.copy_(value)


def _names(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without shared memory, which safetensors refuses, and in the usual order of elements."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
