"""Settings out of range, or that do not go together, are refused in one line before a run."""

import logging
import math
import re

import pytest
import torch
from transformers.training_args import ParallelMode

from hamu import HamuError, UnlearnConfig
from hamu.core.distributed import is_main
from hamu.unlearning.jobs.options import BY_HAND
from hamu.unlearning.trainer import TrainConfig
from hamu.unlearning.trainer import config as config_module

GOAL = {"auto": True, "max_retain_increase": 0.1, "target_forget_loss": 2.0}
LASTING, TWO = {"lasting": True}, {"processes": 2}
SPLIT, SHARD, OFFLOAD = {"pairing": "split"}, {"shard": True}, {"offload_grads": "cpu"}
NEEDS_BOTH = "needs both whole gradients in each process; leave pairing at sequential"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate 0.0 must be positive, and finite in float32"),
        ({"learning_rate": "1e-3"}, "learning_rate '1e-3' is no number"),
        ({"num_train_epochs": math.inf}, "num_train_epochs inf must be positive"),
        ({"seed": -1}, "seed -1 must be 0 to 4294967295"),
        ({"save_strategy": "best"}, "save_strategy best needs --eval_strategy steps or epoch, and"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs --save_strategy and"),
        ({"weight_decay": math.nan}, "weight_decay nan must be 0 or more, and finite in float32"),
        ({"dataloader_in_order": False}, "dataloader_in_order False: batches come in another o"),
        ({"warmup_steps": 2}, "warmup_steps 2 has no effect on a constant learning rate; give"),
        ({"lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs {'a': 1} has no effect on a co"),
        ({"fsdp": "full_shard"}, "two gradients have to meet before they are combined"),
    ],
)
def test_training_and_unlearning_refuse(settings, message):
    others = {"eval_strategy": "no", **settings}
    for config in (TrainConfig, UnlearnConfig):
        with pytest.raises(HamuError, match="^" + re.escape(message)):
            config(output_dir="unused", **others)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "never"}, "shuffle 'never' is unknown; choose epoch or once"),
        ({"radius": "large"}, "radius 'large' is neither \"gradient\" nor a number"),
        ({"max_eval_samples": 0}, "max_eval_samples 0 must be at least 1"),
        ({"max_skips": 0}, "max_skips 0 must be at least 1"),
        ({"correct_steps": True, "method": "ga"}, "ga promises nothing; --correct_steps needs"),
        ({"check_steps": -1}, "check_steps -1 must be 0 or more"),
        ({"forget_objective": "idk", "max_forget_loss": 2.0}, "max_forget_loss is a loss of the"),
        ({"forget_objective": "hate"}, "objective 'hate' is unknown; choose one of cross_entropy"),
        ({"min_forget_loss": 0.1, "method": "ft"}, "min_forget_loss has no effect with ft, which"),
        ({"method": "pdu", "trust_region": True}, "pdu remembers its steps, of which --trust"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor 0.1 has no place in unlearning"),
        (OFFLOAD | GOAL, f"auto {NEEDS_BOTH}"),
        (GOAL | {"goal": "erased"}, "target_forget_loss is of the goal loss, not erased; leave"),
        (GOAL | {"goal": "loss", "target_forget_loss": None}, "the goal loss needs --target"),
        (GOAL | {"target_share": 1.5}, "target_share 1.5 must be a share in (0, 1]"),
        (GOAL | {"lr_scheduler_type": "cosin"}, "lr_scheduler_type 'cosin' is unknown; did"),
        (GOAL | {"optim": "sgd"}, "optim sgd does not go with a run by goal (auto), whose rates"),
        (GOAL | {"eval_on_start": False}, "eval_on_start False does not go with a run by goal"),
        (GOAL | {"method": "gdiff"}, "method gdiff does not go with a run by goal"),
        (LASTING | {"forget_objective": "npo"}, "forget_objective npo does not go with --lasting"),
        (
            LASTING | {"freeze_batchnorm": False},
            "freeze_batchnorm False does not go with --lasting",
        ),
        (LASTING | {"method": "ga"}, "lasting looks ahead with both gradients, but ga has one"),
        ({"lookahead_steps": 20}, "lookahead_steps has no effect without --lasting; add it, or"),
        ({"fp16": True, "use_cpu": True}, "fp16 needs a GPU: on a CPU training would be"),
        ({"eval_on_start": False}, "eval_on_start measures the baseline of every figure; leave"),
        ({"max_steps": 0}, "max_steps 0 takes no step; leave it out, or give at least 1"),
        ({"save_only_model": True}, "save_only_model True has no place in unlearning; leave it"),
        ({"label_names": ["y"]}, "label_names ['y'] has no place in unlearning; leave it out"),
        (
            {"torch_compile_backend": "indctor"},
            "torch_compile_backend 'indctor' is unknown; did you",
        ),
        ({"optim": "lomo"}, "lomo steps within a backward pass, before two gradients"),
        ({"optim": "schedule_free_sgd"}, "schedule_free_sgd changes the weights between steps"),
        ({"remove_unused_columns": True}, "remove_unused_columns: collators do; leave it out"),
        (TWO | SHARD | {"optim": "adafactor"}, "--shard goes with sequential pairing and without"),
        (TWO | SPLIT | {"method": "ga"}, "split pairing needs both sides, but ga has one; leave"),
        (TWO | SPLIT | {"trust_region": True}, f"trust_region {NEEDS_BOTH}"),
    ],
)
def test_unlearning_refuses(monkeypatch, settings, message):
    settings = dict(settings)
    monkeypatch.setenv("WORLD_SIZE", str(settings.pop("processes", 1)))
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        UnlearnConfig(output_dir="unused", **settings)


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        (SHARD, 1, "--shard needs several processes; start them with torchrun, or give --shard"),
        (SPLIT, 3, "split pairing needs an even number of processes; there are 3"),
        (LASTING, 2, "lasting looks ahead in one process, not 2; start it without torchrun"),
    ],
)
def test_settings_for_another_number_of_processes(monkeypatch, settings, processes, message):
    args = UnlearnConfig(output_dir="unused", **settings)  # a run may be looked at by one
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        args.check_processes()


def test_a_rank_of_something_else_leaves_the_only_process_the_main_one(monkeypatch):
    """As a script may call that of its adapters: nothing would be written."""
    monkeypatch.setenv("RANK", "16")
    for count, is_it in (("1", True), ("32", False)):
        monkeypatch.setenv("WORLD_SIZE", count)
        assert is_main() == is_it
    monkeypatch.delenv("WORLD_SIZE")
    assert is_main()


@pytest.mark.parametrize("config", [TrainConfig, UnlearnConfig])
def test_a_launcher_that_contradicts_the_settings_is_refused(monkeypatch, config):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert config(output_dir="unused", bf16=True).mixed_precision == "bf16"
    with pytest.raises(HamuError, match=r"--mixed_precision bf16, but .* precision is no;"):
        config(output_dir="unused")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(HamuError, match="two gradients have to meet before they are combined"):
        config(output_dir="unused", bf16=True)


@pytest.fixture
def said(caplog):
    """Warnings of which each is given once, from the start."""
    logging.Logger.warning_once.cache_clear()
    yield caplog
    logging.Logger.warning_once.cache_clear()


def test_one_process_uses_one_of_several_gpus(monkeypatch, said):
    """transformers counts several while it sets up the device."""
    devices = TrainConfig._setup_devices

    def two(self):
        device = devices.func(self)
        self._n_gpu = 2
        return device

    monkeypatch.setattr(TrainConfig, "_setup_devices", property(two))
    configs = [TrainConfig(output_dir="unused"), UnlearnConfig(output_dir="unused")]
    assert [c.n_gpu for c in configs] == [1, 1]
    configs[0].settle_batch_sizes(is_text=False)
    configs[1].settle_batch_sizes(is_text=True)
    assert [c.train_batch_size for c in configs] == [128, 8]
    assert configs[0].parallel_mode == ParallelMode.NOT_PARALLEL
    [message] = said.messages
    assert message.startswith("one process uses one GPU, the first of 2, unless")


def test_an_accelerator_without_float64_is_left_alone(monkeypatch, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    config = UnlearnConfig(output_dir="unused")
    assert (config.use_cpu, config.device.type) == (True, "cpu")
    assert UnlearnConfig(output_dir="unused", use_cpu=True).use_cpu
    assert said.messages == ["the CPU is used: this machine's accelerator, mps, has no float64"]


def test_bf16_is_advised_against_where_it_is_slower_than_float32(monkeypatch, said):
    assert 0 < config_module._slowdown_by_bf16() < math.inf
    for times in (0.5, 27.6):
        monkeypatch.setattr(config_module, "_slowdown_by_bf16", lambda times=times: times)
        TrainConfig(output_dir="unused", bf16=True, use_cpu=True)
    TrainConfig(output_dir="unused", use_cpu=True)
    [message] = said.messages
    assert message == (
        "this CPU multiplies bfloat16 matrices 28 times as slowly as float32; --bf16 false is "
        "faster"
    )


def test_each_process_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(HamuError, match=r"^2 processes need as many GPUs, and .* has 1; start 1,"):
        UnlearnConfig(output_dir="unused")
    assert UnlearnConfig(output_dir="unused", use_cpu=True).use_cpu


def test_a_run_by_goal_has_a_budget_and_a_lasting_one_bounds_what_it_raises():
    config = UnlearnConfig(output_dir="unused", auto=True)
    assert (config.eval_strategy, UnlearnConfig("unused").eval_strategy) == ("no", "epoch")
    assert UnlearnConfig("unused", auto=True, eval_strategy="epoch").eval_strategy == "epoch"
    assert (config.max_retain_increase, config.forget_objective) == (0.02, "bounded")
    assert (config.constraint_mode, config.stopping) == ("relative", "off")
    asked = {
        "warmup_steps": 3,
        "lr_scheduler_kwargs": {"min_lr": 1.0},
        "lr_scheduler_type": "cosine",
    }
    by_goal = UnlearnConfig("unused", auto=True, **asked)
    assert asked.keys() < config_module.without_effect(by_goal), "they are named as such"
    for layout in ({"pairing": "split"}, {"shard": True}, {"offload_grads": "bf16"}):
        for optim in ("sgd", "adamw_torch"):
            idle = {"stopping_records"} if "offload_grads" not in layout else set()
            idle |= {"check_steps"} if optim != "sgd" else set()  # both gradients would tell
            config = UnlearnConfig("unused", optim=optim, **layout)
            both = {"check_steps", "stopping_records"}
            assert config_module.without_effect(config) & both == idle
    config = UnlearnConfig(output_dir="unused", lasting=True, method="gdiff", max_grad_norm=0.0)
    assert (config.max_retain_increase, config.forget_objective) == (None, "bounded")
    assert config.check_steps == 0
    config = UnlearnConfig("unused", max_grad_norm=None)
    assert config.max_grad_norm == 0, "transformers compares it with 0"


@pytest.mark.parametrize(("settings", "retain", "forget"), [
    ({"forget_objective": "npo"}, "cross_entropy", "npo"),
    ({"method": "scrub"}, "scrub_retain", "kl_to_original"),
    ({"method": "ft"}, "cross_entropy", None),
    ({"method": "ga", "forget_objective": "simnpo"}, None, "simnpo"),
])  # fmt: skip
def test_the_settings_give_the_objective_of_each_side(settings, retain, forget):
    config = UnlearnConfig(output_dir="unused", **settings)
    assert config.objectives() == {"retain": retain, "forget": forget}


def test_the_best_model_is_by_what_unlearning_wants_of_a_metric():
    higher = ("joint_gain", "eval_forget_loss", "retain_accuracy")
    for metric in ("eval_retain_loss", "test_loss", "forget_accuracy", *higher):
        settings = UnlearnConfig(output_dir="unused", metric_for_best_model=metric)
        assert settings.greater_is_better is (metric in higher)


def test_the_help_of_auto_names_all_options_that_choose_a_run_by_hand():
    said = UnlearnConfig.__dataclass_fields__["auto"].metadata["help"]
    assert {*re.findall(r"--(\w+)", said)} == BY_HAND


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "max"),
        ({"metric_for_best_model": "eval_retain_loss"}, "min"),
        ({"lr_scheduler_kwargs": {"mode": "min"}}, "min"),
        ({"lr_scheduler_kwargs": '{"patience": 3}'}, "max"),
    ],
)
def test_a_schedule_judges_its_metric_in_the_metrics_direction(schedule, settings, mode):
    args = UnlearnConfig(output_dir="unused", lr_scheduler_type=schedule, **settings)
    assert args.lr_scheduler_kwargs["mode"] == mode


def test_a_local_rank_of_minus_one_is_that_of_a_process_on_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert UnlearnConfig(output_dir="unused").local_rank in (-1, 0)
