"""Evaluations and steps of a finished run, up to where an experiment ends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.paper.batches import Batches
from hamu.evaluation.gains import Gains
from hamu.files import EVALUATION, STEPS, read_json
from hamu.unlearning.record.inputs import Inputs, read_inputs

Evaluated = dict[str, float]  # figures of an evaluation, and its epoch


@dataclass(frozen=True)
class FinishedRun:
    """A run up to an epoch; it may have gone on for longer.

    Attributes:
        folder: of the run.
        epochs: how many to look at.
        batches: of the run.
    """

    folder: Path
    epochs: float
    batches: Batches

    @property
    def steps(self) -> int:
        """Number of steps that count."""
        return math.ceil(self.epochs * self.batches.steps)

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The run's evaluation.json."""
        found: dict[str, Any] = read_json(self.folder / EVALUATION, remove=self.folder)
        return found

    @cached_property
    def inputs(self) -> Inputs:
        """Inputs of the run."""
        return read_inputs(self.folder)

    @property
    def is_whole(self) -> bool:
        """True if the run ended within the epochs that are looked at."""
        return bool(self.evaluation["trajectory"][-1]["step"] <= self.steps)

    @cached_property
    def points(self) -> list[Evaluated]:
        """Each evaluation from the start on: epoch, gains, losses, accuracies; without those that are not finite."""
        entries = [entry for entry in self.evaluation["trajectory"] if entry["step"] <= self.steps]
        found = []
        for entry in entries:
            point = {
                key.removeprefix("eval_"): value
                for key, value in entry.items()
                if key.startswith("eval_")
            }
            point = {
                key: float(value) for key, value in point.items() if isinstance(value, int | float)
            }
            if math.isfinite(point["forget_gain"]) and math.isfinite(point["retain_gain"]):
                found.append({"epoch": entry["step"] / self.batches.steps} | point)
        return found

    @property
    def last(self) -> Evaluated:
        """The last evaluation that is looked at."""
        return self.points[-1]

    @property
    def trajectory(self) -> list[Gains]:
        """The gains at each evaluation, from the origin on."""
        return [Gains(point["retain_gain"], point["forget_gain"]) for point in self.points]

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The figures of each step that was taken."""
        lines = (self.folder / STEPS).read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        return [step for step in steps if step["taken"] and step["step"] <= self.steps]

    def mean(self, key: str) -> float | None:
        """The mean of a figure over all steps that have it."""
        values = [step[key] for step in self.log if step.get(key) is not None]
        return fmean(values) if values else None

    def promised(self, side: str, max_grad_norm: float) -> float:
        """Sum of the steps' promised changes of the loss of one side, each of its own batch.

        The log has the promise for clipped gradients, per unit of learning rate; the loss changes by as much more as
        its gradient is longer than the clipped one.

        Args:
            side: "retain" or "forget".
            max_grad_norm: to which each side was clipped, 0 for no clipping.
        """
        total = 0.0
        for step in self.log:
            longer = max(1.0, step[f"{side}_norm"] / max_grad_norm) if max_grad_norm > 0 else 1.0
            total += step["learning_rate"] * step[f"promised_{side}_change"] * longer
        return total

    def by_epoch(self, key: str) -> list[float]:
        """The mean of a figure over the steps of each epoch."""
        epochs: dict[int, list[float]] = {}
        for step in self.log:
            if step.get(key) is not None:
                epochs.setdefault((step["step"] - 1) // self.batches.steps, []).append(step[key])
        return [fmean(values) for _, values in sorted(epochs.items())]
