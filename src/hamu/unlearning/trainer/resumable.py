"""A Trainer whose runs can be broken off anywhere and go on as if nothing had been."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy

from hamu.core.distributed import all_reduced, is_main, is_sharded, world_size
from hamu.errors import HamuError, first_line
from hamu.files import TRAINER_STATE
from hamu.models.saving import load_tensors, save_model, save_rest
from hamu.unlearning.trainer.checkpoints import Checkpoints, check_whole, restoring
from hamu.unlearning.trainer.config import TrainConfig, own_options
from hamu.unlearning.trainer.trackers import stand_between

_logger = logging.getLogger(__name__)
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


class ResumableTrainer(Trainer):
    """transformers' Trainer with the checkpoints of `Checkpoints`.

    Attributes:
        checkpoints: of this run.
        beside_model: what is saved in each checkpoint too, so that it opens as a model: tokenizer, image processor.
        before_saving: called before each checkpoint is written, and before a tracker begins.
        interrupted_by: set to a reason, the run ends after the step that it is at, and saves a checkpoint if any step
            was taken.
        was_interrupted: whether it has.
        resumed_from: the checkpoint that the run goes on from, "" if it has been started anew.
    """

    def __init__(self, model: nn.Module, args: TrainConfig, **kwargs: Any) -> None:
        self.interrupted_by = ""
        self.was_interrupted = False
        self.resumed_from = ""
        self.beside_model: list[Any] = [
            one for one in (kwargs.get("processing_class"),) if one is not None
        ]
        self.before_saving: Callable[[], Any] = lambda: None
        self._saved_step = -1
        self._held = False
        self._in_epoch = True
        # transformers removes checkpoints by rules of its own, the one of an interrupted run among them
        if args.keep is None and (args.save_total_limit or 0) > 0:  # 0 is no limit there
            args.keep = args.save_total_limit
        args.save_total_limit = None
        self.checkpoints = Checkpoints(args.output_dir, args.keep)
        super().__init__(model, args, **kwargs)
        stand_between(self, kwargs.get("callbacks") or [], own_options(type(args)))
        self.add_callback(_Marks(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: its folder; True for the newest whole one, "newest" for that or, without any, the
                start.
            kwargs: passed to the Trainer.

        Raises:
            HamuError: if the checkpoint is damaged, or there is none.
        """
        if resume_from_checkpoint is True or resume_from_checkpoint == "newest":
            newest, damages = self.checkpoints.newest()
            for damage in damages if is_main() else []:
                _logger.warning("%s; it is skipped", damage)
            if newest is None and resume_from_checkpoint is True:
                raise HamuError(
                    f"there is no whole checkpoint in {self.args.output_dir}; start the run anew"
                )
            if is_main():
                self.checkpoints.remove_after(newest)
            resume_from_checkpoint = None if newest is None else str(newest)
        elif resume_from_checkpoint:
            check_whole(str(resume_from_checkpoint))
        self.resumed_from = str(resume_from_checkpoint or "")
        return super().train(resume_from_checkpoint=self.resumed_from or None, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer; its settings are refused here, before anything is written."""
        with _making("optimizer", "optim", self.args.optim):
            return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule; its settings are refused here, before anything is written."""
        with _making("schedule", "lr_scheduler_type", self.args.lr_scheduler_type):
            return super().create_scheduler(*args, **kwargs)

    @property
    def has_begun(self) -> bool:
        """Whether a step was taken."""
        return self.state.global_step > 0

    @property
    def global_batch(self) -> int:
        """Records in a step, over all processes."""
        return (
            self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * world_size()
        )

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Take how often to save from the settings of now, and the best checkpoint from this folder."""
        found = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        if self.state.best_global_step:
            best = self.checkpoints.path(self.state.best_global_step)
            if best.is_dir():
                self.state.best_model_checkpoint = str(best)
            else:  # what cannot be gone back to is no best: a later state may be
                self.state.best_model_checkpoint = self.state.best_global_step = (
                    self.state.best_metric
                ) = None
        return found

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        return (
            _ByLength(sampler, self.args.seed)
            if isinstance(sampler, LengthGroupedSampler)
            else sampler
        )

    def _run_epoch(self, **kwargs: Any) -> None:
        """Run an epoch, unless the run had ended when it was saved, or has taken its last step."""
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save after whatever else belongs to a step: a resumed run does not come back to it."""
        if self.was_interrupted:
            return
        epoch_ends = float(self.state.epoch or 0).is_integer() or self.control.should_training_stop
        more_comes = (
            self._in_epoch and epoch_ends
        )  # the same step is looked at again as the epoch's end
        if more_comes:
            self._held, self.control.should_save = self.control.should_save, False
        else:
            self.control.should_save |= self._held
            self._held = False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if not more_comes and self._interrupted_anywhere():
            self.interrupted_by = self.interrupted_by or "another process"
            if self._saved_step != self.state.global_step:
                self._save_checkpoint(self.model, None)
            self.control.should_training_stop = self.was_interrupted = True

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """The best is one that can be gone back to: an evaluation at a step that is saved."""
        saves = (
            self.control.should_save or self._held or self.args.save_strategy == SaveStrategy.BEST
        )
        return self.has_begun and saves and super()._determine_best_metric(*args, **kwargs)

    def _interrupted_anywhere(self) -> bool:
        """Whether any process was interrupted, so that all stop after the same step."""
        if world_size() == 1:
            return bool(self.interrupted_by)
        return bool(
            all_reduced(
                torch.tensor(float(bool(self.interrupted_by)), device=self.args.device)
            ).item()
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint; see `Checkpoints`. None before a step was taken: an earlier run would give way to it."""
        if not self.has_begun:
            return
        step = self.state.global_step
        if self.state.best_global_step:
            best = self.checkpoints.path(self.state.best_global_step)
            if best.is_dir() or self.state.best_global_step == step:
                self.state.best_model_checkpoint = str(best)
        self.before_saving()
        with self.checkpoints.writing(step) as folder:
            save_model(self.model, folder)
            save_rest(self.model, folder)
            self.save_more(folder)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(folder))
                self._save_scaler(str(folder))
                self._save_rng_state(str(folder))
            if is_main():
                for one in self.beside_model:
                    one.save_pretrained(folder)
                for callback in (*self.callback_handler.callbacks, self.control):
                    if isinstance(callback, ExportableState):
                        self.state.stateful_callbacks[type(callback).__name__] = callback.state()
                self.state.save_to_json(str(folder / TRAINER_STATE))
        self._saved_step = step
        self.checkpoints.limit(self.state.best_model_checkpoint)

    def save_more(self, folder: Path) -> None:
        """Write what a kind of run keeps beyond model, optimizer and random state; all processes call it."""

    def load_more(self, folder: Path) -> None:
        """Restore from a checkpoint what `save_more` has written."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        with restoring(folder):
            load_tensors(self.model, folder)
            self.load_more(folder)
            _check_state(folder / TRAINER_STATE)  # which the Trainer will read next

    def _load_best_model(self) -> None:
        load_tensors(self.model, Path(str(self.state.best_model_checkpoint)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        from hamu.core.distributed.sharded import whole_optimizer_state

        state = whole_optimizer_state(self.optimizer)
        if is_main():
            torch.save(state, Path(output_dir) / _OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            if checkpoint is not None and is_sharded(self.model):
                self._load_sharded(Path(checkpoint))
            else:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_sharded(self, checkpoint: Path) -> None:
        """Restore optimizer and schedule; of the optimizer's state each process takes its part."""
        from hamu.core.distributed.sharded import shard_optimizer_state

        state = torch.load(checkpoint / _OPTIMIZER, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(shard_optimizer_state(self.optimizer, state))
        self.lr_scheduler.load_state_dict(torch.load(checkpoint / _SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            super()._load_rng_state(checkpoint)


def _check_state(path: Path) -> None:
    """Check that what the Trainer remembers has the types that it would have."""
    found, types = TrainerState.load_from_json(str(path)), TrainerState()
    for name, value in {**vars(types), "best_metric": 0.0, "train_batch_size": 0}.items():
        given = getattr(found, name)
        expected = int | float if isinstance(value, int | float) else type(value)
        if value is not None and given is not None and not isinstance(given, expected):
            raise TypeError(f"{path.name} has a {type(given).__name__} as {name}")
    for entry in (*found.log_history, *found.stateful_callbacks.values()):
        if not isinstance(entry, dict):
            raise TypeError(f"{path.name} has a {type(entry).__name__} in its lists")


@contextmanager
def _making(what: str, option: str, choice: Any) -> Iterator[None]:
    """Turn into a HamuError what a library says of settings that it alone can judge."""
    try:
        yield
    except (ImportError, ValueError, TypeError, RuntimeError, KeyError) as error:
        name = getattr(choice, "value", choice)
        raise HamuError(
            f"the {what} {name} cannot be made: {first_line(error)}; choose another --{option}"
        ) from error


class _ByLength(Sampler[int]):
    """Records of like length together, in an order that depends on seed and epoch alone."""

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; data loaders call this."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(self._seed + self._epoch)
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _Marks(TrainerCallback, ExportableState):
    """Tells a trainer whether it is within an epoch, and holds a resumed run to the size of its steps."""

    def __init__(self, trainer: ResumableTrainer | None = None, **saved: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that steps are of as many records as those before the checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if not saved or self._trainer is None:
            return
        was, now = saved["attributes"]["global_batch"], self._trainer.global_batch
        if was != now:
            raise HamuError(
                f"the run took steps of {was} records, now they would be of {now}; choose per_device_train_batch_size "
                f"and gradient_accumulation_steps for the same over all processes"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the trainer is within an epoch."""
        if self._trainer is not None:
            self._trainer._in_epoch = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the epoch's steps are over: what follows is the end of the epoch."""
        if self._trainer is not None:
            self._trainer._in_epoch = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many records a step takes."""
        size = None if self._trainer is None else self._trainer.global_batch
        return {"args": {}, "attributes": {"global_batch": size}}
