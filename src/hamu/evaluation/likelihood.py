"""How likely a language model finds right and wrong answers: the figures of TOFU (Maini et al. 2024).

Throughout, NLL is the mean -log p per answer token of a record, and exp(-NLL) its probability.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from hamu.errors import HamuError
from hamu.evaluation.predictions import TokenPredictions


def probabilities(predictions: TokenPredictions) -> Tensor:
    """exp(-NLL) of each record, [records] float64: the probability of its answer, to the power 1/length."""
    return torch.exp(-predictions.record_losses)


def normalized_probabilities(
    answer: TokenPredictions, wrong: TokenPredictions, owner: Tensor
) -> Tensor:
    """P / (p + Σ_j p_j) of each record, [records] float64, where p = exp(-NLL) and j runs over its wrong answers.

    This is the probability that TOFU reports for real authors and world facts.

    Args:
        answer: predictions of the right answers.
        wrong: predictions of the wrong answers, any number for each record.
        owner: [wrong.records], the record that each wrong answer belongs to.

    Raises:
        HamuError: if `owner` does not fit, or a record has no wrong answer.
    """
    _count(owner, wrong, answer)
    odds = torch.exp(
        answer.record_losses[owner] - wrong.record_losses
    )  # p_j / p; no 0/0 where both vanish
    return 1.0 / (1.0 + _sums(odds, owner, answer.records))


def truth_ratios(
    paraphrase: TokenPredictions, perturbed: TokenPredictions, owner: Tensor
) -> Tensor:
    """R = exp(-mean_j NLL(perturbed_j)) / exp(-NLL(paraphrase)) of each record, [records] float64.

    R is small where the model prefers the truth, and 1 where it does not care. The paper writes an arithmetic mean of
    the perturbed answers' probabilities; its published results take the geometric mean, which is the one used here.

    Args:
        paraphrase: predictions of the right answers in other words.
        perturbed: predictions of the wrong answers, any number for each record.
        owner: [perturbed.records], the record that each wrong answer belongs to.

    Raises:
        HamuError: if `owner` does not fit, or a record has no wrong answer.
    """
    count = _count(owner, perturbed, paraphrase)
    mean = _sums(perturbed.record_losses, owner, paraphrase.records) / count
    return torch.exp(paraphrase.record_losses - mean)


def truth_ratio_scores(ratios: Tensor, for_forget: bool) -> Tensor:
    """What a truth ratio R is worth, in [0, 1] and better if higher.

    Args:
        ratios: R of each record, in [0, ∞].
        for_forget: min(R, 1/R), best where right and wrong are equally likely; otherwise max(0, 1 - R), best where
            the truth is certain.
    """
    return torch.minimum(ratios, 1.0 / ratios) if for_forget else (1.0 - ratios).clamp(min=0.0)


def model_utility(values: Sequence[float]) -> float:
    """The harmonic mean, 0 if a value is 0.

    TOFU takes it of nine values: probability, ROUGE-L recall and truth ratio score, each on the retain set, on real
    authors and on world facts.
    """
    return float(statistics.harmonic_mean(values))


def forget_quality(ours: Sequence[float] | Tensor, reference: Sequence[float] | Tensor) -> float:
    """The p-value of a two-sample Kolmogorov-Smirnov test between truth ratios R on the forget set.

    Near 1 the model cannot be told from one that never saw the forget set; TOFU calls p > 0.05 good.

    Args:
        ours: R of each record under the unlearned model.
        reference: R of each record under the retain model (retrained without the forget set).
    """
    import numpy as np
    from scipy.stats import ks_2samp

    return float(ks_2samp(np.asarray(ours), np.asarray(reference)).pvalue)


def _sums(values: Tensor, owner: Tensor, records: int) -> Tensor:
    return values.new_zeros(records).index_add_(0, owner, values)


def _count(owner: Tensor, wrong: TokenPredictions, right: TokenPredictions) -> Tensor:
    """The number of wrong answers of each record, at least 1."""
    if len(owner) != wrong.records or (
        len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < right.records
    ):
        raise HamuError(
            f"owner must name one of {right.records} records for each of {wrong.records} wrong answers"
        )
    count = torch.bincount(owner, minlength=right.records)
    if not count.all():
        raise HamuError(
            f"record {int((count == 0).nonzero()[0])} has no wrong answer; each record needs at least one"
        )
    return count
