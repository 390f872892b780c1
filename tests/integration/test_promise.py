"""The promise of each step checked, kept by any optimizer, and steered by a trust region."""

import copy
import weakref

import pytest
import torch
from torch import nn

from hamu.unlearning.goals import StopReason
from hamu.unlearning.trainer import promise

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-4}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 10)
    )


def figures(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize(("settings", "part"), [({}, 0), (ADAM, 0), (ADAM, 4)])
def test_small_steps_do_what_they_promise(model, trainer_of, settings, part):
    """The promise of an adaptive optimizer, of all or a part, is read from the weights."""
    model = nn.Sequential(*model[:4], nn.Dropout(0.5), model[4])  # by the masks of the step itself
    trainer = trainer_of(model, max_steps=4, check_steps=1, **{"learning_rate": 1e-3} | settings)
    if part:
        trainer.optimizer = torch.optim.AdamW(model[5].parameters(), lr=1e-4)
    trainer.train()
    found = trainer.promise
    assert found["checked"] == 4
    assert found["kept"] == 1.0
    for side in ("retain", "forget"):
        assert found["median_ratio"][side] == pytest.approx(1.0, abs=0.05)
        promised = figures(trainer, f"first_order_{side}_change")
        assert figures(trainer, f"realised_{side}_change") == pytest.approx(promised, rel=0.1)


@pytest.mark.parametrize("settings", [{}, {"freeze_batchnorm": False}, ADAM])
def test_checking_changes_nothing(model, trainer_of, trained, settings):
    model.insert(4, nn.Dropout(0.5))  # the next masks are as without the check
    other = copy.deepcopy(model)
    trainer_of(model, check_steps=0, **settings).train()
    trainer = trained(other, check_steps=1, **settings)
    assert trainer.promise["checked"] == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    trainer = trained(model, max_steps=1, learning_rate=1e-12, bf16=True, check_steps=1)
    for side in ("retain", "forget"):  # the losses before and after are of the same precision
        assert figures(trainer, f"realised_{side}_change") == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "checked"),
    [({"check_steps": 2}, 2), ({"check_steps": 0}, 0), ({"logging_steps": 3}, 1)],
)
def test_checks_come_at_their_interval_or_when_a_step_is_logged(model, trained, settings, checked):
    trainer = trained(model, max_steps=5, **settings)
    assert (trainer.promise or {"checked": 0})["checked"] == checked


@pytest.mark.parametrize("before", [0, 1000])  # steps of a run that was resumed
@pytest.mark.parametrize(
    ("took", "logging", "checked"),
    [
        (0.21, 0.0, [1, 8, 12, 16, 20]),
        (0.21, 0.03, [1, 20]),
        (0.9, 0.0, [1, 35]),
        (0.0, 0.0, [*range(1, 41)]),
        (0.2, 1.0, [1, 20]),  # the log alone takes more: checks 1% all the same
    ],
)
def test_by_default_checks_and_log_take_a_twentieth_of_the_time(
    monkeypatch, took, logging, checked, before
):
    """Steps of one second each, checks of `took` and entries of the log of `logging` more."""
    clock = [100.0]
    monkeypatch.setattr(promise.time, "perf_counter", lambda: clock[0])
    schedule, found = promise.CheckSchedule(None, torch.device("cpu")), []
    for step in range(1, 41):
        is_checked = schedule.is_due(before + step, 1)
        clock[0] += 1.0
        with schedule.logged():
            clock[0] += logging
        if is_checked:
            found.append(step)
            with schedule.timed():
                clock[0] += took
            schedule.checked()
    assert found[: len(checked)] == checked
    if took < 0.9 and logging < 0.05:
        extra = took * len(found) + logging * 40
        assert extra <= 0.05 * (40 + extra)


def test_what_is_rounding_goes_by_the_logits_of_the_step_alone():
    passes, found = promise.RepeatedPasses(nn.Linear(2, 2).bfloat16()), []
    passes.remember("retain", lambda: torch.zeros(()), 4)
    for scale in (8.0, 1.0):
        with torch.no_grad():
            passes.see(scale * torch.tensor([[1.0, -1.0], [2.0, -2.0]]))
        found.append(passes.roughness())
    assert found[0] == pytest.approx(8 * found[1])
    assert found[1] > 0 == passes.roughness()


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_every_optimizer_keeps_the_promise_exactly(model, trained, optim):
    settings = {"method": "hamu-u", "correct_steps": True, "max_steps": 6, "max_grad_norm": 0.5}
    settings |= {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    settings |= {"optim": optim, "per_device_train_batch_size": 64, "check_steps": 1}
    trainer = trained(model, **settings)
    names = ("retain_norm", "first_order_retain_change", "demand")
    norms, promised, demanded = (figures(trainer, name) for name in names)
    assert min(norms) > 0.5, "every gradient is clipped"
    for step, norm in enumerate(norms):
        rate = 1e-3 * (1 - step / 6)
        assert -promised[step] * 0.5 / norm >= 0.999 * demanded[step] * rate


def test_a_step_that_was_undone_is_none_and_no_small_enough_step_ends_the_run(
    model, trainer_of, trained, monkeypatch
):
    trainer = trained(model, learning_rate=1e4, max_steps=3, trust_region=True)
    assert trainer.stop_reason.startswith("3 tried, and the last one skipped as it did not do what")
    assert sum(figures(trainer, "taken")) == trainer.steps_taken
    trainer = trainer_of(model, learning_rate=1e4, max_steps=3, trust_region=True)
    monkeypatch.setattr(promise, "LEAST_SCALE", 0.5)
    trainer.train()
    assert (trainer.steps_taken, trainer.state.global_step) == (0, 1)
    assert trainer.stop == StopReason(
        "no small step", "no step is small enough to realise anything of its promise"
    )


def test_nothing_is_kept_between_steps(model, trainer_of, monkeypatch):
    trainer = trainer_of(model, max_steps=1, correct_steps=True, method="hamu-u", **ADAM)
    kept, combine = [], trainer.pair.combine

    def noting(*args, **kwargs):
        step = combine(*args, **kwargs)
        kept.extend(weakref.ref(g) for g in step.kept["retain"])
        return step

    monkeypatch.setattr(trainer.pair, "combine", noting)
    trainer.train()
    assert len(kept) == len(list(model.parameters()))
    assert all(grad() is None for grad in kept)
    assert len(trainer.watch.passes) == 0
