"""UnlearnTrainer: the same steps as one's own loop, and everything around them."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import weights
from torch import nn
from transformers import TrainerCallback

from hamu import HamuError, PairedGradients, UnlearnConfig, UnlearnTrainer, build_method
from hamu.unlearning.trainer import PairedDataset


def own_loop(model, problem, method, steps, batch_size=256, lr=1e-4):
    """The trainer's run written out by hand."""
    pairs = PairedDataset(problem.retain, problem.forget, seed=42)
    pair = PairedGradients(model, method, max_grad_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.eval()  # the ResNet has no dropout: frozen BatchNorm is all that the mode decides
    for step in range(steps):
        batch = pairs.__getitems__(
            range(step * batch_size, min((step + 1) * batch_size, len(pairs)))
        )
        for side in ("retain", "forget"):
            with getattr(pair, side)():
                logits = model(batch[side]["pixel_values"].double()).logits
                nn.functional.cross_entropy(logits, batch[side]["labels"]).backward()
        pair.combine()
        optimizer.step()


@pytest.mark.parametrize("name", ["hamu-q", "hamu-u", "gdiff", "gru", "pcgrad"])
@pytest.mark.usefixtures("float64_pixels")
def test_a_run_takes_the_steps_of_ones_own_loop(model, problem, trainer_of, name):
    twin, start = copy.deepcopy(model).double(), weights(model)
    trainer = trainer_of(model.double(), method=name, max_steps=3)
    trainer.train()
    method = build_method(name, constraint=0.5, constraint_mode="relative", stopping="off")
    own_loop(twin, problem, method, 3)
    moved = (weights(twin) - start).norm()
    assert moved > 0
    assert (weights(model) - weights(twin)).norm() < 1e-9 * moved


@pytest.fixture
def float64_pixels(monkeypatch):
    """Lets the trainer feed models in float64."""
    monkeypatch.setattr(
        "hamu.unlearning.trainer.sides.predict_logits",
        lambda m, b: m(b["pixel_values"].double()).logits,
    )


@pytest.mark.parametrize(("accumulation", "batch_size"), [(2, 150), (4, 80), (5, 64)])
@pytest.mark.usefixtures("float64_pixels")
def test_accumulated_and_unequal_batches_weigh_every_sample_alike(
    model, trainer_of, accumulation, batch_size
):
    """300 pairs in one batch, or in parts of which the last is short: the same step."""
    twin = copy.deepcopy(model).double()
    trainer_of(model.double(), per_device_train_batch_size=300, max_steps=1).train()
    trainer = trainer_of(
        twin,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
    )
    trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(300))
    trainer.train()
    assert trainer.steps_taken == 1
    assert (weights(model) - weights(twin)).abs().max() < 1e-12


def test_the_data_seed_alone_decides_the_pairs(model, trainer_of, problem):
    default, other = (
        trainer_of(model, **given).train_dataset[0] for given in ({}, {"data_seed": 7})
    )
    expected = PairedDataset(problem.retain, problem.forget, seed=7)[0]
    for side in ("retain", "forget"):
        assert torch.equal(other[side]["pixel_values"], expected[side]["pixel_values"])
        assert not torch.equal(other[side]["pixel_values"], default[side]["pixel_values"])


def test_the_trainers_own_clip_is_off(model, trainer_of):
    """A combined gradient longer than max_grad_norm reaches the optimizer whole."""
    norms = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    trainer = trainer_of(model, method="gru", max_grad_norm=0.01, max_steps=2, callbacks=[Watch()])
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx(logged, rel=1e-4), "the logged norm comes from the Gram"
    assert max(norms) <= 0.0201
    trainer = trainer_of(
        model, method="hamu-q", radius="0.5", max_grad_norm=0.01, max_steps=1, callbacks=[Watch()]
    )
    trainer.train()
    assert norms[-1] > 0.4, "each of the 23 blocks has radius 0.5, far above the clip"


@pytest.mark.parametrize(
    ("method", "passes"), [("ft", 1), ("ga", 1), ("gdiff", 2), ("hamu-q", 2), ("kl", 2)]
)
def test_a_method_that_needs_one_side_runs_one_pass(model, trainer_of, method, passes):
    backwards = []
    handle = model.classifier.register_full_backward_hook(lambda *_: backwards.append(1))
    trainer_of(model, method=method, max_steps=2).train()
    handle.remove()
    assert len(backwards) == 2 * passes


def test_batchnorm_statistics_stay_and_its_weights_move(model, trainer_of):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    trainer_of(model, learning_rate=1e-2).train()
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if "running" in n or "tracked" in n)
    assert all(not torch.equal(before[n], after[n]) for n, _ in model.named_parameters())
    trainer_of(model, freeze_batchnorm=False).train()
    assert not torch.equal(before["norm.running_mean"], model.state_dict()["norm.running_mean"])


@pytest.mark.parametrize("method", ["kl", "scrub"])
def test_methods_that_compare_with_the_original_start_from_no_difference(model, trainer_of, method):
    trainer = trainer_of(model, method=method, max_steps=1)
    trainer.train()
    first = next(e for e in trainer.state.log_history if "taken" in e)
    assert first["retain_loss" if method == "kl" else "forget_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["hamu-q", "scrub"])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(saved_model, trainer_of, method):
    from hamu.models import load_classifier

    settings = {"method": method, "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch",
                "learning_rate": 1e-3, "stopping": "aggregate", "stopping_patience": 50}  # fmt: skip
    whole = load_classifier(str(saved_model))
    trainer = trainer_of(whole, **settings)
    trainer.train()
    checkpoint = f"{trainer.args.output_dir}/checkpoint-3"
    resumed = load_classifier(str(saved_model))
    again = trainer_of(resumed, **settings)
    again.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(weights(whole), weights(resumed))
    assert again.pair.state_dict() == trainer.pair.state_dict()
    assert again.steps_taken == trainer.steps_taken == 8


def test_a_run_by_goal_needs_no_settings_of_the_command_line(model, problem, tmp_path):
    args = UnlearnConfig(output_dir=str(tmp_path), auto=True, max_steps=3, disable_tqdm=True)
    trainer = UnlearnTrainer(model, args, retain_dataset=problem.retain,
                             forget_dataset=problem.forget, test_dataset=problem.test)  # fmt: skip
    trainer.train()
    assert trainer.steps_taken > 0
    assert trainer.stop.kind in ("all steps", "goal")


def test_a_constraint_that_cannot_be_met_at_the_first_step_is_an_error(model, trainer_of):
    start = weights(model)
    with pytest.raises(
        HamuError,
        match=r"no step can be taken: the constraint 50 cannot be met: the gradients allow at",
    ):
        trainer_of(model, constraint=50, constraint_mode="absolute").train()
    assert torch.equal(weights(model), start)


def test_a_constraint_that_cannot_be_met_at_a_later_step_ends_the_run(model, trainer_of):
    class Demands(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.pair.method = build_method("hamu-q", constraint=1e6, stopping="off")

    trainer = trainer_of(
        model, max_steps=5, per_device_train_batch_size=64, check_steps=0, callbacks=[Demands()]
    )
    trainer.train()
    assert (trainer.steps_taken, trainer.state.global_step) == (2, 3)
    assert trainer.stop.kind == "infeasible"
    assert trainer.stop_reason.startswith(
        "the constraint 1e+06 cannot be met: the gradients allow at most"
    )


def test_the_stopping_criterion_ends_the_run_and_says_why(model, trainer_of, problem):
    """Forget and retain are the same records: the hardest case there is (paper, Sec. 4.3)."""
    start = weights(model)
    everything = len(problem.retain)
    trainer = trainer_of(
        model,
        retain=problem.retain,
        forget=problem.retain,
        stopping="aggregate",
        per_device_train_batch_size=everything,
    )
    trainer.train()
    assert trainer.stop_reason.startswith("the stopping criterion is met: the demand")
    assert trainer.stop_reason.endswith("every further step must hurt"), "both sets are the same"
    assert trainer.stop.kind == "criterion"
    assert trainer.state.global_step == 1
    assert trainer.steps_taken == 0
    assert torch.equal(weights(model), start), "the step that must hurt is not taken"


def test_a_batch_that_is_not_finite_is_skipped_and_many_of_them_end_the_run(
    model, trainer_of, problem, monkeypatch
):
    import hamu.unlearning.trainer.sides as module

    real = module.predict_logits
    poisoned = iter([False, False, True, True, False, False])

    def sometimes_nan(model, batch):
        return real(model, batch) * (torch.nan if next(poisoned, False) else 1.0)

    monkeypatch.setattr(module, "predict_logits", sometimes_nan)
    trainer = trainer_of(model, max_steps=3, check_steps=0)
    trainer.train()
    assert (trainer.steps_taken, trainer.steps_skipped) == (2, 1)
    assert torch.isfinite(weights(model)).all()
    monkeypatch.setattr(module, "predict_logits", lambda m, b: real(m, b) * torch.nan)
    start = weights(model)
    trainer = trainer_of(model, max_steps=8, max_skips=2, optim="adamw_torch", weight_decay=0.1)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.stop.kind == "skips"
    assert trainer.stop_reason == (
        "2 steps in a row could not be taken: a gradient is not finite. The weights are those of the last step that "
        "was; lower the learning rate, or look for records with values that are not finite"
    )
    assert torch.equal(weights(model), start)


class _Masked(nn.Module):
    """A classifier that rules one class out."""

    def __init__(self, ruled_out):
        super().__init__()
        self.head, self._ruled_out = nn.Linear(4, 3), ruled_out

    def forward(self, x):
        mask = torch.zeros(3).index_fill(0, torch.tensor(self._ruled_out), -torch.inf)
        return self.head(x.flatten(1)) + mask


@pytest.mark.parametrize("method", ["hamu-q", "gdiff", "ga"])
def test_an_infinite_loss_with_a_finite_gradient_is_skipped_and_many_of_them_end_the_run(
    trainer_of, method
):
    labels = [0, 0, 2, 0]  # of the batches' forget records; class 2 has no probability
    retain = [{"pixel_values": torch.randn(1, 2, 2), "labels": i % 2} for i in range(8)]
    net = _Masked(2)
    trainer = trainer_of(net, retain=retain, forget=[{"pixel_values": torch.ones(1, 2, 2), "labels": 0}] * 8,
                         method=method, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=4,
                         learning_rate=0.1)  # fmt: skip
    turns = iter(label for label in labels for _ in range(2))
    collate = trainer.data_collator

    def masked(items):
        batch = collate(items)
        batch["forget"]["labels"].fill_(next(turns))
        return batch

    trainer.data_collator = masked
    trainer.train()
    lines = [e for e in trainer.state.log_history if "taken" in e]
    assert [line["taken"] for line in lines] == [1.0, 1.0, 0.0, 1.0]
    assert lines[2]["forget_loss"] == torch.inf
    assert (trainer.steps_taken, trainer.steps_skipped) == (3, 1)

    start = weights(net)
    trainer = trainer_of(net, retain=retain, forget=[{"pixel_values": torch.ones(1, 2, 2), "labels": 2}] * 8,
                         method=method, max_steps=8, max_skips=2, optim="adamw_torch", weight_decay=0.1)  # fmt: skip
    trainer.train()
    assert trainer.stop.kind == "skips"
    assert trainer.stop_reason == (
        "2 steps in a row could not be taken: a loss is not finite. The weights are those of the last step that was; "
        "lower the learning rate, or look for records with values that are not finite"
    )
    assert torch.equal(weights(net), start)


def test_an_optimizer_of_another_model_is_refused(model, trainer_of):
    another = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(HamuError, match="a trainable parameter is not in the optimizer"):
        trainer_of(model, optimizers=(another, None))


def test_an_optimizer_of_whole_parameters_is_refused_where_they_are_cut(model):
    before = dict(model.named_parameters())
    given = torch.optim.SGD(model.parameters(), lr=0.1), None
    with pytest.raises(
        HamuError,
        match="holds the whole parameters, which --shard replaces by parts; give its class",
    ):
        UnlearnTrainer(
            model,
            SimpleNamespace(shard=True),
            retain_dataset=[],
            forget_dataset=[],
            optimizers=given,
        )
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_run_whose_demand_is_never_met_blames_no_learning_rate(model, trainer_of):
    trainer = trainer_of(model, max_steps=8, max_skips=2, constraint=1e6, constraint_mode="absolute",
                         on_infeasible="skip", check_steps=0)  # fmt: skip
    trainer.train()
    assert trainer.stop.kind == "skips"
    assert trainer.stop_reason.startswith(
        "2 steps in a row could not be taken: the constraint 1e+06 cannot be met: "
    )
    assert trainer.stop_reason.endswith("The weights are those of the last step that was")


def test_a_run_that_diverges_goes_back_to_its_best_checkpoint(model, trainer_of, monkeypatch):
    settings = {"method": "gdiff", "learning_rate": 0.02}
    after_four = copy.deepcopy(model)
    trainer_of(after_four, **settings, max_steps=4).train()
    trainer = trainer_of(model, **settings, max_steps=12, eval_strategy="steps", eval_steps=4, save_strategy="steps",
                         save_steps=4, max_retain_loss=1e9)  # fmt: skip
    seen = iter([False] * 5 + [True])
    end = trainer._early_ends.end

    def diverging():
        if next(seen):
            monkeypatch.setattr(trainer._early_ends, "_max_retain", 1e-9)
        return end()

    monkeypatch.setattr(trainer._early_ends, "end", diverging)
    trainer.train()
    assert trainer.state.global_step == 6
    assert torch.equal(weights(model), weights(after_four))
    assert trainer.stop.kind == "retain loss"
    assert trainer.stop_reason.endswith("is above 1e-09; back to the weights of step 4")


def test_only_the_last_steps_stay_in_memory(model, trainer_of, monkeypatch):
    import hamu.unlearning.trainer.trainer as module

    monkeypatch.setattr(module, "_REMEMBERED", 3)
    trainer = trainer_of(model, max_steps=6, eval_strategy="steps", eval_steps=2)
    trainer.train()
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "taken" in entry] == [4, 5, 6]
    assert [entry["step"] for entry in history if "eval_joint_gain" in entry] == [2, 4, 6]


def test_evaluations_are_means_over_samples_and_gains_are_since_the_start(
    model, trainer_of, problem
):
    trainer = trainer_of(model, test=problem.test, eval_strategy="steps", eval_steps=2, eval_on_start=True, max_steps=4,
                         learning_rate=1e-2, per_device_eval_batch_size=100)  # fmt: skip
    trainer.train()
    entries = [e for e in trainer.state.log_history if "eval_forget_gain" in e]
    assert [e["step"] for e in entries] == [0, 2, 4]
    assert entries[0]["eval_joint_gain"] == 0
    gain = entries[-1]["eval_forget_loss"] - entries[0]["eval_forget_loss"]
    assert entries[-1]["eval_forget_gain"] == pytest.approx(gain)
    batch = problem.forget.__getitems__(range(len(problem.forget)))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(
            model.eval()(batch["pixel_values"]).logits, batch["labels"]
        )
    assert entries[-1]["eval_forget_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_best_checkpoint_is_the_one_with_the_larger_joint_gain(model, trainer_of):
    trainer = trainer_of(model, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=6,
                         load_best_model_at_end=True, method="ga", learning_rate=0.05)  # fmt: skip
    trainer.train()
    gains = {
        e["step"]: e["eval_joint_gain"]
        for e in trainer.state.log_history
        if "eval_joint_gain" in e and e["step"]
    }
    best = max(gains, key=gains.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    saved = json.loads(Path(trainer.state.best_model_checkpoint, "trainer_state.json").read_text())
    assert saved["best_metric"] == pytest.approx(gains[best])


def test_ones_own_module_and_data_set_can_be_unlearned_from(trainer_of):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    items = [{"pixel_values": torch.randn(1, 2, 2), "labels": i % 3} for i in range(30)]
    trainer = trainer_of(net, retain=items[:20], forget=items[20:], per_device_train_batch_size=10)
    start = weights(net)
    trainer.train()
    assert trainer.steps_taken == 3
    assert not torch.equal(weights(net), start)


def test_every_log_line_has_the_figures_of_its_step(model, trainer_of):
    trainer = trainer_of(model, max_steps=2)
    trainer.train()
    lines = [e for e in trainer.state.log_history if "taken" in e]
    assert [e["step"] for e in lines] == [1, 2]
    for line in lines:
        assert line["demand"] == pytest.approx(0.5 * line["max_demand"])
        assert line["promised_forget_change"] >= line["demand"] * (1 - 1e-9)
        assert -1 <= line["cos"] <= 1
        assert line["direct_threshold"] < 0 < line["stop_threshold"]


def test_evaluations_in_full_precision_are_those_of_a_run_without_autocast(trainer_of, saved_model):
    from hamu.models import load_classifier

    def start_loss(**settings):
        trainer = trainer_of(
            load_classifier(str(saved_model)), eval_on_start=True, max_steps=1, **settings
        )
        trainer.train()
        return next(
            e["eval_retain_loss"] for e in trainer.state.log_history if "eval_retain_loss" in e
        )

    exact = start_loss()
    assert start_loss(bf16=True, full_precision_eval=True) == exact
    assert start_loss(bf16=True) != exact


def test_what_would_never_be_called_is_refused(model, problem, tmp_path):
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
        with pytest.raises(
            HamuError,
            match=f"^{name} is for a batch of one kind, and would never be called; leave it",
        ):
            UnlearnTrainer(model, UnlearnConfig(output_dir=str(tmp_path)), retain_dataset=problem.retain,
                           forget_dataset=problem.forget, **{name: print})  # fmt: skip


class _Turns(TrainerCallback):
    """Every second step demands what is not possible; notes the loss scale after each."""

    def __init__(self, trainer):
        self.trainer, self.scales, self.feasible = trainer, [], trainer.pair.method
        self.infeasible = build_method("hamu-q", constraint=1e6, on_infeasible="skip")

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.pair.method = self.infeasible if state.global_step % 2 else self.feasible

    def on_step_end(self, args, state, control, **kwargs):
        self.scales.append(self.trainer.accelerator.scaler.get_scale())


def test_a_step_that_the_method_skips_leaves_the_loss_scale(model, trainer_of):
    trainer = trainer_of(model, method="hamu-q", max_steps=6)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    turns = _Turns(trainer)
    trainer.add_callback(turns)
    trainer.train()
    assert (trainer.steps_taken, trainer.steps_skipped) == (3, 3)
    assert turns.scales == [256.0, 256.0, 512.0, 512.0, 512.0, 512.0]


def test_a_step_that_is_not_finite_lowers_the_loss_scale(model, trainer_of):
    trainer = trainer_of(model, method="hamu-q", max_steps=2)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    turns = _Turns(trainer)
    trainer.add_callback(turns)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    trainer.train()
    assert (trainer.steps_taken, turns.scales) == (0, [128.0, 64.0])
