"""Membership inference: can the forget set be told from data that was never trained on?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hamu.evaluation.predictions import Predictions

_FOLDS = 5


@dataclass(frozen=True)
class MembershipInference:
    """How well an attacker tells forget records from test records; 0.5 is ideal for both figures.

    Attributes:
        accuracy: share of records told right in cross-validation, the two groups being equally large. It rises above
            0.5 in whichever way the forget set stands out.
        auc: area under the ROC curve of low losses; above 0.5 the forget set still looks trained on, below 0.5 it looks
            forgotten more than unseen data ever would.
        samples: records in each group.
    """

    accuracy: float
    auc: float
    samples: int


@dataclass(frozen=True)
class AttackScores:
    """What an attack makes of records, higher for those that look trained on.

    Attributes:
        members: of forget records, [N].
        nonmembers: of records that were never trained on, [M].
    """

    members: Tensor
    nonmembers: Tensor

    @property
    def is_member(self) -> np.ndarray:
        """1 for each member, then 0 for each nonmember, [N + M]."""
        return np.repeat([1, 0], [len(self.members), len(self.nonmembers)])

    @property
    def both(self) -> np.ndarray:
        """All scores in that order, [N + M]."""
        return np.concatenate([self.members.numpy(), self.nonmembers.numpy()])

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(self.is_member, self.both))

    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """The ROC curve: shares of nonmembers and of members above each threshold that matters, from 0 to 1."""
        from sklearn.metrics import roc_curve

        nonmembers, members, _ = roc_curve(self.is_member, self.both)
        return nonmembers, members


def membership_inference(
    forget: Predictions, test: Predictions, seed: int = 42
) -> MembershipInference | None:
    """Attacks on the per-sample cross-entropy: a logistic regression (after Shokri et al. 2017), and a threshold.

    Each class contributes as many records of the forget as of the test set, drawn at random, so that the attacks cannot
    win by telling classes apart. The regression is judged by 5-fold stratified cross-validation. It finds out by itself
    on which side of the test records the forget records lie; the threshold (Yeom et al. 2018) takes low losses for
    those of members, so that its AUC has a direction.

    Args:
        forget: predictions for the forget set.
        test: predictions for data that was never trained on.
        seed: seed of the draw and of the folds.

    Returns:
        The figures, or None if fewer than 5 records can be matched by class, or a loss is not finite.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    losses = _matched_losses(forget, test, seed)
    if losses is None:
        return None
    scores = _scores(*losses)
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    # balanced: where the folds do not come out even, a regression must not gain or lose by their ratio
    attack = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
    guesses = cross_val_predict(
        attack, torch.cat(losses).numpy()[:, None], scores.is_member, cv=folds
    )
    return MembershipInference(
        float((guesses == scores.is_member).mean()), scores.auc, len(scores.members)
    )


def loss_attack(forget: Predictions, test: Predictions, seed: int = 42) -> AttackScores | None:
    """The scores behind the AUC of `membership_inference`: the right class's log-probability; None as there."""
    losses = _matched_losses(forget, test, seed)
    return None if losses is None else _scores(*losses)


def auc_of(report: Mapping[str, Any]) -> float | None:
    """The AUC that stands for membership inference in a report: of images the losses', of texts that of Min-K%.

    Args:
        report: of `classifier_report` or `text_report`.
    """
    inference = report.get("membership_inference") or {}
    found = inference.get("auc", inference.get("min_k"))
    return None if found is None else float(found)


def _scores(members: Tensor, nonmembers: Tensor) -> AttackScores:
    """Low losses are high scores. Not as probabilities: those of losses beyond 745 are all 0, and would tie."""
    return AttackScores(members.double().neg(), nonmembers.double().neg())


def _matched_losses(
    forget: Predictions, test: Predictions, seed: int
) -> tuple[Tensor, Tensor] | None:
    """Of the records that are compared; None if there are too few of them, or one is not finite."""
    members, nonmembers = _matched(forget.labels, test.labels, torch.Generator().manual_seed(seed))
    losses = forget.losses[members], test.losses[nonmembers]
    usable = len(members) >= _FOLDS and all(bool(torch.isfinite(one).all()) for one in losses)
    return losses if usable else None


def _matched(first: Tensor, second: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in both label lists, equally many of each class."""
    chosen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in first.unique().tolist():
        places = [(labels == label).nonzero().flatten() for labels in (first, second)]
        count = min(len(p) for p in places)
        for side, p in zip(chosen, places, strict=True):
            side.append(p[torch.randperm(len(p), generator=generator)[:count]])
    return tuple(torch.cat(side) if side else torch.zeros(0, dtype=torch.long) for side in chosen)
