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
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hamu.core.plugins import made, with_plugins
from hamu.errors import HamuError, unknown

IGNORED = -100  # the label of what is not scored, transformers' convention


@dataclass(frozen=True)
class Scored:
    """A batch's predictions where there is a label.

    Attributes:
        logits: [N, K].
        labels: [N], int64.
        record: [N], the batch row that each belongs to.
        records: the number of batch rows.
        limits: [records, 2], the losses between which a bounded objective wants each record; None without.
    """

    logits: Tensor
    labels: Tensor
    record: Tensor
    records: int
    limits: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, limits: Tensor | None = None) -> Scored:
        """From a model's output and a batch's labels.

        Args:
            logits: [B, K] of a classifier, or [B, T, K] of a language model.
            labels: [B], or [B, T] with -100 where nothing is scored; there position t is predicted at t-1.
            limits: see the class.

        Raises:
            HamuError: if the model did not predict at each of the T tokens.
        """
        if labels.dim() == 1:
            return cls(
                logits, labels, torch.arange(len(labels), device=labels.device), len(labels), limits
            )
        if logits.shape[:2] != labels.shape:
            raise HamuError(
                f"the model predicts at {logits.shape[1]} places of a text of {labels.shape[1]} tokens; one that puts "
                f"tokens of its own before the text, as prompt tuning does, cannot be scored"
            )
        record, position = (labels[:, 1:] != IGNORED).nonzero(
            as_tuple=True
        )  # the one wait for the device
        return cls(
            logits[:, :-1][record, position],
            labels[:, 1:][record, position],
            record,
            len(labels),
            limits,
        )

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
        return self.gamma * CrossEntropy().total(scored, None) + self.alpha * _kl(
            original, scored.logits
        )


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
        ratio = _log_likelihood(_required(original), scored.labels) - _log_likelihood(
            scored.logits, scored.labels
        )
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
        mean = scored.per_record(likelihood) / scored.per_record(torch.ones_like(likelihood)).clamp(
            min=1
        )
        return 2.0 / self.beta * F.logsigmoid(-self.beta * mean - self.gamma).sum()


class Bounded(Objective):
    """Log-odds of each record's loss, up to its limit T_i: mean of min(o(L_i), o(T_i)), to be raised.

    L_i is the mean cross-entropy of record i over its predictions and o(L) = log(e^L - 1), the log-odds that the model
    does not predict it. o rises with L and is nearly L from L = 3 on, so o(min(L_i, T_i)) = min(o(L_i), o(T_i)) and a
    record that has reached T_i gives no gradient. Below that the gradient of L_i itself fades with L_i: records that
    the model is sure of would hardly move while others rise. With the odds each record weighs the same.

    A record above its upper limit U_i is lowered again: the term -max(0, o(L_i) - o(U_i)).
    """

    name = "bounded"
    per_record = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """Sum over records."""
        if scored.limits is None:
            raise HamuError(
                "the objective bounded needs a limit for each record: a goal sets them (--goal, --target_forget_loss)"
            )
        aim, most = log_odds(scored.limits.to(scored.logits.device, torch.float32)).unbind(1)
        odds = _record_log_odds(scored)
        return (torch.minimum(odds, aim) - (odds - most).clamp(min=0)).sum()


def log_odds(loss: Tensor) -> Tensor:
    """log(e^L - 1) of losses L, the log-odds against the prediction; -inf at 0, inf at inf."""
    return loss + torch.log(-torch.expm1(-loss))


def loss_at(odds: Tensor) -> Tensor:
    """The loss with these log-odds: the inverse of `log_odds`."""
    return F.softplus(odds, threshold=40)


def _record_log_odds(scored: Scored) -> Tensor:
    """`log_odds` of each record's mean loss, [records]; of single predictions exact, however sure the model is."""
    logits, labels = _wide(scored.logits), scored.labels[:, None]
    others = logits.scatter(1, labels, -math.inf).logsumexp(1)
    odds = others - logits.gather(1, labels)[:, 0]
    if len(odds) == scored.records:
        return odds
    counts = scored.per_record(torch.ones_like(odds)).clamp(min=1)
    return log_odds((scored.per_record(loss_at(odds)) / counts).clamp(min=1e-6))


_OURS: tuple[type[Objective], ...] = (
    CrossEntropy,
    KLToOriginal,
    ScrubRetain,
    NegativePreference,
    SimpleNegativePreference,
    Bounded,
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
        raise unknown("objective", name, classes)
    return made("objective", classes[name])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _required(original: Tensor | None) -> Tensor:
    if original is None:
        raise HamuError(
            "this objective needs the original model's predictions; take the logits of an OriginalModel"
        )
    return original


def _kl(original: Tensor | None, logits: Tensor) -> Tensor:
    target = _wide(_required(original)).log_softmax(-1)
    terms = F.kl_div(_wide(logits).log_softmax(-1), target, reduction="none", log_target=True)
    return terms.masked_fill_(
        target == -math.inf, 0.0
    ).sum()  # p log(p/q) is 0 at p = 0, its parts are not numbers


def _log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Log p_y of each prediction, [N]."""
    return -F.cross_entropy(_wide(logits), labels, reduction="none")
