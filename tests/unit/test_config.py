"""Settings of a run that are out of range, or do not go together, are refused in one line before anything runs."""

import math
import re

import pytest
import torch
from transformers.training_args import ParallelMode

from hamu import HamuError, UnlearnConfig
from hamu.unlearning.trainer import TrainConfig
from hamu.unlearning.trainer.config import _say_once

GOAL = {"auto": True, "max_retain_increase": 0.1, "target_forget_loss": 2.0}
NEEDS_BOTH = "needs both whole gradients in each process; leave pairing at sequential, and --shard and --offload_grads out"


@pytest.mark.parametrize(("settings", "message"), [
    ({"learning_rate": 0.0}, "learning_rate 0.0 must be positive, and finite in float32"),
    ({"learning_rate": 1e39}, "learning_rate 1e+39 must be positive, and finite in float32"),
    ({"save_steps": 0}, "save_steps 0 must be positive, and finite in float32"),
    ({"num_train_epochs": math.inf}, "num_train_epochs inf must be positive, and finite in float32"),
    ({"weight_decay": -0.1}, "weight_decay -0.1 must be 0 or more, and finite in float32"),
    ({"adam_beta1": -0.1}, "adam_beta1 -0.1 must be a share in [0, 1)"),
    ({"adam_beta2": 1.0}, "adam_beta2 1.0 must be a share in [0, 1)"),
    ({"seed": -1}, "seed -1 must be 0 to 4294967295"),
    ({"seed": 2**32}, "seed 4294967296 must be 0 to 4294967295"),
    ({"save_strategy": "best"}, "save_strategy best needs --eval_strategy steps or epoch, and --metric_for_best_model"),
])  # fmt: skip
def test_training_refuses(settings, message):
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        TrainConfig(output_dir="unused", **settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"method": "magic"}, "method 'magic' is unknown; choose one of hamu-q"),
    ({"constraint": 0.0}, "constraint 0.0 must be a positive number"),
    ({"constraint": 1.5, "constraint_mode": "relative"}, "a relative constraint is a share of what is possible, in"),
    ({"stopping": "later"}, "stopping criterion 'later' is unknown; choose aggregate, any, global or off"),
    ({"shuffle": "never"}, "shuffle 'never' is unknown; choose epoch or once"),
    ({"blocks": "layer"}, "blocks 'layer' is unknown; choose tensor, module or model"),
    ({"radius": "large"}, "radius 'large' is neither \"gradient\" nor a number"),
    ({"max_eval_samples": 0}, "max_eval_samples 0 must be at least 1"),
    ({"pairing": "both"}, "pairing 'both' is unknown; choose sequential or split"),
    ({"correct_steps": True, "method": "ga"}, "ga promises nothing; --correct_steps needs hamu-q or hamu-u"),
    ({"check_steps": -1}, "check_steps -1 must not be negative; 0 for never"),
    ({"trust_region_growth": 0.5}, "trust_region_growth 0.5 must be at least 1, the learning rate as it is given"),
    ({"offload_grads": "disk"}, "offload_grads 'disk' is unknown; choose none, bf16 or cpu"),
    ({"forget_objective": "hate"}, "objective 'hate' is unknown; choose one of cross_entropy, kl_to_original"),
    ({"min_forget_loss": 0.0}, "min_forget_loss 0.0 must be a positive number"),
    ({"min_forget_loss": 0.1, "method": "ft"}, "min_forget_loss has no effect with ft, which has no forget pass; "),
    ({"max_retain_loss": 9.0, "method": "ga"}, "max_retain_loss has no effect with ga, which has no retain pass; "),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor 0.1 has no effect on unlearning: losses are those"),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices False has no effect on unlearning: "),
    ({"torch_empty_cache_steps": 1}, "torch_empty_cache_steps 1 has no effect on unlearning: a step keeps the memory"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last True has no effect on unlearning: an epoch is all"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers would repeat the first epoch's order"),
])  # fmt: skip
def test_unlearning_refuses(settings, message):
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        UnlearnConfig(output_dir="unused", **settings)


@pytest.mark.parametrize(("processes", "settings", "message"), [
    (1, {"shard": True}, "--shard cuts a model over several processes; start them with torchrun, or give --shard"),
    (2, {"shard": True, "pairing": "split"}, "--shard cuts both gradients over all processes; leave pairing at seq"),
    (2, {"shard": True, "optim": "adafactor"}, "adafactor's factored state cannot be sharded; with --shard choose"),
    (2, {"pairing": "split", "method": "ga"}, "split pairing needs both sides, but ga has one; leave pairing at seq"),
    (3, {"pairing": "split"}, "split pairing needs an even number of processes; there are 3"),
    (2, {"shard": True, "correct_steps": True}, f"correct_steps {NEEDS_BOTH}"),
    (2, {"pairing": "split", "trust_region": True}, f"trust_region {NEEDS_BOTH}"),
    (1, {"offload_grads": "cpu", **GOAL}, f"auto {NEEDS_BOTH}"),
])  # fmt: skip
def test_what_shares_the_work_refuses(monkeypatch, processes, settings, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        UnlearnConfig(output_dir="unused", **settings)


@pytest.mark.parametrize("config", [TrainConfig, UnlearnConfig])
@pytest.mark.parametrize(("environment", "settings"), [
    ({}, {"fsdp": "full_shard"}),
    ({}, {"deepspeed": "settings.json"}),
    ({"ACCELERATE_USE_FSDP": "true"}, {}),  # as accelerate launch --use_fsdp sets it
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}),
])  # fmt: skip
def test_others_cut_no_model(monkeypatch, config, environment, settings):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        HamuError,
        match=r"^two gradients have to meet before they are combined, so unlearning shards",
    ):
        config(output_dir="unused", **settings)


@pytest.mark.parametrize("config", [TrainConfig, UnlearnConfig])
@pytest.mark.parametrize(("told", "settings", "own"), [
    ("bf16", {}, "no"), ("fp16", {"bf16": True}, "bf16"), ("fp8", {"bf16": True}, "bf16"),
])  # fmt: skip
def test_a_precision_that_only_the_launcher_knows_of_is_refused(
    monkeypatch, config, told, settings, own
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    message = f"accelerate launch was given --mixed_precision {told}, but the run's own precision is {own}; leave it"
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        config(output_dir="unused", **settings)


@pytest.mark.parametrize(
    ("told", "settings"), [("no", {}), ("no", {"bf16": True}), ("bf16", {"bf16": True})]
)
def test_a_launcher_that_says_the_same_or_nothing_is_fine(monkeypatch, told, settings):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    config = UnlearnConfig(output_dir="unused", **settings)
    assert config.mixed_precision == ("bf16" if settings else "no")


@pytest.fixture
def said(caplog):
    """What is said once, from the start."""
    _say_once.cache_clear()
    yield caplog
    _say_once.cache_clear()


def test_one_process_uses_one_of_several_gpus(monkeypatch, said):
    """Where there are several, transformers counts them while it sets up the device."""
    devices = TrainConfig._setup_devices

    def two(self):
        device = devices.func(self)
        self._n_gpu = 2
        return device

    monkeypatch.setattr(TrainConfig, "_setup_devices", property(two))
    configs = [TrainConfig(output_dir="unused"), UnlearnConfig(output_dir="unused")]
    assert [c.n_gpu for c in configs] == [1, 1]
    assert [c.train_batch_size for c in configs] == [128, 128]
    assert configs[0].parallel_mode == ParallelMode.NOT_PARALLEL
    assert said.messages == [
        "one process uses one GPU, the first of 2, unless the model itself lies on several; torchrun "
        "--nproc_per_node 2 gives train and unlearn all of them"
    ]


def test_an_accelerator_without_float64_is_left_alone(monkeypatch, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    config = UnlearnConfig(output_dir="unused")
    assert (config.use_cpu, config.device.type) == (True, "cpu")
    assert UnlearnConfig(output_dir="unused", use_cpu=True).use_cpu
    assert said.messages == ["the CPU is used: this machine's accelerator, mps, has no float64"]


@pytest.mark.parametrize(("settings", "message"), [
    ({"max_retain_increase": -1.0}, "max_retain_increase -1.0 must be 0 or more, in nats"),
    ({"max_retain_increase": math.inf}, "max_retain_increase inf must be 0 or more, in nats"),
    ({"goal": "gone"}, "goal 'gone' is unknown; choose one of unseen, retrained, erased, loss"),
    ({"goal": "erased"}, "target_forget_loss is of the goal loss, not erased; leave one of them out"),
    ({"goal": "loss", "target_forget_loss": None}, "the goal loss needs --target_forget_loss, the loss that each"),
    ({"target_share": 0.0}, "target_share 0.0 must be a share in (0, 1]"),
    ({"target_share": 1.5}, "target_share 1.5 must be a share in (0, 1]"),
    ({"load_best_model_at_end": True}, "auto keeps the state that its goal asks for; leave out --load_best"),
    ({"freeze_batchnorm": False}, "auto goes back to weights, not to BatchNorm statistics; leave freeze_batchnorm on"),
    ({"dataloader_num_workers": 2}, "auto chooses the records of the next step by the last; leave dataloader_num"),
    ({"radius": "0.5"}, "auto sets demand and rate itself; leave out radius, distribution and trust_region"),
    ({"trust_region": True}, "auto sets demand and rate itself; leave out radius, distribution and trust_region"),
    ({"method": "gdiff"}, "auto controls hamu-q; leave out --method gdiff"),
    ({"forget_objective": "npo"}, "auto raises each record to its target; leave out forget_objective npo"),
    ({"auto": False}, "max_retain_increase has no effect without --auto; add it, or leave it out"),
])  # fmt: skip
def test_a_goal_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        UnlearnConfig(output_dir="unused", **GOAL | settings)


@pytest.mark.parametrize(("processes", "settings", "message"), [
    (1, {"lookahead_steps": 0}, "lookahead_steps 0 must be at least 1 step of fine-tuning"),
    (2, {}, "lasting looks ahead in one process; leave out torchrun, or --lasting"),
    (1, {"trust_region": True}, "lasting takes the forget loss elsewhere, where no step is judged; leave out trust_"),
    (1, {"method": "ga"}, "lasting needs both gradients, but ga has one; choose another method"),
    (1, {"forget_objective": "npo"}, "lasting needs a bounded objective; leave out forget_objective npo"),
])  # fmt: skip
def test_a_lasting_run_that_cannot_be_is_refused(monkeypatch, processes, settings, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(HamuError, match="^" + re.escape(message)):
        UnlearnConfig(output_dir="unused", lasting=True, **settings)


def test_a_run_by_goal_has_a_budget_that_is_named_and_a_lasting_one_bounds_what_it_raises():
    config = UnlearnConfig(output_dir="unused", auto=True)
    assert (config.max_retain_increase, config.forget_objective) == (0.02, "bounded")
    lasting = UnlearnConfig(output_dir="unused", lasting=True, method="gdiff")
    assert (lasting.max_retain_increase, lasting.forget_objective, lasting.check_steps) == (
        None,
        "bounded",
        0,
    )


@pytest.mark.parametrize(("settings", "objectives"), [
    ({}, {"retain": "cross_entropy", "forget": "cross_entropy"}),
    ({"forget_objective": "npo"}, {"retain": "cross_entropy", "forget": "npo"}),
    ({"method": "scrub"}, {"retain": "scrub_retain", "forget": "kl_to_original"}),
    ({"method": "ft"}, {"retain": "cross_entropy", "forget": None}),
    ({"method": "ga", "forget_objective": "simnpo"}, {"retain": None, "forget": "simnpo"}),
])  # fmt: skip
def test_the_settings_say_what_each_sides_gradient_is_of(settings, objectives):
    assert UnlearnConfig(output_dir="unused", **settings).objectives() == objectives


@pytest.mark.parametrize(("metric", "greater"), [
    ("joint_gain", True), ("forget_gain", True), ("retain_gain", True),
    ("retain_loss", False), ("forget_loss", True), ("test_loss", False),
    ("retain_accuracy", True), ("forget_accuracy", False), ("test_accuracy", True),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_the_best_model_is_by_what_unlearning_wants_of_a_metric(metric, greater, prefix):
    settings = UnlearnConfig(output_dir="unused", metric_for_best_model=prefix + metric)
    assert settings.greater_is_better is greater


@pytest.mark.parametrize(("norm", "clip"), [(0.0, None), (0.5, 0.5)])
def test_a_norm_of_zero_means_no_clipping(norm, clip):
    assert UnlearnConfig(output_dir="unused", max_grad_norm=norm).clip_norm == clip
