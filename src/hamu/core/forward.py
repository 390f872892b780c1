"""A forward pass: how a model is called and where its logits are; the model as it was before unlearning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.distributed.layout import is_sharded
from hamu.core.modes import evaluating
from hamu.errors import HamuError


def predict_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The model's logits for a batch, [B, K] or [B, T, K]; labels are not shown to it.

    A Hugging Face model is called by keyword; any other module gets the pixel values as its one argument. Its output
    is the logits, or has them as `.logits`.
    """
    positional, named = _arguments(model, inputs)
    return logits_of(model(*positional, **named))


def logits_of(output: Any) -> Tensor:
    """Logits from whatever a model returned."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise HamuError(
            f"the model returned {type(output).__name__}; expected logits, or an output with .logits"
        )
    return logits


class OriginalModel:
    """The model as it was before unlearning: the same module, run with its original trainable tensors swapped in.

    Frozen parameters are shared, so the cost is one copy of what is trained (with an adapter, the adapter) and of the
    buffers that a pass in training may move: those of floating point that a state dict has, such as running statistics.

    Args:
        model: the module, before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_sharded = is_sharded(model)
        self._original = _copies(model)

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The original's predictions, in evaluation mode (no dropout, no batch statistics)."""
        with evaluating(self._model):
            if self._is_sharded:
                return self._sharded_logits(inputs)
            called = _arguments(self._model, inputs)
            return logits_of(
                torch.func.functional_call(self._model, self._original, *called, tie_weights=False)
            )

    def _sharded_logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A sharded model gathers its own parameters for a pass, so these have to be the original ones."""
        from hamu.core.distributed.sharding import swapped  # loads what only sharded models need

        with swapped(self._model, self._original):
            return predict_logits(self._model, inputs)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what training moves, by name: one of each tensor, a name in each module that holds it.

    A module that is registered twice is named once: `functional_call` gives back a tensor's place as often as it is
    named, the last time with the copy.
    """
    moving: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        trained = {
            name: p for name, p in module._parameters.items() if p is not None and p.requires_grad
        }
        kept = {
            name: b
            for name, b in module._buffers.items()
            if b is not None and b.is_floating_point()
        }
        kept = {
            name: b for name, b in kept.items() if name not in module._non_persistent_buffers_set
        }
        moving |= {
            f"{prefix}.{name}".lstrip("."): tensor for name, tensor in (trained | kept).items()
        }
    distinct = {id(tensor): tensor for tensor in moving.values()}
    copies = {key: tensor.detach().clone() for key, tensor in distinct.items()}
    return {name: copies[id(tensor)] for name, tensor in moving.items()}


def _arguments(
    model: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    features = {key: value for key, value in inputs.items() if key != "labels"}
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model.module if wrapped else model
    if hasattr(inner, "main_input_name") or set(features) != {"pixel_values"}:
        return (), features
    return (features["pixel_values"],), {}
