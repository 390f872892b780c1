"""Evaluations during a run: predictions for some records of each set, and their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.core.forward import without_autocast
from hamu.data.forget_sets import subset
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions, predict_shared
from hamu.unlearning.goals import AnyPredictions
from hamu.unlearning.trainer.config import UnlearnConfig

_FILE = "start.pt"  # in a checkpoint
_RETAIN_RECORDS = 500  # that a run by goal is measured on


class Evaluations:
    """Predict some records of each set that there is."""

    def __init__(
        self,
        model: nn.Module,
        args: UnlearnConfig,
        collate: Callable[[list[Any]], Mapping[str, Tensor]],
        **data: Dataset[Any] | None,
    ) -> None:
        self._model, self._args, self.collate = model, args, collate
        most: dict[str, int | None] = dict.fromkeys(data, args.max_eval_samples)
        if args.forget_objective == "bounded":  # every record counts
            most["forget"] = None
        self.sets: dict[str, Dataset[Any]] = {
            name: subset(one, most[name], args.seed)
            for name, one in data.items()
            if one is not None
        }
        if args.metric_for_best_model is not None:
            gains = ("forget_gain", "retain_gain", "joint_gain")
            of_sets = [f"{name}_{figure}" for name in self.sets for figure in ("loss", "accuracy")]
            check_is_measured(args.metric_for_best_model, [*of_sets, *gains])
        self._is_text = "input_ids" in self.sets["retain"][0]

    def predictions(self) -> dict[str, AnyPredictions]:
        """Predict all records of each set."""
        return {name: self.predict(data) for name, data in self.sets.items()}

    def retain_loss(self, *, of_all: bool = False) -> float:
        """Mean loss of some retain records, which a run by goal goes by; or of all."""
        most = None if of_all else _RETAIN_RECORDS
        records = subset(self.sets["retain"], most, self._args.seed)
        return self.predict(records).losses.mean().item()

    @property
    def records_of_a_standing(self) -> int:
        """Records that are predicted wherever a run by goal is measured, less those to forget."""
        return min(_RETAIN_RECORDS, len(self.sets["retain"]))  # type: ignore[arg-type]

    def predict(self, data: Dataset[Any]) -> AnyPredictions:
        """Predict a set in the precision of evaluations."""
        size = self._args.eval_batch_size
        exact = without_autocast(self._model) if self._args.full_precision_eval else nullcontext()
        with exact:
            return predict_shared(self._model, data, size, self.collate, is_text=self._is_text)


def set_figures(predictions: Mapping[str, AnyPredictions]) -> dict[str, float]:
    """Loss and accuracy of each set: means over images, or over the scored tokens of all texts."""
    figures: dict[str, float] = {}
    for name, found in predictions.items():
        figures[f"{name}_loss"] = found.losses.mean().item()
        figures[f"{name}_accuracy"] = found.correct.double().mean().item()
    return figures


def first_not_finite_loss(
    now: Mapping[str, float], start: Mapping[str, float] | None = None
) -> str | None:
    """First loss among `set_figures` that is not finite, and was at the start; None without."""
    for name, value in now.items():
        was_finite = start is None or math.isfinite(start[name])
        if name.endswith("_loss") and not math.isfinite(value) and was_finite:
            return name
    return None


def check_is_measured(metric: str, measured: Collection[str]) -> None:
    """Check that evaluations measure the figure that decides which state of a model is best."""
    if metric.removeprefix("eval_") not in measured:
        raise HamuError(
            f"metric_for_best_model {metric!r} is not measured; choose one of {', '.join(measured)}"
        )


def save_start_predictions(folder: Path, start: Mapping[str, AnyPredictions]) -> None:
    """Write predictions by set; no file if there are none."""
    if start:
        found = {
            name: (type(one).__name__, {f.name: getattr(one, f.name) for f in fields(one)})
            for name, one in start.items()
        }
        torch.save(found, folder / _FILE)


def load_start_predictions(folder: Path, order: Sequence[str]) -> dict[str, AnyPredictions]:
    """Read `save_start_predictions`, by set in this order; nothing if there is no file."""
    if not (folder / _FILE).is_file():
        return {}
    found = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    kinds = {cls.__name__: cls for cls in (Predictions, TokenPredictions)}
    return {name: kinds[found[name][0]](**found[name][1]) for name in order if name in found}
