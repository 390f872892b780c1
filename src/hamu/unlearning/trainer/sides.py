"""Losses of a run: of both sides in a step, with early ends, and of each set in an evaluation."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from hamu.core.distributed import all_reduced, world_size
from hamu.core.forward import OriginalModel, predict_logits, without_autocast
from hamu.core.gram import SIDES
from hamu.core.objectives import CrossEntropy, Objective, Scored, build_objective
from hamu.core.plugins import naming
from hamu.data import collate
from hamu.data.forget_sets import ALTERNATIVE, WEIGHT, subset
from hamu.errors import HamuError
from hamu.evaluation.predictions import predict, predict_tokens
from hamu.unlearning.goals import AnyPredictions, StopReason, is_text
from hamu.unlearning.trainer.config import UnlearnConfig

_RETAIN_RECORDS = 500  # that a run by goal is measured on


def check_items(model: nn.Module, data_collator: Callable[[list[Any]], Any], **data: Any) -> None:
    """Check that sets have a length, and that a first item has inputs and labels.

    The item may be what a user's own collator makes of it; of texts, whose lengths are needed
    before, it must have the input_ids, with a label each, and nothing else that the model reads,
    as `collate` would drop it.
    """
    whole: Any = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        whole = whole.get_base_model()  # PEFT's own forward takes anything
    reads = signature(whole.forward).parameters
    inputs = {"pixel_values", "input_ids", getattr(model, "main_input_name", "pixel_values")}

    def is_usable(item: Any) -> bool:
        return isinstance(item, Mapping) and "labels" in item and bool(inputs & item.keys())

    for name, one in data.items():
        if isinstance(one, IterableDataset) or (one is not None and not hasattr(one, "__len__")):
            way = "records are drawn by position, so load it as a list"
            raise HamuError(f"the {name} set, a {type(one).__name__}, has no positions; {way}")
        if one is None or not len(one):
            continue
        if isinstance(one, Mapping) and 0 not in one:
            keys = ", ".join(map(str, islice(one, 5)))
            raise HamuError(f"the {name} set is a mapping with the keys {keys}; give one of them")
        item = one[0]
        made = item if is_usable(item) or data_collator is collate else data_collator([item])
        if not is_usable(made) or ("input_ids" in made and made is not item):
            kind = f"of type {type(item).__name__}"
            if isinstance(item, Mapping):
                kind = f"a mapping with the keys {', '.join(map(str, item)) or 'none'}"
            raise HamuError(
                f"an item of the {name} set is {kind}; expected a mapping with pixel_values and "
                f"labels (images) or input_ids and labels (texts): return one from the data set, "
                f"or for images give a data_collator that makes one"
            )
        if "input_ids" not in made:
            continue
        if np.shape(made["labels"]) != np.shape(made["input_ids"]):
            raise HamuError(
                f"an item of the {name} set has labels of shape {np.shape(made['labels'])} for "
                f"input_ids of shape {np.shape(made['input_ids'])}; give each token one, or -100"
            )
        others = sorted((made.keys() & reads) - {"input_ids", "attention_mask", "labels"})
        lost = [key for key in others if _changes_what_is_read(key, made[key])]
        fetch = getattr(one, "__getitems__", list)
        if lost and data_collator is collate and not isinstance(fetch([0]), Mapping):
            raise HamuError(
                f"an item of the {name} set has {lost[0]}, which the model reads and the "
                f"default data_collator drops; give one that keeps it, or leave it out"
            )


def _changes_what_is_read(name: str, value: Any) -> bool:
    """True for an input that a model would read otherwise: not for zeros, or plain positions."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # of a GPU, or of unequal rows
        return True
    plain = np.arange(array.size) if name == "position_ids" else np.zeros(1)
    return value is not None and not np.all(array.reshape(-1) == plain)


def weight_of(batch: Mapping[str, Any], side: str) -> int:
    """Weight of a side's batch in its step; 0 if it is there for its shape alone."""
    return int(batch.get(WEIGHT, {}).get(side, 1))


def batches_of_share(length: int, size: int, share: int, processes: int) -> list[range]:
    """Batches of one process: its share of global batches that no number of processes changes.

    A last batch with fewer records than processes leaves some without a share. They get a record
    that is read for its shape alone, as ~index, so that all take part; see `PairedDataset`.
    """
    batches = (range(start, min(start + size, length)) for start in range(0, length, size))
    return [one[share::processes] or range(~one.start, -one.start) for one in batches]


class SideLosses:
    """Objectives of both sides, by name as `UnlearnConfig.objectives` has them."""

    def __init__(self, model: nn.Module, objectives: Mapping[str, str | None]) -> None:
        self._objectives = {
            side: build_objective(name) for side, name in objectives.items() if name is not None
        }
        needs_original = any(one.needs_original for one in self._objectives.values())
        self.original = OriginalModel(model) if needs_original else None

    def total(
        self, model: nn.Module, side: str, batch: Mapping[str, Any], limits: Tensor | None = None
    ) -> tuple[Tensor, Scored]:
        """Sum the objective of a side's batch; also returns the predictions behind it."""
        objective, alternative = self._objectives[side], None
        if objective.answers == "both":
            alternative = self._scored(objective, model, batch[ALTERNATIVE])
        scored, original = self._scored(objective, model, self._answers(side, batch))
        scored = replace(scored, limits=limits, alternative=alternative)
        with naming("objective", objective):
            total = objective.total(scored, original)
        if not isinstance(total, Tensor) or total.dim():
            shape = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else repr(total)
            raise HamuError(
                f"the objective {objective.name} gave a total of {shape}; add it up to a tensor "
                f"without dimensions"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            raise HamuError(
                f"the objective {objective.name} gave a total without a gradient; compute it from "
                f"scored.logits, without detach() or item()"
            )
        return total, scored

    def _scored(
        self, objective: Objective, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Scored, Tensor | None]:
        """Predictions of the model, and the original's logits if the objective needs them."""
        own, original = {key: batch[key] for key in batch if key != ALTERNATIVE}, None
        if objective.needs_original and self.original is not None:
            original = Scored.of(self.original.logits(own), own["labels"]).logits
        return Scored.of(predict_logits(model, own), own["labels"]), original

    def _answers(self, side: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a side's batch that its objective scores first."""
        is_other = self._objectives[side].answers == "alternative"
        return batch[ALTERNATIVE] if is_other else batch

    def counts(
        self, batches: Sequence[Mapping[str, Any]], device: torch.device
    ) -> dict[str, Tensor | int]:
        """By side, images or scored tokens of a step, or records that its objective is a mean over.

        They are counted over accumulated batches and all processes.
        """
        counts: dict[str, Tensor | int] = {
            side: sum(
                one.count(self._answers(side, batch[side])["labels"]) * weight_of(batch, side)
                for batch in batches
                if side in batch
            )
            for side, one in self._objectives.items()
        }
        if world_size() == 1:
            return counts
        both = torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in counts.values()])
        return dict(zip(counts, all_reduced(both.to(device)), strict=True))


@dataclass
class EarlyEnds:
    """Ends of a run by the cross-entropy of a step's batches, judged before the step (App. F.3).

    An infinite forget loss has not reached its limit: one record of a class that the model rules
    out is enough for it.
    """

    min_forget_loss: float | None = None
    max_retain_loss: float | None = None
    max_forget_loss: float | None = None
    _sums: dict[str, Tensor] = field(default_factory=dict)  # by side: summed loss, and records

    def __bool__(self) -> bool:
        """True if there is any limit."""
        limits = (self.min_forget_loss, self.max_retain_loss, self.max_forget_loss)
        return any(limit is not None for limit in limits)

    @torch.no_grad()
    def add(self, side: str, scored: Scored, weight: float = 1.0) -> None:
        """Add one of a step's batches; weight 0 is for a batch that is there for its shape."""
        total = CrossEntropy().total(scored, None)
        both = torch.stack([total, total.new_full((), float(len(scored.labels)))])
        self._sums[side] = self._sums.get(side, torch.zeros_like(both)) + weight * both

    def discard(self) -> None:
        """Forget the batches of a step that was broken off."""
        self._sums.clear()

    def end(self) -> StopReason | None:
        """Judge the step whose batches were added, None if it may be taken; starts anew."""
        none = torch.zeros_like(next(iter(self._sums.values())))
        # both sides in every process, as with split pairing each has one
        found = all_reduced(torch.stack([self._sums.get(side, none) for side in SIDES])).tolist()
        self._sums.clear()
        # a side without records has a loss of NaN, which is neither above nor below anything
        forget, retain = (loss / n if n else math.nan for loss, n in reversed(found))
        most, least, above = self.max_forget_loss, self.min_forget_loss, self.max_retain_loss
        text = f"the forget loss of a step, {forget:.4g},"
        if most is not None and most <= forget < math.inf:
            return StopReason("target", f"{text} has reached {most:g}")
        if least is not None and forget < least:
            return StopReason("no forgetting", f"{text} is below {least:g}")
        if above is not None and retain > above:
            text = f"the retain loss of a step, {retain:.4g}, is above {above:g}"
            return StopReason("retain loss", text)
        return None


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
        self.whole = {name: one for name, one in data.items() if one is not None}
        most = args.most_evaluated
        self.sets = {n: subset(one, most(n), args.seed) for n, one in self.whole.items()}
        if args.metric_for_best_model is not None:
            gains = ("forget_gain", "retain_gain", "joint_gain")
            of_sets = [f"{name}_{figure}" for name in self.sets for figure in ("loss", "accuracy")]
            check_is_measured(args.metric_for_best_model, [*of_sets, *gains])
        self._is_text = is_text(self.sets["retain"])
        self.some_retain: Any = subset(self.sets["retain"], _RETAIN_RECORDS, args.seed)

    def predict(self, data: Dataset[Any]) -> AnyPredictions:
        """Predict a set in the precision of evaluations."""
        size = self._args.eval_batch_size
        exact = without_autocast(self._model) if self._args.full_precision_eval else nullcontext()
        run: Callable[..., AnyPredictions] = predict_tokens if self._is_text else predict
        with exact:
            return run(self._model, data, size, self.collate, shared=True)


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
