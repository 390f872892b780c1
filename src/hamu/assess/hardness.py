"""The hardness of an unlearning problem, from the mean gradients of both sides; the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hamu.methods import HamuQ, Method
from hamu.objectives import CrossEntropy, Scored, predict_logits
from hamu.paired import PairedGradients

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
    """Measure the hardness over all data: one pass over each side, in evaluation mode.

    Args:
        model: the model; weights, gradients and mode are as before afterwards.
        retain, forget: the two sets.
        collate: makes a batch from what a data set gives.
        method: a HAMU method whose constraint the thresholds are for; by default HAMU-Q with half of what is possible.
        max_grad_norm: the clipping of the run to come.
        batch_size: records per pass.
    """
    method = method or HamuQ(0.5, constraint_mode="relative", stopping="off")
    modes = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    device = next(model.parameters()).device
    pair = PairedGradients(model, method, max_grad_norm=max_grad_norm)
    model.eval()
    objective = CrossEntropy()
    try:
        for context, data in ((pair.retain, retain), (pair.forget, forget)):
            with context():
                count = 0
                for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
                    moved = {key: value.to(device) for key, value in batch.items()}
                    scored = Scored.of(predict_logits(model, moved), moved["labels"])
                    count += len(scored.labels)
                    objective.total(scored, None).backward()
                torch._foreach_div_([p.grad for p in pair.parameters if p.grad is not None], float(count))
        step = pair.combine()
    finally:
        for module, training in modes:
            module.training = training
        for parameter, grad in grads:
            parameter.grad = grad
    constraint, regime = step.weights.constraint, step.regime
    assert constraint is not None
    assert regime is not None
    return Hardness(
        step.kappa.item(),
        step.cos.item(),
        constraint.direct_threshold.item(),
        constraint.stop_threshold.item(),
        REGIMES[int(regime)],
        constraint.capacity.item(),
    )
