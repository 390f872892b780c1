"""Training that resumes bit by bit after any interruption, and training of the original model.

A checkpoint is whole or not there:

    checkpoint-12/
        config.json model.safetensors ...   from `save_pretrained`, so that it opens as a model
        rest.safetensors                    tensors that those files lack, if any
        run.pt                              state of the run beyond model and optimizer
        optimizer.pt scheduler.pt ...       of transformers; all are read with weights_only
        trainer_state.json
        manifest.json                       size and SHA-256 of every file

transformers writes into a hidden folder; `Checkpoints` adds the manifest and renames. Several
processes, sharded or not, write what one writes, so a run resumes in any number and any layout.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Sampler
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy

from hamu import files
from hamu.core.distributed import all_reduced, barrier, from_main, is_main, is_sharded, world_size
from hamu.core.forward import logits_of
from hamu.data import collate
from hamu.errors import HamuError, reading
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.files import CHECKPOINT, MANIFEST, STAGED, TRAINER_STATE
from hamu.models import first_not_finite
from hamu.models.storage import load_tensors, save_model, save_rest
from hamu.unlearning.goals import StopReason, is_text
from hamu.unlearning.trainer.config import TrainConfig
from hamu.unlearning.trainer.logs import silence, stand_between
from hamu.unlearning.trainer.sides import check_is_measured

_logger = logging.getLogger(__name__)
# Settings that a resumed run keeps; the jobs compare all of config.yaml
_DECIDING = ("seed", "data_seed", "optim", "learning_rate", "lr_scheduler_type", "forget_objective")
_OPTIMIZER, _SCHEDULER, _RUN = "optimizer.pt", "scheduler.pt", "run.pt"
_EACH_MAY_BE_BEST = (SaveStrategy.NO, SaveStrategy.BEST)
_CLASSES: list[Any] = [Predictions, TokenPredictions, StopReason]  # in a run's state

# Private methods of transformers' Trainer that this package overrides, each there since 5.18.
# transformers promises nothing of them: where one is missing the import fails, instead of a run
# that takes other steps than it should.
OVERRIDDEN = (
    *("_clip_grad_norm", "_determine_best_metric", "_evaluate", "_get_grad_norm"),
    *("_get_num_items_in_batch", "_get_output_dir", "_get_train_sampler", "_init_training_state"),
    *("_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    *("_load_rng_state", "_maybe_log_save_evaluate", "_run_epoch", "_save_checkpoint"),
    "_save_optimizer_and_scheduler",
)
_missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
if _missing:
    raise ImportError(
        f"transformers {transformers.__version__} lacks Trainer.{_missing[0]}, which hamu "
        f'overrides; pip install "transformers>=5.18,<6"'
    )


class Checkpoints:
    """Checkpoints in the folder of one run."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self.staged = self._folder / STAGED  # transformers writes into it

    def path(self, step: int) -> Path:
        """Place of the checkpoint of a step."""
        return self._folder / f"{CHECKPOINT}{step}"

    @contextmanager
    def writing(self, step: int, begin: Callable[[], Any] = lambda: None) -> Iterator[Path]:
        """Folder to write into, the checkpoint of this step once all processes have written.

        It is whole when the run may `begin`, for which an earlier run gives way.
        """
        failure = f"the checkpoint of step {step} cannot be written into {self._folder}"
        remedy = (
            "and give the same command again; if the folder holds this run, --resume with this "
            "--output_dir alone"
        )
        with files.finding_room(failure, remedy):
            from_main(self._remove_left)
            try:
                inside = self.staged / f"{CHECKPOINT}{step}"  # the name that transformers gives it
                inside.mkdir(parents=True, exist_ok=True)
                yield inside
                barrier()
                if is_main():
                    seal(inside)
                    begin()
                    files.replace_folder(inside, self.path(step))
                    files.sync(self._folder)
            finally:
                if is_main():
                    shutil.rmtree(self.staged, ignore_errors=True)
        if not is_main():
            begin()
        barrier()

    def _remove_left(self) -> None:
        for left in self._folder.glob(f".{CHECKPOINT}*"):  # of an interrupted write
            shutil.rmtree(left)

    def limit(self, most: int | None, newest: int, best: int | None = None) -> None:
        """Remove the oldest beyond `save_total_limit`; those of these two steps stay, and count.

        Those of later steps than the newest are of an earlier run, and go first.
        """
        if not most or most < 0 or not is_main():
            return
        found = sorted((step <= newest, step, path) for step, path in self._found(ours=True))
        removable = [path for _, step, path in found if step not in (newest, best)]
        for path in removable[: max(0, len(found) - most)]:
            files.remove_whole(path)

    def newest(self) -> Path | None:
        """Newest whole checkpoint; damaged ones above it are removed. None if none is whole."""

        def find() -> Path | None:
            damaged, whole = dict[Path, str](), None
            for _, path in reversed(self._found()):
                damage = damage_of(path)
                if damage is None:
                    whole = path
                    break
                damaged[path] = damage
            ours = [path for _, path in self._found(ours=True)] if whole else []
            for path, damage in damaged.items():
                fate = "removed" if path in ours else "skipped"
                _logger.warning("%s is damaged: %s; it is %s", path, damage, fate)
                if path in ours:
                    files.remove_whole(path)
            if damaged and whole is None:
                _logger.warning("no checkpoint is whole")
            return whole

        return from_main(find)

    def warn_of_earlier(self) -> None:
        """Warn where a run begins beside the checkpoints of another."""
        if is_main() and (found := self._found()):
            remedy = "remove those, or name another output_dir, if this run may need a resume"
            _logger.warning("%s is of an earlier run; %s", found[-1][1], remedy)

    def _found(self, *, ours: bool = False) -> list[tuple[int, Path]]:
        """Step and folder of each, oldest first; of other programs have files and no manifest."""
        return sorted(
            (int(step), path)
            for path in self._folder.glob(f"{CHECKPOINT}*")
            if path.is_dir() and (step := path.name.removeprefix(CHECKPOINT)).isdecimal()
            if not ours or (path / MANIFEST).is_file() or not any(path.iterdir())
        )


def damage_of(path: Path) -> str | None:
    """Damage of a checkpoint, None if it is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        damaged = [name for name, entry in manifest.items() if entry != _entry(path / name)]
    except (ValueError, AttributeError, RecursionError):
        return f"its {MANIFEST} cannot be read"
    except OSError as error:
        return f"{Path(error.filename).name} is missing"
    return f"{damaged[0]} is not as it was written" if damaged else None


def seal(folder: Path) -> None:
    """Write the manifest, and flush all files to the disk."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {str(path.relative_to(folder)): _entry(path) for path in found}
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    for path in (*found, folder / MANIFEST, folder):
        files.sync(path)


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": files.file_digest(path)}


class ResumableTrainer(Trainer):
    """transformers' Trainer with the checkpoints of `Checkpoints`.

    Attributes:
        beside_model: tokenizer or image processor, saved in each checkpoint with the model.
        before_saving: called before each checkpoint is in its place, and before TensorBoard begins,
            to clear the folder; without it an earlier run's checkpoints are warned of.
        interrupted_by: set to a reason, the run ends after its present step, and saves a
            checkpoint if any step was taken; `was_interrupted` is true once it has.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any
    train_dataset: Any
    _records: Mapping[str, int] = MappingProxyType({})  # by side, of unlearning

    def __init__(self, model: nn.Module, args: TrainConfig, **kwargs: Any) -> None:
        if getattr(model, "is_loaded_in_4bit", False) and not hasattr(model, "peft_config"):
            raise HamuError(
                "weights in 4 bits cannot be trained; train an adapter on them (--lora)"
            )
        self.interrupted_by = ""
        self.was_interrupted = False
        processing = kwargs.get("processing_class")
        self.beside_model: list[Any] = [] if processing is None else [processing]
        self.before_saving: Callable[[], Any] | None = None
        self.checkpoints = Checkpoints(str(args.output_dir))
        super().__init__(model, args, **kwargs)
        callbacks = kwargs.get("callbacks") or []
        if any(isinstance(one, transformers.EarlyStoppingCallback) for one in callbacks):
            _check_each_is_saved(args)
        stand_between(self, callbacks)

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any
    ) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: its folder; True for the newest whole one, "newest" for that
                or, without any, the start.
            kwargs: passed to the Trainer.

        Raises:
            HamuError: if the checkpoint is damaged, or there is none.
        """
        checkpoint: Any = resume_from_checkpoint
        if checkpoint is True or checkpoint == "newest":
            newest = self.checkpoints.newest()
            if newest is None and checkpoint is True:
                raise HamuError(
                    f"there is no whole checkpoint in {self.args.output_dir}; start the run anew"
                )
            checkpoint = newest
        elif checkpoint and not Path(checkpoint).is_dir():
            raise HamuError(f"there is no checkpoint {checkpoint}; check the path")
        elif checkpoint and (inside := Checkpoints(checkpoint)._found()):
            raise HamuError(
                f"{checkpoint} holds checkpoints and is none; give one: the newest is "
                f"{inside[-1][1]}"
            )
        elif checkpoint and (damaged := damage_of(Path(checkpoint))):
            raise HamuError(
                f"the checkpoint {checkpoint} is damaged: {damaged}; resume from an older one"
            )
        if not checkpoint and self.before_saving is None:
            self.checkpoints.warn_of_earlier()
        if self.was_interrupted:  # in an earlier call; what asks before this one holds
            self.interrupted_by, self.was_interrupted = "", False
        self._passed_step = -1
        return super().train(resume_from_checkpoint=checkpoint and str(checkpoint), **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer; a library's refusal names the option."""
        name = getattr(self.args.optim, "value", self.args.optim)
        remedy = "; correct --optim_args, or choose another --optim"
        with reading(f"the optimizer {name} cannot be made", remedy):
            found = super().create_optimizer(*args, **kwargs)
        if type(found).__module__.startswith("torch.optim"):  # takes what it knows by its own names
            for word in filter(None, (self.args.optim_args or "").replace(" ", "").split(",")):
                _check_is_taken(found, *word.split("="))
        return found

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule; a library's refusal names the option."""
        name = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        remedy = "; give its --lr_scheduler_kwargs, or choose another --lr_scheduler_type"
        with reading(f"the schedule {name} cannot be made", remedy):
            return super().create_scheduler(*args, **kwargs)

    @property
    def has_begun(self) -> bool:
        """True once a step was taken."""
        return self.state.global_step > 0

    @property
    def is_over(self) -> bool:
        """True if no step is to follow."""
        return self.control.should_training_stop or self.state.global_step >= self.state.max_steps

    @property
    def _sharing(self) -> int:
        return world_size()  # processes to a batch

    @property
    def global_batch(self) -> int:
        """Records in a step (of each side, in unlearning), over all processes."""
        args: TrainConfig = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self._sharing

    def run_state(self) -> dict[str, Any]:
        """State of the run for a checkpoint, made in the main process."""
        return {"global_batch": self.global_batch, "settings": self._deciding()}

    def _deciding(self) -> dict[str, Any]:
        found = {name: getattr(self.args, name, None) for name in _DECIDING}
        found |= {f"{side} records": number for side, number in self._records.items()}
        return {name: getattr(value, "value", value) for name, value in found.items()}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Restore `run_state`; refuse steps of another number of records, or made otherwise."""
        for name, value in self._deciding().items():
            if (begun := state["settings"][name]) != value:
                raise HamuError(
                    f"the run began with {name} {begun}; resume it with that, not {value}"
                )
        was, now = state["global_batch"], self.global_batch
        if was != now:
            raise HamuError(
                f"the run took steps of {was} records, now they would be of {now}; choose "
                f"per_device_train_batch_size and gradient_accumulation_steps for as many in all"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `from_pretrained` reads it, and into a checkpoint the run's state."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, folder)
        if is_main():
            for one in self.beside_model:
                one.save_pretrained(folder)
        if _internal_call:
            save_rest(self.model, folder)
            if is_main():
                torch.save(self.run_state(), folder / _RUN)

    # Private methods of transformers from here on; see OVERRIDDEN.

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Take the saving interval from the settings, and the best checkpoint from this folder."""
        found = super()._init_training_state(max_steps, *args)
        state = self.state
        state.compute_steps(self.args, max_steps)
        if state.best_global_step:
            best = self.checkpoints.path(state.best_global_step)
            state.best_model_checkpoint = str(best)
            if not best.is_dir():  # without its checkpoint it is no best: a later state may be
                state.best_model_checkpoint = state.best_global_step = state.best_metric = None
        return found

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):  # else an order depends on those before it
            draw = sampler.generator = torch.Generator().manual_seed(self.args.seed)
            reseed = lambda epoch: draw.manual_seed(self.args.seed + epoch)  # noqa: E731
            sampler.set_epoch = reseed  # type: ignore[attr-defined]
        return sampler

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]
        """Run an epoch, unless the run had ended when it was saved, or has taken its last step."""
        if not self.is_over:
            super()._run_epoch(**kwargs)  # type: ignore[no-untyped-call]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save after whatever else belongs to a step: a resumed run does not come back to it."""
        step, control = self.state.global_step, self.control
        epoch_ends = float(self.state.epoch or 0).is_integer() or control.should_training_stop
        # the last step of an epoch comes again as the epoch's end, with all that is due still due
        is_early = epoch_ends and step != self._passed_step
        self._passed_step = step
        if is_early or self.was_interrupted:
            return
        is_saved = control.should_save
        self._log_save_evaluate(*args, **kwargs)
        if self._interrupted_anywhere():
            self.interrupted_by = self.interrupted_by or "another process"
            if not is_saved:
                self._save_checkpoint(self.model, None)
            self.control.should_training_stop = self.was_interrupted = True

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _interrupted_anywhere(self) -> bool:
        """True if any process was interrupted, so that all stop after the same step."""
        if world_size() == 1:  # without a read from the device
            return bool(self.interrupted_by)
        mine = torch.tensor(float(bool(self.interrupted_by)), device=self.args.device)
        return bool(all_reduced(mine).item())

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Only a saved state can be the best, as a run can go back to it, unless none is saved."""
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        saves = self.control.should_save or self.args.save_strategy in _EACH_MAY_BE_BEST
        may_be_best = self.has_begun and saves and name in metrics  # gains need a start
        return may_be_best and super()._determine_best_metric(metrics, trial)

    def _get_output_dir(self, trial: Any) -> str:
        """Folder in which transformers writes and removes checkpoints: the staged one."""
        return str(self.checkpoints.staged)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint; none before a step was taken, as an earlier run would give way."""
        if not self.has_begun:
            return
        state = self.state
        begin = () if self.before_saving is None else (self.before_saving,)
        with self.checkpoints.writing(state.global_step, *begin) as folder:
            super()._save_checkpoint(model, trial)
            if state.best_global_step:  # the place that it will have
                best = self.checkpoints.path(state.best_global_step)
                state.best_model_checkpoint = str(best)
            if is_main():
                state.save_to_json(str(folder / TRAINER_STATE))
        most = self.args.save_total_limit
        self.checkpoints.limit(most, state.global_step, state.best_global_step)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        with _restoring(folder := Path(resume_from_checkpoint)):
            TrainerState.load_from_json(str(folder / TRAINER_STATE))  # transformers reads it next
            load_tensors(self.model, folder)
            self.load_run_state(run_state_of(folder))

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
        if checkpoint is None:
            return
        with _restoring(checkpoint):
            if not is_sharded(self.model):
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            from hamu.core.distributed.sharded import shard_optimizer_state

            folder = Path(checkpoint)
            state = torch.load(  # read tensor by tensor
                folder / _OPTIMIZER, map_location="cpu", weights_only=True, mmap=True
            )
            self.optimizer.load_state_dict(shard_optimizer_state(self.optimizer, state))
            self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _restoring(checkpoint):
            super()._load_rng_state(checkpoint)


def _check_each_is_saved(args: Any) -> None:
    """Check that each evaluated state can be the best, from which patience counts: it is saved."""
    is_alike = args.save_strategy == args.eval_strategy and (
        args.save_strategy != SaveStrategy.STEPS or args.save_steps == args.eval_steps
    )
    if args.save_strategy not in _EACH_MAY_BE_BEST and not is_alike:
        raise HamuError(
            "early stopping goes by the best state that was saved; set save_strategy and "
            "save_steps as eval_strategy and eval_steps, or save_strategy to best or no"
        )


def _restoring(checkpoint: object) -> AbstractContextManager[None]:
    # one that is whole, but of another model or version
    return reading(f"the checkpoint {checkpoint} cannot be restored", "; resume from an older one")


def run_state_of(checkpoint: Path) -> dict[str, Any]:
    """The `ResumableTrainer.run_state` in a checkpoint."""
    with _restoring(checkpoint), torch.serialization.safe_globals(_CLASSES):
        found: dict[str, Any] = torch.load(checkpoint / _RUN, map_location="cpu", weights_only=True)
    return found


class _OriginalTrainer(ResumableTrainer):
    """Trainer of the original model."""

    def compute_loss(self, *args: Any, **given: Any) -> Any:
        """As in transformers, which would take a record off outputs that are bare logits."""
        found = super().compute_loss(*args, **given)
        if isinstance(found, tuple) and isinstance(found[1], Tensor):
            return found[0], {"logits": found[1]}
        return found


def train_original(
    model: Any,
    data: Dataset[Any],
    args: TrainConfig,
    callbacks: list[TrainerCallback] | None = None,
    eval_data: Dataset[Any] | None = None,
    *,
    resume: bool = False,
    around: Callable[[ResumableTrainer], AbstractContextManager[Any]] = nullcontext,
) -> PreTrainedModel:
    """Train a classifier or a language model by cross-entropy, in place; returns it.

    Args:
        model: a language model's forward returns a loss when given labels.
        data: items with labels, e.g. `ImageData` or `TextData`.
        args: the settings; with disable_tqdm nothing is printed.
        callbacks: transformers callbacks.
        eval_data: for --eval_strategy, by loss (and accuracy, for a classifier).
        resume: go on from the newest checkpoint in the output folder, if there is one.
        around: a context for the training, made from its trainer.

    Raises:
        HamuError: if there is nothing to evaluate on, or the trained weights are not finite.
    """
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if evaluates and eval_data is None:
        raise HamuError(
            "an evaluation needs test data; give --test_data, or leave out --eval_strategy and "
            "--eval_on_start"
        )
    set_up_layers(model, args, channels_last=args.channels_last)
    of_texts = is_text(data)
    args.settle_batch_sizes(is_text=of_texts)
    batch, records = args.per_device_train_batch_size * world_size(), len(data)  # type: ignore[arg-type]
    if args.dataloader_drop_last and records < batch:
        raise HamuError(
            f"dataloader_drop_last leaves no batch of {batch} of {records} records; leave it out, "
            f"or give a smaller --per_device_train_batch_size"
        )
    if not of_texts and args.train_sampling_strategy not in ("random", "sequential"):
        raise HamuError(
            f"train_sampling_strategy {args.train_sampling_strategy} goes by lengths, which images "
            f"have none of; leave it out"
        )
    if evaluates and args.metric_for_best_model is not None:
        check_is_measured(
            args.metric_for_best_model, ["loss"] if of_texts else ["loss", "accuracy"]
        )
    args.prediction_loss_only = of_texts  # all tokens' logits would not fit in memory
    args.label_names = ["labels"]  # also of a classifier whose forward takes none
    trainer = _OriginalTrainer(
        model,
        args,
        data_collator=collate,
        train_dataset=data,
        eval_dataset=eval_data,
        compute_loss_func=None if of_texts else partial(_loss, args.label_smoothing_factor),
        compute_metrics=None if of_texts else _accuracy,
        callbacks=callbacks,
    )
    if args.disable_tqdm:
        silence(trainer)
    with around(trainer):
        trainer.train(resume_from_checkpoint="newest" if resume else None)
    check_finite("training", first_not_finite(model), args.learning_rate)
    found: PreTrainedModel = model.eval()
    return found


def check_finite(what: str, broken: str | None, rate: float) -> None:
    """Refuse what has come out of a run if something in it, named `broken`, is not finite."""
    if broken is not None:
        raise HamuError(f"{what} diverged: {broken} is not finite; lower --learning_rate {rate}")


def _loss(smoothing: float, output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross-entropy of a classifier over the records of a step, whatever loss it has itself."""
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    logits = logits_of(output).float()
    return cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / count


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    hits = np.argmax(prediction.predictions, -1) == prediction.label_ids
    return {"accuracy": float(hits.mean())}


def set_up_layers(model: Any, args: TrainConfig, *, channels_last: bool) -> None:
    """Order a model's convolutions, and let gradients pass its checkpointed layers."""
    if channels_last:
        to_channels_last(model)
    if not args.gradient_checkpointing:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise HamuError(
            f"{type(model).__name__} cannot recompute activations; leave out "
            f"--gradient_checkpointing"
        )
    if hasattr(model, "peft_config"):  # else gradients would end at the frozen embeddings
        model.enable_input_require_grads()


def to_channels_last(model: Any) -> None:
    """Put two-dimensional convolutions in channels-last order, unless others are among them."""
    if all(p.dim() <= 4 for p in model.parameters()):
        model.to(memory_format=torch.channels_last)


def _check_is_taken(optimizer: torch.optim.Optimizer, name: str, value: str) -> None:
    """Check that a value of --optim_args has become a setting of the optimizer."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = [group.get(name) for group in optimizer.param_groups]
    with suppress(ValueError):
        if (words.get(value.lower()) if isinstance(found[0], bool) else float(value)) in found:
            return
    raise HamuError(
        f"--optim_args {name}={value}: {type(optimizer).__name__} takes no {name} from there; "
        f"correct it, or leave it out"
    )
