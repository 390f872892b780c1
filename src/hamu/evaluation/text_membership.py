"""Membership inference on texts: can forgotten records be told from records that were never trained on?

Four attacks without a trained attacker. Each gives a record a score that is higher the more it looks like a member, and
is judged by its AUC: the probability that a forget record scores above a holdout record, ties counted half. 0.5 is
ideal; above it the forget set still looks trained on, below it it looks forgotten more than unseen data ever would.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hamu.errors import HamuError
from hamu.evaluation.membership import AttackScores
from hamu.evaluation.predictions import TokenPredictions

_SMALLEST_SPREAD = 1e-3  # below it one token has all of the probability, as far as float32 can tell


def text_membership(
    forget: TokenPredictions,
    holdout: TokenPredictions,
    forget_texts: Sequence[str],
    holdout_texts: Sequence[str],
    k: float = 0.2,
) -> dict[str, float | None] | None:
    """The AUC of each attack of `membership_scores`, forget records being the members.

    Args:
        forget: predictions for the forget set.
        holdout: predictions for data that was never trained on.
        forget_texts, holdout_texts: the texts that are scored, for zlib: the answers, or with their prompts.
        k: the share of least likely tokens that Min-K% looks at.

    Returns:
        AUC by name of the attack, None for one with a score that is not finite; or None for all if a set is empty, or
        no attack has a figure.

    Raises:
        HamuError: if texts and predictions do not fit, or k is not in (0, 1].
    """
    members, nonmembers = (
        membership_scores(forget, forget_texts, k),
        membership_scores(holdout, holdout_texts, k),
    )
    scores = {name: AttackScores(members[name], nonmembers[name]) for name in members}
    finite = {name: bool(np.isfinite(attack.both).all()) for name, attack in scores.items()}
    if not (forget.records and holdout.records and any(finite.values())):
        return None
    return {name: attack.auc if finite[name] else None for name, attack in scores.items()}


def membership_scores(
    predictions: TokenPredictions, texts: Sequence[str], k: float = 0.2
) -> dict[str, Tensor]:
    """Four scores of each record, [records] float64, over its n scored tokens.

    - `loss`: -NLL, the mean log p per token (Yeom et al. 2018).
    - `zlib`: -NLL / (bytes of the zlib-compressed text) (Carlini et al. 2021). Their ratio takes the logarithm of the
      perplexity, which is the mean per token and not the total; so does this.
    - `min_k`: the mean log p of the max(1, ⌊n·k⌋) least likely tokens (Min-K% Prob, Shi et al. 2024).
    - `min_k_plus_plus`: the mean of the max(1, ⌊n·k⌋) lowest (log p - μ)/σ, μ and σ being mean and standard deviation
      of log p under the model's own prediction at that token (Min-K%++, Zhang et al. 2024b); σ is at least 0.001.

    Args:
        predictions: of the records.
        texts: what is scored of each record, as text.
        k: the share of tokens for the last two.

    Raises:
        HamuError: if texts and predictions do not fit, or k is not in (0, 1].
    """
    if len(texts) != predictions.records:
        raise HamuError(
            f"{len(texts)} texts do not fit the predictions of {predictions.records} records"
        )
    loss = -predictions.record_losses
    compressed = torch.tensor(
        [len(zlib.compress(text.encode())) for text in texts], dtype=torch.float64
    )
    normalized = (-predictions.losses - predictions.expected) / predictions.spread.clamp(
        min=_SMALLEST_SPREAD
    )
    return {
        "loss": loss,
        "zlib": loss / compressed,
        "min_k": min_k_scores(predictions, k),
        "min_k_plus_plus": _mean_of_lowest(predictions, normalized, k),
    }


def min_k_scores(predictions: TokenPredictions, k: float = 0.2) -> Tensor:
    """`min_k` of `membership_scores` alone, [records] float64, which needs no texts.

    Raises:
        HamuError: if k is not in (0, 1].
    """
    return _mean_of_lowest(predictions, -predictions.losses, k)


def privleak(auc: float, retain_auc: float) -> float:
    """(auc - retain_auc) / retain_auc: how much more the forget set leaks than if it had never been trained on.

    After PrivLeak of MUSE (Shi et al. 2024), to be taken with the AUC of `min_k`; 0 is ideal. Here members score
    higher, so a model that has not unlearned is above 0. MUSE's own code counts the holdout set as the members, so
    that its AUC is 1 - ours and such a model is near -1 (-100 %): `privleak(1 - auc, 1 - retain_auc)` is their figure
    (they report it with k = 0.4).

    Args:
        auc: of the unlearned model, from `text_membership`.
        retain_auc: of the retain model (retrained without the forget set), on the same records.

    Raises:
        HamuError: if retain_auc is 0.
    """
    if retain_auc == 0.0:
        raise HamuError("PrivLeak is relative to the retain model's AUC, which is 0 here")
    return (auc - retain_auc) / retain_auc


def _mean_of_lowest(predictions: TokenPredictions, values: Tensor, k: float) -> Tensor:
    """The mean of the share k of lowest values in each record, [records]."""
    if not 0.0 < k <= 1.0:
        raise HamuError(f"k {k} must be above 0 and at most 1")
    means = [
        each.sort().values[: max(1, int(len(each) * k))].mean() for each in predictions.each(values)
    ]
    return torch.stack(means) if means else values.new_zeros(0)
