"""Model files, whole although each process may hold a part; adapters merged into their models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hamu.core.distributed import is_main, is_sharded
from hamu.errors import HamuError, first_line

_REST = "rest.safetensors"
_RESUME = "resume with the model that the run was started with"
_SAVES_EMBEDDINGS = "_hamu_saves_embeddings"  # of a model: True if its adapter's file had them


def save_model(model: Any, folder: Path) -> None:
    """Write a model so that `from_pretrained` reads it; of a module of the user's own, the tensors.

    All processes must call it; the main one writes.
    """
    is_adapter, embeddings = hasattr(model, "peft_config"), getattr(model, _SAVES_EMBEDDINGS, False)
    state = _whole_state(model, _names_of_adapter(model, embeddings) if is_adapter else None)
    if not is_main():
        return
    if not hasattr(model, "save_pretrained"):
        whole = model.state_dict() if state is None else state
        save_file(_apart(whole), folder / "model.safetensors")
        return
    # not "auto": PEFT would ask the hub whether the base model's embeddings have changed
    more = {"save_embedding_layers": embeddings} if is_adapter else {}
    model.save_pretrained(folder, safe_serialization=True, state_dict=state, **more)


def set_saves_embeddings(model: nn.Module, does: bool) -> None:
    """Make `save_model` write an adapter with its base's embeddings, or without them."""
    setattr(model, _SAVES_EMBEDDINGS, does)


def save_rest(model: Any, folder: Path) -> None:
    """Write the trainable tensors and buffers that `save_model` left out or wrote by other names.

    All processes must call it.
    """
    own = _own(model)
    state = _whole_state(model, own) or own
    if not is_main():
        return
    written: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written |= {*file.keys()}
    rest = {name: state[name] for name in own if name not in written}
    if rest:
        save_file(_apart(rest), folder / _REST)


@torch.no_grad()
def load_tensors(model: Any, folder: Path) -> None:
    """Put what `save_model` and `save_rest` wrote into a model, whole or sharded, bit by bit."""
    own = _own(model)
    left = set(own)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(left & {*file.keys()}):
                value = file.get_tensor(name)
                if value.shape != own[name].shape:
                    raise HamuError(
                        f"{folder} has {name} as {tuple(value.shape)}, the model as "
                        f"{tuple(own[name].shape)}; {_RESUME}"
                    )
                if hasattr(own[name], "device_mesh"):
                    from hamu.core.distributed.sharded import shard_like

                    value = shard_like(value, own[name])
                own[name].copy_(value)
                left.discard(name)
    if left:
        raise HamuError(f"{folder} lacks {min(left)}; {_RESUME}")


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Return what a run changes: trainable parameters, and the buffers that a model saves."""
    saved = model.state_dict(keep_vars=True)  # of a sharded model: its shards
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in saved.items() if name in trainable | buffers}


def _names_of_adapter(model: Any, embeddings: bool) -> set[str]:
    """Return the names that an adapter's file may hold."""
    names = {*_own(model)}
    if embeddings:
        ends = [id(module) for module in _ends(model)]
        inside = tuple(f"{name}." for name, one in model.named_modules() if id(one) in ends)
        names |= {name for name in model.state_dict() if name.startswith(inside)}
    return names


def _whole_state(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor] | None:
    """Gather a sharded model's tensors, for `save_pretrained` cannot; None for other models."""
    if not is_sharded(model):
        return None
    from hamu.core.distributed.sharded import whole_state  # loads what only sharded models need

    return whole_state(model, names)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors out of shared memory, which safetensors refuses, in the usual order."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


class CannotMerge(HamuError):
    """An adapter that PEFT, or the memory, refuses to put into its model."""


def check_can_merge(model: Any) -> None:
    """Check, before a PeftModel is trained, that its adapter is of a kind that can be merged."""
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise HamuError(
            f"an adapter of type {kind} cannot be merged into its model; leave --merge out"
        )
    for name, module in model.named_modules():
        has_bias = any(getattr(module, "lora_bias", {}).values())
        if has_bias and getattr(_inner(module), "bias", None) is None:
            raise HamuError(
                f"the adapter has a bias at {name}, where its model has none to merge it into; "
                f"leave --merge out"
            )


def merged(model: Any) -> Any:
    """Merge a PeftModel's adapter into its model, in float32; the PeftModel is used up.

    Half precision would round small updates away. CannotMerge is raised if PEFT or the memory fail.
    """
    try:
        model = model.float()
        first, last = map(_inner, _ends(model))
        shared = None not in (first, last) and first.weight is last.weight
        is_adapted = any(_inner(end) is not end for end in _ends(model))
        if shared and is_adapted:  # what is put into the one would be in the other too
            last.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=False)
        whole = model.merge_and_unload()
    except (ValueError, RuntimeError) as error:  # among the latter: not implemented, out of memory
        raise CannotMerge(
            f"the adapter cannot be merged into its model: {first_line(error)}; what else the run "
            f"leaves is complete"
        ) from error
    if shared:
        first, last = _ends(whole)
        whole.config.tie_word_embeddings = first.weight is last.weight  # loading goes by it
    return whole


def _ends(model: Any) -> tuple[Any, Any]:
    """Return the modules of the input and of the output embeddings."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _inner(module: Any) -> Any:
    """Return the module that an adapter is put around."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return module.get_base_layer()
    return module.original_module if isinstance(module, ModulesToSaveWrapper) else module
