"""What a backward pass is taken of: losses of a model's predictions, summed.

In:  what the model predicted where there is a label (for an image its class, for a text each answer token), and where
     the objective asks for it what the original model predicted there.
Out: the sum over predictions, or over records for objectives of whole records, so that the caller's division by their
     number is exact over unequal batches, accumulation and processes.

Signs: a retain objective is lowered, a forget objective is raised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamu.distributed.layout import is_sharded
from hamu.errors import HamuError
from hamu.modes import evaluating
from hamu.plugins import made, with_plugins

IGNORED = -100  # the label of what is not scored, transformers' convention


@dataclass(frozen=True)
class Scored:
    """A batch's predictions where there is a label.

    Attributes:
        logits: [N, K].
        labels: [N], int64.
        record: [N], the batch row that each belongs to.
        records: the number of batch rows.
    """

    logits: Tensor
    labels: Tensor
    record: Tensor
    records: int

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Scored:
        """From a model's output and a batch's labels.

        Args:
            logits: [B, K] of a classifier, or [B, T, K] of a language model.
            labels: [B], or [B, T] with -100 where nothing is scored; there position t is predicted at t-1.
        """
        if labels.dim() == 1:
            return cls(logits, labels, torch.arange(len(labels), device=labels.device), len(labels))
        scored = labels[:, 1:] != IGNORED
        record = scored.nonzero()[:, 0]
        return cls(logits[:, :-1][scored], labels[:, 1:][scored], record, len(labels))

    def detached(self) -> Scored:
        """The same, without a graph."""
        return replace(self, logits=self.logits.detach())

    def per_record(self, values: Tensor) -> Tensor:
        """Sums of [N] values over each record, [records]."""
        return values.new_zeros(self.records).index_add(0, self.record, values)


def count_predictions(labels: Tensor) -> Tensor | int:
    """How many predictions are scored in a batch with these labels; nothing waits for it."""
    return len(labels) if labels.dim() == 1 else (labels[:, 1:] != IGNORED).sum()


class Objective(ABC):
    """One loss. `name` is what methods and the command line call it.

    Attributes:
        needs_original: whether it compares with the original model.
        per_record: whether its sum is over records; otherwise it is over predictions.
    """

    name: ClassVar[str]
    needs_original: ClassVar[bool] = False
    per_record: ClassVar[bool] = False

    @abstractmethod
    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """The loss, summed.

        Args:
            scored: the model's predictions.
            original: [N, K] logits of the model before unlearning at the same places, where `needs_original`.

        Returns:
            0-dim, float32 or wider.
        """

    def count(self, labels: Tensor) -> Tensor | int:
        """The number of terms of the sum in a batch with these labels."""
        return len(labels) if self.per_record else count_predictions(labels)


class CrossEntropy(Objective):
    """-log p_y (the paper's L)."""

    name = "cross_entropy"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum of -log p_y over predictions."""
        return F.cross_entropy(_wide(scored.logits), scored.labels, reduction="sum")


class KLToOriginal(Objective):
    """KL(p_original ‖ p_model) (Maini et al. 2024, on retain data; Kurmanji et al. 2023, on both)."""

    name = "kl_to_original"
    needs_original = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum of KL(p_original ‖ p_model) over predictions."""
        return _kl(original, scored.logits)


class ScrubRetain(Objective):
    """γ·CE + α·KL(p_original ‖ p_model), α = 0.001, γ = 0.99 (Kurmanji et al. 2023; HAMU, App. D).

    The published code softens both distributions with a temperature; here, as in the paper's text, it is 1.
    """

    name = "scrub_retain"
    needs_original = True
    alpha: ClassVar[float] = 0.001
    gamma: ClassVar[float] = 0.99

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum of γ·CE + α·KL over predictions."""
        return self.gamma * CrossEntropy().total(scored, None) + self.alpha * _kl(original, scored.logits)


class NegativePreference(Objective):
    """(2/β)·log σ(-β·log(π/π_original)), to be raised: the negative of the NPO loss (Zhang et al. 2024), β = 0.1.

    π is the probability of a record's whole answer. While π = π_original its gradient is that of the answer's
    negative log-likelihood; it fades as the record is forgotten.
    """

    name = "npo"
    needs_original = True
    per_record = True
    beta: ClassVar[float] = 0.1

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum over records."""
        ratio = _log_likelihood(_required(original), scored.labels) - _log_likelihood(scored.logits, scored.labels)
        return 2.0 / self.beta * F.logsigmoid(self.beta * scored.per_record(ratio)).sum()


class SimpleNegativePreference(Objective):
    """(2/β)·log σ(-(β/|y|)·log π - γ), to be raised: the negative of SimNPO's loss (Fan et al. 2024), β = 2.5, γ = 0.

    |y| is the number of the answer's tokens.
    """

    name = "simnpo"
    per_record = True
    beta: ClassVar[float] = 2.5
    gamma: ClassVar[float] = 0.0

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum over records."""
        likelihood = _log_likelihood(scored.logits, scored.labels)
        mean = scored.per_record(likelihood) / scored.per_record(torch.ones_like(likelihood)).clamp(min=1)
        return 2.0 / self.beta * F.logsigmoid(-self.beta * mean - self.gamma).sum()


_OURS: tuple[type[Objective], ...] = (
    CrossEntropy,
    KLToOriginal,
    ScrubRetain,
    NegativePreference,
    SimpleNegativePreference,
)


def objective_classes(asked: str | None = None) -> dict[str, type[Objective]]:
    """All known objectives by name: ours, and those that installed packages name in group `hamu.objectives`.

    Args:
        asked: the one that is looked for; if an installed package has it and cannot be loaded, that is an error.
    """
    return with_plugins(_OURS, "hamu.objectives", "objective", asked=asked)


def build_objective(name: str) -> Objective:
    """Make an objective by name.

    Raises:
        HamuError: if the name is unknown, or its class cannot be loaded or made.
    """
    classes = objective_classes(name)
    if name not in classes:
        raise HamuError(f"objective {name!r} is unknown; choose one of {', '.join(classes)}")
    return made("objective", classes[name])


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
        raise HamuError(f"the model returned {type(output).__name__}; expected logits, or an output with .logits")
    return logits


class OriginalModel:
    """The model as it was before unlearning: the same module, run with its original trainable tensors swapped in.

    Frozen parameters are shared, so the cost is one copy of what is trained (with an adapter, the adapter) and of the
    buffers that a pass in training may move: the floating-point ones, such as running statistics.

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
            return logits_of(torch.func.functional_call(self._model, self._original, *called, tie_weights=False))

    def _sharded_logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A sharded model gathers its own parameters for a pass, so these have to be the original ones."""
        from hamu.distributed.shards import swapped  # loads what only sharded models need

        with swapped(self._model, self._original):
            return predict_logits(self._model, inputs)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what training moves, by name: one of each tensor, a name in each module that holds it.

    A module that is registered twice is named once: `functional_call` gives back a tensor's place as often as it is
    named, the last time with the copy.
    """
    moving: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        trained = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        kept = {name: b for name, b in module._buffers.items() if b is not None and b.is_floating_point()}
        moving |= {f"{prefix}.{name}".lstrip("."): tensor for name, tensor in (trained | kept).items()}
    distinct = {id(tensor): tensor for tensor in moving.values()}
    copies = {key: tensor.detach().clone() for key, tensor in distinct.items()}
    return {name: copies[id(tensor)] for name, tensor in moving.items()}


def _arguments(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    features = {key: value for key, value in inputs.items() if key != "labels"}
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model.module if wrapped else model
    if hasattr(inner, "main_input_name") or set(features) != {"pixel_values"}:
        return (), features
    return (features["pixel_values"],), {}


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _required(original: Tensor | None) -> Tensor:
    if original is None:
        raise HamuError("this objective needs the original model's predictions; take the logits of an OriginalModel")
    return original


def _kl(original: Tensor | None, logits: Tensor) -> Tensor:
    target = _wide(_required(original)).log_softmax(-1)
    terms = F.kl_div(_wide(logits).log_softmax(-1), target, reduction="none", log_target=True)
    return terms.masked_fill_(target == -math.inf, 0.0).sum()  # p log(p/q) is 0 at p = 0, its parts are not numbers


def _log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Log p_y of each prediction, [N]."""
    return -F.cross_entropy(_wide(logits), labels, reduction="none")
