"""UnlearnTrainer: transformers' Trainer with a pair of backward passes in each step.

Everything that the Trainer does stays as it is (optimizers, schedulers, accumulation, precision, checkpoints,
callbacks); a step differs in three places: two batches are counted apart, two gradients are collected apart, and the
combined one is what the optimizer sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import TrainerCallback

from hamu.core.distributed import (
    DataParallelLayout,
    SplitPairing,
    all_reduced,
    broadcast,
    check_equal,
    rank,
    side_of_process,
    world_size,
)
from hamu.core.forward import predict_logits
from hamu.core.gram import SIDES
from hamu.core.guard import check_steps_all
from hamu.core.methods import Method
from hamu.core.objectives import CrossEntropy, Scored
from hamu.core.pair import PairedGradients
from hamu.core.pair_step import PairStep
from hamu.data import UnlearningData
from hamu.data.images import collate
from hamu.data.pairing import POSITIONS, WEIGHT, PairCollator, PairedDataset
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.models.causal_mask import check_causal_mask_of_batch
from hamu.unlearning.controller import Controller
from hamu.unlearning.goal_run import GoalRun, is_text, steps_of_a_run
from hamu.unlearning.goals import Standing
from hamu.unlearning.lookahead import Lookahead
from hamu.unlearning.stop_reason import ALL_DONE, StopReason
from hamu.unlearning.trainer.config import UnlearnConfig, checkpoints_activations
from hamu.unlearning.trainer.logs import print_lines, silence
from hamu.unlearning.trainer.measuring import (
    Evaluations,
    eval_sets,
    gains,
    load_start_predictions,
    save_start_predictions,
    set_figures,
)
from hamu.unlearning.trainer.monitor import Monitor
from hamu.unlearning.trainer.promise import layer_figures, step_figures
from hamu.unlearning.trainer.resumable import (
    ResumableTrainer,
    let_gradients_through,
    run_state_of,
    to_channels_last,
)
from hamu.unlearning.trainer.sides import (
    EarlyEnds,
    ShareSampler,
    SideLosses,
    check_items,
    shared_loader,
)

_FINE_TUNED = 64  # images in a batch of fine-tuning that is rehearsed; a quarter of that for texts
_COMPARED_EVERY = 100  # steps between two comparisons of the weights of all processes
_REMEMBERED = 1000  # steps in `state.log_history`; a callback's on_log sees them all
_OF_ONE_BATCH = (
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
)  # of transformers' Trainer


class UnlearnTrainer(ResumableTrainer):
    """Unlearn the forget set from a model. A run can be broken off and resumed: see `ResumableTrainer`.

    It prints a line per logged step; `state.log_history`, callbacks and trackers get all figures.

    Args:
        model: a Hugging Face model, or any module that maps pixel values to logits; changed in place.
        args: the settings.
        retain_dataset, forget_dataset: training records that stay and that must go; an item is a mapping with
            pixel_values and labels (images) or input_ids and labels (texts).
        test_dataset: records that were never trained on, evaluated where given.
        data_collator: makes a batch from a list of items of either data set.
        retain_predictions: what a retain model predicts for the forget records, for the goal "retrained".
        kwargs: passed to `transformers.Trainer`.

    Attributes:
        pair: the `PairedGradients` behind the steps.
        sides: those that the method uses.
        side_losses: what their backward passes are taken of.
        watch: what surrounds each step.
        evaluations: what the model is looked at through.
        goal_run: when a record counts as forgotten, and how the run gets there.
        lookahead: of a lasting run, None for others.
        evaluated_step: step of the last evaluation, -1 before the first.
        start_predictions: by set, what the first evaluation predicted.
        predictions: by set, what the last one did.

    Raises:
        HamuError: if a set is empty or its items are not what a run trains on, the model cannot train, labels are of
            tokens and it is no causal language model (seen at the first batch), a function is given that would never be
            called, an optimizer that leaves out what is trained, or the constraint cannot be met at the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        args: UnlearnConfig,
        *,
        retain_dataset: Dataset[Any],
        forget_dataset: Dataset[Any],
        test_dataset: Dataset[Any] | None = None,
        data_collator: Callable[[list[Any]], Mapping[str, Tensor]] = collate,
        retain_predictions: Predictions | TokenPredictions | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(args, kwargs)
        method = args.build_method()
        self.sides = [side for side in SIDES if getattr(method, f"uses_{side}")]
        self._is_split = args.pairing == "split"
        # with split pairing a process has but one side; else all that the method needs
        self._own_sides = (
            self.sides if not self._is_split else [side_of_process(rank(), world_size())]
        )
        pairs = PairedDataset(
            retain_dataset,
            forget_dataset,
            sides=self._own_sides,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.shuffle,  # type: ignore[arg-type]  # checked by the settings
            with_positions=args.forget_objective == "bounded",
        )
        check_items(
            model, data_collator, retain=retain_dataset, forget=forget_dataset, test=test_dataset
        )
        _prepare_model(model, args)
        self.pair = _new_pair(model, method, args)
        self.side_losses = SideLosses(model, args.objectives())
        self._batchnorms = [
            m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
        if self._is_split and self._batchnorms and not args.freeze_batchnorm:
            raise HamuError(
                "with split pairing a process sees one side alone, and its BatchNorm statistics would be of that side; "
                "leave freeze_batchnorm on, or pairing at sequential"
            )
        sets = eval_sets(args, retain=retain_dataset, forget=forget_dataset, test=test_dataset)
        self.evaluations = Evaluations(model, args, sets, data_collator)
        self._early_ends = EarlyEnds(
            args.min_forget_loss, args.max_retain_loss, args.max_forget_loss
        )
        self.watch = Monitor(self.pair, args, partial(self._side_total, model), model, self.sides)
        self.lookahead = (
            _new_lookahead(model, self.pair, args, retain_dataset) if args.lasting else None
        )
        self.goal_run = GoalRun(
            args,
            self.pair,
            self.evaluations,  # type: ignore[arg-type]  # its predictions are one of two kinds
            pairs,
            place=self._place_of,
            retain_batches=partial(self._retain_batches, retain_dataset, data_collator),
            end_run=self._end_run,
            lookahead=self.lookahead,
            retain_predictions=retain_predictions,
        )
        if args.auto and args.max_steps <= 0:
            args.max_steps = steps_of_a_run(args, len(pairs), self._records_of_a_step(args))
        self._taken = self._skipped = self._skips_in_a_row = 0
        self._start: dict[str, float] = {}  # figures of the first evaluation
        self._end: StopReason | None = None
        self.evaluated_step = -1
        self._skips_evaluation = False  # of a start that was evaluated before the run was resumed
        self._weights_are_earlier = False
        self.start_predictions: dict[str, Predictions | TokenPredictions] = {}
        self.predictions: dict[str, Predictions | TokenPredictions] = {}
        self._losses: dict[str, Tensor] = {}
        self._causality_checked = False
        self._step: PairStep | None = None
        self._scaling: dict[str, Any] | None = None
        self._steps_of_best: int | None = None
        collator, retain = PairCollator(data_collator), sets["retain"]
        super().__init__(
            model, args, data_collator=collator, train_dataset=pairs, eval_dataset=retain, **kwargs
        )
        print_lines(self, kwargs.get("callbacks") or [])
        if self.optimizer is not None:  # one that was given
            check_steps_all(self.optimizer, self.pair)
        if self._is_split or args.shard:
            # accelerate is to prepare the model for its precision, but not to average its gradients
            self.accelerator.prepare_model = partial(
                self.accelerator.prepare_model, evaluation_mode=True
            )
        if self.controller is not None:
            self.add_callback(self.controller)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `ResumableTrainer` does; a run that diverged goes back to its best checkpoint, if it has one."""
        output = super().train(*args, **kwargs)
        diverged = self.end.kind == "retain loss"
        # else the best weights, or those of the goal, are loaded already
        chosen = self.args.load_best_model_at_end or self.controller is not None
        if diverged and not (chosen or self.was_interrupted):
            if self.state.best_model_checkpoint is None:
                how = (
                    ", --save_strategy would write some" if self.args.save_strategy == "no" else ""
                )
                self._say_of_end(f"there is no checkpoint to go back to{how}")
            else:
                self._load_best_model()
                self._say_of_end(f"back to the weights of step {self.state.best_global_step}")
        return output

    @property
    def controller(self) -> Controller | None:
        """The controller of a run by goal; None for one by hand."""
        return self.goal_run.controller

    @property
    def end(self) -> StopReason:  # type: ignore[override]
        """Why the run ended."""
        return self._end or ALL_DONE

    @property
    def stop_reason(self) -> str:
        """Why the run ended before its last epoch, "" if it did not."""
        return "" if self._end is None else self._end.text

    @property
    def steps_taken(self) -> int:
        """Steps in which the weights were updated."""
        return self._taken

    @property
    def skip_reason(self) -> str:
        """Why the last step was skipped, "" if it was not."""
        return "" if self._step is None else self._step.reason

    @property
    def steps_skipped(self) -> int:
        """Steps that could not be taken, or that the trust region undid."""
        return self._skipped

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.predictions = {}
        self._steps_of_best = run_state_of(Path(str(self.state.best_model_checkpoint)))["taken"]
        self._weights_are_earlier = self.state.best_global_step != self.state.global_step
        if self._weights_are_earlier and self.args.load_best_model_at_end:
            self._say_of_end(
                f"the weights are the best ones, of step {self.state.best_global_step}"
            )

    def _end_run(self, end: StopReason) -> None:
        self._end = end
        self.control.should_training_stop = True

    def _say_of_end(self, more: str) -> None:
        self._end = replace(self.end, text=f"{self.end.text}; {more}")

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        """A sampler that goes in order: the paired data set does the shuffling."""
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of training batches; each of several processes reads its share of the same global batches."""
        if world_size() == 1:
            return super().get_train_dataloader()
        share, sharing = rank() % self._sharing, self._sharing
        sampler = ShareSampler(
            len(self.train_dataset), self._train_batch_size * sharing, share, sharing
        )
        return shared_loader(self.train_dataset, sampler, self.data_collator, self.args)

    @property
    def _sharing(self) -> int:
        """How many processes share the batches of a side."""
        layout: Any = self.pair.layout
        return int(layout.half) if self._is_split else world_size()

    @property
    def has_begun(self) -> bool:
        """True if a step was taken; one that was skipped is none."""
        return self.steps_taken > 0

    @property
    def global_batch(self) -> int:
        """Records of each side in a step, over all processes."""
        return self._records_of_a_step(self.args)

    def _records_of_a_step(self, args: UnlearnConfig) -> int:
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self._sharing

    def _place_of(self, step: int) -> int:
        """The first pair of a step, counted over all epochs."""
        records = len(self.train_dataset)
        epoch, within = divmod(step, max(1, math.ceil(records / self.global_batch)))
        return epoch * records + within * self.global_batch

    def _retain_batches(
        self,
        data: Any,
        collator: Callable[[list[Any]], Mapping[str, Tensor]],
        seed: int,
        number: int,
    ) -> Iterator[Mapping[str, Tensor]]:
        """Batches as fine-tuning takes them, on the device."""
        generator = torch.Generator().manual_seed(self.args.seed + seed)
        size = (
            min(_FINE_TUNED, len(data)) if not is_text(data) else min(_FINE_TUNED // 4, len(data))
        )
        for _ in range(number):
            indices = torch.randperm(len(data), generator=generator)[:size].tolist()
            fetch = getattr(data, "__getitems__", None)
            batch = collator(fetch(indices) if fetch else [data[i] for i in indices])
            yield self._prepare_inputs(dict(batch))

    def standings(self) -> dict[str, Standing]:
        """Standings of the forget set against the goal before and after the run; empty without a goal."""
        found: dict[str, Standing] = {}
        for name, predictions in (("before", self.start_predictions), ("after", self.predictions)):
            if "forget" in predictions:
                standing = self.goal_run.standing_of(predictions, self.start_predictions)
                found |= {} if standing is None else {name: standing}
        return found

    def save_more(self, folder: Path) -> None:
        """Write the start model's predictions, and the state that a run by goal would go back to."""
        save_start_predictions(folder, self.start_predictions)
        self.goal_run.save(folder)

    def load_more(self, folder: Path) -> None:
        """Restore what `save_more` has written."""
        found = load_start_predictions(folder, list(self.evaluations.sets))
        self.start_predictions = found or self.start_predictions
        self.goal_run.load(folder)

    @property
    def _parts(self) -> dict[str, Any]:
        """Parts with a state; the goal first: its controller sets the demand that the pair was saved with."""
        return {"goal": self.goal_run, "pair": self.pair, "watch": self.watch}

    def run_state(self) -> dict[str, Any]:
        """Counts, stop reason and the parts' states, as JSON holds them."""
        own = {
            "taken": self._taken,
            "skipped": self._skipped,
            "skips_in_a_row": self._skips_in_a_row,
            "start": self._start,
            "end": None if self._end is None else vars(self._end),
            "evaluated": self.evaluated_step,
        }
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return super().run_state() | own | parts

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Restore `run_state`."""
        super().load_run_state(state)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._taken, self._skipped = state["taken"], state["skipped"]
        self._skips_in_a_row, self._start = state["skips_in_a_row"], state["start"]
        self._end = None if state["end"] is None else StopReason(**state["end"])
        self.evaluated_step = state["evaluated"]
        self._skips_evaluation = self.args.eval_on_start

    def begin_run(self) -> None:
        """Stay at the end if the run had come to it before it was saved."""
        if self.resumed_from and self._end is not None:
            self.control.should_training_stop = True

    def _get_num_items_in_batch(  # type: ignore[override]
        self, batch_samples: list[Any], device: torch.device
    ) -> dict[str, Tensor | int]:
        return self.side_losses.counts(batch_samples, device)

    def training_step(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Run both passes of one batch of pairs, and combine once the step's batches are all in; returns the loss."""
        model.train()
        if self.args.freeze_batchnorm:
            for module in self._batchnorms:
                module.eval()
        inputs = self._prepare_inputs(inputs)
        weight = inputs.get(WEIGHT, 1.0)
        if self.lookahead is not None and not self._losses:  # once a step
            self.lookahead.advance(inputs["retain"], inputs["forget"])
        losses: dict[str, Tensor] = {}
        limits = self.goal_run.limits_of(inputs[POSITIONS]) if POSITIONS in inputs else None
        measured = self.watch.is_due(self.state.global_step + 1, self.state.logging_steps)
        # DDP averages gradients over the processes, but each has only its part of the sum; split pairing sums them
        scale = 1 if self._is_split else world_size()
        for side in self._own_sides:
            batch = inputs[side]
            count = (
                self.side_losses.count(side, batch)
                if num_items_in_batch is None
                else num_items_in_batch[side]
            )
            if measured:
                more = {} if limits is None else {"limits": limits}
                self.watch.passes.remember(side, batch, weight, count, **more)
            ahead = self.lookahead if side == "forget" else None
            with getattr(self.pair, side)(), nullcontext() if ahead is None else ahead.ahead():
                loss = self._side_total(model, side, batch, weight, limits) * weight / count
                self.accelerator.backward(loss * scale if scale > 1 else loss)
            losses[side] = loss.detach()
            self._losses[side] = self._losses.get(side, 0.0) + losses[side]
        if self.accelerator.sync_gradients:
            self._end_step()
        return torch.stack(list(losses.values())).sum()

    def _side_total(
        self,
        model: nn.Module,
        side: str,
        batch: Mapping[str, Tensor],
        weight: float = 1.0,
        limits: Tensor | None = None,
    ) -> Tensor:
        if not self._causality_checked and torch.is_grad_enabled():
            check_causal_mask_of_batch(self.model, batch)
            self._causality_checked = True
        total, scored = self.side_losses.total(
            model, side, batch, limits if side == "forget" else None
        )
        if self._early_ends and torch.is_grad_enabled():
            self._early_ends.add(side, scored, weight)
        self.watch.passes.see(scored.logits)
        return total

    def begin_step(self) -> None:
        """Begin a step, of which nothing is summed yet."""
        super().begin_step()
        self._losses.clear()
        self.goal_run.at(self.state.global_step)

    def _end_step(self) -> None:
        """Combine, unless the losses say that the run is over."""
        end = self._early_ends.end() if self._early_ends else None
        if self.controller is not None and self.controller.ended:
            end = self.end
        if end is None:
            if not self.args.shard and self.state.global_step % _COMPARED_EVERY == 0:
                check_equal(self.pair.names, self.pair.parameters)
            keep = self.watch.keep(self.optimizer)
            finite = torch.isfinite(
                all_reduced(torch.stack(list(self._losses.values())).double().sum())
            )
            self._record_decision(
                self.pair.combine(self.accelerator.scaler, keep=keep, losses_finite=finite)
            )
            return
        self.watch.skip()
        self.pair.abandon(self.accelerator.scaler)
        self._step = None
        self._end_run(end)

    def _record_decision(self, step: PairStep) -> None:
        """Count the step, and end the run if it says so."""
        self._step = step
        if self.controller is not None:
            self.controller.note(step)
        if step.decision == "step":
            self._taken += 1
            self._skips_in_a_row = 0
            return
        self.watch.skip()
        self._skipped += 1
        self._skips_in_a_row += 1
        if self.steps_taken == 0 and step.should_stop and step.cause == "infeasible":
            raise HamuError(f"no step can be taken: {step.reason}")
        if step.should_stop:
            self._end_run(
                StopReason("infeasible" if step.cause == "infeasible" else "criterion", step.reason)
            )
        elif self._skips_in_a_row >= self.args.max_skips:
            why = (
                f"{self._skips_in_a_row} steps in a row could not be taken: {step.reason}. The weights are those "
                f"of the last step that was"
            )
            if step.cause == "not finite":
                why += (
                    "; lower the learning rate, or look for records with values that are not finite"
                )
            elif step.cause == "out of range":
                why += "; lower the constraint, or give the radius as a number"
            self._end_run(StopReason("skips", why))

    def begin_optimizer_step(self) -> None:
        """Look at the weights before the optimizer moves them."""
        self._scaling = self._scaling_to_keep()
        if self._step is not None and self._step.decision == "step":
            self.watch.before(self._step, self.optimizer, self._losses)

    def _scaling_to_keep(self) -> dict[str, Any] | None:
        """The loss scaler's state where it would take a step that was not taken for an overflow; None elsewhere."""
        scaler, step = self.accelerator.scaler, self._step
        innocent = step is None or (step.decision != "step" and step.finite)
        return (
            scaler.state_dict() if innocent and scaler is not None and scaler.is_enabled() else None
        )

    def end_optimizer_step(self) -> None:
        """Look at what the optimizer did; a step that was undone was none."""
        if self._scaling is not None:
            self.accelerator.scaler.load_state_dict(self._scaling)
        if self._step is None or self._step.decision != "step" or not self.watch.after():
            return
        self._step = replace(
            self._step, decision="skip", reason="it did not do what it promised"
        )  # for the log
        self._taken -= 1
        self._skipped += 1
        trust = self.watch.trust
        if trust is not None and trust.exhausted:
            self._end_run(
                StopReason(
                    "no small step", "no step is small enough to realise anything of its promise"
                )
            )

    @property
    def steps_in_model(self) -> int:
        """Steps that the weights have behind them: fewer than were taken, once the run has gone back to a state."""
        return self.steps_taken if self._steps_of_best is None else self._steps_of_best

    @property
    def promise(self) -> dict[str, Any] | None:
        """The steps that were checked, summed up; None if none was. See `PromiseRecord.summary`."""
        return self.watch.record.summary()

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Each side was clipped before it was weighed; their combination is not clipped again."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """‖g*‖, from the Gram: no pass over the gradients."""
        if self._step is None:  # the run ended before this step
            return torch.zeros(())
        return self._step.combined_sq.sum().sqrt()

    def floating_point_ops(self, inputs: Any) -> int:
        """0, as nothing is counted: a pair of batches is not one model input."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put the step's own figures in place of the summed loss."""
        if "loss" in logs and self._losses:
            del logs["loss"]
            logs.update(self._step_figures())
            if self.controller is not None:
                logs["learning_rate"] = self.controller.rate_of_step
        for name in ("train_loss", "total_flos"):  # the sum of two losses, and what is not counted
            logs.pop(name, None)
        super().log(logs, start_time)
        steps = [number for number, entry in enumerate(self.state.log_history) if "taken" in entry]
        for number in reversed(steps[:-_REMEMBERED]):
            del self.state.log_history[number]

    def _step_figures(self) -> dict[str, float]:
        """The figures of the last step, by name."""
        step, none = self._step, torch.zeros((), device=self.args.device)
        losses: dict[str, Tensor] = {
            side: all_reduced(self._losses.get(side, none).double()) for side in self.sides
        }
        figures = step_figures(step, losses, self.sides) | self.watch.figures
        taken = step is not None and step.decision == "step"
        return figures | {"taken": float(taken), "stopped": float(self._end is not None)}

    def layer_figures(self) -> dict[str, list[float] | None]:
        """cosθ_i and ‖Δw_i‖ of the last step by block; None for what is not known."""
        return layer_figures(self._step, self.watch.lengths, self.sides)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, but not once more at the start of a run that is resumed: that was before its first step."""
        if self._skips_evaluation:
            self._skips_evaluation = False
            return {}
        return super()._evaluate(*args, **kwargs)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure loss and accuracy on the retain, forget and test sets, and the changes so far, by name."""
        evaluated = [
            entry["step"]
            for entry in self.state.log_history
            if f"{metric_key_prefix}_forget_gain" in entry
        ]
        # evaluated before the run was resumed; or those of other weights, which are not the last step's
        known = self.state.global_step in evaluated or self._weights_are_earlier
        if (
            not self.args.freeze_batchnorm
        ):  # each process has those of its own records; the first one's are saved
            broadcast(
                [statistics for module in self._batchnorms for statistics in module.buffers()]
            )
        self.predictions = self.evaluations.predictions()
        self.start_predictions = self.start_predictions or self.predictions
        self.evaluated_step = self.state.global_step
        if self.args.forget_objective == "bounded" and self.controller is None:
            self.goal_run.focus(self.standings()["after"])
        found = set_figures(self.predictions)
        self._start = self._start or found
        found = found | gains(found, self._start)
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in found.items()}
        if known:
            return metrics
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def _prepare_model(model: nn.Module, args: UnlearnConfig) -> None:
    """Bring a model to where it will be unlearned, before anything is made that lives where its parameters do.

    Raises:
        HamuError: if activations are to be recomputed, and the model cannot.
    """
    if args.shard:
        from hamu.core.distributed.sharded import shard  # loads what only sharded models need

        shard(model, args.device.type)
    elif not hasattr(model, "hf_device_map"):
        model.to(args.device)
    if args.channels_last and not args.shard:  # shards have the usual order
        to_channels_last(model)
    if checkpoints_activations(args):
        let_gradients_through(model)


def _new_pair(model: nn.Module, method: Method, args: UnlearnConfig) -> PairedGradients:
    """The two gradients of a model that has been prepared."""
    pair = PairedGradients(
        model,
        method,
        blocks=args.blocks,  # type: ignore[arg-type]  # checked by the settings
        max_grad_norm=args.clip_norm,
        offload_grads=args.offload_grads,
    )
    if args.pairing == "split":
        pair.use(SplitPairing(pair.parameters, pair.block_of))
    elif world_size() > 1 and not args.shard:
        pair.use(DataParallelLayout(pair.parameters, pair.block_of))
    return pair


def _new_lookahead(
    model: nn.Module, pair: PairedGradients, args: UnlearnConfig, data: Dataset[Any]
) -> Lookahead:
    def loss(batch: Mapping[str, Tensor], rows: slice) -> Tensor:
        part = {name: value[rows] for name, value in batch.items()}
        scored = Scored.of(predict_logits(model, part), part["labels"])
        return CrossEntropy().total(scored, None) / len(scored.labels)

    rate = args.lookahead_rate or (3e-4 if is_text(data) else 1e-3)
    return Lookahead(model, pair.parameters, loss, rate=rate, depth=args.lookahead_steps)


def _check_arguments(args: UnlearnConfig, given: Mapping[str, Any]) -> None:
    """Check that what was given for `transformers.Trainer` has a place in a run of unlearning."""
    for name in _OF_ONE_BATCH:
        if given.get(name) is not None:
            raise HamuError(
                f"{name} is for a batch of one kind, and would never be called; leave it out"
            )
    if args.shard and given.get("optimizers", (None, None))[0] is not None:
        raise HamuError(
            "an optimizer that is given holds the whole parameters, which --shard replaces by parts; give its "
            "class as optimizer_cls_and_kwargs, or name one with optim"
        )


def quiet_trainer(
    model: Any,
    problem: UnlearningData[Any],
    args: UnlearnConfig,
    callbacks: list[TrainerCallback],
    collator: Callable[[Any], Mapping[str, Any]],
    retain_predictions: Any = None,
) -> UnlearnTrainer:
    """A trainer for this problem that prints nothing by itself."""
    trainer = UnlearnTrainer(
        model,
        args,
        retain_dataset=problem.retain,
        forget_dataset=problem.forget,
        test_dataset=problem.test,
        data_collator=collator,
        callbacks=callbacks,
        retain_predictions=retain_predictions,
    )
    silence(trainer)
    return trainer
