"""The goal of one run: chosen from its settings and data, measured on its records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hamu.core.objectives import log_odds, loss_at
from hamu.data import batch_of
from hamu.data.forget_sets import rows_of
from hamu.errors import HamuError
from hamu.evaluation.predictions import TokenPredictions
from hamu.unlearning import goals
from hamu.unlearning.controller import Controller
from hamu.unlearning.goals import AnyPredictions, Goal, Standing

if TYPE_CHECKING:
    from hamu.unlearning.trainer.config import UnlearnConfig
    from hamu.unlearning.trainer.trainer import UnlearnTrainer

_FURTHER = 3.0  # log-odds above the target of "erased" that a lasting run takes a record to, ahead
_STEPS, _LASTING_STEPS = 400, 800  # of a run by goal, at most, if its epochs have fewer
_FINE_TUNED = 64  # images in a batch of fine-tuning that is rehearsed; a quarter of that for texts
_LEAST_STEPS = 3  # between two measurements
_ERRORS = 3.0  # standard errors that a mean may be off
_FORWARD = 3.0  # forward passes that a forward and a backward pass cost


class GoalRun:
    """The goal of a run, None if nothing tells what forgotten means, and how far records are."""

    def __init__(
        self, trainer: UnlearnTrainer, retain_data: Any, retain_predictions: AnyPredictions | None
    ) -> None:
        self.trainer, self._retain_data = trainer, retain_data
        self.pair, self.lookahead = trainer.pair, trainer.lookahead
        self._looks, self._pairs = trainer.evaluations, trainer.train_dataset
        args: UnlearnConfig = trainer.args
        self.goal = goals.choose_goal(
            self._looks.whole,  # a sample has no labels
            args,
            has_retain_model=retain_predictions is not None,
            is_needed=args.needs_goal,
        )
        if self.goal is not None and retain_predictions is not None:
            known = len(goals.record_losses(retain_predictions))
            evaluated = len(self._looks.sets["forget"])
            if known != evaluated:
                raise HamuError(
                    f"retain_predictions are of {known} records, the forget set that is evaluated "
                    f"has {evaluated}; give those of the same records in the same order"
                )
            self.goal = self.goal.against(None, {"forget": retain_predictions})
        self.limits: Tensor | None = None  # aim and most of each forget record, [n, 2]
        self._some: Tensor | None = None  # losses of some retain records, [m]: now,
        self._known: Tensor | None = None  # and when all were measured
        self.controller: Controller | None = None  # of a run by goal
        if args.auto and self.goal is not None:
            budget = float(args.max_retain_increase or 0.0)
            self.controller = Controller(self, self.goal, budget, self._every())

    def stand(self) -> Standing:
        """Measure the forget records, and the retain loss on some records.

        Its error is that of their mean change since all retain records were measured; of texts a
        mean over tokens, which are drawn by the record (Cochran 1977, ratio estimates).
        """
        retain = self._looks.predict(self._looks.some_retain)
        self._some = goals.record_losses(retain)
        self._known = self._some if self._known is None else self._known
        sizes = torch.ones_like(self._some)
        if isinstance(retain, TokenPredictions):
            sizes = retain.lengths.double()
        change = (self._some - self._known).where(sizes > 0, 0.0)
        off = sizes * (change - (sizes * change).sum() / sizes.sum())
        is_whole = len(sizes) == len(self._looks.sets["retain"])
        error = 0.0 if is_whole else _ERRORS * (off.norm() / sizes.sum()).item()
        return self._measured(retain.losses.mean().item(), error)

    def retain_rise(self) -> float | None:
        """Rise of the loss over all retain records since the start; None if each measurement is of
        all, or the start was not measured.
        """
        start, retain = self.trainer.start_predictions.get("retain"), self._looks.sets["retain"]
        if start is None or len(self._looks.some_retain) == len(retain):
            return None
        self._known = self._some
        return (self._looks.predict(retain).losses.mean() - start.losses.mean()).item()

    @property
    def steps_between_all(self) -> int:
        """Steps that take as long as measuring all retain records."""
        return math.ceil(len(self._looks.sets["retain"]) / (_FORWARD * self._trained))

    def rehearse(self) -> list[Standing]:
        """Standings half-way through fine-tuning a copy on retain records, and at its end."""
        assert self.lookahead is not None
        half, found = max(1, self.lookahead.depth // 2), []
        for steps in (half, self.lookahead.depth):
            with self.lookahead.rehearsed(islice(self._retain_batches(), steps)):
                found.append(self._measured())
        return found

    def _measured(self, *retain: float) -> Standing:
        forget = self._looks.predict(self._looks.sets["forget"])
        return self._complete().standing(forget, *retain)

    def _retain_batches(self) -> Iterator[Mapping[str, Tensor]]:
        """Draw batches as fine-tuning takes them, alike whenever this step comes again."""
        data, step = self._retain_data, max(0, int(self.trainer.state.global_step) - 1)
        generator = torch.Generator().manual_seed(self.trainer.args.seed + step)
        size = min(_FINE_TUNED // 4 if goals.is_text(data) else _FINE_TUNED, len(data))
        device = self.pair.parameters[0].device
        while True:
            indices = torch.randperm(len(data), generator=generator)[:size].tolist()
            batch = batch_of(data, indices, self._looks.collate)
            yield {k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor)}

    def _complete(self) -> Goal:
        """The goal with its reference: the start model's losses on unseen records."""
        assert self.goal is not None
        if self.goal.kind == "unseen" and self.goal.reference is None:
            test = self.trainer.start_predictions.get("test")
            if test is None and not self.trainer.state.global_step:
                test = self._looks.predict(self._looks.sets["test"])
            if test is not None:
                self.goal = self.goal.against({"test": test}, None)
        return self.goal

    def standings(self) -> dict[str, Standing]:
        """Standings before and after, as far as there are a goal and predictions to go by."""
        found: dict[str, Standing] = {}
        roles = {"before": self.trainer.start_predictions, "after": self.trainer.predictions}
        for name, predictions in roles.items():
            if self.goal is None or "forget" not in predictions:
                continue
            goal, forget = self._complete(), predictions["forget"]
            if goal.kind != "unseen" or goal.reference is not None:
                found[name] = goal.standing(forget)
        return found

    def figures(self) -> dict[str, Any] | None:
        """The goal with its standings as JSON holds it; None if nothing defines forgotten."""
        standings = self.standings()
        if self.goal is None or "after" not in standings:
            return None
        rows = rows_of(self._looks.sets["forget"])
        more: dict[str, Any] = {"lasting": self.lookahead is not None}
        whole = len(self._looks.whole["forget"])  # type: ignore[arg-type]
        found = self.trainer.predictions
        more["doubts"] = goals.doubts(self.goal, found["forget"], found.get("test"))
        more["sampled_from"] = whole if whole > len(standings["after"].losses) else None
        if self.controller is not None:
            more |= {"budget": self.controller.budget, "reached": self.controller.reached}
            more["doubts"] += self.controller.doubts
        if "before" in standings:
            more["before"] = standings["before"].figures(rows)
        return self.goal.figures(standings["after"], rows, **more)

    def focus(self, standing: Standing) -> None:
        """Take these targets; draw forget batches from the records that are not there yet.

        A lasting run draws from all, as a forgotten record may come back; so does a run whose
        records may rise too high, where those that are there hold the others back.
        """
        targets, is_lasting = standing.targets, self.lookahead is not None
        limits = targets.limits
        if is_lasting and self.goal is not None and self.goal.kind == "erased":
            limits = replace(targets, aim=loss_at(log_odds(targets.aim) + _FURTHER)).limits
        self.limits = limits.to(self.pair.parameters[0].device, torch.float32)
        if self.controller is not None:
            draws_all = is_lasting or bool(targets.most.isfinite().any())
            open_ = [] if draws_all else (~standing.forgotten).nonzero().flatten().tolist()
            records, batch = len(self._pairs), self.trainer.global_batch
            done = int(self.trainer.state.global_step)
            first = done + 1 if done else 0  # the loader holds the next step's batch
            epoch, within = divmod(first, max(1, math.ceil(records / batch)))
            self._pairs.focus_on(open_, epoch * records + within * batch)

    def begin(self) -> None:
        """Begin a run, which compares with its own start."""
        self.limits = self._known = None
        if self.goal is not None and self.goal.kind == "unseen":
            self.goal = replace(self.goal, reference=None)

    def _every(self) -> int:
        """Steps between two measurements, such that these take at most a quarter of the time.

        A few at least, whose mean is measured: of a small set each step would move many records
        over their targets and back, and a run would give up amid them.
        """
        forget: Any = self._looks.sets["forget"]
        measured = len(forget) + len(self._looks.some_retain)
        return max(_LEAST_STEPS, math.ceil(3 * measured / (_FORWARD * self._trained)))

    @property
    def _trained(self) -> int:
        """Records that a step goes through."""
        forget: Any = self._looks.sets["forget"]
        return self.trainer.global_batch + min(self.trainer.global_batch, len(forget))

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        parts = {"controller": self.controller, "lookahead": self.lookahead}
        states = {name: one.state_dict() for name, one in parts.items() if one is not None}
        reference = None
        if self.goal is not None and self.goal.kind == "unseen":  # that of a retain model is given
            reference = self.goal.reference
        own = {"focus": self._pairs.focus, "limits": self.limits, "known": self._known}
        return states | own | {"reference": reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.controller is not None:
            self.controller.load_state_dict(state["controller"])
        if self.lookahead is not None:
            self.lookahead.load_state_dict(state["lookahead"])
        self._pairs.focus, self._known = state["focus"], state["known"]
        if state["limits"] is not None:
            self.limits = state["limits"].to(self.pair.parameters[0].device)
        if self.goal is not None and self.goal.kind == "unseen" and state["reference"] is not None:
            self.goal = replace(self.goal, reference=state["reference"])


def steps_of_a_run(args: UnlearnConfig, records: int, batch: int) -> int:
    """Most steps of a run by goal that names none: its epochs, and at least what goals take."""
    epochs = math.ceil(args.num_train_epochs * records / batch)
    return max(_LASTING_STEPS if args.lasting else _STEPS, epochs)
