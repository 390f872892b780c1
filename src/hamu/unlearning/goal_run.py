"""The goal of one run: resolved from its settings and data, measured on its records, kept in its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from hamu.core.distributed import world_size
from hamu.core.objectives import log_odds, loss_at
from hamu.core.pair import PairedGradients
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.unlearning.controller import Controller
from hamu.unlearning.goals import (
    Goal,
    Reference,
    Standing,
    Targets,
    default_kind,
    record_losses,
    whole_classes,
)
from hamu.unlearning.lookahead import Lookahead
from hamu.unlearning.stop_reason import StopReason

if TYPE_CHECKING:
    from hamu.unlearning.trainer.config import UnlearnConfig

_FILE = "goal.safetensors"  # in a checkpoint
_FURTHER = 3.0  # log-odds above the target of "erased" that a lasting run takes a record to, ahead
_STEPS, _LASTING_STEPS = 400, 800  # of a run by goal, at most, if its epochs have fewer
_FORWARD = 3.0  # forward passes that a forward and a backward pass cost

Found = Predictions | TokenPredictions


class Looks(Protocol):
    """Measurements of a model."""

    sets: dict[str, Dataset[Any]]

    def predict(self, data: Dataset[Any]) -> Found:
        """Predict a set."""

    def retain_loss(self) -> float:
        """Measure the loss of some retain records."""

    @property
    def records_of_a_standing(self) -> int:
        """Count these."""


class Pairs(Protocol):
    """Source of forget batches."""

    focus: list[tuple[int, list[int]]]

    def focus_on(self, positions: list[int], start: int) -> None:
        """Draw from these positions alone, from this place on."""


class GoalRun:
    """The goal of a run.

    Args:
        args: goal, target_forget_loss, target_share, auto, lasting.
        pair: whose parameters are trained.
        looks: how the model is looked at.
        pairs: the paired data.
        place: where the run is before a step, in pairs.
        retain_batches: batches of retain records, by a seed and their number.
        end_run: ends the run.
        lookahead: of a lasting run.
        retain_predictions: what a retain model predicts for the forget records.

    Attributes:
        limits: aim and most of each forget record, [n, 2] float32; None until it is measured.
        controller: of a run by goal; None for one by hand.
    """

    def __init__(
        self,
        args: UnlearnConfig,
        pair: PairedGradients,
        looks: Looks,
        pairs: Pairs,
        *,
        place: Callable[[int], int],
        retain_batches: Callable[[int, int], Iterator[Mapping[str, Tensor]]],
        end_run: Callable[[StopReason], None],
        lookahead: Lookahead | None = None,
        retain_predictions: Found | None = None,
    ) -> None:
        self._args, self.pair, self._looks, self._pairs = args, pair, looks, pairs
        self._place, self.end_run, self.lookahead = place, end_run, lookahead
        self._retain_batches = retain_batches
        self._reference = None if retain_predictions is None else Reference.of(retain_predictions)
        self._kind = (
            self._chosen_kind()
            if args.auto or args.forget_objective == "bounded"
            else self._kind_if_any()
        )
        self._goal: Goal | None = None
        self._step = 0
        self.limits: Tensor | None = None
        self.controller: Controller | None = None
        if args.auto:
            self.controller = Controller(
                self, self._unresolved(), float(args.max_retain_increase or 0.0), self._every()
            )

    def _chosen_kind(self) -> str:
        if self._args.goal is not None:
            return self._args.goal
        sets = self._looks.sets
        return default_kind(
            has_test="test" in sets,
            has_retain_model=self._reference is not None,
            loss=self._args.target_forget_loss,
            whole_classes=whole_classes(sets["retain"], sets["forget"]),
        )

    def _kind_if_any(self) -> str | None:
        known = self._args.target_forget_loss is not None or "test" in self._looks.sets
        known = known or self._args.goal is not None or self._reference is not None
        sets = self._looks.sets
        return (
            self._chosen_kind() if known or whole_classes(sets["retain"], sets["forget"]) else None
        )

    def _unresolved(self) -> Goal:
        """The goal, as far as it is known before the model is looked at; checks what its kind needs."""
        kind, reference = self._kind, self._reference if self._kind == "retrained" else None
        if kind == "unseen" and "test" in self._looks.sets:
            reference = Reference(torch.zeros(1, dtype=torch.float64))
        return Goal(kind, self._args.target_share, self._args.target_forget_loss, reference)  # type: ignore[arg-type]

    def goal_from(self, test: Found | None) -> Goal | None:
        """The goal, by the start model's predictions of unseen records; None where nothing defines it."""
        if self._kind is None:
            return None
        if self._goal is None:
            self._goal = self._unresolved()
            if self._kind == "unseen":
                assert test is not None
                self._goal = replace(self._goal, reference=Reference.of(test))
        return self._goal

    @property
    def goal(self) -> Goal:
        """The goal; of "unseen" the unseen records are looked at now, unless they were before."""
        test = None
        if self._goal is None and self._kind == "unseen":
            test = self._looks.predict(self._looks.sets["test"])
        goal = self.goal_from(test)
        assert goal is not None
        return goal

    def stand(self) -> Standing:
        """Measure the forget records, and the retain loss on some records."""
        return self.goal.standing(
            self._looks.predict(self._looks.sets["forget"]), self._looks.retain_loss()
        )

    def rehearse(self) -> list[Standing]:
        """Fine-tune a copy of the model on retain records, and measure the forget records half-way and at the end."""
        assert self.lookahead is not None
        half, found = max(1, self.lookahead.depth // 2), []
        batches = self._retain_batches(self._step, 2 * half)
        for steps in (half, 2 * half):
            with self.lookahead.rehearsed(islice(batches, steps)):
                found.append(self.goal.standing(self._looks.predict(self._looks.sets["forget"])))
            batches = self._retain_batches(self._step, 2 * half)
        return found

    def standing_of(self, forget: Found, test: Found | None) -> Standing | None:
        """Standing of predictions for the forget set; None without a goal, or if they are of a part of the set.

        Args:
            forget: the predictions.
            test: what the start model predicts for unseen records.
        """
        goal = self.goal_from(test)
        if goal is None or (
            self._kind == "retrained" and len(record_losses(forget)) != len(goal.reference.losses)
        ):  # type: ignore[union-attr]
            return None
        return goal.standing(forget)

    def focus(self, standing: Standing) -> None:
        """Take these targets; draw forget batches from the records that are not where they should be.

        A lasting run draws from all: a record that is forgotten may come back.
        """
        targets = standing.targets
        if self.lookahead is not None and self._kind == "erased":
            aim = loss_at(log_odds(targets.aim) + _FURTHER)
            targets = Targets(targets.least, aim, targets.most)
        self.limits = targets.limits.to(self.pair.parameters[0].device, torch.float32)
        away = ~standing.forgotten | standing.too_high
        open_ = away.nonzero().flatten().tolist() if self.lookahead is None else []
        if self.controller is not None:
            self._pairs.focus_on(open_, self._place(self._step + 1))

    def at(self, step: int) -> None:
        """Note how many steps are done."""
        self._step = step

    def limits_of(self, positions: Tensor) -> Tensor:
        """The limits of some forget records, [B, 2]; measured first in a run by hand."""
        if self.limits is None:
            self.focus(self.stand())
        assert self.limits is not None
        return self.limits[positions]

    def _every(self) -> int:
        """Steps between two measurements, such that these take at most a quarter of the time."""
        args, sets = self._args, self._looks.sets
        measured = len(sets["forget"]) + self._looks.records_of_a_standing  # type: ignore[arg-type]
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size()
        trained = batch + min(batch, len(sets["forget"]))  # type: ignore[arg-type]
        return max(1, math.ceil(3 * measured / (_FORWARD * trained)))

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON holds it."""
        return {
            "controller": None if self.controller is None else self.controller.state_dict(),
            "lookahead": None if self.lookahead is None else self.lookahead.state_dict(),
            "focus": self._pairs.focus,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.controller is not None:
            self.controller.load_state_dict(state["controller"])
        if self.lookahead is not None:
            self.lookahead.load_state_dict(state["lookahead"])
        self._pairs.focus = [(start, positions) for start, positions in state["focus"]]

    def save(self, folder: Path) -> None:
        """Write tensors into a checkpoint: limits, reference, best state and the point ahead."""
        found: dict[str, Tensor] = {} if self.limits is None else {"limits": self.limits}
        if self._goal is not None and self._kind == "unseen" and self._goal.reference is not None:
            found["reference.losses"] = self._goal.reference.losses
            if self._goal.reference.labels is not None:
                found["reference.labels"] = self._goal.reference.labels
        if self.controller is not None:
            found |= {f"good.{name}": tensor for name, tensor in self.controller.good.items()}
        if self.lookahead is not None:
            found |= {f"ahead.{name}": tensor for name, tensor in self.lookahead.tensors().items()}
        if found:
            save_file(
                {n: t.detach().cpu().contiguous().clone() for n, t in found.items()}, folder / _FILE
            )

    def load(self, folder: Path) -> None:
        """Restore what `save` has written."""
        if not (folder / _FILE).is_file():
            return
        found = load_file(folder / _FILE)
        if "limits" in found:
            self.limits = found["limits"].to(self.pair.parameters[0].device)
        if "reference.losses" in found:
            reference = Reference(found["reference.losses"], found.get("reference.labels"))
            self._goal = replace(self._unresolved(), reference=reference)
        if self.controller is not None:
            self.controller.load_good(_below("good.", found))
        if self.lookahead is not None:
            self.lookahead.load_tensors(_below("ahead.", found))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def is_text(data: Any) -> bool:
    """True if the records of a data set are texts."""
    return "input_ids" in data[0]


def steps_of_a_run(args: UnlearnConfig, records: int, batch: int) -> int:
    """The most steps of a run by goal that names none: its epochs, and at least as many as goals commonly take."""
    epochs = math.ceil(args.num_train_epochs * records / batch)
    return max(_LASTING_STEPS if args.lasting else _STEPS, epochs)
