"""What the backward passes of a step are taken of: the objective of each side, summed over a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.distributed import all_reduced, world_size
from hamu.core.forward import OriginalModel, predict_logits
from hamu.core.objectives import Scored, build_objective
from hamu.data.pairing import WEIGHT
from hamu.errors import HamuError


class SideLosses:
    """The objectives of both sides.

    Args:
        model: before its first step; where an objective compares with it, its trainable tensors are kept.
        objectives: the name of each side's, None for a side without a pass; see `UnlearnConfig.objectives`.

    Attributes:
        original: the model before its first step, None where nothing compares with it.
    """

    def __init__(self, model: nn.Module, objectives: Mapping[str, str | None]) -> None:
        self._objectives = {
            side: build_objective(name) for side, name in objectives.items() if name is not None
        }
        needs_original = any(objective.needs_original for objective in self._objectives.values())
        self.original = OriginalModel(model) if needs_original else None

    def total(
        self, model: nn.Module, side: str, batch: Mapping[str, Tensor], limits: Tensor | None = None
    ) -> tuple[Tensor, Scored]:
        """The objective of a side's batch, summed, 0-dim; and the predictions that it was taken of.

        Args:
            model: as it is.
            side: "retain" or "forget".
            batch: its records.
            limits: of each record, for a bounded objective; see `Scored`.

        Raises:
            HamuError: if an objective gives one value for each record.
        """
        objective, labels = self._objectives[side], batch["labels"]
        original = None
        if objective.needs_original and self.original is not None:
            original = Scored.of(self.original.logits(batch), labels).logits
        scored = Scored.of(predict_logits(model, batch), labels, limits)
        total = objective.total(scored, original)
        if total.dim():
            raise HamuError(
                f"the objective {objective.name} gave a total of shape {tuple(total.shape)}; add it up"
            )
        return total, scored

    def count(self, side: str, batch: Mapping[str, Tensor]) -> Tensor | int:
        """Images or scored tokens of a batch, or whatever the side's objective is a mean over."""
        return self._objectives[side].count(batch["labels"])

    def counts(
        self, batches: Sequence[Mapping[str, Any]], device: torch.device
    ) -> dict[str, Tensor | int]:
        """By side, the same of a whole step: over all its accumulated batches and all processes."""
        counts = {
            side: sum(
                self.count(side, batch[side]) * batch.get(WEIGHT, 1.0)
                for batch in batches
                if side in batch
            )
            for side in self._objectives
        }
        if world_size() == 1:
            return counts
        both = all_reduced(
            torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in counts.values()]).to(
                device
            )
        )
        return dict(zip(counts, both, strict=True))
