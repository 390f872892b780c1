"""An adapter put into the weights of its model."""

from __future__ import annotations

from typing import Any

from torch import nn

from hamu.errors import HamuError, first_line


class CannotMerge(HamuError):
    """An adapter that PEFT, or the memory, refuses to put into its model."""


def check_can_merge(model: Any) -> None:
    """Check what can be known before the adapter is trained.

    Args:
        model: a PeftModel.

    Raises:
        HamuError: if its adapter is of a kind that is never merged, or has a bias where its layer has none.
    """
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise HamuError(
            f"an adapter of type {kind} cannot be merged into its model; leave --merge out"
        )
    for name, module in model.named_modules():
        has_bias = any(getattr(module, "lora_bias", {}).values())
        if has_bias and getattr(_inner(module), "bias", None) is None:
            raise HamuError(
                f"the adapter has a bias at {name}, where its model has none to merge it into; leave --merge out"
            )


def merged(model: Any) -> Any:
    """The model with its adapter merged in, in float32; the model itself is used up.

    In float32: small updates would be rounded away in the half precision of a base model.

    Args:
        model: a PeftModel.

    Raises:
        CannotMerge: if PEFT cannot, or the memory does not suffice.
    """
    try:
        model = model.float()
        first, last = (_inner(end) for end in _ends(model))
        shared = None not in (first, last) and first.weight is last.weight
        if shared and _is_adapted(model):  # what is put into the one would be in the other too
            last.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=False)
        whole = model.merge_and_unload()
    except (
        ValueError,
        RuntimeError,
    ) as error:  # not implemented and out of memory are among the latter
        raise CannotMerge(
            f"the adapter cannot be merged into its model: {first_line(error)}; what else the run leaves is complete"
        ) from error
    if shared:
        first, last = _ends(whole)
        whole.config.tie_word_embeddings = first.weight is last.weight  # loading goes by it
    return whole


def _ends(model: Any) -> tuple[Any, Any]:
    """The modules of the input and of the output embeddings."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _is_adapted(model: Any) -> bool:
    return any(_inner(end) is not end for end in _ends(model))


def _inner(module: Any) -> Any:
    """The module that an adapter is put around."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return module.get_base_layer()
    return module.original_module if isinstance(module, ModulesToSaveWrapper) else module
