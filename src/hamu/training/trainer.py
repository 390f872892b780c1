"""UnlearnTrainer: transformers' Trainer with a pair of backward passes in each step.

Everything that the Trainer does stays as it is (optimizers, schedulers, accumulation, precision, checkpoints,
callbacks); a step differs in three places: two batches are counted apart, two gradients are collected apart, and the
combined one is what the optimizer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from hamu.distributed import SplitPairing, check_equal, is_main, processes, rank, summed
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.evaluation.sharing import predict_shared
from hamu.gram import SIDES
from hamu.modes import without_autocast
from hamu.objectives import OriginalModel, Scored, build_objective, predict_logits
from hamu.paired import Decision, PairedGradients, PairStep
from hamu.training.config import UnlearnConfig, checkpoints_activations
from hamu.training.early_ends import EarlyEnds
from hamu.training.goal import Goal, Standing
from hamu.training.original import check_is_measured, collate, let_gradients_through, to_channels_last
from hamu.training.pairing import WEIGHT, PairCollator, PairedDataset, subset
from hamu.training.resumable import ResumableTrainer
from hamu.training.run_state import RunState, load_saved_tensors, save_tensors, steps_taken_in
from hamu.training.sharing import ShareSampler, shared_loader
from hamu.training.steering import Steering
from hamu.training.watch import StepWatch

ALL_DONE = "all its steps are done"  # why a run ended that nothing ended before
_COMPARED_EVERY = 100  # steps between two comparisons of the weights of all processes
_REMEMBERED = 1000  # steps in `state.log_history`; a callback's on_log sees them all
_OF_ONE_BATCH = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")  # of transformers' Trainer
_STEERED_BY = 1000  # records of each side that a run by goal is measured on


class UnlearnTrainer(ResumableTrainer):
    """Unlearn the forget set from a model. A run can be broken off and resumed: see `ResumableTrainer`.

    Args:
        model: a Hugging Face model, or any module that maps pixel values to logits; changed in place.
        args: the settings.
        retain_dataset, forget_dataset: training records that stay and that must go.
        test_dataset: records that were never trained on, evaluated where given.
        data_collator: makes a batch from a list of items of either data set.
        kwargs: passed to `transformers.Trainer`.

    Attributes:
        pair: the `PairedGradients` behind the steps.
        steps_taken: steps in which the weights were updated.
        steps_skipped: steps that could not be taken, or that the trust region undid.
        stop_reason: why the run ended before its last epoch, "" if it did not.
        start_predictions: by set, what the first evaluation predicted.
        predictions: by set, what the last one did.
        evaluated_step: the step after which the last one was, -1 before the first evaluation.

    Raises:
        HamuError: if a set is empty, the model cannot train, a function is given that would never be called, or the
            constraint cannot be met at the first step.
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
        **kwargs: Any,
    ) -> None:
        for name in _OF_ONE_BATCH:
            if kwargs.get(name) is not None:
                raise HamuError(f"{name} is for a batch of one kind, and would never be called; leave it out")
        method = args.build_method()
        self.sides = [side for side in SIDES if getattr(method, f"uses_{side}")]
        self._is_split = args.pairing == "split"
        # with split pairing a process has but one side; else all that the method needs
        self._own_sides = self.sides if not self._is_split else [SIDES[rank() // (processes() // 2)]]
        pairs = PairedDataset(
            retain_dataset,
            forget_dataset,
            sides=self._own_sides,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.shuffle,
        )
        # The gradients' meter and the original's weights live where the model will: move it before they are made.
        if args.shard:
            from hamu.distributed.shards import shard  # loads what only sharded models need

            shard(model, args.device.type)
        elif not hasattr(model, "hf_device_map"):
            model.to(args.device)
        if args.channels_last and not args.shard:  # shards are cut in the usual order
            to_channels_last(model)
        if checkpoints_activations(args):
            let_gradients_through(model)
        self.pair = PairedGradients(
            model,
            method,
            blocks=args.blocks,
            max_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
            stash=args.stash,
        )
        names = {"retain": method.retain_objective, "forget": args.forget_objective or method.forget_objective}
        self._objectives = {side: build_objective(names[side]) for side in self.sides}
        needs_original = any(objective.needs_original for objective in self._objectives.values())
        self._original = OriginalModel(model) if needs_original else None
        self._batchnorms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._eval_sets = {
            name: subset(data, args.max_eval_samples, args.seed)
            for name, data in (("retain", retain_dataset), ("forget", forget_dataset), ("test", test_dataset))
            if data is not None
        }
        if args.metric_for_best_model is not None:
            measured = [f"{name}_{figure}" for name in self._eval_sets for figure in ("loss", "accuracy")]
            check_is_measured(args.metric_for_best_model, [*measured, "forget_gain", "retain_gain", "joint_gain"])
        self._collate = data_collator
        self._is_text = "input_ids" in retain_dataset[0]
        target = None if args.auto else args.target_forget_loss
        self._early_ends = EarlyEnds(args.min_forget_loss, args.max_retain_loss, target)
        self.steering = self._new_steering(args) if args.auto else None
        if self._is_split:
            self.pair.use(SplitPairing(self.pair.parameters, self.pair.block_of))
        total = lambda side, batch: self._side_total(self.model, side, batch)  # noqa: E731
        self._watch = StepWatch(self.pair, args, total, model, self.sides)
        self._start: dict[str, float] = {}
        self._losses: dict[str, Tensor] = {}
        self._step: PairStep | None = None
        self._scaling: dict[str, Any] | None = None
        self._skips_in_a_row = 0
        self._starts = False
        self.steps_taken = 0
        self.steps_skipped = 0
        self.stop_reason = ""
        self.start_predictions: dict[str, Predictions | TokenPredictions] = {}
        self.predictions: dict[str, Predictions | TokenPredictions] = {}
        self.evaluated_step = -1
        self._is_back = False
        self._steps_of_best: int | None = None
        super().__init__(
            model,
            args,
            data_collator=PairCollator(data_collator),
            train_dataset=pairs,
            eval_dataset=self._eval_sets["retain"],
            **kwargs,
        )
        if self._is_split or args.shard:
            # accelerate is to prepare the model for its precision, but not to average its gradients
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.add_callback(RunState(self))
        if self.steering is not None:
            self.steering.trust, self._watch.search = self._watch.trust, self.steering.search
            self.add_callback(self.steering)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; a run that diverged goes back to its best checkpoint, if it has one. See `ResumableTrainer.train`."""
        output = super().train(*args, **kwargs)
        if self._early_ends.diverged and not (self._goes_back or self.was_interrupted):
            if self.state.best_model_checkpoint is None:
                self.stop_reason += "; there is no checkpoint to go back to, --save_strategy would write some"
            else:
                self._load_best_model()
                self.stop_reason += f"; back to the weights of step {self.state.best_global_step}"
        return output

    @property
    def _goes_back(self) -> bool:
        """Whether it is settled already which weights a run ends with: the best ones, or those that its goal wants."""
        return self.args.load_best_model_at_end or self.steering is not None

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.predictions = {}
        self._steps_of_best = steps_taken_in(Path(str(self.state.best_model_checkpoint)))
        self._is_back = self.state.best_global_step != self.state.global_step
        if self._is_back and self.args.load_best_model_at_end:
            self.stop_reason = f"{self.stop_reason or ALL_DONE}; the weights are the best ones, of step "
            self.stop_reason += str(self.state.best_global_step)

    def _new_steering(self, args: UnlearnConfig) -> Steering:
        samples = {
            name: subset(data, min(_STEERED_BY, args.max_eval_samples or _STEERED_BY), args.seed)
            for name, data in self._eval_sets.items()
            if name in SIDES
        }

        def standing() -> Standing:
            found = {name: self._predict(data) for name, data in samples.items()}
            loss = {name: predictions.losses.mean().item() for name, predictions in found.items()}
            return Standing(loss["forget"], loss["retain"], found["forget"].correct.double().mean().item())

        return Steering(self.pair, Goal.of(args), standing, self._end_run)

    def _end_run(self, reason: str) -> None:
        self.stop_reason = reason
        self.control.should_training_stop = True

    def _predict(self, data: Dataset[Any]) -> Predictions | TokenPredictions:
        with without_autocast(self.model) if self.args.full_precision_eval else nullcontext():
            return predict_shared(self.model, data, self.args.eval_batch_size, self._collate, is_text=self._is_text)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        """In order: the paired data set does the shuffling."""
        return SequentialSampler(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """With several processes each reads its share of the same global batches."""
        if processes() == 1:
            return super().get_train_dataloader()
        share, sharing = rank() % self._sharing, self._sharing
        sampler = ShareSampler(len(self.train_dataset), self._train_batch_size * sharing, share, sharing)
        return shared_loader(self.train_dataset, sampler, self.data_collator, self.args)

    @property
    def _sharing(self) -> int:
        """How many processes share the batches of a side."""
        return processes() // 2 if self._is_split else processes()

    @property
    def has_begun(self) -> bool:
        """Whether a step was taken; one that was passed over is none."""
        return self.steps_taken > 0

    @property
    def global_batch(self) -> int:
        """Records of each side in a step, over all processes."""
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self._sharing

    def save_more(self, folder: Path) -> None:
        """What the start model predicted, and where a run by goal stands."""
        if is_main():
            save_tensors(self, folder)

    def load_more(self, folder: Path) -> None:
        """Restore it."""
        load_saved_tensors(self, folder)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> dict[str, Tensor | int]:
        """Images or scored tokens of a whole step, over all its accumulated batches and processes, of each side."""
        counts = {
            side: sum(
                self._count(side, batch[side]) * batch.get(WEIGHT, 1.0) for batch in batch_samples if side in batch
            )
            for side in self.sides
        }
        if processes() == 1:
            return counts
        both = summed(torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in counts.values()]).to(device))
        return dict(zip(counts, both, strict=True))

    def _count(self, side: str, batch: Mapping[str, Tensor]) -> Tensor | int:
        return self._objectives[side].count(batch["labels"])

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Mapping[str, int] | None = None
    ) -> Tensor:
        """Both passes of one batch of pairs; the combine, once the step's batches are all in."""
        model.train()
        if self.args.freeze_batchnorm:
            for module in self._batchnorms:
                module.eval()
        inputs = self._prepare_inputs(inputs)
        weight = inputs.get(WEIGHT, 1.0)
        losses: dict[str, Tensor] = {}
        measured = self._watch.is_due(self.state.global_step + 1, self.state.logging_steps)
        # DDP averages gradients over the processes, but each has only its part of the sum; split pairing sums them
        scale = 1 if self._is_split else processes()
        for side in self._own_sides:
            batch = inputs[side]
            count = self._count(side, batch) if num_items_in_batch is None else num_items_in_batch[side]
            if measured:
                self._watch.remember(side, batch, weight, count)
            with getattr(self.pair, side)():
                loss = self._side_total(model, side, batch, weight) * weight / count
                self.accelerator.backward(loss * scale if scale > 1 else loss)
            losses[side] = loss.detach()
            self._losses[side] = self._losses.get(side, 0.0) + losses[side]
        if self.accelerator.sync_gradients:
            self._end_step()
        return torch.stack(list(losses.values())).sum()

    def _side_total(self, model: nn.Module, side: str, batch: Mapping[str, Tensor], weight: float = 1.0) -> Tensor:
        objective = self._objectives[side]
        labels = batch["labels"]
        original = None
        if objective.needs_original and self._original is not None:
            original = Scored.of(self._original.logits(batch), labels).logits
        scored = Scored.of(predict_logits(model, batch), labels)
        if self._early_ends and torch.is_grad_enabled():
            self._early_ends.add(side, scored, weight)
        self._watch.see(scored.logits)
        return objective.total(scored, original)

    def _end_step(self) -> None:
        """Combine, unless the losses say that the run is over."""
        reason = self._early_ends.reason() if self._early_ends else ""
        if self.steering is not None and self.steering.ended:
            reason = self.stop_reason
        if not reason:
            if self._is_split and self.state.global_step % _COMPARED_EVERY == 0:
                check_equal(self.pair.names, self.pair.parameters)
            keep = self._watch.keep(self.optimizer)
            self._settle(self.pair.combine(self.accelerator.scaler, keep=keep))
            return
        self._watch.skip()
        self.pair.abandon(self.accelerator.scaler)
        self._step = None
        self._end_run(reason)

    def _settle(self, step: PairStep) -> None:
        """Count the step, and end the run if it says so."""
        self._step = step
        decision: Decision = step.decision
        if self.steering is not None:
            self.steering.demand(step, float(self.optimizer.param_groups[0]["lr"]))
        if decision == "step":
            self.steps_taken += 1
            self._skips_in_a_row = 0
            return
        self._watch.skip()
        self.steps_skipped += 1
        self._skips_in_a_row += 1
        constraint = step.weights.constraint
        infeasible = constraint is not None and not constraint.feasible and self.pair.method.on_infeasible == "stop"
        if self.steps_taken == 0 and decision == "stop" and infeasible:
            raise HamuError(f"no step can be taken: {step.reason}")
        if decision == "stop":
            self._end_run(step.reason)
        elif self._skips_in_a_row >= self.args.max_skips:
            self._end_run(
                f"{self._skips_in_a_row} steps in a row could not be taken: {step.reason}. The weights are those of "
                f"the last step that was; lower the learning rate, or look for records with values that are not finite"
            )

    def _begin_optimizer_step(self) -> None:
        self._scaling = self._scaling_to_keep()
        if self._step is not None and self._step.decision == "step":
            self._watch.before(self._step, self.optimizer, self._losses)

    def _scaling_to_keep(self) -> dict[str, Any] | None:
        """The loss scaler's state where it would take a step that was not taken for an overflow; None elsewhere."""
        scaler, step = self.accelerator.scaler, self._step
        innocent = step is None or (step.decision != "step" and step.finite)
        return scaler.state_dict() if innocent and scaler is not None and scaler.is_enabled() else None

    def _end_optimizer_step(self) -> None:
        """Look at what the optimizer did; a step that was undone was none."""
        if self._scaling is not None:
            self.accelerator.scaler.load_state_dict(self._scaling)
        if self._step is None or self._step.decision != "step" or not self._watch.after():
            return
        self._step = replace(self._step, decision="skip")  # for the log
        self.steps_taken -= 1
        self.steps_skipped += 1
        trust = self._watch.trust
        if trust is not None and trust.exhausted:
            self._end_run("no step is small enough to realise anything of its promise")

    @property
    def steps_in_model(self) -> int:
        """Steps that the weights have behind them: fewer than were taken, once the run has gone back to a state."""
        return self.steps_taken if self._steps_of_best is None else self._steps_of_best

    @property
    def promise(self) -> dict[str, Any] | None:
        """The steps that were checked, summed up; None if none was. See `PromiseRecord.summary`."""
        return self._watch.record.summary()

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Each side was clipped before it was weighed; their combination is not clipped again."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """‖g*‖, from the Gram: no pass over the gradients."""
        if self._step is None:  # the run ended before this step
            return torch.zeros(())
        return self._step.combined_sq.sum().sqrt()

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: a pair of batches is not one model input."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put the step's own figures in place of the summed loss."""
        if "loss" in logs and self._losses:
            del logs["loss"]
            logs.update(self._step_figures())
        for name in ("train_loss", "total_flos"):  # the sum of two losses, and what is not counted
            logs.pop(name, None)
        super().log(logs, start_time)
        steps = [number for number, entry in enumerate(self.state.log_history) if "taken" in entry]
        for number in reversed(steps[:-_REMEMBERED]):
            del self.state.log_history[number]

    def _step_figures(self) -> dict[str, Any]:
        """What happened in the last step, read from the device at once."""
        step = self._step
        none = torch.zeros((), device=self.args.device)
        tensors = {f"{side}_loss": summed(self._losses.get(side, none).double()) for side in self.sides}
        if step is None:  # the run ended before this step
            return {name: loss.item() for name, loss in tensors.items()} | {"taken": 0.0, "stopped": 1.0}
        norms = step.gradient_norms
        tensors |= {f"{side}_norm": norms[SIDES.index(side)] for side in self.sides}
        if len(self.sides) == 2:
            tensors |= {"kappa": step.kappa, "cos": step.cos}
        tensors |= {
            "promised_retain_change": step.promised_retain_change,
            "promised_forget_change": step.promised_forget_change,
        }
        constraint = step.weights.constraint
        if constraint is not None:
            tensors |= {
                "direct_threshold": constraint.direct_threshold,
                "stop_threshold": constraint.stop_threshold,
                "demand": constraint.demand,
                "granted": constraint.granted,
                "sustainable": constraint.sustainable,
                "capacity": constraint.capacity,
                "direct_share": constraint.direct.double().mean(),
                "criterion_met": constraint.conflict & (constraint.granted > constraint.sustainable),
            }
        values = torch.stack([t.detach().double() for t in tensors.values()]).tolist()
        figures = dict(zip(tensors, values, strict=True)) | self._watch.figures
        return figures | {"taken": float(step.decision == "step"), "stopped": float(bool(self.stop_reason))}

    def layer_figures(self) -> dict[str, list[float] | None]:
        """cosθ_i and ‖Δw_i‖ of the last step by block, read from the device at once; None for what is not known."""
        step, lengths = self._step, self._watch.lengths
        if step is None:
            return {"cos": None, "change": None}
        known = {"cos": step.gram.cos if len(self.sides) == 2 else None, "change": lengths}
        there = {name: values for name, values in known.items() if values is not None}
        if not there:
            return dict.fromkeys(known)
        rows = torch.stack([values.detach().double().to(self.args.device) for values in there.values()]).tolist()
        return dict.fromkeys(known) | dict(zip(there, rows, strict=True))

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Not once more at the start of a run that is resumed: it was before its first step."""
        if self._starts:
            self._starts = False
            return {}
        return super()._evaluate(*args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and accuracy on the retain, forget and test sets, and the changes so far.

        They are means over images, or over the scored tokens of all texts.
        """
        evaluated = [entry["step"] for entry in self.state.log_history if f"{metric_key_prefix}_forget_gain" in entry]
        # evaluated before the run was resumed; or those of other weights, which are not the last step's
        known = self.state.global_step in evaluated or self._is_back
        self.predictions = {name: self._predict(data) for name, data in self._eval_sets.items()}
        self.start_predictions = self.start_predictions or self.predictions
        self.evaluated_step = self.state.global_step
        metrics: dict[str, float] = {}
        for name, predictions in self.predictions.items():
            metrics[f"{name}_loss"] = predictions.losses.mean().item()
            metrics[f"{name}_accuracy"] = predictions.correct.double().mean().item()
        self._start = self._start or dict(metrics)
        gains = {
            "forget_gain": metrics["forget_loss"] - self._start["forget_loss"],
            "retain_gain": self._start["retain_loss"] - metrics["retain_loss"],
        }
        metrics |= gains | {"joint_gain": min(gains.values())}
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        if known:
            return metrics
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
