"""The hardness of an unlearning problem, from the mean gradients of both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.assess.gradients import PartedGram, parted_gradient
from hamu.assess.problem import Problem
from hamu.gram import PairGram
from hamu.methods import HamuQ, HamuU, Method
from hamu.methods.base import ConstraintStatus

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
    capacity: float

    @classmethod
    def of(cls, gram: PairGram, method: Method) -> Hardness:
        """From the Gram of the clipped gradients, for a HAMU method's constraint."""
        return cls.at(constraint_status(gram, method))

    @classmethod
    def at(cls, status: ConstraintStatus) -> Hardness:
        """From how a constraint stands."""
        kappa, direct, stop = (t.item() for t in (status.kappa, status.direct_threshold, status.stop_threshold))
        return cls(
            kappa,
            status.gram.total().cos.item(),
            direct,
            stop,
            REGIMES[(kappa > direct) + (kappa > stop)],
            status.capacity.item(),
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
    def of(cls, gram: PairGram, method: Method) -> BlockHardness:
        """From the Gram of the clipped gradients, for a HAMU method's constraint."""
        return cls.at(constraint_status(gram, method))

    @classmethod
    def at(cls, status: ConstraintStatus) -> BlockHardness:
        """From how a constraint stands."""
        gram, phi = status.gram, status.fraction.clamp(max=1.0)
        norms = gram.retain_norm * gram.forget_norm
        direct, stop = -phi * norms, ((1.0 - phi) * (1.0 + phi)).sqrt() * norms
        return cls(gram.dot, gram.cos, regime_at(gram.dot, direct, stop), direct, stop)


def regime_at(kappa: Tensor, direct_threshold: Tensor, stop_threshold: Tensor) -> Tensor:
    """The regime of each κ between its thresholds, an index into `REGIMES`."""
    return (kappa > direct_threshold).long() + (kappa > stop_threshold).long()


def variants_of(method: HamuQ | HamuU) -> dict[str, HamuQ | HamuU]:
    """Both variants by name, with the same constraint, each demanding it of its own side."""
    shared = (method.constraint, method.constraint_mode, method.distribution, method.radius)
    return {cls.name: cls(*shared) for cls in (HamuQ, HamuU)}


def constraint_status(gram: PairGram, method: Method) -> ConstraintStatus:
    """How a HAMU method's constraint stands."""
    status = method.weigh(gram).constraint
    assert status is not None, f"{method.name} has no constraint"
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
    method: Method | None = None,
    max_grad_norm: float | None = 1.0,
    batch_size: int = 500,
) -> Hardness:
    """Measure the hardness over all data and nothing else: one pass over each side, in evaluation mode.

    Args:
        model: the model; weights, gradients and mode are as before afterwards.
        retain, forget: the two sets.
        collate: makes a batch from what a data set gives.
        method: a HAMU method whose constraint the thresholds are for; by default HAMU-Q with half of what is possible.
        max_grad_norm: the clipping of the run to come.
        batch_size: records per pass.
    """
    problem = Problem(model, retain, forget, collate, batch_size)
    with problem.untouched():
        sides = [parted_gradient(problem, side, parts=1) for side in ("retain", "forget")]
        with torch.no_grad():
            gram = clipped(PartedGram.of(problem, *sides).gram(), max_grad_norm)
    return Hardness.of(gram, method or HamuQ(0.5, constraint_mode="relative", stopping="off"))
