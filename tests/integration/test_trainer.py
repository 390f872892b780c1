"""UnlearnTrainer: the same steps as one's own loop, and everything around them."""

import copy
import json
import re
from pathlib import Path
from shutil import which

import pytest
import torch
from helpers import weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from hamu import HamuError, PairedGradients, UnlearnConfig, UnlearnTrainer, build_method
from hamu.core.population import FEWEST
from hamu.data import PairedDataset, subset
from hamu.unlearning.trainer import sides
from hamu.unlearning.trainer import trainer as trainer_module

EVERY_SECOND = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 10)
    )


@pytest.fixture
def float64_pixels(monkeypatch):
    """Lets the trainer feed models in float64."""
    monkeypatch.setattr(sides, "predict_logits", lambda m, b: m(b["pixel_values"].double()))


def lines(trainer, name="taken"):
    return [entry for entry in trainer.state.log_history if name in entry]


def own_loop(model, problem, method, steps, batch_size=256, lr=1e-4):
    """The trainer's run written out by hand."""
    pairs = PairedDataset(problem.retain, problem.forget, seed=7)
    pair = PairedGradients(model, method, max_grad_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.eval()  # there is no dropout: frozen BatchNorm is all that the mode decides
    for step in range(steps):
        places = range(step * batch_size, min((step + 1) * batch_size, len(pairs)))
        batch = pairs.__getitems__(places)
        for side in ("retain", "forget"):
            with getattr(pair, side)():
                logits = model(batch[side]["pixel_values"].double())
                F.cross_entropy(logits, batch[side]["labels"]).backward()
        pair.combine()
        optimizer.step()


@pytest.mark.parametrize("name", ["hamu-q", "hamu-u", "gdiff", "gru", "pcgrad"])
@pytest.mark.usefixtures("float64_pixels")
def test_a_run_takes_the_steps_of_ones_own_loop(model, problem, trainer_of, name):
    twin, start = copy.deepcopy(model).double(), weights(model)
    trainer_of(model.double(), method=name, max_steps=3, data_seed=7).train()
    method = build_method(name, constraint=0.5, constraint_mode="relative", stopping="off")
    own_loop(twin, problem, method, 3)
    moved = (weights(twin) - start).norm()
    assert moved > 0
    assert (weights(model) - weights(twin)).norm() < 1e-9 * moved


@pytest.mark.parametrize(("accumulation", "batch_size"), [(2, 150), (4, 80), (5, 64)])
@pytest.mark.usefixtures("float64_pixels")
def test_accumulated_and_unequal_batches_weigh_every_sample_alike(
    model, trainer_of, accumulation, batch_size
):
    """300 pairs in one batch, or in parts of which the last is short: the same step."""
    twin = copy.deepcopy(model).double()
    trainer_of(model.double(), per_device_train_batch_size=300, max_steps=1).train()
    parts = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    trainer = trainer_of(twin, max_steps=1, **parts)
    trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(300))
    trainer.train()
    assert trainer.steps_taken == 1
    assert (weights(model) - weights(twin)).abs().max() < 1e-12


def test_the_trainers_own_clip_is_off(model, trainer_of, trained):
    """A combined gradient longer than max_grad_norm reaches the optimizer whole."""
    norms = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    clip = {"max_grad_norm": 0.01, "callbacks": [Watch()]}
    trainer = trained(model, method="gru", max_steps=2, **clip)
    logged = [entry["grad_norm"] for entry in lines(trainer)]
    assert norms == pytest.approx(logged, rel=1e-4), "the logged norm comes from the Gram"
    assert max(norms) <= 0.0201
    trainer_of(model, method="hamu-q", radius="0.5", max_steps=1, **clip).train()
    assert norms[-1] > 0.4, "each of the blocks has radius 0.5, far above the clip"


@pytest.mark.parametrize(("method", "passes"), [("ga", 1), ("kl", 2)])
def test_a_method_that_needs_one_side_runs_one_pass(model, trainer_of, method, passes):
    backwards = []
    model[4].register_full_backward_hook(lambda *_: backwards.append(1))
    trainer_of(model, method=method, max_steps=2).train()
    assert len(backwards) == 2 * passes


def test_batchnorm_statistics_stay_and_its_weights_move(model, trainer_of):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    trainer_of(model, learning_rate=1e-2).train()
    after = model.cpu().state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if "running" in n or "tracked" in n)
    assert all(not torch.equal(before[n], after[n]) for n, _ in model.named_parameters())
    trainer_of(model, freeze_batchnorm=False).train()
    assert not torch.equal(before["2.running_mean"], model.cpu().state_dict()["2.running_mean"])


def test_a_constraint_that_cannot_be_met_at_a_later_step_ends_the_run(model, trainer_of):
    class Demands(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.pair.method = build_method("hamu-q", constraint=1e6, stopping="off")

    trainer = trainer_of(model, max_steps=5, check_steps=0, callbacks=[Demands()])
    trainer.train()
    assert (trainer.steps_taken, trainer.state.global_step) == (2, 3)
    assert trainer.stop.kind == "infeasible"
    assert trainer.stop_reason.startswith("the constraint 1e+06 cannot be met: the gradients allow")


def test_the_stopping_criterion_ends_the_run_and_names_itself(model, trained, problem):
    """Forget and retain are the same records: the hardest case there is (paper, Sec. 4.3)."""
    start, same = weights(model), problem.retain
    whole = {"per_device_train_batch_size": len(same), "stopping": "aggregate"}
    trainer = trained(model, retain=same, forget=same, **whole)
    assert trainer.stop_reason.startswith("the stopping criterion is met: the demand")
    assert (trainer.stop.kind, trainer.state.global_step) == ("criterion", 1)
    assert torch.equal(weights(model), start)


def test_small_batches_stop_by_the_expected_gradients_and_say_how_surely(model, trained, problem):
    small = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "max_steps": 100}
    small |= {"stopping": "aggregate", "check_steps": 0}
    sides = {"retain": problem.retain, "forget": problem.retain}  # the hardest case there is
    state = {name: value.clone() for name, value in model.state_dict().items()}
    noisy = trained(model, stopping_records=0, **sides, **small)
    assert (noisy.pair.half_life, noisy.stop.kind) == (None, "all steps")
    model.load_state_dict(state)
    trainer = trained(model, **sides, **small)
    assert trainer.pair.half_life == 2560 / 32
    count = len(problem.retain)
    assert trainer.pair.steps_per_pass == [count / 32, count / 32]
    assert trainer.stop.kind == "criterion"
    assert FEWEST <= trainer.state.global_step < 100
    assert re.search(
        r"; confidence \d+% by this estimate alone(, whose angle is lost in noise)?$",
        trainer.stop_reason,
    )
    first, *_, last = [entry for entry in trainer.state.log_history if "taken" in entry]
    assert "headroom" not in first
    assert last["headroom"] < 1
    assert last["headroom_error"] <= 0.2
    assert last["expected_cos"] > last["cos"]
    assert last["retain_noise_scale"] > 10


def test_a_batch_that_is_not_finite_is_skipped_and_many_of_them_end_the_run(
    model, trained, trainer_of, monkeypatch
):
    real = sides.predict_logits
    poisoned = iter([False, False, True, True, False, False])
    monkeypatch.setattr(
        sides,
        "predict_logits",
        lambda m, b: real(m, b) * (torch.nan if next(poisoned, False) else 1.0),
    )
    trainer = trained(model, max_steps=3, check_steps=0)
    assert (trainer.steps_taken, trainer.steps_skipped) == (2, 1)
    assert torch.isfinite(weights(model)).all()
    resumed = trainer_of(model, max_steps=3, check_steps=0)
    resumed.load_run_state(trainer.run_state())
    assert resumed.skip_reason == trainer.skip_reason == "a gradient is not finite"
    monkeypatch.setattr(sides, "predict_logits", lambda m, b: real(m, b) * torch.nan)
    start = weights(model)
    trainer = trained(model, max_steps=8, max_skips=2, optim="adamw_torch", weight_decay=0.1)
    assert trainer.state.global_step == 2
    assert trainer.stop.kind == "skips"
    assert "could not be taken: a gradient is not finite; lower the l" in trainer.stop_reason
    assert torch.equal(weights(model), start)


class Stream(IterableDataset):
    """Has a length, but no records by position."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(())


def test_what_unlearning_has_no_place_for_is_refused(model, trainer_of):
    another = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(HamuError, match="a trainable parameter is not in the optimizer"):
        trainer_of(model, optimizers=(another, None))
    with pytest.raises(HamuError, match=r"predicts no single set; call hamu\.evaluation\.predict"):
        trainer_of(model).predict([])
    packed = copy.deepcopy(model)
    packed.is_loaded_in_4bit = True
    with pytest.raises(HamuError, match="weights in 4 bits cannot be trained; train an adapter"):
        trainer_of(packed)
    plain, sharded = UnlearnConfig("unused"), UnlearnConfig("unused")
    sharded.shard, sharded.check_processes = True, list
    for model_, args, given, message in (
        (model, plain, {"retain_dataset": iter(())}, "the retain set, a tuple_iterator, has no po"),
        (model, plain, {"retain_dataset": Stream()}, "the retain set, a Stream, has no positions;"),
        (model, sharded, {"optimizers": (another, None)}, "holds the whole parameters, which --sh"),
        (model, plain, {"compute_metrics": print}, "compute_metrics is for a batch of one kind,"),
        (model, plain, {"train_dataset": []}, "train_dataset is the trainer's own; give retain_d"),
        (model, TrainingArguments("unused"), {}, "args is a TrainingArguments; give an UnlearnCo"),
        ("gpt2", plain, {}, "a str is no module; give the model, not its name"),
        (None, plain, {}, "a NoneType is no module; give the model, not its name"),
    ):
        with pytest.raises(HamuError, match=message):
            UnlearnTrainer(model_, args, **{"retain_dataset": [], "forget_dataset": []} | given)


@pytest.mark.parametrize(
    ("saved", "restored", "said"),
    [
        ({"save_steps": 4, "eval_steps": 4}, 4, "is above 1e-09; back to the weights of step 4"),
        # evaluated at its end alone
        ({"save_steps": 2, "eval_strategy": "epoch"}, None, "no evaluated checkpoint to restore, "
         "see --save_strategy and --eval_strategy"),
    ],
)  # fmt: skip
def test_a_run_that_diverges_goes_back_to_its_best_checkpoint(
    model, trainer_of, saved, restored, said
):
    class Diverges(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                trainer._early_ends.max_retain_loss = 1e-9

    settings, at_four = {"method": "gdiff", "learning_rate": 0.02}, copy.deepcopy(model)
    trainer_of(at_four, **settings, max_steps=4).train()
    saved = {"save_strategy": "steps", "max_retain_loss": 1e9} | EVERY_SECOND | saved
    trainer = trainer_of(model, **settings, **saved, max_steps=12, callbacks=[Diverges()])
    trainer.train()
    assert (trainer.state.global_step, trainer.stop.kind) == (6, "retain loss")
    assert trainer.stop_reason.endswith(said)
    assert (trainer.restored, trainer.steps_taken, trainer.steps_skipped) == (restored, 5, 1)
    assert torch.equal(weights(model), weights(at_four)) == (restored is not None)


class Stop(TrainerCallback):
    """Ends a run once, at one of its events."""

    def __init__(self, event):
        setattr(self, event, self.stop)
        self.waits = True

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop, self.waits = self.waits, False


def test_nothing_of_a_step_that_was_broken_off_enters_another_run(model, trainer_of):
    settings = {"gradient_accumulation_steps": 3, "max_steps": 2, "max_retain_loss": 1e9}
    settings |= {"per_device_train_batch_size": 64, "logging_steps": 1}
    fresh = trainer_of(copy.deepcopy(model), **settings)
    broken = trainer_of(model, **settings, callbacks=[Stop("on_substep_end")])
    judged = [[], []]  # records that the early ends have seen, by step
    for seen, trainer in zip(judged, (fresh, broken), strict=True):
        early, end = trainer._early_ends, trainer._early_ends.end
        early.end = lambda early=early, end=end, seen=seen: (
            seen.append(early._sums["retain"][1].item()) or end()
        )
    fresh.train()
    broken.train()
    assert broken.state.global_step == 0
    broken.train()
    assert torch.equal(weights(model), weights(fresh.model))
    losses = [[one["retain_loss"] for one in lines(run)] for run in (fresh, broken)]
    assert losses[0] == losses[1]
    assert judged[0] == judged[1]


def test_a_callback_that_ends_a_run_is_named_though_another_state_is_the_best(model, trainer_of):
    trainer = trainer_of(model, max_steps=4, callbacks=[Stop("on_step_end")])
    trainer.train()
    assert (trainer.state.global_step, trainer.stop.kind) == (1, "other")
    assert trainer.stop_reason == "a callback ended it"
    saved = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    every = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1}
    for more in (saved, {}):
        asked = {"method": "ga", "learning_rate": 0.5, "max_steps": 9} | every | more
        trainer = trainer_of(copy.deepcopy(model), **asked, callbacks=[EarlyStoppingCallback(2)])
        trainer.train()
        assert trainer.state.global_step == 3, "it falls from the first step on"
        assert (trainer.stop.kind, "of step" in trainer.stop.text) == ("other", bool(more))


@pytest.mark.parametrize("more", [{"save_steps": 2}, {"save_strategy": "epoch"}])
def test_patience_that_would_count_unsaved_states_is_refused(model, trainer_of, more):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"} | more
    every |= {"eval_on_start": True}
    with pytest.raises(HamuError, match="early stopping goes by the best state that was saved"):
        trainer_of(model, **every, callbacks=[EarlyStoppingCallback(2)])


def test_a_callback_may_evaluate_and_save_where_the_start_was_not_measured(model, trainer_of):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = control.should_save = True

    trainer = trainer_of(model, max_steps=2, callbacks=[Asks()])
    trainer.train()
    assert [entry["step"] for entry in lines(trainer, "eval_forget_loss")] == [1, 2]
    assert trainer.state.best_global_step is None


def test_a_trainer_leaves_its_configuration_as_it_was(model, problem, tmp_path):
    goal = {"auto": True, "goal": "loss", "target_forget_loss": 2.0}
    args = UnlearnConfig(output_dir=str(tmp_path / "run"), disable_tqdm=True, **goal)
    before, data = str(args), {"forget_dataset": problem.forget}
    trainer = UnlearnTrainer(model, args, retain_dataset=problem.retain, **data)
    assert trainer.args.max_steps > 0
    assert str(args) == before, "what depends on the data is settled in a copy"


def test_other_records_are_evaluated_by_themselves_and_a_second_run_counts_its_own_steps(
    model, trained, problem
):
    trainer = trained(model, eval_on_start=True, check_steps=1)
    few, kept = problem.retain.select(range(20)), dict(trainer.predictions)
    found, by_name = trainer.evaluate(few), trainer.evaluate({"few": few, "all": problem.retain})
    assert found.keys() == {"eval_loss", "eval_accuracy"}
    assert by_name["eval_few_loss"] == found["eval_loss"] != by_name["eval_all_loss"]
    assert trainer.predictions == kept, "those of the run are its own sets'"
    first = trainer.start_predictions["retain"].losses
    trainer.train()
    assert trainer.steps_taken == trainer.state.global_step == trainer.promise["checked"] == 3
    assert not torch.equal(trainer.start_predictions["retain"].losses, first)


class Beginning(TrainerCallback):
    """Notes the state in which each run begins."""

    def __init__(self):
        self.found, self.trainer = [], None

    def on_train_begin(self, args, state, control, **kwargs):
        self.found.append(str([self.trainer.pair.state_dict(), self.trainer.watch.state_dict()]))


@pytest.mark.parametrize("settings", [
    {"trust_region": True, "stopping": "aggregate", "per_device_train_batch_size": 64},
    {"method": "gru-ema"},
    {"method": "pdu"},
])  # fmt: skip
def test_a_second_run_remembers_nothing_of_the_first(model, trainer_of, settings):
    beginning = Beginning()
    trainer = beginning.trainer = trainer_of(model, **settings, callbacks=[beginning])
    ended = []
    for _ in range(2):
        trainer.train()
        ended.append(str([trainer.pair.state_dict(), trainer.watch.state_dict()]))
        assert trainer.promise["checked"], "the first step at the least"
    assert beginning.found[0] == beginning.found[1] != ended[0]


@pytest.mark.parametrize("label", [-100, 10])
def test_a_label_that_is_no_class_is_refused(model, trainer_of, problem, label):
    items = [dict(problem.retain[n]) for n in range(300)]
    items[-1]["labels"] = torch.tensor(label)
    every = {"eval_on_start": True, "eval_strategy": "epoch"}
    with pytest.raises(HamuError, match=f"a label is {label}; a classifier of 10 classes needs"):
        trainer_of(model, retain=items, **every).train()


def test_evaluations_are_means_over_samples_since_the_start_and_only_the_last_steps_stay_in_memory(
    model, trained, problem, monkeypatch
):
    monkeypatch.setattr(trainer_module, "_REMEMBERED", 2)
    settings = {"learning_rate": 1e-2, "per_device_eval_batch_size": 100}
    trainer = trained(model, test=problem.test, max_steps=4, **EVERY_SECOND, **settings)
    assert [entry["step"] for entry in lines(trainer)] == [3, 4]
    first, *_, last = entries = lines(trainer, "eval_forget_gain")
    assert ([e["step"] for e in entries], first["eval_joint_gain"]) == ([0, 2, 4], 0)
    gain = last["eval_forget_loss"] - first["eval_forget_loss"]
    assert last["eval_forget_gain"] == pytest.approx(gain)
    batch = problem.forget.__getitems__(range(len(problem.forget)))
    with torch.no_grad():
        loss = F.cross_entropy(model.cpu().eval()(batch["pixel_values"]), batch["labels"])
    assert last["eval_forget_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_best_checkpoint_is_the_one_with_the_larger_joint_gain(model, trained, caplog):
    saved = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = trained(model, max_steps=6, method="ga", learning_rate=0.05, **EVERY_SECOND, **saved)
    gains = {e["step"]: e["eval_joint_gain"] for e in lines(trainer, "eval_joint_gain")}
    best = max((step for step in gains if step), key=gains.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    state = json.loads(Path(trainer.state.best_model_checkpoint, "trainer_state.json").read_text())
    assert state["best_metric"] == pytest.approx(gains[best])
    assert not caplog.messages
    trainer.train()
    assert "checkpoint-6 is of an earlier run; remove those, or name another" in caplog.text
    assert {e["step"] for e in lines(trainer, "eval_joint_gain")} == gains.keys()


@pytest.mark.parametrize(("weight", "scale"), [(0.1, 256.0), (torch.nan, 64.0)])
def test_only_a_step_that_is_not_finite_lowers_the_loss_scale(model, trainer_of, weight, scale):
    """Both steps are skipped: one that asks for too much leaves it."""
    asked = {"constraint": 1e6, "constraint_mode": "absolute", "on_infeasible": "skip"}
    trainer = trainer_of(model, max_steps=2, **asked)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    nn.init.constant_(model[1].weight, weight)
    trainer.train()
    assert (trainer.steps_skipped, trainer.accelerator.scaler.get_scale()) == (2, scale)


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
def test_a_check_drops_out_what_the_compiled_step_dropped(model, trained):
    model[3] = nn.Sequential(model[3], nn.Dropout(0.5))
    promise = trained(model, check_steps=1, torch_compile=True).promise
    assert promise["median_ratio"]["forget"] == pytest.approx(1, abs=0.1)


def test_a_run_of_a_compiled_model_ends_as_that_of_the_model(model, trained, tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = []
    for settings in ({}, compiled):
        one = copy.deepcopy(model)
        trainer = trained(one, check_steps=1, correct_steps=True, **settings)
        trainer.save_model(str(tmp_path / "saved"))
        found.append((one.state_dict(), trainer.promise))
    (eager, promise), (compiled, other) = found
    on_gpu = torch.cuda.is_available()  # whose kernels are others once compiled
    assert other["median_ratio"] == pytest.approx(promise["median_ratio"], rel=0.01 * on_gpu)
    assert {**other, "median_ratio": 0} == {**promise, "median_ratio": 0}
    for name, tensor in eager.items():
        atol = 1e-5 * on_gpu
        torch.testing.assert_close(compiled[name], tensor, rtol=0, atol=atol, msg=name)


def test_an_optimizer_takes_the_arguments_that_it_knows(model, trainer_of):
    given = {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"}
    found = trainer_of(model, **given).create_optimizer()
    assert (found.defaults["momentum"], found.defaults["nesterov"]) == (0.9, True)


@pytest.mark.parametrize(("retained", "shares", "passes"), [
    (50, [1.0, 18 / 32, 1.0, 18 / 32], [50 / 32, 40 / 32]), (20, [1.0] * 4, [1.0, 40 / 20]),
])  # fmt: skip
def test_the_running_means_are_told_how_short_a_step_is(
    model, trainer_of, problem, monkeypatch, retained, shares, passes
):
    sides = {"retain": subset(problem.retain, retained, 0), "forget": subset(problem.retain, 40, 0)}
    trainer = trainer_of(model, **sides, per_device_train_batch_size=32, max_steps=4)
    combine, told = trainer.pair.combine, []

    def noted(*args, share, **kwargs):
        told.append(share)
        return combine(*args, share=share, **kwargs)

    monkeypatch.setattr(trainer.pair, "combine", noted)
    trainer.train()
    assert told == shares
    assert trainer.pair.steps_per_pass == passes
