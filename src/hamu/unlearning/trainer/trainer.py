"""UnlearnTrainer: transformers' Trainer with a pair of backward passes in each step.

Everything that the Trainer does stays as it is (optimizers, schedulers, accumulation, precision,
checkpoints, callbacks); a step differs in three places: two batches are counted apart, two
gradients are collected apart, and the combined one is what the optimizer sees.
"""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from hamu.core import distributed
from hamu.core.distributed import all_reduced, rank, side_of_process, world_size
from hamu.core.forward import predict_logits
from hamu.core.gram import SIDES
from hamu.core.guard import check_steps_all
from hamu.core.methods import Method
from hamu.core.objectives import CrossEntropy, Scored
from hamu.core.pair import PairedGradients, PairStep
from hamu.data import UnlearningData, collate
from hamu.data.forget_sets import ALTERNATIVE, POSITIONS, PairedDataset
from hamu.errors import HamuError
from hamu.evaluation.gains import Gains
from hamu.models.language import check_causal_mask
from hamu.models.storage import refuse_encoder
from hamu.unlearning.goal_run import GoalRun, steps_of_a_run
from hamu.unlearning.goals import ALL_DONE, BY_A_CALLBACK, AnyPredictions, StopReason, is_text
from hamu.unlearning.lookahead import Lookahead
from hamu.unlearning.trainer.config import UnlearnConfig
from hamu.unlearning.trainer.logs import silence
from hamu.unlearning.trainer.promise import StepWatch
from hamu.unlearning.trainer.resumable import ResumableTrainer, run_state_of, set_up_layers
from hamu.unlearning.trainer.sides import (
    EarlyEnds,
    Evaluations,
    SideLosses,
    batches_of_share,
    check_items,
    set_figures,
    weight_of,
)

_warn = logging.get_logger(__name__).warning
_COMPARED_EVERY = 100  # steps between two comparisons of the weights of all processes
_REMEMBERED = 1000  # steps in `state.log_history`; a callback's on_log sees them all
_OWN = "the trainer's own; give retain_dataset, forget_dataset, test_dataset"
_REFUSED = {"train_dataset": _OWN, "eval_dataset": _OWN} | dict.fromkeys(
    ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"),
    "for a batch of one kind, so never called; leave it out",
)
_REMEDIES = {
    "not finite": "; lower the learning rate, or look for records with values that are not finite",
    "out of range": "; lower the constraint, or give the radius as a number",
}
_PARTS = ("goal_run", "pair", "watch")  # the controller sets the demand of the pair
_SAVED = (
    *("steps_taken", "steps_skipped", "skips_in_a_row", "skip_reason"),
    *("stop", "start_predictions"),
)


class UnlearnTrainer(ResumableTrainer):
    """Unlearn the forget set from a model; a run resumes as `ResumableTrainer` describes.

    Args:
        model: a Hugging Face model, or any module that maps pixel values to logits; changed in
            place.
        args: the settings.
        retain_dataset, forget_dataset: training records that stay and that must go; an item is a
            mapping with pixel_values and labels (images) or input_ids and labels (texts).
        test_dataset: records that were never trained on, evaluated where given.
        data_collator: makes a batch from a list of items of either data set; by default
            `hamu.data.collate`, which pads.
        retain_predictions: of a retain model for the forget records, for the goal "retrained".
        kwargs: passed to `transformers.Trainer`.

    Attributes:
        pair: the `PairedGradients` behind the steps.
        sides: those that the method uses.
        steps_taken: steps in which the weights were updated.
        steps_skipped: steps that could not be taken, or that the trust region undid.
        skip_reason: of the last of them.
        stop: `StopReason` of the run.
        goal_run: when a record counts as forgotten, and how the run gets there.
        controller: of a run by goal; None for one by hand.
        start_predictions: of the first evaluation, by set.
        predictions: of the weights as they are, by set; empty unless they were evaluated.

    Raises:
        HamuError: if data, model (as at the first batch), settings and optimizer do not fit
            together, or the constraint cannot be met at the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        args: UnlearnConfig,
        *,
        retain_dataset: Dataset[Any],
        forget_dataset: Dataset[Any],
        test_dataset: Dataset[Any] | None = None,
        data_collator: Callable[[list[Any]], Mapping[str, Tensor]] | None = None,
        retain_predictions: AnyPredictions | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(model, args, kwargs, forget_dataset)
        _check_model(model, args, kwargs, type(self))
        args = copy.copy(args)  # defaults that depend on the data are settled in it
        args.train_sampling_strategy = "sequential"  # the paired data set does the shuffling
        method = args.build_method()
        self.sides = [side for side in SIDES if getattr(method, f"uses_{side}")]
        self._is_split = args.pairing == "split"
        # with split pairing a process has but one side; else all that the method needs
        self._own_sides = [side_of_process(rank(), world_size())] if self._is_split else self.sides
        data = {"retain": retain_dataset, "forget": forget_dataset, "test": test_dataset}
        data_collator = data_collator or collate
        check_items(model, data_collator, **data)
        has_others = args.needs_alternatives and "forget" in self._own_sides
        pairs = PairedDataset(
            retain_dataset,
            forget_dataset,
            collate=data_collator,
            sides=[*self._own_sides, ALTERNATIVE] if has_others else self._own_sides,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.shuffle,  # type: ignore[arg-type]  # checked by the settings
            with_positions=args.forget_objective == "bounded",
            share=rank() % self._sharing,
        )
        args.settle_batch_sizes(is_text=is_text(retain_dataset))
        self._batchnorms = _batchnorms(model, args)
        self.evaluations = Evaluations(model, args, data_collator, **data)
        self._records = {side: len(data[side]) for side in SIDES}  # type: ignore[arg-type]
        self._set_up(model, method, args)
        kwargs |= {"train_dataset": pairs, "eval_dataset": self.evaluations.sets["retain"]}
        super().__init__(model, args, data_collator=collate, **kwargs)
        self.goal_run = GoalRun(self, retain_dataset, retain_predictions)
        self.controller = self.goal_run.controller
        self.start_predictions: dict[str, AnyPredictions] = {}
        self.predictions: dict[str, AnyPredictions] = {}
        self._begin()
        if args.auto and args.max_steps <= 0:
            args.max_steps = steps_of_a_run(args, len(pairs), self.global_batch)
        if self.optimizer is not None:  # one that was given
            check_steps_all(self.optimizer, self.pair)
        if self._is_split or args.shard:
            # accelerate is to prepare the model for its precision, but not to average its gradients
            prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
            self.accelerator.prepare_model = prepare
        for callback in filter(None, (self.watch, self.controller)):
            self.add_callback(callback)

    def _set_up(self, model: nn.Module, method: Method, args: UnlearnConfig) -> None:
        if args.torch_compile:  # a check repeats its passes uncompiled, by the same random numbers
            import torch._inductor.config as inductor  # slow to load

            inductor.fallback_random = True
        self.pair = _prepared(model, method, args, **self._records)
        self.side_losses = SideLosses(model, args.objectives())
        limits = (args.min_forget_loss, args.max_retain_loss, args.max_forget_loss)
        self._early_ends = EarlyEnds(*limits)
        self.watch = StepWatch(self.pair, args, model, self.sides, self._undone)
        self.lookahead: Lookahead | None = None
        if args.lasting:
            usual = 3e-4 if is_text(self.evaluations.sets["retain"]) else 1e-3
            rate, depth = args.lookahead_rate or usual, args.lookahead_steps
            loss = partial(_mean_loss, model)
            self.lookahead = Lookahead(model, self.pair.parameters, loss, rate=rate, depth=depth)
        self._of_step: list[Any] = []  # batches of the step under way
        self._causality_checked = False

    def _begin(self) -> None:
        """Keep weights and optimizer of an earlier run alone; a checkpoint is loaded after this."""
        self.steps_taken = self.steps_skipped = self.skips_in_a_row = 0
        self.skip_reason, self.stop = "", ALL_DONE
        self._steps_of_best: int | None = None
        self.restored: int | None = None  # step whose checkpoint was loaded at the end
        self._losses: dict[str, Tensor] = {}  # of the step at hand, by side
        if self.state.global_step or self.args.eval_on_start:
            self.start_predictions, self.predictions = {}, {}
        self.pair.discard()  # what an earlier run was broken off in
        self.pair.use(self.pair.layout)
        self.watch.begin()
        self._early_ends.discard()
        self.goal_run.begin()
        if self.lookahead is not None:
            self.lookahead.restart()

    # The run: data, checkpoints, and its end.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `ResumableTrainer` does; if it diverged, go back to the best checkpoint."""
        self._begin()
        output = super().train(*args, **kwargs)
        is_early = self.state.global_step < self.state.max_steps and not self.was_interrupted
        if self.stop == ALL_DONE and is_early:
            self.stop = BY_A_CALLBACK
        if self.stop == ALL_DONE and self.steps_skipped and not self.steps_taken:
            tried = f"{self.steps_skipped} tried, and the last one skipped as {self.skip_reason}"
            self.stop = StopReason("skips", tried)
            _warn(f"no step was taken, the model is as it was: {tried}")
        best, more = self.state.best_global_step, ""
        is_earlier = best not in (None, self.state.global_step)  # the end is evaluated all the same
        if self.args.load_best_model_at_end:
            more = f"; the weights are the best ones, of step {best}" if is_earlier else ""
        elif self.stop.kind == "retain loss" and not (self.controller or self.was_interrupted):
            more = "; no evaluated checkpoint to restore, see --save_strategy and --eval_strategy"
            if is_earlier:
                self._load_best_model()
                more = f"; back to the weights of step {best}"
        self.stop = replace(self.stop, text=self.stop.text + more)
        return output

    @property
    def stop_reason(self) -> str:
        """Stop reason in words, "" if nothing ended the run before its last epoch."""
        return "" if self.stop == ALL_DONE else self.stop.text

    @property
    def promise(self) -> dict[str, Any] | None:
        """Sum of the checked steps, None without any; see `PromiseRecord.summary`."""
        return self.watch.record.summary()

    @property
    def has_begun(self) -> bool:
        """True if a step was taken; skipped steps do not count."""
        return self.steps_taken > 0

    @property
    def is_over(self) -> bool:
        """True if no step is to follow, as where the run had ended when it was saved."""
        return self.stop != ALL_DONE or super().is_over

    @property
    def _steps_in_model(self) -> int:
        if self.controller is not None and self.controller.ended:
            return self.controller.updates_of_best
        return self.steps_taken if self._steps_of_best is None else self._steps_of_best

    @property
    def _sharing(self) -> int:
        return world_size() // 2 if self._is_split else world_size()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Load training batches; several processes read their shares of the same global ones."""
        if world_size() == 1:
            return super().get_train_dataloader()
        share, sharing = rank() % self._sharing, self._sharing
        batch = self._train_batch_size * sharing
        loader: DataLoader[Any] = DataLoaderShard(
            self.train_dataset,
            batch_sampler=batches_of_share(len(self.train_dataset), batch, share, sharing),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            device=self.args.device,
            _non_blocking=self.accelerator.non_blocking,
        )
        return loader

    def run_state(self) -> dict[str, Any]:
        """Counts, stop reason, the start model's predictions, and the parts' states."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        own = {name: getattr(self, name) for name in _SAVED}
        own["accumulation"] = self.args.gradient_accumulation_steps
        return super().run_state() | own | parts

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Restore `run_state`; "bounded" counts a forget record once in each batch."""
        now = self.args.gradient_accumulation_steps
        was = state["accumulation"]
        old, new = state["global_batch"] // was, self.global_batch // now
        if self.args.needs_goal and (was, old) != (now, new):
            size, rest = divmod(old, self._sharing)
            way = f"give --gradient_accumulation_steps {was} --per_device_train_batch_size {size}"
            raise HamuError(
                f"by goal, or with the objective bounded, a run keeps its batches: it had {was} a "
                f"step of {old} records over all processes, and would have {now} of {new}; "
                f"{f'start a number of processes that divides {old}' if rest else way}"
            )
        super().load_run_state(state)
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name in _SAVED:
            setattr(self, name, state[name])

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.predictions = {}
        of_best = run_state_of(Path(str(self.state.best_model_checkpoint)))
        self._steps_of_best = of_best["steps_taken"]
        self.restored = self.state.best_global_step

    def end_run(self, stop: StopReason) -> None:
        """End the run after the step at hand; its weights may be others than were evaluated."""
        self.stop, self.predictions = stop, {}
        self.control.should_training_stop = True

    # The step.

    def _get_num_items_in_batch(  # type: ignore[override]
        self, batch_samples: list[Any], device: torch.device
    ) -> dict[str, Tensor | int]:
        self._of_step, self._losses, self.predictions = batch_samples, {}, {}
        return self.side_losses.counts(batch_samples, device)

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: Any, num_items_in_batch: Mapping[str, Tensor | int]
    ) -> Tensor:
        """Run both passes of a batch of pairs, and combine after the step's last; return the loss.

        The number of items is that of the whole step, by side.
        """
        model.train()
        for module in self._batchnorms if self.args.freeze_batchnorm else ():
            module.eval()
        inputs = self._prepare_inputs(inputs)
        if self.lookahead is not None and not self._losses:  # once a step
            whole: list[Any] = [self._prepare_inputs(one) for one in self._of_step]
            self.lookahead.advance([(one["retain"], one["forget"]) for one in whole])
        if self.args.forget_objective == "bounded" and self.goal_run.limits is None:
            self.goal_run.focus(self.goal_run.stand())  # by all processes, also of the other side
        step, logged_every = self.state.global_step + 1, self.state.logging_steps
        is_checked = self.watch.schedule.is_due(step, logged_every)
        # DDP averages gradients over the processes, but each has only its part of the sum; split
        # pairing sums them
        scale = 1 if self._is_split else world_size()
        losses: list[Tensor] = []
        for side in self._own_sides:
            count = num_items_in_batch[side]
            loss_of = partial(self._loss, side, inputs, count)
            if is_checked:
                self.watch.passes.remember(side, partial(loss_of, self.model), count)
            ahead = self.lookahead if side == "forget" else None
            with getattr(self.pair, side)(), nullcontext() if ahead is None else ahead.ahead():
                loss = loss_of(model)
                self.accelerator.backward(loss * scale if scale > 1 else loss)
            losses.append(loss.detach())
            self._losses[side] = self._losses.get(side, 0.0) + losses[-1]
        if self.accelerator.sync_gradients:
            self._end_step()
        return torch.stack(losses).sum()

    def _loss(
        self, side: str, inputs: Mapping[str, Any], count: Tensor | int, model: nn.Module
    ) -> Tensor:
        """A side's batch as part of the mean over its step, of `count` records or tokens."""
        batch, weight, limits = inputs[side], weight_of(inputs, side), None
        if side == "forget" and POSITIONS in inputs:
            assert self.goal_run.limits is not None  # `training_step` sees to it
            limits = self.goal_run.limits[inputs[POSITIONS]]
        if not self._causality_checked:
            check_causal_mask(self.model, batch)
            self._causality_checked = True
        total, scored = self.side_losses.total(model, side, batch, limits)
        if self._early_ends and torch.is_grad_enabled():
            self._early_ends.add(side, scored, weight)
        self.watch.passes.see(scored.logits)
        return total * weight / count

    def _end_step(self) -> None:
        scaler = self.accelerator.scaler
        stop = self._early_ends.end() if self._early_ends else None
        if stop is not None:
            self.pair.abandon(scaler)
            self.watch.take(None, self._losses, scaler)
            self.steps_skipped += 1
            self.end_run(stop)
            return
        if not self.args.shard and self.state.global_step % _COMPARED_EVERY == 0:
            distributed.check_equal(self.pair.names, self.pair.parameters)
        none = torch.zeros_like(next(iter(self._losses.values())))
        losses = torch.stack([self._losses.get(side, none) for side in SIDES]).double()
        keep = self.watch.keep(self.optimizer)
        pairs = len(self.train_dataset)
        batch = min(self.global_batch, pairs)
        done = self.state.global_step % math.ceil(pairs / batch) * batch
        share = min(1.0, (pairs - done) / batch)  # the last step of an epoch may have fewer
        step = self.pair.combine(scaler, keep=keep, losses=all_reduced(losses), share=share)
        self.watch.take(step, self._losses, scaler)
        if self.controller is not None:
            self.controller.note(step)
        if step.decision == "step":
            self.steps_taken += 1
            self.skips_in_a_row = 0
        else:
            self._skip(step)

    def _skip(self, step: PairStep) -> None:
        self.steps_skipped += 1
        self.skips_in_a_row += 1
        self.skip_reason = step.reason
        is_infeasible = step.cause == "infeasible"
        if step.should_stop and is_infeasible and not self.steps_taken:
            raise HamuError(f"no step can be taken: {step.reason}")
        if step.should_stop:
            self.end_run(StopReason("infeasible" if is_infeasible else "criterion", step.reason))
        elif self.skips_in_a_row >= self.args.max_skips:
            text = f"{self.skips_in_a_row} steps in a row could not be taken: {step.reason}"
            self.end_run(StopReason("skips", text + _REMEDIES.get(step.cause, "")))

    def _undone(self, is_least: bool) -> None:
        self.steps_taken -= 1
        self.steps_skipped += 1
        self.skip_reason = self.watch.step.reason  # type: ignore[union-attr]  # the step undone
        if is_least:
            text = "no step is small enough to realise anything of its promise"
            self.end_run(StopReason("no small step", text))

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Each side was clipped before it was weighed; their combination is not clipped again."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """‖g*‖, from the Gram: no pass over the gradients."""
        step = self.watch.step
        return torch.zeros(()) if step is None else step.combined_sq.sum().sqrt()

    def floating_point_ops(self, inputs: Any) -> int:
        """0, as nothing is counted: a pair of batches is not one model input."""
        return 0

    # Figures.

    def _log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Tensor, *args: Any, learning_rate: float
    ) -> None:
        """Log what the host knows: a read of the summed loss would wait for the device."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._globalstep_last_logged = self.state.global_step
            with self.watch.schedule.logged():
                logs = {"grad_norm": float(grad_norm), "learning_rate": learning_rate}
                logs |= self.watch.step_figures() | self._population_figures()
                logs["taken"] = float(self.watch.is_taken)
                logs["stopped"] = float(self.stop.kind != ALL_DONE.kind)
                if self.controller is not None:
                    logs |= self.controller.figures()
                self.log(logs)
        super()._log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log figures, but for a sum of both losses; of the steps the history keeps the latest."""
        for name in ("train_loss", "total_flos"):  # a sum, and not counted
            logs.pop(name, None)
        super().log(logs, start_time)
        steps = [number for number, entry in enumerate(self.state.log_history) if "taken" in entry]
        for number in reversed(steps[:-_REMEMBERED]):
            del self.state.log_history[number]

    def _population_figures(self) -> dict[str, float]:
        """Latest estimates for the expected gradients; the noise scales are in records.

        Steps of n of N records on average, each once, have the variance (1/n - 1/N) S² on average.
        """
        status = None if self.watch.step is None else self.watch.step.population
        if status is None:
            return {}
        found = {"headroom": status.headroom, "headroom_error": status.error}
        found |= {"expected_kappa": status.kappa, "expected_cos": status.cos}
        pairs = len(self.train_dataset)
        for side, whole in self._records.items():
            if self.global_batch < whole:
                share = math.ceil(pairs / self.global_batch) / pairs - 1.0 / whole
                found[f"{side}_noise_scale"] = getattr(status, f"{side}_noise") / share
        return found

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; the start of a run that is resumed was evaluated before its first step."""
        if self.state.global_step and kwargs.get("skip_scheduler"):  # as at the start alone
            return {}
        return super()._evaluate(*args, **kwargs)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure loss and accuracy on all sets, and the gains since the start if it was measured.

        On other records, or several sets of them by name, it measures loss and accuracy alone.
        """
        if eval_dataset is not None:
            is_one = not isinstance(eval_dataset, dict)
            sets = {"": eval_dataset} if is_one else {f"_{k}": v for k, v in eval_dataset.items()}
            found = {metric_key_prefix + k: self.evaluations.predict(v) for k, v in sets.items()}
            return set_figures(found)
        prefix, step = metric_key_prefix, self.state.global_step
        evaluated = [e["step"] for e in self.state.log_history if f"{prefix}_forget_loss" in e]
        # evaluated before the run was resumed; or those of other weights, not the last step's
        by = self.controller
        kept = by.steps_of_best if by is not None and by.ended else self._steps_in_model
        is_known = step in evaluated or kept != self.steps_taken
        if not self.args.freeze_batchnorm:
            # each process has those of its own records; the first one's are saved
            distributed.broadcast([one for module in self._batchnorms for one in module.buffers()])
        measured = self.evaluations.sets.items()
        self.predictions = {name: self.evaluations.predict(data) for name, data in measured}
        if not step:
            self.start_predictions = self.start_predictions or self.predictions
        if self.args.forget_objective == "bounded" and self.controller is None:
            self.goal_run.focus(self.goal_run.standings()["after"])
        start, figures = set_figures(self.start_predictions), set_figures(self.predictions)
        if start:
            both = ({str(side): one[f"{side}_loss"] for side in SIDES} for one in (start, figures))
            gains = Gains.between(*both)
            names = ("forget", "retain", "joint")
            figures |= {f"{name}_gain": getattr(gains, name) for name in names}
        metrics = {f"{prefix}_{key}": value for key, value in figures.items()}
        if not is_known:
            self.log(dict(metrics))
            run = (self.args, self.state, self.control)
            self.control = self.callback_handler.on_evaluate(*run, metrics)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, as the trainer's batches have two sides."""
        raise HamuError("UnlearnTrainer predicts no single set; call hamu.evaluation.predict")

    def history(self) -> dict[str, Any]:
        """Evaluations of a run that has ended, its steps, promise, goal and stop reason."""
        return {
            # a checkpoint's entries come in another order
            "trajectory": [
                dict(sorted(e.items())) for e in self.state.log_history if "eval_forget_gain" in e
            ],
            "steps_taken": self.steps_taken,
            "steps_skipped": self.steps_skipped,
            "steps_in_model": self._steps_in_model,
            "promise": self.promise,
            "controller": None if self.controller is None else self.controller.history,
            "goal": self.goal_run.figures(),
            "ended": self.stop.text,
            "ended_kind": self.stop.kind,
        }


def _mean_loss(model: nn.Module, batch: Mapping[str, Tensor], rows: slice) -> Tensor:
    part = {name: value[rows] for name, value in batch.items()}
    scored = Scored.of(predict_logits(model, part), part["labels"])
    return CrossEntropy().total(scored, None) / len(scored.labels)


def _prepared(
    model: nn.Module, method: Method, args: UnlearnConfig, retain: int, forget: int
) -> PairedGradients:
    """Bring a model to where it will be unlearned, and collect its two gradients there.

    `retain` and `forget` are sizes of sets: batches that hold all of both have no noise.
    """
    if args.shard:
        from hamu.core.distributed.sharded import shard  # loads what only sharded models need

        shard(model, args.device.type)
    elif not hasattr(model, "hf_device_map"):
        model.to(args.device)
    # shards have the usual order
    set_up_layers(model, args, channels_last=args.channels_last and not args.shard)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size()
    is_noisy = batch < max(retain, forget) and args.pairing != "split" and not args.shard
    half_life = args.stopping_records / batch
    pair = PairedGradients(
        model,
        method,
        blocks=args.blocks,  # type: ignore[arg-type]  # checked by the settings
        max_grad_norm=args.max_grad_norm or None,
        offload_grads=args.offload_grads,
        half_life=half_life if is_noisy and half_life >= 1 else None,
        steps_per_pass=(max(1.0, retain / batch), max(1.0, forget / min(batch, retain))),
    )
    if args.pairing == "split":
        pair.use(distributed.SplitPairing(pair.parameters, pair.block_of))
    elif world_size() > 1 and not args.shard:
        pair.use(distributed.DataParallelLayout(pair.parameters, pair.block_of))
    return pair


def _batchnorms(model: nn.Module, args: UnlearnConfig) -> list[nn.Module]:
    kind = nn.modules.batchnorm._BatchNorm
    found: list[nn.Module] = [one for one in model.modules() if isinstance(one, kind)]
    if args.pairing == "split" and found and not args.freeze_batchnorm:
        raise HamuError(
            "with split pairing a process sees one side alone, and its BatchNorm statistics would "
            "be of that side; leave freeze_batchnorm on, or pairing at sequential"
        )
    return found


def _check_model(
    model: nn.Module, args: UnlearnConfig, given: Mapping[str, Any], kind: type[UnlearnTrainer]
) -> None:
    """Name what would be lost without a word: an encoder, small steps, a loss of one's own."""
    if kind.compute_loss is not Trainer.compute_loss:
        raise HamuError("compute_loss is never called; make the loss an objective of its own")
    own = given.get("optimizers", (None,))[0] or given.get("optimizer_cls_and_kwargs")
    has_optimizer = own or kind.create_optimizer is not ResumableTrainer.create_optimizer
    config = getattr(model, "config", None)
    refuse_encoder(config, getattr(config, "name_or_path", "") or type(model).__name__)
    for name, parameter in model.named_parameters():
        is_rounded = parameter.requires_grad and parameter.dtype.itemsize < 4
        is_kept = args.correct_steps or args.optim == "adamw_anyprecision" or has_optimizer
        if is_rounded and not is_kept:
            raise HamuError(
                f"{name} is trained in {parameter.dtype}, which loses small steps; load the model "
                f"with dtype=torch.float32 and use bf16=True, or train an adapter, all in float32"
            )


def _check_arguments(
    model: nn.Module, args: UnlearnConfig, given: Mapping[str, Any], forget: Any
) -> None:
    if not isinstance(args, UnlearnConfig):
        raise HamuError(f"args is a {type(args).__name__}; give an UnlearnConfig")
    if not isinstance(model, nn.Module):
        raise HamuError(f"a {type(model).__name__} is no module; give the model, not its name")
    args.check_processes()
    if args.needs_alternatives and getattr(forget, "alternatives", None) is None:
        raise HamuError(
            f"the forget objective {args.objectives()['forget']} needs another answer to each "
            f"forget record, which images have not; for texts give a forget_dataset with "
            f"`alternatives`"
        )
    for name in given.keys() & _REFUSED.keys():
        if given[name] is not None:
            raise HamuError(f"{name} is {_REFUSED[name]}")
    if args.shard and given.get("optimizers", (None, None))[0] is not None:
        raise HamuError(
            "an optimizer that is given holds the whole parameters, which --shard replaces by "
            "parts; give its class as optimizer_cls_and_kwargs, or name one with optim"
        )


def quiet_trainer(
    model: Any,
    problem: UnlearningData[Any],
    args: UnlearnConfig,
    callbacks: list[TrainerCallback],
    retain_predictions: Any = None,
) -> UnlearnTrainer:
    """Make a trainer for this problem that prints nothing by itself."""
    sets = {f"{name}_dataset": data for name, data in problem.sets().items()}
    given = {"callbacks": callbacks, "retain_predictions": retain_predictions}
    trainer = UnlearnTrainer(model, args, **sets, **given)
    silence(trainer)
    return trainer
