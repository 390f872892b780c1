"""Membership inference: can the forget set be told from data that was never trained on?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hamu.evaluation.predictions import Predictions

_FOLDS = 5


@dataclass(frozen=True)
class MembershipInference:
    """How well an attacker tells forget records from test records; 0.5 is ideal for both figures.

    Attributes:
        accuracy: share of records told right in cross-validation, the two groups being equally large.
        auc: area under the ROC curve of the cross-validated scores; above 0.5 the forget set still looks trained on,
            below 0.5 it looks forgotten more than unseen data ever would.
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
        strangers: of records that were never trained on, [M].
    """

    members: Tensor
    strangers: Tensor

    @property
    def is_member(self) -> np.ndarray:
        """1 for each member, then 0 for each stranger, [N + M]."""
        return np.repeat([1, 0], [len(self.members), len(self.strangers)])

    @property
    def both(self) -> np.ndarray:
        """All scores in that order, [N + M]."""
        return np.concatenate([self.members.numpy(), self.strangers.numpy()])

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(self.is_member, self.both))

    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """The ROC curve: shares of strangers and of members above each threshold that matters, from 0 to 1."""
        from sklearn.metrics import roc_curve

        strangers, members, _ = roc_curve(self.is_member, self.both)
        return strangers, members


def membership_inference(forget: Predictions, test: Predictions, seed: int = 42) -> MembershipInference | None:
    """The loss-based attack: a logistic regression on the per-sample cross-entropy (after Shokri et al. 2017).

    Each class contributes as many records of the forget as of the test set, drawn at random, so that the attack cannot
    win by telling classes apart. The figures are those of 5-fold stratified cross-validation.

    Args:
        forget: predictions for the forget set.
        test: predictions for data that was never trained on.
        seed: seed of the draw and of the folds.

    Returns:
        The figures, or None if fewer than 5 records can be matched by class, or a loss is not finite.
    """
    scores = loss_attack(forget, test, seed)
    if scores is None:
        return None
    accuracy = float(((scores.both > 0.5) == scores.is_member).mean())
    return MembershipInference(accuracy, scores.auc, len(scores.members))


def loss_attack(forget: Predictions, test: Predictions, seed: int = 42) -> AttackScores | None:
    """The scores behind `membership_inference`: cross-validated probabilities of being a member; None as there."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    generator = torch.Generator().manual_seed(seed)
    members, strangers = _matched(forget.labels, test.labels, generator)
    count = len(members)
    if count < _FOLDS:
        return None
    losses = torch.cat([forget.losses[members], test.losses[strangers]]).numpy()[:, None]
    if not np.isfinite(losses).all():
        return None
    is_member = np.repeat([1, 0], count)
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    attack = make_pipeline(StandardScaler(), LogisticRegression())
    scores = torch.from_numpy(cross_val_predict(attack, losses, is_member, cv=folds, method="predict_proba")[:, 1])
    return AttackScores(scores[:count], scores[count:])


def _matched(first: Tensor, second: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in both label lists, equally many of each class."""
    chosen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in first.unique().tolist():
        places = [(labels == label).nonzero().flatten() for labels in (first, second)]
        count = min(len(p) for p in places)
        for side, p in zip(chosen, places, strict=True):
            side.append(p[torch.randperm(len(p), generator=generator)[:count]])
    return torch.cat(chosen[0]), torch.cat(chosen[1])
