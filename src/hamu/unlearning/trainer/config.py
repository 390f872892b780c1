"""Settings of a run: what transformers' TrainingArguments has, plus what unlearning adds.

One dataclass serves the Python API, the command line and YAML.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env  # type: ignore[import-untyped]
from transformers import TrainingArguments

from hamu.core.combine import GradOffload
from hamu.core.distributed import world_size
from hamu.core.distributed.layout import check_even
from hamu.core.methods import HamuQ, HamuU, Method, StoppingRule, build_method
from hamu.core.objectives import build_objective
from hamu.errors import HamuError
from hamu.unlearning.goals import check_goal_settings
from hamu.unlearning.trainer.logs import named_trackers
from hamu.unlearning.trainer.promise import TrustRegion

_logger = logging.getLogger(__name__)

# Settings that have no effect with some methods: for these a method needs a pass over the side,
_OF_A_SIDE = {
    "forget_objective": "forget",
    "min_forget_loss": "forget",
    "max_forget_loss": "forget",
    "max_retain_loss": "retain",
}
# for these a field of its own: a constraint and what belongs to it, or a stopping rule.
_OF_A_FIELD = {
    name: name
    for name in ("constraint", "constraint_mode", "distribution", "radius", "on_infeasible")
}
_OF_A_FIELD |= dict.fromkeys(
    ("stopping", "stopping_margin", "stopping_patience", "stopping_window"), "stopping"
)
_LOWER_IS_BETTER = ("retain_loss", "test_loss", "forget_accuracy")

# Settings of transformers that a step or an evaluation of unlearning has no place for, and why.
_WITHOUT_EFFECT = {
    "label_smoothing_factor": "losses are those of the objectives",
    "dataloader_drop_last": "an epoch is all of the retain set",
    "train_sampling_strategy": "records are paired by the seed alone",
    "average_tokens_across_devices": "losses are means over all processes in any case",
    "include_num_input_tokens_seen": "a pair of batches is not one input",
    "bf16_full_eval": "evaluations run as training does; see full_precision_eval",
    "fp16_full_eval": "evaluations run as training does; see full_precision_eval",
    "prediction_loss_only": "evaluations keep what is measured, and no more",
    "eval_accumulation_steps": "evaluations keep what is measured, and no more",
    "eval_do_concat_batches": "evaluations keep what is measured, and no more",
    "eval_use_gather_object": "evaluations keep what is measured, and no more",
    "torch_empty_cache_steps": "a step keeps the memory that it needs again",
}


DEFAULT_BUDGET = 0.02  # nats that the retain loss may rise in a run by goal


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


_LARGEST = torch.finfo(torch.float32).max
_POSITIVE = (
    "learning_rate", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "logging_steps", "save_steps", "eval_steps",
)  # fmt: skip
_NOT_NEGATIVE = (
    "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "dataloader_num_workers", "eval_delay",
)  # fmt: skip


@dataclass
class TrainConfig(TrainingArguments):
    """Settings for training the original model; the defaults are the paper's (App. E.2), but for its batch of 5000."""

    learning_rate: float = _option(1e-3, "Learning rate.")
    num_train_epochs: float = _option(50, "Passes over the training data.")
    lr_scheduler_type: str = _option(
        "constant", "How the learning rate develops: constant, linear, cosine, ..."
    )
    per_device_train_batch_size: int = _option(128, "Samples per forward and backward pass.")
    per_device_eval_batch_size: int = _option(500, "Samples per forward pass of an evaluation.")
    max_grad_norm: float = _option(0.0, "Clip the gradient to this global norm; 0 for no clipping.")
    logging_steps: float = _option(50, "Steps from one log entry to the next.")
    save_strategy: str = _option("no", "When to save checkpoints: no, steps, epoch.")
    report_to: str = _option(
        "none",
        "Where to send settings and figures, nothing else: tensorboard, wandb, mlflow, trackio (with commas).",
    )
    channels_last: bool = _option(
        True, "Keep images and convolutions in channels-last order, faster on most devices."
    )
    remove_unused_columns: bool = _option(False, "Not used: the collators choose the columns.")
    logging_nan_inf_filter: bool = _option(False, "Hide non-finite losses from the logs.")

    def __post_init__(self) -> None:
        """Check the ranges of what transformers leaves unchecked, and keep it from choosing trackers by itself.

        Where there is no accelerator it is told so, as it refuses bf16 otherwise; Apple's has no float64, which every
        Gram is in, so that it counts as none. One process uses one GPU: transformers would wrap the model in
        DataParallel, which runs without autocast and on batches that many times as large.

        Raises:
            HamuError: if a value is out of range, the best state is to be saved and nothing says which that is, or
                accelerate was told what these settings do not say.
        """
        for name in (*_POSITIVE, *_NOT_NEGATIVE):
            value, zero = getattr(self, name), name in _NOT_NEGATIVE
            if value is None or 0 < value <= _LARGEST or (zero and value == 0):
                continue
            if zero:
                raise HamuError(f"{name} {value} must be 0 or more, and finite in float32")
            raise HamuError(f"{name} {value} must be positive, and finite in float32")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise HamuError(f"{name} {getattr(self, name)} must be a share in [0, 1)")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**32:
                raise HamuError(f"{name} {value} must be 0 to {2**32 - 1}")
        if self.max_steps < -1:
            raise HamuError(
                f"max_steps {self.max_steps} must be a number of steps; leave it out to go by epochs"
            )
        if self.save_strategy == "best" and (
            self.eval_strategy == "no" or self.metric_for_best_model is None
        ):
            raise HamuError(
                "save_strategy best needs --eval_strategy steps or epoch, and --metric_for_best_model, by which it goes"
            )
        self._check_launcher()
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if not self.use_cpu and str(torch.accelerator.current_accelerator()) == "mps":
            _say_once("the CPU is used: this machine's accelerator, mps, has no float64")
            self.use_cpu = True
        trackers = named_trackers(self.report_to)
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.n_gpu > 1:
            _say_once(
                f"one process uses one GPU, the first of {self.n_gpu}, unless the model itself lies on several; "
                f"torchrun --nproc_per_node {self.n_gpu} gives train and unlearn all of them"
            )
            self._n_gpu = 1
        # transformers adds one by itself where its environment has another
        self.report_to = trackers  # type: ignore[assignment]

    def _check_launcher(self) -> None:
        """What `accelerate launch` puts into the environment goes round these settings, and round the run's record."""
        launched = any(
            map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))
        )
        if self.fsdp or self.deepspeed or launched:
            raise HamuError(
                "two gradients have to meet before they are combined, so unlearning shards the model itself, with "
                "--shard, and training does not; leave out --fsdp and --deepspeed, and --use_fsdp and --use_deepspeed "
                "of accelerate launch"
            )
        told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        own = "fp16" if self.fp16 else "bf16" if self.bf16 else "no"
        if told not in ("no", own):
            raise HamuError(
                f"accelerate launch was given --mixed_precision {told}, but the run's own precision is {own}; leave it "
                f"out there, and give the run --bf16 or --fp16"
            )


@dataclass
class UnlearnConfig(TrainConfig):
    """Settings for unlearning; the defaults are the paper's (Sec. 6, App. E.3) but for batch and `shuffle`.

    There a batch has 5000 records of each side, and their order is that of the first epoch in all of them.

    Raises:
        HamuError: if a value is out of range, before anything runs.
    """

    method: str = _option("hamu-q", "How to unlearn; `hamu methods` lists them.")
    constraint: float = _option(
        0.5,
        "Loss change demanded per step and unit of learning rate, Q/lr or U/lr; with --constraint_mode relative "
        "the share of what is possible, in (0, 1].",
    )
    constraint_mode: str = _option(
        "absolute", "absolute (the paper) or relative (feasible wherever anything is)."
    )
    distribution: str = _option(
        "norm_product", "How the constraint is divided over blocks: norm_product or uniform."
    )
    radius: str = _option(
        "gradient", "Step radius of each block over lr: gradient (the paper) or a number."
    )
    on_infeasible: str = _option(
        "stop", "If the constraint cannot be met: stop, clamp (do the most possible) or skip."
    )
    stopping: str = _option(
        "aggregate", "Stopping criterion: aggregate (the paper), any, global or off."
    )
    stopping_margin: float = _option(0.0, "Stop earlier by this share of the constraint.")
    stopping_patience: int = _option(
        1, "Stop only after this many steps in a row that meet the criterion."
    )
    stopping_window: int = _option(1, "Average the criterion over this many steps.")
    pairing: str = _option(
        "sequential",
        "With several processes: sequential (each runs its retain and its forget records) or split (half of them hold "
        "retain, half forget records; an even number of processes).",
    )
    shard: bool = _option(
        False,
        "With several processes: shard parameters, gradients and the optimizer's state over them (FSDP2).",
    )
    offload_grads: str = _option(
        "none",
        "Where one side's gradient waits for the other's: none (in full, where it is), cpu (in the host's memory) or "
        "bf16 (in half the memory, each entry to 2^-8 of itself whenever it is put away: once in each pass of a step).",
    )
    correct_steps: bool = _option(
        False,
        "Correct the optimizer's steps where momentum or adaptive rates fall short of the demand (one copy of what is "
        "trained); without, the promise holds for g*, as in the paper.",
    )
    trust_region: bool = _option(
        False,
        "Steer the learning rate by what steps realise of their promise: halve it under a quarter, double it over "
        "three quarters, quadruple it over 95%, undo a step that realises nothing.",
    )
    trust_region_growth: float = _option(
        8.0, "How far above --learning_rate --trust_region may go, as a factor."
    )
    check_steps: int | None = _option(
        None,
        "Steps from one check to the next of what a step did to the losses of its batches; by default whenever it is "
        "logged, 0 for never.",
    )
    blocks: str = _option("tensor", "What one constraint is for: tensor, module or model.")
    shuffle: str = _option(
        "epoch", "Order of the data: epoch (a new one each epoch) or once (the paper)."
    )
    freeze_batchnorm: bool = _option(
        True, "Keep BatchNorm statistics as they are; its weights still train."
    )
    full_precision_eval: bool = _option(
        False,
        "With --bf16 or --fp16: evaluate in the model's own precision, for changes that are small.",
    )
    max_eval_samples: int | None = _option(
        None, "Evaluate on at most this many records of each set, drawn once."
    )
    forget_objective: str | None = _option(
        None,
        "What a forget pass raises, in place of the method's own: cross_entropy, kl_to_original, npo, simnpo, bounded.",
    )
    min_forget_loss: float | None = _option(
        None,
        "End when the forget loss of a step is below this: it does not unlearn (the paper: 0.1).",
    )
    max_retain_loss: float | None = _option(
        None,
        "End when the retain loss of a step is above this: it unlearns too much (the paper: 0.4).",
    )
    max_forget_loss: float | None = _option(
        None,
        "End when the forget loss of a step is above this, by the mean of its batch; --goal looks at each record.",
    )
    auto: bool = _option(
        False,
        "Unlearn by goal: demand, learning rate and length of the run follow from what is measured on the records. "
        "hamu unlearn does so unless --method, --learning_rate or --constraint is given.",
    )
    goal: str | None = _option(
        None,
        "When a record is forgotten: unseen (its loss is as that of records never trained on; the default with test "
        "data), retrained (as under --retain_model), erased (no longer recognised; the default for a whole class) or "
        "loss (--target_forget_loss).",
    )
    target_forget_loss: float | None = _option(
        None, "The loss that each forgotten record must have: --goal loss."
    )
    target_share: float = _option(0.95, "The share of the forget records that must be forgotten.")
    max_retain_increase: float | None = _option(
        None, "With --auto: how far the retain loss may rise, in nats; 0.02 by default."
    )
    lasting: bool = _option(
        False,
        "Forget for good: take the forget gradient where fine-tuning would lead, so that it does not bring back what "
        "was forgotten. Twice the time a step, and more steps; four copies of what is trained.",
    )
    lookahead_steps: int = _option(
        40, "With --lasting: steps of fine-tuning that are looked ahead."
    )
    lookahead_rate: float | None = _option(
        None, "With --lasting: their learning rate; by default 1e-3 for images, 3e-4 for texts."
    )
    max_skips: int = _option(10, "Stop after this many steps in a row that could not be taken.")

    learning_rate: float = _option(1e-4, "Learning rate.")
    num_train_epochs: float = _option(5, "Passes over the retain data, at most.")
    optim: str = _option(
        "sgd",
        "Optimizer: sgd (the paper, without momentum; --auto replaces it by adamw_torch), adafactor, ...",
    )
    max_grad_norm: float = _option(
        1.0, "Clip each side's gradient to this global norm; 0 for no clipping."
    )
    logging_steps: float = _option(1, "Steps from one log entry to the next.")
    eval_strategy: str = _option("epoch", "When to evaluate: no, steps, epoch.")
    eval_on_start: bool = _option(
        True, "Evaluate before the first step; changes are relative to it."
    )
    metric_for_best_model: str | None = _option(
        "joint_gain",
        "What --load_best_model_at_end goes by; joint_gain is the smaller of the forget gain and the retain gain.",
    )
    greater_is_better: bool | None = _option(
        None,
        "Whether a larger value of that metric is better; by default what unlearning wants of it.",
    )

    def __post_init__(self) -> None:
        """Check what is ours, then let TrainingArguments check the rest."""
        self.build_method()
        if self.shuffle not in ("epoch", "once"):
            raise HamuError(f"shuffle {self.shuffle!r} is unknown; choose epoch or once")
        if self.blocks not in ("tensor", "module", "model"):
            raise HamuError(f"blocks {self.blocks!r} is unknown; choose tensor, module or model")
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise HamuError(f"max_eval_samples {self.max_eval_samples} must be at least 1")
        if self.pairing not in ("sequential", "split"):
            raise HamuError(f"pairing {self.pairing!r} is unknown; choose sequential or split")
        if self.pairing == "split" or self.shard or GradOffload(self.offload_grads).is_used:
            self._check_parted()
        if self.correct_steps and not isinstance(self.build_method(), HamuQ | HamuU):
            raise HamuError(
                f"{self.method} promises nothing; --correct_steps needs hamu-q or hamu-u"
            )
        if self.check_steps is not None and self.check_steps < 0:
            raise HamuError(f"check_steps {self.check_steps} must not be negative; 0 for never")
        TrustRegion(self.trust_region_growth)
        if self.forget_objective is not None:
            build_objective(self.forget_objective)
        method = self.build_method()
        for name, side in _OF_A_SIDE.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) and not 0 < value < float("inf"):
                raise HamuError(f"{name} {value} must be a positive number")
            if not getattr(method, f"uses_{side}"):
                raise HamuError(
                    f"{name} has no effect with {self.method}, which has no {side} pass; leave it out"
                )
        defaults = {f.name: f.default for f in fields(TrainingArguments)}
        for name, why in _WITHOUT_EFFECT.items():
            value = getattr(self, name, None)
            if value != defaults.get(name) and (value or defaults[name] is True):
                raise HamuError(f"{name} {value} has no effect on unlearning: {why}; leave it out")
        self._settle_goal()
        if self.greater_is_better is None:
            self.greater_is_better = (
                str(self.metric_for_best_model).removeprefix("eval_") not in _LOWER_IS_BETTER
            )
        if self.dataloader_persistent_workers:
            raise HamuError(
                "dataloader_persistent_workers would repeat the first epoch's order; leave it off"
            )
        super().__post_init__()

    def _check_parted(self) -> None:
        """What works where a process has only a part of the gradients."""
        method = self.build_method()
        if self.shard and self.pairing == "split":
            raise HamuError(
                "--shard cuts both gradients over all processes; leave pairing at sequential"
            )
        if self.shard and world_size() < 2:
            raise HamuError(
                "--shard cuts a model over several processes; start them with torchrun, or give --shard False"
            )
        if self.shard and self.optim == "adafactor":
            raise HamuError(
                "adafactor's factored state cannot be sharded; with --shard choose another --optim, such as adamw_torch"
            )
        if self.pairing == "split" and not (method.uses_retain and method.uses_forget):
            raise HamuError(
                f"split pairing needs both sides, but {self.method} has one; leave pairing at sequential"
            )
        if self.pairing == "split":
            check_even(world_size())
        for name, asked in (("correct_steps", self.correct_steps), ("trust_region", self.trust_region),
                            ("auto", self.auto)):  # fmt: skip
            if asked:
                raise HamuError(
                    f"{name} needs both whole gradients in each process; leave pairing at sequential, and --shard and "
                    f"--offload_grads out"
                )

    def _settle_goal(self) -> None:
        """Check the settings of a run by goal, and of a lasting one; set what follows from them."""
        check_goal_settings(self.goal, self.target_forget_loss, self.target_share)
        if self.lookahead_steps < 1:
            raise HamuError(
                f"lookahead_steps {self.lookahead_steps} must be at least 1 step of fine-tuning"
            )
        if self.lasting:
            self._settle_lasting()
        if not self.auto:
            if self.max_retain_increase is not None:
                raise HamuError(
                    "max_retain_increase has no effect without --auto; add it, or leave it out"
                )
            return
        if self.max_retain_increase is None:
            self.max_retain_increase = DEFAULT_BUDGET
        if not 0 <= self.max_retain_increase < float("inf"):
            raise HamuError(
                f"max_retain_increase {self.max_retain_increase} must be 0 or more, in nats"
            )
        if self.load_best_model_at_end:
            raise HamuError(
                "auto keeps the state that its goal asks for; leave out --load_best_model_at_end"
            )
        if not self.freeze_batchnorm:
            raise HamuError(
                "auto goes back to weights, not to BatchNorm statistics; leave freeze_batchnorm on"
            )
        if self.dataloader_num_workers:
            raise HamuError(
                "auto chooses the records of the next step by the last; leave dataloader_num_workers at 0"
            )
        if self.method != "hamu-q":
            raise HamuError(f"auto controls hamu-q; leave out --method {self.method}")
        if self.radius != "gradient" or self.distribution != "norm_product" or self.trust_region:
            raise HamuError(
                "auto sets demand and rate itself; leave out radius, distribution and trust_region"
            )
        if self.forget_objective not in (None, "bounded"):
            raise HamuError(
                f"auto raises each record to its target; leave out forget_objective {self.forget_objective}"
            )
        self.forget_objective, self.constraint_mode, self.constraint = "bounded", "relative", 0.5
        self.stopping, self.on_infeasible, self.lr_scheduler_type = "off", "clamp", "constant"
        self.check_steps = self.check_steps or 0
        self.optim = "adamw_torch" if self.optim == "sgd" else self.optim
        if self.eval_strategy == "epoch":
            self.eval_strategy = "no"  # the controller measures

    def _settle_lasting(self) -> None:
        method = self.build_method()
        if world_size() > 1 or self.shard:
            raise HamuError("lasting looks ahead in one process; leave out torchrun, or --lasting")
        if self.fp16:
            raise HamuError(
                "lasting takes steps of its own, which float16 would round away; use --bf16 or neither"
            )
        if not (method.uses_retain and method.uses_forget):
            raise HamuError(
                f"lasting needs both gradients, but {self.method} has one; choose another method"
            )
        if self.forget_objective not in (None, "bounded"):
            raise HamuError(
                f"lasting needs a bounded objective; leave out forget_objective {self.forget_objective}"
            )
        if self.trust_region:
            raise HamuError(
                "lasting takes the forget loss elsewhere, where no step is judged; leave out trust_region"
            )
        self.forget_objective, self.check_steps = "bounded", 0

    @property
    def clip_norm(self) -> float | None:
        """The global norm that each side's gradient is clipped to; None for no clipping, which is `max_grad_norm` 0."""
        return self.max_grad_norm if self.max_grad_norm > 0 else None

    def objectives(self) -> dict[str, str | None]:
        """The name of what each side's gradient is taken of; None for a side that the method has no pass over."""
        method = self.build_method()
        return {
            "retain": method.retain_objective,
            "forget": self.forget_objective or method.forget_objective,
        }

    def build_method(self) -> Method:
        """The method that these settings describe."""
        return build_method(
            self.method,
            constraint=self.constraint,
            constraint_mode=self.constraint_mode,
            distribution=self.distribution,
            radius=self.radius if self.radius == "gradient" else _number("radius", self.radius),
            on_infeasible=self.on_infeasible,
            stopping=StoppingRule(
                self.stopping,  # type: ignore[arg-type]  # checked by the rule
                self.stopping_margin,
                self.stopping_patience,
                self.stopping_window,
            ),
        )


def unused_settings(method: Method) -> set[str]:
    """Names of the settings that have no effect with a method, or are refused with it."""
    own: set[str] = {one.name for one in fields(method)} if is_dataclass(method) else set()
    unused = {name for name, side in _OF_A_SIDE.items() if not getattr(method, f"uses_{side}")}
    unused |= {name for name, needed in _OF_A_FIELD.items() if needed not in own}
    return unused if isinstance(method, HamuQ | HamuU) else unused | {"correct_steps"}


def checkpoints_activations(args: TrainingArguments) -> bool:
    """Whether activations are recomputed, by either of the names that transformers has had for it."""
    return bool(
        getattr(args, "gradient_checkpointing", False)
        or getattr(args, "activation_checkpointing", False)
    )


def own_options(cls: type) -> list[str]:
    """Names of the options that a class adds to, or changes in, TrainingArguments."""
    return [
        f.name
        for base in cls.__mro__
        if base.__module__ == __name__
        for f in fields(base)
        if f.name in vars(base)
    ]


@cache
def _say_once(text: str) -> None:
    _logger.warning("%s", text)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise HamuError(f'{name} {value!r} is neither "gradient" nor a number') from None
