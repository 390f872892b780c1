"""Membership inference: attacks that tell the forget set from data that was never trained on.

Each attack scores a record, higher for one that looks like a member. An AUC of 0.5 is ideal; above
it the forget set still looks trained on, below it forgotten more than unseen data ever would.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.core.forward import evaluating, predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import collate
from hamu.evaluation.predictions import Predictions, TokenPredictions

FEWEST = 5  # records on each side, and folds
_SMALLEST_SPREAD = 1e-3  # below it one token has all of the probability, within float32
_FALSE_POSITIVES = 0.01  # rate at which `AttackScores.tpr` counts the true positives
_GAMMA = 2.0  # RMIA's threshold of the likelihood ratio
_TELLING, _ENOUGH = 0.4, 10  # of an AUC; records, for which chance is a third of that
_ALIKE = 0.1  # of the AUCs of two models


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

    @cached_property
    def auc(self) -> float | None:
        """Area under the ROC curve; None without scores of both, or where one is not finite."""
        from sklearn.metrics import roc_auc_score

        is_known = len(self.members) and len(self.nonmembers) and np.isfinite(self.ranked[1]).all()
        return float(roc_auc_score(*self.ranked)) if is_known else None

    @property
    def tpr(self) -> float | None:
        """TPR at 1% FPR (Carlini et al. 2022): the largest share of members above a threshold that
        at most 1% of the nonmembers exceed; None as `auc`.
        """
        if self.auc is None:
            return None
        nonmembers, members = self.roc()
        return float(members[nonmembers <= _FALSE_POSITIVES].max())

    def roc(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """ROC curve: shares of nonmembers and of members above each threshold, from 0 to 1."""
        from sklearn.metrics import roc_curve

        nonmembers, members, _ = roc_curve(*self.ranked, drop_intermediate=False)
        return nonmembers, members


def membership_inference(
    forget: Predictions, test: Predictions, seed: int = 42
) -> dict[str, float] | None:
    """Attack the losses by a logistic regression (after Shokri et al. 2017), and by a threshold.

    `accuracy` is of the regression's guesses in cross-validation, `auc` of low losses, `samples`
    the number in each group: as many of each class, so that telling classes apart is no use. None
    if fewer than 5 records match, or a loss is not finite.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scores = loss_attack(forget, test, seed)
    if scores is None or scores.auc is None:
        return None
    folds = StratifiedKFold(FEWEST, shuffle=True, random_state=seed)
    # balanced: an uneven ratio in a fold must neither help nor hurt the regression
    attack = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
    is_member, both = scores.ranked
    guesses = cross_val_predict(attack, -both[:, None], is_member, cv=folds)
    accuracy = float((guesses == is_member).mean())
    return {"accuracy": accuracy, "auc": scores.auc, "samples": len(scores.members)}


def loss_attack(forget: Predictions, test: Predictions, seed: int = 42) -> AttackScores | None:
    """Scores behind the AUC of `membership_inference`; None if fewer than 5 records match."""
    # log p, as probabilities of losses beyond 745 are all 0, and would tie
    first, second = matched_by_class(forget.labels, test.labels, seed)
    found = AttackScores(-forget.losses[first], -test.losses[second])
    return found if len(first) >= FEWEST else None


def matched_by_class(forget: Tensor, test: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw positions in both sets by their labels, as many of each class on both sides."""
    generator = torch.Generator().manual_seed(seed)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in torch.unique(forget).tolist():
        both = [(labels == label).nonzero().flatten() for labels in (forget, test)]
        count = min(map(len, both))
        for drawn, places in zip(found, both, strict=True):
            drawn.append(places[torch.randperm(len(places), generator=generator)[:count]])
    return torch.cat(found[0]), torch.cat(found[1])


def auc_of(report: Mapping[str, Any]) -> float | None:
    """Headline AUC of a report: of images that of the losses, of texts that of Min-K%."""
    inference = report.get("membership_inference") or {}
    found = inference.get("auc", inference.get("min_k"))
    return None if found is None else float(found)


def aucs_of(report: Mapping[str, Any]) -> dict[str, float]:
    """AUC of each attack that has one."""
    found = (report.get("membership_inference") or {}).items()
    return {n: auc for n, auc in found if n not in ("accuracy", "samples") and auc is not None}


def most_telling(report: Mapping[str, Any]) -> tuple[str, float, float | None] | None:
    """Attack whose AUC is furthest from 0.5, with that and the retain model's; None without any."""
    theirs, found = aucs_of(report.get("retain_model") or {}), aucs_of(report)
    name = max(found, key=lambda one: abs(found[one] - 0.5), default=None)
    return None if name is None else (name, found[name], theirs.get(name))


def attacker_words(report: Mapping[str, Any]) -> str:
    """Name the attack that tells the forget records from unseen ones almost surely, unless it does
    so for the retain model, or much better or worse than for that; "" where records are few.
    """
    counts = [
        one.get("records") or one.get("samples") or 0
        for name in ("forget", "test", "membership_inference")
        if (one := report.get(name)) and ("records" in one or "samples" in one)
    ]
    if min(counts, default=0) < _ENOUGH:
        return ""
    theirs, found = aucs_of(report.get("retain_model") or {}), aucs_of(report)
    away = {name: auc - 0.5 for name, auc in found.items()}
    apart = {name: auc - theirs[name] for name, auc in found.items() if name in theirs}
    sure = [n for n in away if abs(away[n]) >= _TELLING and abs(apart.get(n, 1.0)) >= _ALIKE]
    if sure:
        name = max(sure, key=lambda one: abs(away[one]))
        beside = f"; the retain model's {theirs[name]:.2f}" if name in theirs else ""
        told = f"by {_in_words(name)}, AUC {found[name]:.2f}{beside}"
        return f"an attacker tells the forget records from unseen ones ({told})"
    name = max(apart, key=lambda one: abs(apart[one]), default="")
    if abs(apart.get(name, 0.0)) < _TELLING:
        return ""
    own = f"the model's AUC of membership inference by {_in_words(name)} is {found[name]:.2f}"
    return f"{own}, the retain model's {theirs[name]:.2f}"


def _in_words(attack: str) -> str:
    return "losses" if attack == "auc" else attack.replace("_", " ")


def text_membership(
    forget: TokenPredictions,
    holdout: TokenPredictions,
    forget_texts: Sequence[str],
    holdout_texts: Sequence[str],
) -> dict[str, float | None] | None:
    """AUC of each attack of `membership_scores`; forget records are the members.

    The holdout set was never trained on; the texts are those that are scored, for zlib. None for an
    attack with a score that is not finite, and for all if none has a figure.
    """
    members = membership_scores(forget, forget_texts)
    nonmembers = membership_scores(holdout, holdout_texts)
    found = {name: AttackScores(members[name], nonmembers[name]).auc for name in members}
    return None if set(found.values()) == {None} else found


def membership_scores(predictions: TokenPredictions, texts: Sequence[str]) -> dict[str, Tensor]:
    """Scores of each record, [records] float64, by the formulas of docs/metrics.md."""
    sizes = torch.tensor([len(zlib.compress(text.encode())) for text in texts])
    spread = predictions.spread.clamp(min=_SMALLEST_SPREAD)
    normalized = (-predictions.losses - predictions.expected) / spread
    found = {"loss": -predictions.record_losses, "zlib": -predictions.record_losses / sizes}
    for name, values in (("min_k", -predictions.losses), ("min_k_plus_plus", normalized)):
        found[name] = min_k_scores(predictions, values)
        found[f"{name}_40"] = min_k_scores(predictions, values, 0.4)
    return found


def gradient_scores(model: nn.Module, data: Dataset[Any]) -> Tensor:
    """-mean over parameter tensors of ‖∇ NLL‖₂ for each record, [records] float64.

    The gradient norm attack (Wang et al. 2024) as OpenUnlearning averages it (Dorna et al. 2025),
    over the trainable tensors: of a model with an adapter, the adapter's. The NLL is of all tokens,
    there of all but the last. A pass takes one record.
    """
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    scores = []
    with evaluating(model):
        for row in range(len(data)):  # type: ignore[arg-type]
            batch = {key: value.to(device) for key, value in collate([data[row]]).items()}
            scored = Scored.of(predict_logits(model, batch), batch["labels"])
            loss = CrossEntropy().total(scored, None) / len(scored.labels)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            norms = [g.double().norm().cpu() for g in gradients if g is not None]
            scores.append(-torch.stack(norms).mean())
    return torch.stack(scores)


def min_k_scores(predictions: TokenPredictions, values: Tensor, k: float = 0.2) -> Tensor:
    """Mean of the share k of lowest token values in each record, [records]; a NaN is the lowest."""
    each = (one.neg().sort(descending=True).values for one in predictions.each(values))
    return -torch.stack([one[: max(1, int(len(one) * k))].mean() for one in each])


def privleak(auc: float, retain_auc: float) -> float:
    """(auc - retain_auc) / retain_auc, after PrivLeak of MUSE (Shi et al. 2024); 0 is ideal.

    MUSE counts the holdout set as the members: `privleak(1 - auc, 1 - retain_auc)` of Min-K% at 40%
    is their figure, which their tables multiply by 100.
    """
    return (auc - retain_auc) / retain_auc


@dataclass(frozen=True)
class ShadowPredictions:
    """Predictions of S shadow models for N records, each of which trained about half of them on."""

    trained: Tensor  # [S, N, K] logits float32, after training
    unlearned: Tensor | None  # the same, after each has unlearned its records; None if not needed
    holds: Tensor  # [S, N] bool, True where a model was trained on the record


def rmia_scores(log_p: Tensor, shadow_log_p: Tensor, population: Tensor) -> Tensor:
    """RMIA: share of the population that each record beats twofold (Zarifzadeh et al. 2024).

    The mean over z of 1[Pr(x|θ)/Pr(x) ≥ 2·Pr(z|θ)/Pr(z)], Pr(x) the mean over shadow models, half
    of which were trained on x: the online attack, with γ = 2. [N] float64; NaN without a loss.

    Args:
        log_p: log p of the right class under the attacked model, [N].
        shadow_log_p: the same under each shadow model, [S, N].
        population: positions of the records z, which the attacked model was not trained on, [Z].
    """
    prior = shadow_log_p.double().logsumexp(0) - math.log(len(shadow_log_p))
    ratios = log_p.double() - prior
    others = ratios[population].sort().values
    beaten = torch.searchsorted(others, ratios - math.log(_GAMMA), right=True)
    return (beaten.double() / len(others)).masked_fill(ratios.isnan(), torch.nan)


def confidences(logits: Tensor, labels: Tensor) -> Tensor:
    """Log odds of the right class, log p - log(1 - p), [..., N] float64, of logits [..., N, K]."""
    logits, places = logits.double(), labels.expand(logits.shape[:-1])[..., None]
    others = logits.scatter(-1, places, -torch.inf).logsumexp(-1)
    return logits.gather(-1, places)[..., 0] - others


def ulira_scores(confidence: Tensor, shadow_confidence: Tensor, holds: Tensor) -> Tensor:
    """U-LiRA: log N(c; μ_in, σ_in) - log N(c; μ_out, σ_out) of each record (Hayes et al. 2024).

    "In" are the shadow models that were trained on the record and unlearned it, "out" the others.
    All records share both variances, as Carlini et al. 2022 advise for few models. [N] float64.

    Args:
        confidence: `confidences` under the attacked model, [N].
        shadow_confidence: the same under each unlearned shadow model, [S, N].
        holds: True where a shadow model was trained on the record, [S, N]; two of each per record.
    """

    def log_density(chosen: Tensor) -> Tensor:
        count = chosen.sum(0)
        mean = (shadow_confidence * chosen).sum(0) / count
        squares = ((shadow_confidence - mean).square() * chosen).sum()
        variance = (squares / (count - 1).sum()).clamp(min=_SMALLEST_SPREAD**2)
        return -(variance.log() + (confidence - mean).square() / variance) / 2

    return log_density(holds) - log_density(~holds)


def shadow_figures(
    forget: Predictions, test: Predictions, shadows: ShadowPredictions, seed: int = 42
) -> dict[str, float | None]:
    """AUC and TPR at 1% FPR of RMIA, and of U-LiRA if the shadow models have unlearned.

    `shadows` predict all forget records, then the test records that `matched_by_class` draws.
    """
    first, second = matched_by_class(forget.labels, test.labels, seed)
    labels = torch.cat([forget.labels, test.labels[second]])
    logits = torch.cat([forget.logits, test.logits[second]])
    members, others = first, torch.arange(len(forget.labels), len(labels))

    every = [-Predictions(one, labels).losses for one in (logits, *shadows.trained)]
    scores = {"rmia": rmia_scores(every[0], torch.stack(every[1:]), others)}
    if shadows.unlearned is not None:
        sure = confidences(shadows.unlearned, labels)
        scores["ulira"] = ulira_scores(confidences(logits, labels), sure, shadows.holds)
    found: dict[str, float | None] = {}
    for name, values in scores.items():
        attack = AttackScores(values[members], values[others])
        found |= {f"{name}_auc": attack.auc, f"{name}_tpr_at_1_fpr": attack.tpr}
    return found
