"""What a backward pass is taken of: losses of a model's predictions, summed over samples.

In:  logits of the model, the labels, and where the objective asks for them the original model's logits.
Out: the sum of the per-sample losses, so that the caller's division by the number of samples is exact over unequal
     batches, accumulation and processes.

Signs: a retain objective is lowered, a forget objective is raised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamu.errors import HamuError


class Objective(ABC):
    """One loss. `name` is what methods and the command line call it."""

    name: ClassVar[str]
    needs_original: ClassVar[bool] = False

    @abstractmethod
    def total(self, logits: Tensor, labels: Tensor, original: Tensor | None) -> Tensor:
        """The loss summed over samples.

        Args:
            logits: [B, K] of the model.
            labels: [B], int64.
            original: [B, K] logits of the model before unlearning, where `needs_original`.

        Returns:
            0-dim, float32 or wider.
        """


class CrossEntropy(Objective):
    """-log p_y (the paper's L)."""

    name = "cross_entropy"

    def total(self, logits: Tensor, labels: Tensor, original: Tensor | None) -> Tensor:
        """Sum of -log p_y over samples."""
        return F.cross_entropy(_wide(logits), labels, reduction="sum")


class KLToOriginal(Objective):
    """KL(p_original ‖ p_model) (Maini et al. 2024, on retain data; Kurmanji et al. 2023, on both)."""

    name = "kl_to_original"
    needs_original = True

    def total(self, logits: Tensor, labels: Tensor, original: Tensor | None) -> Tensor:
        """Sum of KL(p_original ‖ p_model) over samples."""
        return _kl(original, logits)


class ScrubRetain(Objective):
    """γ·CE + α·KL(p_original ‖ p_model), α = 0.001, γ = 0.99 (Kurmanji et al. 2023; HAMU, App. D).

    The published code softens both distributions with a temperature; here, as in the paper's text, it is 1.
    """

    name = "scrub_retain"
    needs_original = True
    alpha: ClassVar[float] = 0.001
    gamma: ClassVar[float] = 0.99

    def total(self, logits: Tensor, labels: Tensor, original: Tensor | None) -> Tensor:
        """Sum of γ·CE + α·KL over samples."""
        cross_entropy = F.cross_entropy(_wide(logits), labels, reduction="sum")
        return self.gamma * cross_entropy + self.alpha * _kl(original, logits)


_OBJECTIVES: dict[str, type[Objective]] = {cls.name: cls for cls in (CrossEntropy, KLToOriginal, ScrubRetain)}


def build_objective(name: str) -> Objective:
    """Make an objective by name.

    Raises:
        HamuError: if the name is unknown.
    """
    if name not in _OBJECTIVES:
        raise HamuError(f"objective {name!r} is unknown; choose one of {', '.join(_OBJECTIVES)}")
    return _OBJECTIVES[name]()


def predict_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The model's logits for a batch; labels are not shown to it.

    A Hugging Face model is called by keyword; any other module gets the pixel values as its one argument. Its output
    is the logits, or has them as `.logits`.
    """
    positional, named = _arguments(model, inputs)
    return logits_of(model(*positional, **named))


def logits_of(output: Any) -> Tensor:
    """Logits from whatever a model returned."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise HamuError(f"the model returned {type(output).__name__}; expected logits, or an output with .logits")
    return logits


class OriginalModel:
    """The model as it was before unlearning: the same module, run with its original trainable tensors swapped in.

    Frozen parameters are shared (BatchNorm statistics are not), so the cost is one copy of what is trained: with an
    adapter, the adapter.

    Args:
        model: the module, before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._original = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # statistics that may move with the run
                self._original |= {f"{name}.{n}".lstrip("."): b.clone() for n, b in module.named_buffers()}

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The original's predictions, in evaluation mode (no dropout, no batch statistics)."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            positional, named = _arguments(self._model, inputs)
            return logits_of(torch.func.functional_call(self._model, self._original, positional, named))
        finally:
            for module, training in modes:
                module.training = training


def _arguments(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    features = {key: value for key, value in inputs.items() if key != "labels"}
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model.module if wrapped else model
    if hasattr(inner, "main_input_name") or set(features) != {"pixel_values"}:
        return (), features
    return (features["pixel_values"],), {}


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _kl(original: Tensor | None, logits: Tensor) -> Tensor:
    if original is None:
        raise HamuError("this objective needs the original model's predictions")
    return F.kl_div(_wide(logits).log_softmax(-1), _wide(original).log_softmax(-1), reduction="sum", log_target=True)
