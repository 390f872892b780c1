"""How a model runs for a while: in evaluation mode, or in its own precision. Everything is as it was afterwards."""

from __future__ import annotations

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
