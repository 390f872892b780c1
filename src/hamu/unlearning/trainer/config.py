"""Settings of a run: transformers' TrainingArguments and what unlearning adds.

One dataclass serves the Python API, the command line and YAML.
"""

import os
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from numbers import Real
from timeit import repeat
from typing import Any

import torch
from accelerate.utils import DynamoBackend, parse_flag_from_env  # type: ignore[import-untyped]
from transformers import SchedulerType, TrainingArguments
from transformers.integrations import integration_utils
from transformers.utils import logging

from hamu.core.distributed import check_even, launched, world_size
from hamu.core.methods import Method, StoppingRule, build_method
from hamu.core.objectives import OBJECTIVES, build_objective
from hamu.core.pair import OFFLOADS
from hamu.errors import HamuError, reading, unknown
from hamu.unlearning.goals import check_goal_settings

_warn_once = logging.get_logger(__name__).warning_once

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_SLOW = 2.0  # times as long as float32 takes
DEFAULT_BUDGET = 0.02  # nats that the retain loss may rise in a run by goal
_UPLOADS = ("WANDB_LOG_MODEL", "WANDB_WATCH", "HF_MLFLOW_LOG_ARTIFACTS")
# Settings that have no effect with some methods: for these a method needs a pass over the side,
_OF_THE_FORGET_LOSS = ("min_forget_loss", "max_forget_loss")  # whose step a lasting run takes ahead
_OF_A_SIDE = dict.fromkeys(("forget_objective", *_OF_THE_FORGET_LOSS), "forget")
_OF_A_SIDE["max_retain_loss"] = "retain"
# for these a field of its own: a constraint and what belongs to it, a weight, or a stopping rule.
_METHOD_FIELDS = (
    *("constraint", "constraint_mode", "distribution", "radius", "on_infeasible"),
    "forget_weight",
)
_STOPPING_FIELDS = ("stopping", "stopping_margin", "stopping_patience", "stopping_window")
_SET_BY_GOAL = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("constraint", "constraint_mode", "on_infeasible", "stopping_records", *_STOPPING_FIELDS),
)
_LOWER_IS_BETTER = ("retain_loss", "test_loss", "forget_accuracy")
# Settings of transformers that a step or an evaluation of unlearning has no place for.
_WITHOUT_EFFECT = (
    *("label_smoothing_factor", "train_sampling_strategy", "average_tokens_across_devices"),
    *("dataloader_drop_last", "dataloader_persistent_workers", "include_num_input_tokens_seen"),
    *("bf16_full_eval", "fp16_full_eval", "prediction_loss_only", "eval_accumulation_steps"),
    *("eval_do_concat_batches", "eval_use_gather_object", "torch_empty_cache_steps"),
    *("neftune_noise_alpha", "save_only_model", "auto_find_batch_size", "batch_eval_metrics"),
    *("label_names", "length_column_name", "enable_jit_checkpoint"),
)
_CHOICES = {
    "shuffle": ("epoch", "once"),
    "blocks": ("tensor", "module", "model"),
    "pairing": ("sequential", "split"),
    "offload_grads": OFFLOADS,
}
# Values that settings must have in a run by goal, or a lasting one.
_WITH: dict[str, dict[str, tuple[Any, ...]]] = {
    "auto": {
        "method": ("hamu-q",),
        "radius": ("gradient",),
        "distribution": ("norm_product",),
        "trust_region": (False,),
        "forget_objective": (None, "bounded"),
        "load_best_model_at_end": (False,),  # its controller keeps the best state
        "freeze_batchnorm": (True,),  # it goes back to weights, not to statistics
        "eval_on_start": (True,),  # its budget counts from all retain records
        "dataloader_num_workers": (0,),  # it chooses the records of the next step by the last
    },
    "lasting": {
        "fp16": (False,),  # it would round away the steps ahead
        "freeze_batchnorm": (True,),  # passes ahead would move the statistics of the model itself
        "trust_region": (False,),  # the forget loss is taken elsewhere, where no step is judged
        "forget_objective": (None, "bounded"),
    },
}
# Settings that have an effect with another alone.
_NEEDS = {
    "max_retain_increase": "auto",
    "lookahead_steps": "lasting",
    "lookahead_rate": "lasting",
    "trust_region_growth": "trust_region",
}
# Values that transformers leaves unchecked: the first are positive, the others may be 0.
_LARGEST = torch.finfo(torch.float32).max
_POSITIVE = (
    *("learning_rate", "num_train_epochs", "logging_steps", "save_steps", "eval_steps"),
    *("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("min_forget_loss", "max_forget_loss", "max_retain_loss", "lookahead_rate"),
)
_REST = (
    *("max_grad_norm", "warmup_steps", "dataloader_num_workers", "eval_delay"),
    *("check_steps", "stopping_records", "max_retain_increase", "weight_decay"),
)


def _check(holds: Any, message: str) -> None:
    if not holds:
        raise HamuError(message)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TrainConfig(TrainingArguments):
    """Settings for training the original model: the paper's (App. E.2), but for its batch of 5000.

    Raises:
        HamuError: if a value is out of range, save_strategy best lacks a metric, or the
            environment of accelerate contradicts these settings.
    """

    learning_rate: float = _option(1e-3, "Learning rate.")
    num_train_epochs: float = _option(50, "Passes over the training data.")
    lr_scheduler_type: str = _option("constant", "Its schedule: constant, linear, cosine, ...")
    per_device_train_batch_size: int = _option(
        None, "Samples per forward and backward pass; by default 128 images or 8 texts."
    )
    per_device_eval_batch_size: int = _option(
        None, "Samples per forward pass of an evaluation; by default 500 images or 16 texts."
    )
    max_grad_norm: float = _option(0.0, "Clip the gradient to this global norm; 0 for no clipping.")
    logging_steps: float = _option(50, "Steps from one log entry to the next.")
    save_strategy: str = _option("no", "When to save checkpoints: no, steps, epoch.")
    report_to: str = _option("none", "Trackers: tensorboard, wandb, mlflow, trackio (commas).")
    channels_last: bool = _option(True, "Keep images and convolutions in channels-last order.")
    remove_unused_columns: bool = _option(False, "Not used: the collators choose the columns.")
    logging_nan_inf_filter: bool = _option(False, "Hide non-finite losses from the logs.")

    def __post_init__(self) -> None:
        """Check the settings, and settle device and trackers."""
        self.max_grad_norm = self.max_grad_norm or 0.0  # transformers compares it with 0
        for name in (*_POSITIVE, *_REST):
            value: Any = getattr(self, name, None)
            least = "0 or more" if name in _REST else "positive"
            is_number = isinstance(value, Real)  # YAML reads 1e-3 as a text
            is_in_range = is_number and (0 < value <= _LARGEST or (name in _REST and value == 0))
            problem = f"must be {least}, and finite in float32" if is_number else "is no number"
            _check(value is None or is_in_range, f"{name} {value!r} {problem}")
        _check(self.max_steps != 0, "max_steps 0 takes no step; leave it out, or give at least 1")
        _check(not self.remove_unused_columns, "remove_unused_columns: collators do; leave it out")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            _check(value is None or 0 <= value < 2**32, f"{name} {value} must be 0 to {2**32 - 1}")
        has_metric = self.eval_strategy != "no" and self.metric_for_best_model is not None
        _check(
            self.save_strategy != "best" or has_metric,
            "save_strategy best needs --eval_strategy steps or epoch, and --metric_for_best_model",
        )
        fits = self.eval_strategy != "no" and self.save_strategy in (self.eval_strategy, "best")
        _check(
            fits or not self.load_best_model_at_end,
            f"load_best_model_at_end needs --save_strategy and --eval_strategy alike, steps or "
            f"epoch; they are {self.save_strategy} and {self.eval_strategy}",
        )
        self._check_loading_and_schedule()
        self._check_launcher()
        # transformers refuses bf16 else; Apple's accelerator has no float64, as every Gram needs
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if not self.use_cpu and str(torch.accelerator.current_accelerator()) == "mps":
            _warn_once("the CPU is used: this machine's accelerator, mps, has no float64")
            self.use_cpu = True
        here, gpus = launched("LOCAL_WORLD_SIZE", 1), torch.accelerator.device_count()
        may_have_its_own = "CUDA_VISIBLE_DEVICES" in os.environ  # given to each by its launcher
        _check(
            self.use_cpu or here <= gpus or may_have_its_own,
            f"{here} processes need as many GPUs, and this machine has {gpus}; start {gpus}, or "
            f"give --use_cpu",
        )
        self._check_precision()
        trackers = named_trackers(self.report_to)
        with reading("the settings do not fit together"):
            super().__post_init__()  # type: ignore[no-untyped-call]
        backends = [name.lower() for name in DynamoBackend.__members__]
        if self.torch_compile and str(self.torch_compile_backend).lower() not in backends:
            raise unknown("torch_compile_backend", self.torch_compile_backend, backends)
        # batches reach a GPU while it works; the host waits for no copy
        loading: Any = self.accelerator_config
        loading.non_blocking = self.dataloader_pin_memory and not self.use_cpu
        if self.n_gpu > 1:  # else a DataParallel: no autocast, and larger batches
            _warn_once(
                f"one process uses one GPU, the first of {self.n_gpu}, unless the model lies on "
                f"several; torchrun --nproc_per_node {self.n_gpu} uses all of them"
            )
            self._n_gpu = 1
        # transformers adds one by itself where its environment has another
        self.report_to = trackers  # type: ignore[assignment]

    def _check_loading_and_schedule(self) -> None:
        """Check what transformers would take, and leave without effect or without a repetition."""
        smoothing, by_goal = self.label_smoothing_factor, getattr(self, "auto", False)
        _check(0 <= smoothing < 1, f"label_smoothing_factor {smoothing} must be in [0, 1)")
        _check(
            self.dataloader_in_order,
            "dataloader_in_order False: batches come in another order each time; leave it out",
        )
        for name in ("warmup_steps", "lr_scheduler_kwargs"):
            value = getattr(self, name)
            _check(
                not value or self.lr_scheduler_type != "constant" or by_goal,
                f"{name} {value} has no effect on a constant learning rate; give "
                f"--lr_scheduler_type constant_with_warmup or another, or leave it out",
            )

    def _check_launcher(self) -> None:
        """Check what accelerate launch was given, which bypasses settings and record."""
        flags = map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))
        told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        is_alone = world_size() == 1 and os.environ.get("LOCAL_RANK", "-1") == "-1"
        _check(
            is_alone or torch.distributed.is_initialized() or "MASTER_ADDR" in os.environ,
            f"WORLD_SIZE is {world_size()} and LOCAL_RANK "
            f"{os.environ.get('LOCAL_RANK') or 'empty'}, but no launcher has started this process; "
            f"start by torchrun, or unset both",
        )
        own = "fp16" if self.fp16 else "bf16" if self.bf16 else "no"
        _check(
            not (self.fsdp or self.deepspeed or any(flags)),
            "two gradients have to meet before they are combined; leave out --fsdp, --deepspeed, "
            "and these of accelerate launch: unlearning shards by --shard, training does not",
        )
        _check(
            told in ("no", own),
            f"accelerate launch was given --mixed_precision {told}, but the run's own precision is "
            f"{own}; leave it out there, and give the run --bf16 or --fp16",
        )

    def _check_precision(self) -> None:
        """Refuse, or advise against, half precision that a CPU does not have."""
        _check(
            not (self.fp16 and self.use_cpu),
            "fp16 needs a GPU: on a CPU training would be in float32; give --bf16, or neither",
        )
        if self.bf16 and self.use_cpu and (times := _slowdown_by_bf16()) >= _SLOW:
            _warn_once(
                f"this CPU multiplies bfloat16 matrices {times:.0f} times as slowly as float32; "
                f"--bf16 false is faster"
            )

    def settle_batch_sizes(self, *, is_text: bool) -> None:
        """Set the batch sizes that were not given."""
        train, evaluated = (8, 16) if is_text else (128, 500)
        self.per_device_train_batch_size = self.per_device_train_batch_size or train
        self.per_device_eval_batch_size = self.per_device_eval_batch_size or evaluated


@dataclass
class UnlearnConfig(TrainConfig):
    """Settings for unlearning: the paper's (Sec. 6, App. E.3), but for batch size and `shuffle`.

    There a batch has 5000 records of each side, and their order is that of the first epoch in all.

    Raises:
        HamuError: if a value is out of range, before anything runs.
    """

    method: str = _option("hamu-q", "How to unlearn; `hamu methods` lists them.")
    constraint: float = _option(
        0.5,
        "Loss change demanded per step and unit of learning rate, Q/lr or U/lr; with "
        "--constraint_mode relative the share of what is possible, in (0, 1].",
    )
    constraint_mode: str = _option("absolute", "absolute (the paper) or relative (feasible).")
    distribution: str = _option("norm_product", "Division over blocks: norm_product or uniform.")
    radius: str = _option("gradient", "Step radius of a block over lr: gradient or a number.")
    on_infeasible: str = _option("stop", "If unmet: stop, clamp (the most possible) or skip.")
    stopping: str = _option("aggregate", "Stopping criterion: aggregate, any, global or off.")
    stopping_margin: float = _option(0.0, "Stop earlier by this share of the constraint.")
    stopping_patience: int = _option(1, "Stop once so many steps (estimates) in a row meet it.")
    stopping_window: int = _option(1, "Average the criterion over so many steps (estimates).")
    stopping_records: int = _option(
        2560, "Half-life of the criterion's means over batches, for smaller ones; 0: one batch."
    )
    forget_weight: float = _option(
        0.5, "gdiff, kl, scrub, npo, simnpo: weight of the forget gradient; retain has the rest."
    )
    pairing: str = _option("sequential", "sequential, or split (half the processes for each side).")
    shard: bool = _option(False, "Shard model, gradients and optimizer over processes (FSDP2).")
    offload_grads: str = _option(
        "none", "Where one gradient waits: none, cpu, bf16 (rounded 2^-8)."
    )
    correct_steps: bool = _option(False, "Correct steps short of the demand (a copy of weights).")
    trust_region: bool = _option(
        False,
        "Steer the learning rate by the share of its promise that a step realises: halve it under "
        "1/4, double it over 3/4, quadruple it over 95%, undo a step that realises nothing.",
    )
    trust_region_growth: float = _option(8.0, "Most by which --trust_region raises the rate.")
    check_steps: int | None = _option(
        None,
        "Steps between checks of promises, 0: none; by default logged ones, in 5% of the time "
        "with the log; by goal 0.",
    )
    blocks: str = _option("tensor", "What one constraint is for: tensor, module or model.")
    shuffle: str = _option("epoch", "Order of the data: epoch (each its own) or once (the paper).")
    freeze_batchnorm: bool = _option(True, "Keep BatchNorm statistics; its weights still train.")
    full_precision_eval: bool = _option(False, "With --bf16 or --fp16: evaluate without them.")
    max_eval_samples: int | None = _option(None, "Records of each set to evaluate on, at most.")
    forget_objective: str | None = _option(
        None, f"Raised in place of the method's own: {', '.join(OBJECTIVES)}."
    )
    min_forget_loss: float | None = _option(None, "End if a forget loss is below (paper: 0.1).")
    max_retain_loss: float | None = _option(None, "End if a retain loss is above (paper: 0.4).")
    max_forget_loss: float | None = _option(None, "End if a forget loss reaches it; see --goal.")
    auto: bool = _option(
        False,
        "By goal: demand, learning rate and length follow from measurements. hamu unlearn does so "
        "unless --method, --learning_rate, --constraint, --constraint_mode, --forget_objective or "
        "--stopping is given.",
    )
    goal: str | None = _option(
        None,
        "When a record is forgotten: unseen (its loss is as that of records never trained on; the "
        "default with test data), retrained (as under --retain_model), erased (no longer "
        "recognised; the default for a whole class) or loss (--target_forget_loss).",
    )
    target_forget_loss: float | None = _option(None, "With --goal loss: that of each record.")
    target_share: float = _option(0.95, "Share of the forget records that must be forgotten.")
    max_retain_increase: float | None = _option(
        None, "With --auto: rise of the retain loss at most, in nats; 0.02 by default."
    )
    lasting: bool = _option(
        False,
        "Take the forget gradient where fine-tuning would lead, so that it brings nothing back: "
        "half as much time again a step, more steps, four copies of what is trained.",
    )
    lookahead_steps: int = _option(40, "With --lasting: steps of fine-tuning looked ahead.")
    lookahead_rate: float | None = _option(None, "Rate of these steps; 1e-3, for texts 3e-4.")
    max_skips: int = _option(10, "Stop after so many steps in a row that could not be taken.")

    learning_rate: float = _option(1e-4, "Learning rate.")
    num_train_epochs: float = _option(
        5, "Passes over the retain data, at most; by goal at least 400 steps."
    )
    optim: str = _option(None, "Optimizer: sgd (the paper), by default with --auto adamw_torch.")
    max_grad_norm: float = _option(1.0, "Clip each side's gradient to this global norm; 0: none.")
    logging_steps: float = _option(1, "Steps from one log entry to the next.")
    eval_strategy: str | None = _option(  # type: ignore[assignment]  # a string once it is made
        None, "When to evaluate: no, steps, epoch (by default epoch; no in a run by goal)."
    )
    eval_on_start: bool = _option(True, "Evaluate before the first step, as a reference.")
    metric_for_best_model: str | None = _option(
        "joint_gain",
        "What --load_best_model_at_end goes by; joint_gain is the smaller gain of both sides.",
    )
    greater_is_better: bool | None = _option(None, "Larger is better; by default as it is wanted.")

    def __post_init__(self) -> None:
        """Check the settings of unlearning, then those of TrainConfig."""
        method = self.build_method()
        for name, choices in _CHOICES.items():
            value, either = getattr(self, name), f"{', '.join(choices[:-1])} or {choices[-1]}"
            _check(value in choices, f"{name} {value!r} is unknown; choose {either}")
        for name in ("max_eval_samples", "lookahead_steps", "trust_region_growth", "max_skips"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} {value} must be at least 1")
        if self.forget_objective is not None:
            build_objective(self.forget_objective)
        check_goal_settings(self.goal, self.target_forget_loss, self.target_share)
        self._check_effects(method)
        if self.pairing == "split" or self.shard or self.offload_grads != "none":
            self._check_parted(method)
        for option, allowed in _WITH.items():
            for name, values in allowed.items() if getattr(self, option) else ():
                value = getattr(self, name)
                mode = "a run by goal (auto)" if option == "auto" else f"--{option}"
                _check(value in values, f"{name} {value} does not go with {mode}; leave it out")
        if self.lasting:
            _check(
                method.uses_retain and method.uses_forget,
                f"lasting looks ahead with both gradients, but {self.method} has one",
            )
            self.forget_objective, self.check_steps = "bounded", 0
            self.min_forget_loss = self.max_forget_loss = None  # its forget losses are those ahead
        if self.auto:
            self._settle_goal()
        self.optim, self.eval_strategy = self.optim or "sgd", self.eval_strategy or "epoch"
        _check(
            self.eval_on_start or self.eval_strategy == "no",
            "eval_on_start measures the baseline of every figure; leave it on",
        )
        if self.greater_is_better is None:
            metric = str(self.metric_for_best_model).removeprefix("eval_")
            self.greater_is_better = metric not in _LOWER_IS_BETTER
        super().__post_init__()
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):  # by that metric
            own: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = {"mode": "max" if self.greater_is_better else "min"} | own

    def _check_effects(self, method: Method) -> None:
        """Check the settings that some methods have no place for, and those that none has."""
        for name, side in _OF_A_SIDE.items():
            has_effect = getattr(self, name) is None or getattr(method, f"uses_{side}")
            lack = f"{self.method}, which has no {side} pass; leave it out"
            _check(has_effect, f"{name} has no effect with {lack}")
        for name in _OF_THE_FORGET_LOSS:
            _check(
                getattr(self, name) is None or self.objectives()["forget"] != "idk",
                f"{name} is a loss of the forget records' own answers, which idk does not measure",
            )
        _check(
            not (method.retain_decay and self.fp16),
            f"{self.method} averages gradients, which --fp16 rescales; use --bf16, or neither",
        )
        optimizer = str(getattr(self.optim, "value", self.optim))
        _check(
            "lomo" not in optimizer and "layerwise" not in optimizer,
            f"{optimizer} steps within a backward pass, before two gradients are there to combine",
        )
        _check(
            not optimizer.startswith("schedule_free"),
            f"{optimizer} changes the weights between steps and evaluations; choose another optim",
        )
        _check(
            not self.trust_region or not method.remembers,
            f"{self.method} remembers its steps, of which --trust_region undoes some; leave it out",
        )
        _check(
            not self.correct_steps or method.constrained is not None,
            f"{self.method} promises nothing; --correct_steps needs a constraint, as hamu-q has",
        )
        for name, needed in _NEEDS.items():
            is_default = getattr(self, name) == self.__dataclass_fields__[name].default
            lack = f"without --{needed}; add it, or leave it out"
            _check(is_default or getattr(self, needed), f"{name} has no effect {lack}")
        defaults = {f.name: f.default for f in fields(TrainingArguments)}
        for name in _WITHOUT_EFFECT:
            value = getattr(self, name, None)
            message = f"{name} {value} has no place in unlearning; leave it out"
            is_left_out = value == defaults.get(name)
            if name == "include_num_input_tokens_seen":  # transformers' parser makes it a bool
                is_left_out = value in ("no", False)
            _check(is_left_out, message)

    def _check_parted(self, method: Method) -> None:
        """Check what works where a process has only a part of the gradients."""
        is_split = self.pairing == "split"
        modes = {name: getattr(self, name) for name in ("correct_steps", "trust_region", "auto")}
        for name, is_on in ({self.method: method.retain_decay} | modes).items():
            _check(
                not is_on,
                f"{name} needs both whole gradients in each process; leave pairing at sequential, "
                f"and --shard and --offload_grads out",
            )
        _check(
            not self.shard or (not is_split and self.optim != "adafactor"),
            "--shard goes with sequential pairing and without adafactor; leave these out",
        )
        if is_split:
            _check(
                method.uses_retain and method.uses_forget,
                f"split pairing needs both sides, but {self.method} has one; leave it sequential",
            )

    def check_processes(self) -> None:
        """Check that there are as many processes as these settings need; a HamuError if not."""
        count = world_size()
        if self.pairing == "split":
            check_even(count)
        _check(
            not self.shard or count > 1,
            "--shard needs several processes; start them with torchrun, or give --shard False",
        )
        _check(
            not self.lasting or count == 1,
            f"lasting looks ahead in one process, not {count}; start it without torchrun",
        )

    def _settle_goal(self) -> None:
        """Set what the controller of a run by goal relies on."""
        if self.lr_scheduler_type not in (schedules := [one.value for one in SchedulerType]):
            raise unknown("lr_scheduler_type", self.lr_scheduler_type, schedules)
        if self.max_retain_increase is None:
            self.max_retain_increase = DEFAULT_BUDGET
        self.forget_objective, self.constraint_mode, self.constraint = "bounded", "relative", 0.5
        self.stopping, self.on_infeasible, self.lr_scheduler_type = "off", "clamp", "constant"
        self.check_steps = self.check_steps or 0
        _check(
            self.optim != "sgd",
            "optim sgd does not go with a run by goal (auto), whose rates are Adam's; give "
            "--optim adamw_torch, or leave it out",
        )
        self.optim = self.optim or "adamw_torch"
        self.eval_strategy = self.eval_strategy or "no"  # the controller measures

    def objectives(self) -> dict[str, str | None]:
        """Name of each side's objective; None for a side that the method has no pass over."""
        method = self.build_method()
        forget = self.forget_objective or method.forget_objective
        return {"retain": method.retain_objective, "forget": forget}

    @property
    def needs_goal(self) -> bool:
        """True if records are raised to what the goal asks of them."""
        return self.auto or self.forget_objective == "bounded"

    def most_evaluated(self, name: str) -> int | None:
        """Most records of a set that evaluations look at; None for all, as where each must rise."""
        is_whole = name == "forget" and self.forget_objective == "bounded"
        return None if is_whole else self.max_eval_samples

    @property
    def needs_alternatives(self) -> bool:
        """True if the forget objective needs another answer to each forget record."""
        name = self.objectives()["forget"]
        return name is not None and build_objective(name).answers != "own"

    def build_method(self) -> Method:
        """The method that these settings describe."""
        radius: float | str = self.radius
        if radius != "gradient":
            try:
                radius = float(radius)
            except ValueError:
                raise HamuError(f'radius {radius!r} is neither "gradient" nor a number') from None
        settings = {name: getattr(self, name) for name in _METHOD_FIELDS} | {"radius": radius}
        stopping = StoppingRule(*(getattr(self, name) for name in _STOPPING_FIELDS))
        return build_method(self.method, **settings, stopping=stopping)


@cache
def _slowdown_by_bf16() -> float:
    """Time of a product of bfloat16 matrices on this CPU over that of float32, measured."""
    matrix = torch.ones(128, 128, device="cpu")
    of_both = (matrix.bfloat16(), matrix.float())
    half, full = (min(repeat(partial(torch.mm, one, one), number=1)) for one in of_both)
    return half / full


def named_trackers(asked: str | list[str] | None) -> list[str]:
    """Trackers that --report_to names, separated by commas.

    Raises:
        HamuError: if one is unknown or not installed, or its environment asks it to upload models.
    """
    words = asked.split(",") if isinstance(asked, str) else asked or []
    names = [name for name in words if name not in ("", "none")]
    for name in names:
        choices = f"name some of {', '.join(TRACKERS)}, or none"
        _check(name in TRACKERS, f"report_to {name!r} is unknown; {choices}")
        is_there = getattr(integration_utils, f"is_{name}_available")()
        remedy = f"pip install {name}, or leave it out"
        _check(is_there, f"report_to {name}: it is not installed; {remedy}")
    for variable in _UPLOADS if names else ():
        is_off = os.environ.get(variable, "false").lower() in ("false", "0", "")
        _check(is_off, f"trackers are given figures, not models; unset {variable}")
    return names


def unused_settings(method: Method) -> set[str]:
    """Names of the settings that have no effect with a method, or are refused with it."""
    own: set[str] = {one.name for one in fields(method)} if is_dataclass(method) else set()
    unused = {name for name, side in _OF_A_SIDE.items() if not getattr(method, f"uses_{side}")}
    unused |= set(_METHOD_FIELDS) - own
    unused |= set() if "stopping" in own else {*_STOPPING_FIELDS, "stopping_records"}
    unused |= {"trust_region"} if method.remembers else set()
    return unused | ({"correct_steps"} if method.constrained is None else set())


def without_effect(args: UnlearnConfig) -> set[str]:
    """Names of the settings without effect on a run: of its method, by goal, lasting, in parts."""
    unused = unused_settings(args.build_method())
    unused |= {*_SET_BY_GOAL} if args.auto else set()
    is_in_parts = args.shard or args.pairing == "split"
    unused |= {"stopping_records"} if is_in_parts else set()
    keeps_none = is_in_parts or args.offload_grads != "none"
    unused |= {"check_steps"} if keeps_none and args.optim != "sgd" else set()
    return unused | ({*_OF_THE_FORGET_LOSS, "check_steps"} if args.lasting else set())


def own_options(cls: type) -> list[str]:
    """Names of the options that a class adds to, or changes in, TrainingArguments."""
    ours = [base for base in cls.__mro__ if base.__module__ == __name__]
    return [f.name for base in ours for f in fields(base) if f.name in vars(base)]
