"""Weights rounded to 8 and 4 bits, as a deployed model's often are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hamu.errors import HamuError

BITS = (8, 4)
_BLOCK = 64  # weights that share a scale of NF4


def check_can_quantize() -> None:
    """Check that the library is there.

    Raises:
        HamuError: if it is not.
    """
    _library()


def _library() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise HamuError(
            "the attack quantize needs bitsandbytes, which is not installed; pip install 'hamu[quantize]', or "
            "leave quantize out of --attacks"
        ) from error
    return functional


@contextmanager
def quantized(model: nn.Module, bits: int) -> Iterator[None]:
    """Round the weights of all linear and convolutional layers for a while, but for a language model's head.

    8 bits: one scale for each output channel, as LLM.int8() has for weights (Dettmers et al. 2022). 4 bits: NF4
    in blocks of 64 (Dettmers et al. 2023), the setting of Dorna et al. 2025. The rounded weights are kept in
    their own dtype; activations are not rounded.

    Args:
        model: any module.
        bits: 8 or 4.

    Raises:
        HamuError: if bitsandbytes is not installed.
    """
    functional = _library()
    of_model: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(of_model(), "weight", None)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight is not head}
    kept = [(weight, weight.detach().clone()) for weight in weights.values()]
    with torch.no_grad():
        try:
            for weight in weights.values():
                weight.copy_(_rounded(functional, weight.flatten(1), bits).view_as(weight))
            yield
        finally:
            for weight, was in kept:
                weight.copy_(was)


def _rounded(functional: Any, weight: Tensor, bits: int) -> Tensor:
    """A matrix [out, in] after rounding."""
    if bits == 8:
        values, scales, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
        found = functional.int8_vectorwise_dequant(values, scales)
    else:
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=_BLOCK, quant_type="nf4"
        )
        found = functional.dequantize_4bit(codes, state)
    return torch.as_tensor(found).to(weight.dtype)
