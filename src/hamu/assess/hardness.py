"""The hardness of an unlearning problem, from the mean gradients of both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.assess.assessed_model import AssessedModel
from hamu.assess.gradients import PartedGram, parted_gradient
from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.core.methods.base import ConstraintStatus, regime_at

REGIMES = ("direct", "rectified", "unavoidable")


@dataclass(frozen=True)
class Hardness:
    """How hard it is to reconcile both objectives, at the model as it is (paper, Sec. 4).

    Attributes:
        kappa: κ = g_r·g_f of the clipped gradients; the larger, the harder.
        cos: cosθ between them, whatever their size.
        direct_threshold: κ1 (κ3 for HAMU-U); at or below it the objective's own gradient keeps the promise.
        stop_threshold: κ2 (κ4); above it every step that keeps the promise must hurt the other side.
        regime: "direct", "rectified" or "unavoidable" (Fig. 1).
        capacity: the largest constraint that the gradients allow.
    """

    kappa: float
    cos: float
    direct_threshold: float
    stop_threshold: float
    regime: str
    max_demand: float

    @classmethod
    def at(cls, status: ConstraintStatus) -> Hardness:
        """The whole model's, from how a constraint on the clipped gradients stands; see `constraint_status`."""
        return cls(
            status.kappa.item(),
            status.gram.total().cos.item(),
            status.direct_threshold.item(),
            status.stop_threshold.item(),
            REGIMES[int(status.regime)],
            status.max_demand.item(),
        )


@dataclass(frozen=True)
class BlockHardness:
    """The hardness of each block for one variant, [L] each.

    Attributes:
        kappa: κ_i.
        cos: cosθ_i.
        regime: an index into `REGIMES`.
        direct_threshold: κ1 of the block (κ3 for HAMU-U), -φ_i ‖g_r,i‖‖g_f,i‖.
        stop_threshold: κ2 (κ4), √(1-φ_i²) ‖g_r,i‖‖g_f,i‖.
    """

    kappa: Tensor
    cos: Tensor
    regime: Tensor
    direct_threshold: Tensor
    stop_threshold: Tensor

    @classmethod
    def at(cls, status: ConstraintStatus) -> BlockHardness:
        """Each block's, from how a constraint on the clipped gradients stands; see `constraint_status`."""
        gram, phi = status.gram, status.fraction.clamp(max=1.0)
        norms = gram.retain_norm * gram.forget_norm
        direct, stop = -phi * norms, ((1.0 - phi) * (1.0 + phi)).sqrt() * norms
        return cls(gram.dot, gram.cos, regime_at(gram.dot, direct, stop), direct, stop)


def variants_of(method: HamuQ | HamuU) -> dict[str, HamuQ | HamuU]:
    """Both variants by name, with the same constraint, each demanding it of its own side."""
    shared = (method.constraint, method.constraint_mode, method.distribution, method.radius)
    return {cls.name: cls(*shared) for cls in (HamuQ, HamuU)}


def constraint_status(gram: PairGram, method: HamuQ | HamuU) -> ConstraintStatus:
    """How a HAMU method's constraint stands."""
    status = method.weigh(gram).constraint
    assert status is not None
    return status


def clipped(gram: PairGram, max_grad_norm: float | None) -> PairGram:
    """The Gram as a step would weigh it."""
    return gram.scaled(*gram.clip_factors(max_grad_norm))


def measure_hardness(
    model: nn.Module,
    retain: Dataset[Any],
    forget: Dataset[Any],
    *,
    collate: Callable[[Any], Mapping[str, Tensor]],
    batch_size: int = 500,
) -> Hardness:
    """Measure the hardness over all data and nothing else: one pass over each side, in evaluation mode.

    Each side's mean gradient is clipped to a norm of 1; `assess` has other settings.

    Args:
        model: the model; weights, gradients and mode are as before afterwards.
        retain, forget: the two sets.
        collate: makes a batch from what a data set gives.
        batch_size: records per pass.

    Returns:
        The hardness; the thresholds are those of HAMU-Q when half of what is possible is demanded.

    Raises:
        HamuError: if a set is empty or has nothing that is scored, nothing is trainable, or a gradient is zero or not
            finite.
    """
    assessed = AssessedModel(model, retain, forget, collate, batch_size)
    with assessed.untouched():
        sides = [parted_gradient(assessed, side, parts=1) for side in ("retain", "forget")]
        with torch.no_grad():
            gram = clipped(PartedGram.of(assessed, *sides).gram(), max_grad_norm=1.0)
    return Hardness.at(
        constraint_status(gram, HamuQ(0.5, constraint_mode="relative", stopping="off"))
    )
