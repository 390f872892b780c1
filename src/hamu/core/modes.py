"""How a model runs for a while: in evaluation mode, or in its own precision. Everything is as it was afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode; then each has its own mode again, a part that was left in it included.

    The CPU's random state is left alone: every loader of data draws from it, and what is trained after an evaluation
    must not depend on whether there was one.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model in its own precision: accelerate puts autocast around its forward, and keeps the original beside it.

    Both are attributes of the instance; a model that has neither is left alone.
    """
    wrapped: Any = vars(model).get("forward")
    original = vars(model).get("_original_forward")
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


def rounds_to_tf32(model: nn.Module) -> bool:
    """Whether a GPU rounds some of the model's float32 products to TF32 as things are, with 10 bits of mantissa.

    By default it does so in convolutions and recurrent layers, after `--tf32` in all products.
    """
    if not any(p.is_cuda and p.dtype == torch.float32 for p in model.parameters()):
        return False
    if torch.cuda.get_device_capability()[0] < 8:
        return False
    matmul, *of_cudnn = _products()
    if _may_round(matmul):
        return True
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
    return any(map(_may_round, of_cudnn)) and any(
        isinstance(module, kinds) for module in model.modules()
    )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Products of float32 in float32: TF32 would hide what a small step does to a loss.

    From torch 2.9 there are two interfaces, and one refuses to be read after the other has been written alone; both are
    turned off here, and on again as far as they could be read.
    """
    if not torch.cuda.is_available():
        yield
        return
    older: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    newer = [product for product in _products() if hasattr(product, "fp32_precision")]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there are two
        allowed = [_allowed(one) for one in older]
        precisions = [one.fp32_precision for one in newer]
        for one in older:
            one.allow_tf32 = False
        for one in newer:
            one.fp32_precision = "ieee"
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for one, was in zip(older, allowed, strict=True):
                if was is not None:
                    one.allow_tf32 = was
            for one, precision in zip(newer, precisions, strict=True):
                one.fp32_precision = precision


def _products() -> list[Any]:
    """What may round to TF32: matrix products, and cuDNN's convolutions and recurrent layers (one before torch 2.9)."""
    cudnn: Any = torch.backends.cudnn
    parts = [cudnn.conv, cudnn.rnn] if hasattr(cudnn, "conv") else [cudnn]
    return [torch.backends.cuda.matmul, *parts]


def _may_round(product: Any) -> bool:
    if hasattr(product, "fp32_precision"):
        return bool(product.fp32_precision == "tf32")
    return bool(product.allow_tf32)


def _allowed(backend: Any) -> bool | None:
    """Whether TF32 is allowed by torch's older interface; None where the newer one says otherwise."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return None
