"""Ends of a run that its losses call for (paper, App. F.3), judged before each step by the batches of that step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hamu.core.distributed import all_reduced
from hamu.core.gram import SIDES
from hamu.core.objectives import CrossEntropy, Scored
from hamu.unlearning.stop_reason import StopReason


class EarlyEnds:
    """Watches the cross-entropy of a step's batches, whatever objectives the method has.

    Args:
        min_forget_loss: end when the forget loss is below it: the run does not unlearn (the paper: 0.1).
        max_retain_loss: end when the retain loss is above it: the run unlearns too much (the paper: 0.4).
        max_forget_loss: end when the forget loss has reached it; an infinite one, as of a single record of a class
            that the model rules out, says nothing of the others.
    """

    def __init__(
        self,
        min_forget_loss: float | None = None,
        max_retain_loss: float | None = None,
        max_forget_loss: float | None = None,
    ) -> None:
        self._min_forget, self._max_retain, self._target = (
            min_forget_loss,
            max_retain_loss,
            max_forget_loss,
        )
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether anything is watched at all."""
        return any(
            limit is not None for limit in (self._min_forget, self._max_retain, self._target)
        )

    def add(self, side: str, scored: Scored, weight: float = 1.0) -> None:
        """Take one batch of a side; a step may have several, and one of weight 0 counts for nothing."""
        total = CrossEntropy().total(scored.detached(), None)
        self._sums[side] = self._sums.get(side, 0.0) + weight * total
        self._counts[side] = self._counts.get(side, 0.0) + weight * len(scored.labels)

    def end(self) -> StopReason | None:
        """The end of the run before the step whose batches were added, None if it goes on; starts anew."""
        some = next(iter(self._sums.values()))
        values = [(self._sums.get(side, 0.0), self._counts.get(side, 0)) for side in SIDES]
        # both sides in every process, as with split pairing each has seen one
        sums = torch.stack(
            [
                torch.as_tensor(v, dtype=some.dtype, device=some.device)
                for pair in values
                for v in pair
            ]
        )
        totals, counts = all_reduced(sums).reshape(len(SIDES), 2).T.tolist()
        losses = {side: t / n for side, t, n in zip(SIDES, totals, counts, strict=True) if n}
        self._sums.clear()
        self._counts.clear()
        forget, retain = losses.get("forget"), losses.get("retain")
        if forget is not None and self._target is not None and self._target <= forget < math.inf:
            return StopReason(
                "target", f"the forget loss of a step, {forget:.4g}, has reached {self._target:g}"
            )
        if forget is not None and self._min_forget is not None and forget < self._min_forget:
            return StopReason(
                "no forgetting",
                f"the forget loss of a step, {forget:.4g}, is below {self._min_forget:g}",
            )
        if retain is not None and self._max_retain is not None and retain > self._max_retain:
            return StopReason(
                "retain loss",
                f"the retain loss of a step, {retain:.4g}, is above {self._max_retain:g}",
            )
        return None
