"""Evaluations of a run: loss and accuracy of each set, changes since the start, and the history for evaluation.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from hamu.core.forward import without_autocast
from hamu.core.gram import SIDES
from hamu.data.forget_sets import subset
from hamu.errors import HamuError
from hamu.evaluation.gains import Gains
from hamu.evaluation.predictions import Predictions, TokenPredictions, predict_shared
from hamu.unlearning.trainer.config import UnlearnConfig

if TYPE_CHECKING:
    from hamu.unlearning.trainer.trainer import UnlearnTrainer

_FILE = "start.safetensors"  # in a checkpoint
_AnyPredictions = Predictions | TokenPredictions
_RETAIN_RECORDS = 500  # that a run by goal is measured on


class Evaluations:
    """Looks at a model through some records of each set.

    Args:
        model: as it will be when it is looked at.
        args: max_eval_samples, full_precision_eval, per_device_eval_batch_size.
        sets: by name, those of `eval_sets`.
        collate: makes a batch of items.
    """

    def __init__(
        self,
        model: nn.Module,
        args: UnlearnConfig,
        sets: Mapping[str, Dataset[Any]],
        collate: Callable[[list[Any]], Mapping[str, Tensor]],
    ) -> None:
        self._model, self._args, self.sets, self._collate = model, args, sets, collate
        self._is_text = "input_ids" in sets["retain"][0]

    def predictions(self) -> dict[str, Predictions | TokenPredictions]:
        """What the model predicts for all records of each set, by set."""
        return {name: self.predict(data) for name, data in self.sets.items()}

    def retain_loss(self) -> float:
        """The mean loss of some retain records, which a run by goal goes by."""
        return (
            self.predict(subset(self.sets["retain"], _RETAIN_RECORDS, self._args.seed))
            .losses.mean()
            .item()
        )

    @property
    def records_of_a_standing(self) -> int:
        """Records that are predicted wherever a run by goal is measured, less those to forget."""
        return min(_RETAIN_RECORDS, len(self.sets["retain"]))  # type: ignore[arg-type]

    def predict(self, data: Dataset[Any]) -> Predictions | TokenPredictions:
        """Predict a set in the precision of evaluations."""
        args = self._args
        with without_autocast(self._model) if args.full_precision_eval else nullcontext():
            return predict_shared(
                self._model, data, args.eval_batch_size, self._collate, is_text=self._is_text
            )


def eval_sets(args: UnlearnConfig, **data: Dataset[Any] | None) -> dict[str, Dataset[Any]]:
    """What is evaluated of each set that there is.

    Raises:
        HamuError: if the figure that decides which state is best is not measured on them.
    """
    whole = ("forget",) if args.forget_objective == "bounded" else ()  # whose every record counts
    most = {name: None if name in whole else args.max_eval_samples for name in data}
    found = {
        name: subset(one, most[name], args.seed) for name, one in data.items() if one is not None
    }
    if args.metric_for_best_model is not None:
        measured = [f"{name}_{figure}" for name in found for figure in ("loss", "accuracy")]
        check_is_measured(
            args.metric_for_best_model, [*measured, "forget_gain", "retain_gain", "joint_gain"]
        )
    return found


def set_figures(predictions: Mapping[str, Predictions | TokenPredictions]) -> dict[str, float]:
    """Loss and accuracy of each set: means over images, or over the scored tokens of all texts."""
    figures: dict[str, float] = {}
    for name, found in predictions.items():
        figures[f"{name}_loss"] = found.losses.mean().item()
        figures[f"{name}_accuracy"] = found.correct.double().mean().item()
    return figures


def first_not_finite_loss(
    now: Mapping[str, float], start: Mapping[str, float] | None = None
) -> str | None:
    """The first loss among the figures of `set_figures` that is not finite, None if all are.

    Args:
        now: the figures of a model.
        start: those of the model that it was made from; a loss that was not finite there either does not count.
    """
    broken = (
        name for name, value in now.items() if name.endswith("_loss") and not math.isfinite(value)
    )
    return next((name for name in broken if start is None or math.isfinite(start[name])), None)


def gains(now: Mapping[str, float], start: Mapping[str, float]) -> dict[str, float]:
    """What was gained since the start in forgetting, in retaining, and in the worse of both."""
    losses: list[dict[str, float]] = [
        {side: figures[f"{side}_loss"] for side in SIDES} for figures in (start, now)
    ]
    found = Gains.between(*losses)
    return {"forget_gain": found.forget, "retain_gain": found.retain, "joint_gain": found.joint}


def check_is_measured(metric: str, measured: Collection[str]) -> None:
    """Check the figure that decides which state of a model is best.

    Raises:
        HamuError: if no evaluation measures it.
    """
    if metric.removeprefix("eval_") not in measured:
        raise HamuError(
            f"metric_for_best_model {metric!r} is not measured; choose one of {', '.join(measured)}"
        )


def save_start_predictions(folder: Path, start: Mapping[str, _AnyPredictions]) -> None:
    """Write them, by set, as tensors "SET/CLASS/FIELD"; no file if there are none."""
    found = {
        f"{kind}/{type(predictions).__name__}/{one.name}": torch.as_tensor(
            getattr(predictions, one.name)
        )
        for kind, predictions in start.items()
        for one in fields(predictions)
    }
    if found:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / _FILE)


def load_start_predictions(folder: Path, order: Sequence[str]) -> dict[str, _AnyPredictions]:
    """What was written, by set in this order; nothing if there is no file."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, tensor in load_file(folder / _FILE).items() if (folder / _FILE).is_file() else ():
        kind, cls, part = name.split("/")
        found.setdefault((kind, cls), {})[part] = tensor
    return {
        kind: _predictions(cls, values)
        for (kind, cls), values in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    }


def _predictions(cls: str, values: dict[str, Any]) -> _AnyPredictions:
    if cls == Predictions.__name__:
        return Predictions(**values)
    return TokenPredictions(**{**values, "records": int(values["records"])})


def history(trainer: UnlearnTrainer) -> dict[str, Any]:
    """The evaluations of a run that has ended, its steps, what it promised and why it ended."""
    return {
        "trajectory": [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry],
        "steps_taken": trainer.steps_taken,
        "steps_skipped": trainer.steps_skipped,
        "steps_in_model": trainer.steps_in_model,
        "promise": trainer.promise,
        "controller": None if trainer.controller is None else trainer.controller.history,
        "goal": _goal(trainer),
        "ended": trainer.end.text,
        "ended_kind": trainer.end.kind,
    }


def _goal(trainer: UnlearnTrainer) -> dict[str, Any] | None:
    """Goal of the run with its standings before and after; None if nothing defines forgotten."""
    standings, goal = trainer.standings(), trainer.goal_run.goal
    if goal is None or "after" not in standings:
        return None
    controller = trainer.controller
    return {
        "kind": goal.kind,
        "share": goal.share,
        "loss": goal.loss,
        "budget": None if controller is None else controller.budget,
        "reached": standings["after"].share >= goal.share
        if controller is None
        else controller.reached,
        "lasting": trainer.lookahead is not None,
    } | {name: standing.figures() for name, standing in standings.items()}
