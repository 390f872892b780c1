"""Goals: the loss that each record of the forget set must reach before it counts as forgotten.

In:  each forgotten record's loss, the losses of records that were never trained on, or those of a
     retain model.
Out: `Targets`, three losses for each record, and a `Standing`, the count of records that are there.

No mean decides: one record with a loss of 20 does not pay for ten with a loss of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from scipy.stats import beta
from torch import Tensor

from hamu.core.objectives import log_odds, loss_at
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions

Kind = Literal["unseen", "retrained", "erased", "loss"]
KINDS: tuple[str, ...] = get_args(Kind)
LEVEL = 0.05  # of the band around a quantile: records never trained on fall below it this often
_MARGIN = 0.1  # log-odds: how far beyond a limit a run aims, and how far below a retain model's loss counts as there
_SOME = 0.25, 0.5, 0.75  # quantiles that a standing shows


@dataclass(frozen=True)
class Targets:
    """Losses that a goal sets for n records, [n] float64 each.

    Attributes:
        least: from here on a record counts as forgotten.
        aim: where a run takes it, the T_i of the bounded objective.
        most: above it a record stands out again, and is lowered; inf where nothing is too much.
    """

    least: Tensor
    aim: Tensor
    most: Tensor

    @property
    def limits(self) -> Tensor:
        """Aim and most, [n, 2], as the bounded objective takes them."""
        return torch.stack([self.aim, self.most], dim=1)


@dataclass(frozen=True)
class Standing:
    """Standing of the records of a forget set against a goal.

    Attributes:
        losses: of each record, [n] float64.
        targets: see `Targets`.
        forgotten: [n] bool.
        retain_loss: mean loss on the retain records that were measured with them; NaN if none were.
    """

    losses: Tensor
    targets: Targets
    forgotten: Tensor
    retain_loss: float = math.nan

    @cached_property
    def count(self) -> int:
        """The number of records that are forgotten."""
        return int(self.forgotten.sum())

    @property
    def share(self) -> float:
        """Their share of all."""
        return self.count / len(self.losses)

    @cached_property
    def missing(self) -> float:
        """Mean distance to the aim in log-odds over all records; 0 for records that are forgotten."""
        gap = log_odds(self.targets.aim) - log_odds(self.losses.clamp(min=1e-12))
        return gap.clamp(min=0).masked_fill(self.forgotten, 0.0).mean().item()

    @cached_property
    def too_high(self) -> Tensor:
        """Records that stand out above their target, [n] bool."""
        return self.losses > self.targets.most

    @property
    def is_finite(self) -> bool:
        """True if no loss is NaN, and the retain loss is a number."""
        return not bool(self.losses.isnan().any()) and math.isfinite(self.retain_loss)

    def figures(self) -> dict[str, Any]:
        """The standing as JSON holds it: counts, quantiles of the losses, the ten worst records."""
        gap = log_odds(self.targets.least) - log_odds(self.losses.clamp(min=1e-12))
        worst = gap.masked_fill(self.forgotten, -math.inf).argsort(descending=True)[:10].tolist()
        quantiles = torch.quantile(
            self.losses, torch.tensor([0.0, *_SOME, 1.0], dtype=torch.float64)
        ).tolist()
        return {
            "records": len(self.losses),
            "forgotten": self.count,
            "too_high": int(self.too_high.sum()),
            "loss_quantiles": dict(
                zip(("min", "q25", "median", "q75", "max"), quantiles, strict=True)
            ),
            "worst": [
                {
                    "position": i,
                    "loss": self.losses[i].item(),
                    "target": self.targets.least[i].item(),
                }
                for i in worst
                if not self.forgotten[i]
            ],
        }


@dataclass(frozen=True)
class Reference:
    """Losses that a goal compares with.

    Attributes:
        losses: of m records, [m] float64.
        labels: the class of each image, [m]; None for texts.
    """

    losses: Tensor
    labels: Tensor | None = None

    @classmethod
    def of(cls, predictions: Predictions | TokenPredictions) -> Reference:
        """The losses of some predictions."""
        return cls(record_losses(predictions), getattr(predictions, "labels", None))


@dataclass(frozen=True)
class Goal:
    """Meaning of forgotten in a run.

    Args:
        kind: "unseen": the losses of the forgotten records are distributed as those of records never trained on, class
            by class for images: the i-th smallest of n reaches the i-th smallest of n such records, as far as chance
            (5 %) lets that be told. "retrained": each record has the loss that it has under a retain model, to 0.1 in
            log-odds. "erased": no record is recognised, for classifiers. "loss": each record has at least this loss.
        share: of the records that must be forgotten.
        loss: of kind "loss".
        reference: of "unseen" the original model's losses on unseen records, of "retrained" the retain model's on the
            forgotten ones.

    Raises:
        HamuError: if what the kind needs is missing.
    """

    kind: Kind
    share: float = 0.95
    loss: float | None = None
    reference: Reference | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check that the kind has what it needs."""
        if self.kind not in KINDS:
            raise HamuError(f"goal {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if not 0 < self.share <= 1:
            raise HamuError(f"target_share {self.share} must be a share in (0, 1]")
        if self.kind == "loss" and (self.loss is None or not 0 < self.loss < math.inf):
            raise HamuError(
                f"target_forget_loss {self.loss} must be a positive number: the loss of each record"
            )
        if self.kind == "unseen" and self.reference is None:
            raise HamuError(
                "the goal unseen compares with records that were never trained on; give --test_data, or another goal: "
                "--retain_model, or --target_forget_loss"
            )
        if self.kind == "retrained" and self.reference is None:
            raise HamuError(
                "the goal retrained compares with a retain model; give --retain_model, or another --goal"
            )

    def standing(
        self, predictions: Predictions | TokenPredictions, retain_loss: float = math.nan
    ) -> Standing:
        """Standing of a model by its predictions for the forget set."""
        losses = record_losses(predictions)
        targets = self.targets(predictions)
        if self.kind == "erased":
            assert isinstance(predictions, Predictions)
            return Standing(losses, targets, ~predictions.correct, retain_loss)
        return Standing(losses, targets, losses >= targets.least, retain_loss)

    def targets(self, predictions: Predictions | TokenPredictions) -> Targets:
        """The losses that each record must reach; those of "unseen" follow the records' present order.

        Raises:
            HamuError: if "erased" is asked of a language model.
        """
        losses = record_losses(predictions)
        never = torch.full_like(losses, math.inf)
        if self.kind == "loss":
            least = torch.full_like(losses, float(self.loss or 0.0))
            return Targets(least, _moved(least, _MARGIN), never)
        if self.kind == "retrained":
            assert self.reference is not None
            aim = self.reference.losses.clamp(min=1e-12)
            if len(aim) != len(losses):
                raise HamuError(
                    f"the retain model predicts {len(aim)} forget records, the model {len(losses)}; both need the same"
                )
            return Targets(_moved(aim, -_MARGIN), aim, _moved(aim, 1.0))
        if self.kind == "erased":
            if not isinstance(predictions, Predictions):
                raise HamuError(
                    "the goal erased is for classifiers; of texts choose unseen, retrained or a loss"
                )
            # with p at most 1/(eK) another class is more likely, whatever the others are
            least = torch.full_like(losses, 1.0 + math.log(predictions.logits.shape[1]))
            return Targets(least, least, never)
        return self._unseen(predictions, losses)

    def _unseen(self, predictions: Predictions | TokenPredictions, losses: Tensor) -> Targets:
        assert self.reference is not None
        found = Targets(*(torch.empty_like(losses) for _ in range(3)))
        unseen = self.reference.losses
        for members, among in _groups(Reference.of(predictions), self.reference):
            n = len(members)
            rank = losses[members].argsort(stable=True).argsort().double() + 1
            # the level of the i-th smallest of n draws is distributed as Beta(i, n + 1 - i)
            levels = [
                torch.from_numpy(beta.ppf(q, rank.numpy(), (n + 1 - rank).numpy()))
                for q in (LEVEL, 0.5, 1 - LEVEL)
            ]
            for column, level in zip((found.least, found.aim, found.most), levels, strict=True):
                column[members] = torch.quantile(unseen[among], level.clamp(0, 1))
        return found


def record_losses(predictions: Predictions | TokenPredictions) -> Tensor:
    """The loss of each record, [n] float64: of an image, or the mean over a text's scored tokens."""
    return predictions.losses if isinstance(predictions, Predictions) else predictions.record_losses


def default_kind(
    *, has_test: bool, has_retain_model: bool, loss: float | None, whole_classes: bool
) -> Kind:
    """The goal of a run that names none.

    Args:
        has_test: whether there are records that were never trained on.
        has_retain_model: whether a retain model is named.
        loss: --target_forget_loss.
        whole_classes: whether no record of the forgotten classes is retained.

    Raises:
        HamuError: if nothing tells what forgotten means.
    """
    if loss is not None:
        return "loss"
    if whole_classes:
        return "erased"
    if has_test:
        return "unseen"
    if has_retain_model:
        return "retrained"
    raise HamuError(
        "nothing tells when a record is forgotten; give --test_data (records never trained on), --retain_model, or "
        "--target_forget_loss"
    )


def check_goal_settings(goal: str | None, loss: float | None, share: float) -> None:
    """Check --goal, --target_forget_loss and --target_share.

    Raises:
        HamuError: if one is out of range, or they contradict each other.
    """
    if goal is not None and goal not in KINDS:
        raise HamuError(f"goal {goal!r} is unknown; choose one of {', '.join(KINDS)}")
    if goal not in (None, "loss") and loss is not None:
        raise HamuError(
            f"target_forget_loss is of the goal loss, not {goal}; leave one of them out"
        )
    if goal == "loss" and loss is None:
        raise HamuError(
            "the goal loss needs --target_forget_loss, the loss that each record must have"
        )
    if loss is not None and not 0 < loss < math.inf:
        raise HamuError(
            f"target_forget_loss {loss} must be a positive number: the loss of each record"
        )
    if not 0 < share <= 1:
        raise HamuError(f"target_share {share} must be a share in (0, 1]")


def whole_classes(retain: Any, forget: Any) -> bool:
    """True if the forget records are images of classes that none of the retain records is of."""
    kept, gone = (getattr(data, "labels", None) for data in (retain, forget))
    if not isinstance(kept, Tensor) or not isinstance(gone, Tensor):
        return False
    return not bool(torch.isin(gone.unique(), kept).any())


def _moved(loss: Tensor, by: float) -> Tensor:
    return loss_at(log_odds(loss) + by)


def _groups(ours: Reference, reference: Reference) -> list[tuple[Tensor, Tensor]]:
    """Positions of the forgotten records and of the unseen ones that they are compared with.

    Images of a class that no unseen image has are compared with all of them.
    """
    everyone = torch.arange(len(reference.losses))
    if ours.labels is None or reference.labels is None:
        return [(torch.arange(len(ours.losses)), everyone)]
    found = []
    for label in ours.labels.unique():
        among = (reference.labels == label).nonzero().flatten()
        found.append(
            ((ours.labels == label).nonzero().flatten(), among if len(among) else everyone)
        )
    return found


def standing_line(standing: Mapping[str, Any]) -> str:
    """A sentence about `Standing.figures`."""
    low, mid, high = (standing["loss_quantiles"][name] for name in ("min", "median", "max"))
    return (
        f"{standing['forgotten']} of {standing['records']} records are forgotten (losses {low:.3g} to {high:.3g}, "
        f"median {mid:.3g})"
    )
