"""Membership inference: attacks that tell the forget set from data that was never trained on.

Each attack scores a record, higher for one that looks like a member. An AUC of 0.5 is ideal; above
it the forget set still looks trained on, below it forgotten more than unseen data ever would.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hamu.evaluation.predictions import Predictions, TokenPredictions

_FOLDS = 5
_SMALLEST_SPREAD = 1e-3  # below it one token has all of the probability, within float32


@dataclass(frozen=True)
class MembershipInference:
    """Success of an attacker who tells forget from test records; 0.5 is ideal for both figures."""

    accuracy: float  # of guesses in cross-validation; above 0.5 if either side stands out
    auc: float  # area under the ROC curve of low losses
    samples: int  # in each group


@dataclass(frozen=True)
class AttackScores:
    """Scores of an attack, higher for records that look trained on."""

    members: Tensor  # [N], of forget records
    nonmembers: Tensor  # [M], of records that were never trained on

    @cached_property
    def ranked(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """1 for each member, then 0 for each nonmember; and all scores in that order."""
        is_member = np.repeat([1, 0], [len(self.members), len(self.nonmembers)])
        return is_member, torch.cat([self.members, self.nonmembers]).numpy()

    @property
    def is_usable(self) -> bool:
        """True if there are scores of both, all finite."""
        return bool(
            len(self.members) and len(self.nonmembers) and np.isfinite(self.ranked[1]).all()
        )

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(*self.ranked))

    def roc(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """ROC curve: shares of nonmembers and of members above each threshold, from 0 to 1."""
        from sklearn.metrics import roc_curve

        nonmembers, members, _ = roc_curve(*self.ranked)
        return nonmembers, members


def membership_inference(
    forget: Predictions, test: Predictions, seed: int = 42
) -> MembershipInference | None:
    """Attack the losses by a logistic regression (after Shokri et al. 2017), and by a threshold.

    Each class contributes as many records of the forget as of the test set, drawn at random, so
    that the attacks cannot win by telling classes apart; the test set was never trained on. None if
    fewer than 5 records match, or a loss is not finite. `seed` is that of draw and folds.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scores = loss_attack(forget, test, seed)
    if scores is None:
        return None
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    # balanced: an uneven ratio in a fold must neither help nor hurt the regression
    attack = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
    is_member, both = scores.ranked
    guesses = cross_val_predict(attack, -both[:, None], is_member, cv=folds)
    accuracy = float((guesses == is_member).mean())
    return MembershipInference(accuracy, scores.auc, len(scores.members))


def loss_attack(forget: Predictions, test: Predictions, seed: int = 42) -> AttackScores | None:
    """Scores behind the AUC of `membership_inference`: log p of the right class; None as there."""
    generator = torch.Generator().manual_seed(seed)
    members, nonmembers = [], []
    for label in torch.unique(forget.labels).tolist():
        # no probabilities: those of losses beyond 745 are all 0, and would tie
        first, second = (-one.losses[one.labels == label] for one in (forget, test))
        count = min(len(first), len(second))
        members.append(first[torch.randperm(len(first), generator=generator)[:count]])
        nonmembers.append(second[torch.randperm(len(second), generator=generator)[:count]])
    found = AttackScores(torch.cat(members), torch.cat(nonmembers))
    return found if len(found.members) >= _FOLDS and found.is_usable else None


def auc_of(report: Mapping[str, Any]) -> float | None:
    """Headline AUC of a report: of images that of the losses, of texts that of Min-K%."""
    inference = report.get("membership_inference") or {}
    found = inference.get("auc", inference.get("min_k"))
    return None if found is None else float(found)


def text_membership(
    forget: TokenPredictions,
    holdout: TokenPredictions,
    forget_texts: Sequence[str],
    holdout_texts: Sequence[str],
    k: float = 0.2,
) -> dict[str, float | None] | None:
    """AUC of each attack of `membership_scores`; forget records are the members.

    The holdout set was never trained on; the texts are those that are scored, for zlib. None for an
    attack with a score that is not finite, and for all if none has a figure.
    """
    members = membership_scores(forget, forget_texts, k)
    nonmembers = membership_scores(holdout, holdout_texts, k)
    scores = {name: AttackScores(members[name], nonmembers[name]) for name in members}
    found = {name: one.auc if one.is_usable else None for name, one in scores.items()}
    return None if set(found.values()) == {None} else found


def membership_scores(
    predictions: TokenPredictions, texts: Sequence[str], k: float = 0.2
) -> dict[str, Tensor]:
    """Four scores of each record, [records] float64, by the formulas of docs/metrics.md."""
    sizes = torch.tensor([len(zlib.compress(text.encode())) for text in texts])
    spread = predictions.spread.clamp(min=_SMALLEST_SPREAD)
    normalized = (-predictions.losses - predictions.expected) / spread
    return {
        "loss": -predictions.record_losses,
        "zlib": -predictions.record_losses / sizes,
        "min_k": min_k_scores(predictions, k),
        "min_k_plus_plus": _mean_of_lowest(predictions, normalized, k),
    }


def min_k_scores(predictions: TokenPredictions, k: float = 0.2) -> Tensor:
    """`min_k` of `membership_scores` alone, which needs no texts."""
    return _mean_of_lowest(predictions, -predictions.losses, k)


def _mean_of_lowest(predictions: TokenPredictions, values: Tensor, k: float) -> Tensor:
    """Mean of the share k of lowest values in each record, [records]."""
    each = (one.sort().values for one in predictions.each(values))
    return torch.stack([one[: max(1, int(len(one) * k))].mean() for one in each])


def privleak(auc: float, retain_auc: float) -> float:
    """(auc - retain_auc) / retain_auc, after PrivLeak of MUSE (Shi et al. 2024); 0 is ideal.

    MUSE counts the holdout set as the members: `privleak(1 - auc, 1 - retain_auc)` is their figure.
    """
    return (auc - retain_auc) / retain_auc
