"""Objectives: summed losses of a model's predictions, for one backward pass.

The caller divides a sum by its number of terms (predictions, or records for objectives of whole
records), which is exact over unequal batches, accumulation and processes. A retain objective is
lowered, a forget objective raised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hamu.core.plugins import made, plugins
from hamu.errors import HamuError, unknown

IGNORED = -100  # label without a score, transformers' convention


@dataclass(frozen=True)
class Scored:
    """Predictions of a batch, where it has labels.

    Attributes:
        logits: [N, K].
        labels: [N], int64.
        record: [N], the batch row of each.
        records: the number of batch rows.
        limits: [records, 2], limits of each record's loss, for the objective "bounded".
        alternative: predictions for another answer to each record's prompt, and the original's
            logits there, for objectives that compare both answers.
    """

    logits: Tensor
    labels: Tensor
    record: Tensor
    records: int
    limits: Tensor | None = None
    alternative: tuple[Scored, Tensor | None] | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, limits: Tensor | None = None) -> Scored:
        """Select the labelled predictions of a model's output.

        Args:
            logits: [B, K] of a classifier, or [B, T, K] of a language model.
            labels: [B], or [B, T] with -100 for no score; position t-1 predicts t.
            limits: see the class.
        """
        count = len(labels)
        is_whole = not labels.is_floating_point() and len(logits) == count
        if not is_whole or logits.dim() != labels.dim() + 1:
            raise HamuError(
                f"labels of shape {tuple(labels.shape)} and {labels.dtype} do not fit logits of "
                f"shape {tuple(logits.shape)}; give a whole number for each image or token"
            )
        if labels.dim() == 1:
            return cls(logits, labels, torch.arange(count, device=labels.device), count, limits)
        if logits.shape[:2] != labels.shape:
            raise HamuError(
                f"the model predicts at {logits.shape[1]} places of a text of {labels.shape[1]} "
                f"tokens; one that adds tokens of its own, as prompt tuning does, cannot be scored"
            )
        scored = labels[:, 1:] != IGNORED
        record, position = scored.nonzero(as_tuple=True)  # the one wait for the device
        chosen = logits[:, :-1][record, position]
        return cls(chosen, labels[:, 1:][record, position], record, count, limits)

    def per_record(self, values: Tensor) -> Tensor:
        """Sums of [N] values over each record, [records]."""
        return values.new_zeros(self.records).index_add(0, self.record, values)


def count_predictions(labels: Tensor) -> Tensor | int:
    """Number of scored predictions of a batch, without a host synchronisation."""
    return len(labels) if labels.dim() == 1 else (labels[:, 1:] != IGNORED).sum()


class Objective(ABC):
    """Loss with a name, for methods and the command line."""

    name: ClassVar[str]
    needs_original: ClassVar[bool] = False  # compares with the original model
    per_record: ClassVar[bool] = False  # sums over records instead of predictions
    answers: ClassVar[Literal["own", "alternative", "both"]] = "own"  # that it scores

    @abstractmethod
    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        """The loss, summed: 0-dim, float32 or wider.

        Args:
            scored: the model's predictions.
            original: [N, K] logits of the model before unlearning, if `needs_original`.
        """

    def count(self, labels: Tensor) -> Tensor | int:
        """Number of terms of the sum over a batch."""
        return len(labels) if self.per_record else count_predictions(labels)


class CrossEntropy(Objective):
    """-log p_y (the paper's L)."""

    name = "cross_entropy"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        return F.cross_entropy(_wide(scored.logits), scored.labels, reduction="sum")


class KLToOriginal(Objective):
    """KL(p_original ‖ p_model) (Maini et al. 2024, retain; Kurmanji et al. 2023, both sides)."""

    name = "kl_to_original"
    needs_original = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        return _kl(original, scored.logits)


class ScrubRetain(Objective):
    """γ·CE + α·KL(p_original ‖ p_model), α = 0.001, γ = 0.99 (Kurmanji et al. 2023; HAMU, App. D).

    The published code softens both distributions with a temperature; here, as in the paper's text,
    it is 1.
    """

    name = "scrub_retain"
    needs_original = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        cross_entropy = CrossEntropy().total(scored, None)
        return 0.99 * cross_entropy + 0.001 * _kl(original, scored.logits)


class NegativePreference(Objective):
    """(2/β)·log σ(-β·log(π/π_original)), to be raised: NPO's loss negated (Zhang et al. 2024).

    β = 0.1; π is the probability of a record's whole answer. At π = π_original the
    gradient is that of the answer's negative log-likelihood; it fades as the record is forgotten.
    """

    name = "npo"
    needs_original = True
    per_record = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        return _preference(-_log_ratio(scored, original), beta=0.1)


class SimpleNegativePreference(Objective):
    """(2/β)·log σ(-(β/|y|)·log π), to be raised: SimNPO's loss negated, γ = 0 (Fan et al. 2024).

    β = 2.5; |y| is the number of the answer's tokens.
    """

    name = "simnpo"
    per_record = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        likelihood = _log_likelihood(scored.logits, scored.labels)
        tokens = scored.per_record(torch.ones_like(likelihood)).clamp(min=1)
        return _preference(-scored.per_record(likelihood) / tokens, beta=2.5)


class DirectPreference(Objective):
    """(2/β)·log σ(β·log(π'/π'_original) - β·log(π/π_original)), to be raised: DPO's loss negated.

    π' is the probability of the alternative answer, preferred to the record's own (Rafailov et al.
    2023); β = 0.1, the factor 2 as in NPO.
    """

    name = "dpo"
    needs_original = True
    per_record = True
    answers = "both"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        if scored.alternative is None:
            raise HamuError("dpo prefers another answer; give its predictions as `alternative`")
        other = _log_ratio(*scored.alternative)
        return _preference(other - _log_ratio(scored, original), beta=0.1)


class Refusal(Objective):
    """log p of the alternative answer, to be raised: IDK (Maini et al. 2024)."""

    name = "idk"
    answers = "alternative"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        return _log_likelihood(scored.logits, scored.labels).sum()


class WeightedAscent(Objective):
    """-p, to be raised (Wang et al. 2025b).

    Its gradient is that of WGA's loss p^α·log p, α = 1, negated, with the weight p held constant.
    """

    name = "wga"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        return -_log_likelihood(scored.logits, scored.labels).exp().sum()


class SaturationImportance(Objective):
    """-p^β/β + p^(β+1)/(β+1), β = 5, to be raised (Yang et al. 2025).

    Its gradient is that of SatImp's loss p^β·(1 - p)·log p, negated, with the weights constant.
    """

    name = "satimp"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        likelihood = _log_likelihood(scored.logits, scored.labels)
        return ((6.0 * likelihood).exp() / 6.0 - (5.0 * likelihood).exp() / 5.0).sum()


class SelfDistillation(Objective):
    """-CE(q, p), to be raised: UNDIAL's loss negated (Dong et al. 2025).

    q is the original's distribution with the label's logit lowered by β = 10.
    """

    name = "undial"
    needs_original = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        original, labels = _given(original), scored.labels[:, None]
        lowered = original.gather(1, labels) - 10.0
        share = _wide(original.scatter(1, labels, lowered)).softmax(-1)
        terms = share * _wide(scored.logits).log_softmax(-1)
        return terms.masked_fill(share == 0, 0.0).sum()  # 0 log 0 is 0


class CrossEntropyUnlearning(Objective):
    """log(1 - p), to be raised (Yang 2025).

    Its gradient is that of CE-U's loss, negated: the cross-entropy to the model's own distribution
    without the label, held constant.
    """

    name = "ce-u"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        logits = _wide(scored.logits)
        others = logits.scatter(1, scored.labels[:, None], -math.inf)
        return (others.logsumexp(1) - logits.logsumexp(1)).sum()


class LogitMargin(Objective):
    """-(max z - mean z)² of the logits z, to be raised: PDU's flattening loss negated (Entesari et
    al. 2025).
    """

    name = "logit_margin"

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        logits = _wide(scored.logits)
        return -(logits.amax(1) - logits.mean(1)).square().sum()


class Bounded(Objective):
    """Mean of min(o(L_i), o(T_i)), to be raised: each record's log-odds, up to its limit T_i.

    L_i is record i's mean cross-entropy and o(L) = log(e^L - 1), its log-odds against the
    prediction. o rises with L, so a record that has reached T_i gives no gradient. Below T_i the
    gradient of L_i itself fades with L_i, and records of confident predictions would hardly move;
    with log-odds each record weighs the same. A record above its upper limit U_i is lowered again:
    -max(0, o(L_i) - o(U_i)).
    """

    name = "bounded"
    per_record = True

    def total(self, scored: Scored, original: Tensor | None) -> Tensor:
        if scored.limits is None:
            raise HamuError("the objective bounded needs a goal, which sets a limit per record")
        aim, most = log_odds(scored.limits.to(scored.logits.device, torch.float32)).unbind(1)
        odds = _record_log_odds(scored)
        none = most.isinf() | odds.isinf()  # an infinite loss has no gradient
        beyond = (odds - most).masked_fill(none, 0.0).clamp(min=0)
        return (torch.minimum(odds, aim) - beyond).sum()


def log_odds(loss: Tensor) -> Tensor:
    """log(e^L - 1) of losses L, the log-odds against the prediction; -inf at 0, inf at inf."""
    return loss + torch.log(-torch.expm1(-loss))


def loss_at(odds: Tensor) -> Tensor:
    """Inverse of `log_odds`."""
    return F.softplus(odds, threshold=40)


def _record_log_odds(scored: Scored) -> Tensor:
    """`log_odds` of each record's mean loss, [records]; exact for records of one prediction."""
    logits, labels = _wide(scored.logits), scored.labels[:, None]
    others = logits.scatter(1, labels, -math.inf).logsumexp(1)
    odds = others - logits.gather(1, labels)[:, 0]
    counts = scored.per_record(torch.ones_like(odds))
    mean = scored.per_record(loss_at(odds)) / counts.clamp(min=1)
    of_mean = log_odds(mean + (1e-6 - mean).clamp(min=0).detach())  # clamp has no gradient below
    return torch.where(counts == 1, scored.per_record(odds), of_mean)


_OURS: tuple[type[Objective], ...] = (
    *(CrossEntropy, KLToOriginal, ScrubRetain),
    *(NegativePreference, SimpleNegativePreference, DirectPreference, Refusal),
    *(WeightedAscent, SaturationImportance, SelfDistillation, CrossEntropyUnlearning),
    *(LogitMargin, Bounded),
)
OBJECTIVES = tuple(cls.name for cls in _OURS)


def build_objective(name: str) -> Objective:
    """Make an objective by name; a HamuError if it is unknown, or its class fails to load."""
    classes: dict[str, type[Objective]] = {cls.name: cls for cls in _OURS}
    classes |= plugins("objective", classes, asked=name)
    if name not in classes:
        raise unknown("objective", name, classes)
    return made("objective", classes[name])


def _given(original: Tensor | None) -> Tensor:
    if original is None:
        raise HamuError(
            "the objective compares with the original model; give its logits as `original`"
        )
    return original


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _kl(original: Tensor | None, logits: Tensor) -> Tensor:
    target = _wide(_given(original)).log_softmax(-1)
    terms = F.kl_div(_wide(logits).log_softmax(-1), target, reduction="none", log_target=True)
    return terms.masked_fill_(target == -math.inf, 0.0).sum()  # p log(p/q) is 0 at p = 0


def _log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Log p_y of each prediction, [N]."""
    return -F.cross_entropy(_wide(logits), labels, reduction="none")


def _preference(values: Tensor, beta: float) -> Tensor:
    return 2.0 / beta * F.logsigmoid(beta * values).sum()


def _log_ratio(scored: Scored, original: Tensor | None) -> Tensor:
    """log(π/π_original) of each record's whole answer, [records]."""
    now = _log_likelihood(scored.logits, scored.labels)
    return scored.per_record(now - _log_likelihood(_given(original), scored.labels))
