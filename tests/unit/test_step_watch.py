"""The outcome of one step against its promise, the record of them, and the trust region."""

import itertools
import math
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn

from hamu import HamuQ, HamuU, PairedGradients, UnlearnConfig
from hamu.unlearning.trainer.promise import (
    LEAST_SCALE,
    PromiseRecord,
    StepOutcome,
    StepWatch,
    is_plain_descent,
    kept_in_words,
    next_scale,
)

RATE = 0.1


class Losses(nn.Module):
    def __init__(self, retain, forget, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start, 0.0], dtype=torch.float64))
        self.of = {"retain": retain, "forget": forget}

    def total(self, side, batch):
        return self.of[side](self.w)


def slopes(forget_bend=0.0, retain_bend=0.0):
    """The retain loss falls along one weight, the forget loss rises by 10 along another, bent."""
    retain = lambda w: retain_bend * w[0] ** 2 - w[0]  # noqa: E731
    return Losses(retain, lambda w: 10.0 * w[1] - forget_bend * w[1] ** 2)


class Watched:
    def __init__(self, model, method, *, rate=RATE, max_grad_norm=1.0, **settings):
        self.model = model
        self.pair = PairedGradients(model, method, max_grad_norm=max_grad_norm)
        args = UnlearnConfig(output_dir="unused", check_steps=1, **settings)
        self.undone = 0
        self.watch = StepWatch(self.pair, args, model, ("retain", "forget"), self.count)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def count(self, is_least):
        self.undone += 1

    def step(self):
        """Take a step; return its rate, and True if it was undone."""
        assert self.watch.schedule.is_due(1, 1)
        losses, undone = {}, self.undone
        for side in ("retain", "forget"):
            self.watch.passes.remember(side, partial(self.model.total, side, {}), 1)
            with getattr(self.pair, side)():
                loss = self.model.total(side, {})
                loss.backward()
            losses[side] = loss.detach()
        step = self.pair.combine(keep=self.watch.keep(self.optimizer))
        self.watch.take(step, losses)
        self.watch.on_pre_optimizer_step(None, None, None, optimizer=self.optimizer)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.watch.on_optimizer_step(None, None, None)
        return rate, self.undone > undone


@pytest.mark.parametrize(("share", "kept"), [(1.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("correct_steps", [False, True])
def test_a_step_is_held_to_the_demand_on_the_loss_as_it_is(correct_steps, share, kept):
    """All is demanded: a step of length η along g_f, 10 η of loss, of which a bend leaves a share.

    Of the clipped gradient, of norm 1, a tenth of that is demanded.
    """
    model = slopes(forget_bend=10 * (1 - share) / RATE)
    method = HamuQ(1.0, "relative", stopping="off")
    watched = Watched(model, method, correct_steps=correct_steps)
    assert watched.step() == (RATE, False)
    realised = watched.watch.figures["realised_forget_change"]
    assert realised == pytest.approx(share * 10 * RATE, rel=1e-4)
    assert watched.watch.record.summary()["kept"] == kept


def test_a_step_is_judged_by_losses_of_one_precision_where_its_own_are_rounded(monkeypatch):
    """Its passes are off by more than what a step of this length does, as with TF32 on a GPU."""

    error = [5.0]

    @contextmanager
    def exact():
        error.append(0.0)
        yield
        error.pop()

    monkeypatch.setattr("hamu.unlearning.trainer.promise.rounds_to_tf32", lambda model: True)
    monkeypatch.setattr("hamu.unlearning.trainer.promise.without_tf32", exact)
    model = Losses(lambda w: error[-1] - w[0], lambda w: error[-1] + 10.0 * w[1])
    watched = Watched(model, HamuQ(1.0, "relative", stopping="off"))
    assert not watched.step()[1]
    assert watched.watch.figures["realised_forget_change"] == pytest.approx(10 * RATE, rel=1e-4)
    assert watched.watch.record.summary()["kept"] == 1.0


@pytest.mark.parametrize("curvature", [0.01, 1.0, 1000.0])
def test_the_radius_settles_where_the_curvature_says(curvature):
    """From w = 1 a step of length s against g_r realises 1 - s/2 of its promise: 0 from s = 2 on.

    A step is η·0.01 long, of which at least 0.9 against g_r. So rates over 2/0.009 are undone,
    those over (2 - 2/4)/0.01 shrink, and none below (2 - 2·3/4)/0.01 is ever shrunk at first.
    """
    model = Losses(lambda w: 0.5 * curvature * w[0] ** 2, lambda w: 0.01 * w[1], start=1.0)
    method = HamuU(0.9, constraint_mode="relative", stopping="off")
    settings = {"trust_region": True, "trust_region_growth": 1e6, "max_grad_norm": None}
    watched = Watched(model, method, rate=1000.0, **settings)
    rates, losses = [], []
    for _ in range(60):
        before = model.w.detach().clone()
        rate, undone = watched.step()
        assert undone == torch.equal(before, model.w)
        assert watched.optimizer.param_groups[0]["lr"] == 1000.0, "the schedule's is put back"
        rates.append(rate)
        if len(rates) == 3:
            said = kept_in_words(watched.watch.record.summary())
            assert said.startswith("of 3 checked steps (3 undone) none that stayed had a demand")
        if len(rates) == 4:
            said = kept_in_words(watched.watch.record.summary())
            assert said.startswith(
                "of 4 checked steps (3 undone) 1 had a demand above rounding, of"
            )
        losses.append(model.total("retain", {}).item())
    assert rates[:4] == [1000.0, 500.0, 250.0, 125.0]
    assert sum(loss == 0.5 * curvature for loss in losses) == 3, "undone steps"
    assert losses[3] < 0.5 * curvature
    assert all(b <= a + 2e-6 for a, b in itertools.pairwise(losses)), "no step raises the loss"
    assert losses[-1] < 0.05 * curvature


@pytest.mark.parametrize(
    ("ratio", "scale"),
    [(-1.0, 0.5), (0.0, 0.5), (math.nan, 0.5), (0.1, 0.5), (0.5, 1.0), (0.9, 2.0), (1.0, 4.0)],
)
def test_the_radius_shrinks_under_a_quarter_and_grows_over_three_quarters(ratio, scale):
    assert next_scale(1.0, ratio, 8.0) == scale
    for _ in range(25):
        scale = next_scale(scale, ratio, 8.0)
    assert scale in (LEAST_SCALE, 1.0, 8.0), "it has an end"


def outcome(promised, realised, demand=0.0, constrained="forget", noise=1e-9, reach=2.0):
    def by_side(values):
        both = zip(("retain", "forget"), values, strict=True)
        return {side: value for side, value in both if value is not None}

    reaches = by_side((reach, reach))
    return StepOutcome(by_side(promised), by_side(realised), reaches, constrained, demand, noise)


@pytest.mark.parametrize(("promised", "realised", "kept", "trust"), [
    ((-1.0, 1.0), (-1.0, 1.0), True, 1.0),
    ((-1.0, 1.0), (0.5, 1.0), True, 1 - 1.5),  # the demand was met
    ((-0.1, 1.0), (-0.05, 5.0), True, 1 - 0.05),  # measured by the promise of the other side
    ((-1.0, 1.0), (-1.0, 0.9), False, 0.9),
    ((None, 1.0), (None, 0.949), False, 0.949),
    ((None, 1.0), (None, 0.951), True, 0.951),
])  # fmt: skip
def test_an_outcome_is_judged_by_its_worse_side(promised, realised, kept, trust):
    found = outcome(promised, realised, demand=1.0)
    assert (found.kept, found.trust) == (kept, pytest.approx(trust))
    if promised[0] is None:  # the same of the other side
        mirrored = [(-value, None) for _, value in (promised, realised)]
        assert outcome(*mirrored, demand=1.0, constrained="retain").kept is kept


@pytest.mark.parametrize(("retain", "forget", "is_told", "trust"), [
    (0.002, -0.001, False, 1.0),
    (5.0, -2.0, True, -math.inf),
    (5.0, 0.001, True, -math.inf),
    (-1e-4, -2.0, True, -math.inf),
    (-5.0, 2.0, True, 1.0),  # better than was promised
    (math.nan, 0.001, True, math.nan),
])  # fmt: skip
def test_a_change_above_rounding_is_judged_where_its_promise_is_not(retain, forget, is_told, trust):
    found = outcome((-1e-4, 1e-3), (retain, forget), 1e-3, noise=3e-3, reach=1.0)
    assert (found.is_told, found.kept) == (is_told, None)
    if math.isinf(trust):
        assert found.trust < -100
    else:
        assert found.trust == pytest.approx(trust, nan_ok=True)


def test_the_record_sums_up():
    record = PromiseRecord()
    assert record.summary() is None
    record.add(outcome((None, 1.0), (None, 1.0)))
    assert kept_in_words(record.summary()).startswith("of 1 checked step none that stayed had a de")
    record = PromiseRecord()
    for realised in ((-0.5, 2.0), (-1.5, 0.0)):
        record.add(outcome((-1.0, 1.0), realised, demand=1.0))
    for wrecked in (math.inf, -math.inf, math.nan):
        record.add(outcome((-1.0, 1.0), (wrecked, 1.0)))
    ratios = {"retain": 1.0, "forget": 1.0}  # of those that are numbers
    expected = {"checked": 5, "undone": 0, "judged": 2, "clamped": 0, "kept": 0.5}
    expected["median_ratio"] = ratios
    assert record.summary() == PromiseRecord(**asdict(record)).summary() == expected
    words = "2 had a demand above rounding, of which 50% realised at least 95% of it"
    assert kept_in_words(expected) == f"of 5 checked steps {words}"
    record.add(replace(outcome((-1.0, 1.0), (0.0, 2.0), demand=1.0), clamped=True))
    assert kept_in_words(record.summary()).endswith("of it (1 time cut to what is possible)")


def test_plain_descent_is_recognised():
    p = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    sgd = torch.optim.SGD
    assert is_plain_descent(sgd(p, lr=1), p)
    for other in (
        sgd(p, lr=1, momentum=0.9),
        sgd(p, lr=1, weight_decay=0.1),
        sgd(p, lr=1, maximize=True),
        sgd([{"params": p[:1], "lr": 2}, {"params": p[1:]}], lr=1),
        sgd(p[:1], lr=1),
        torch.optim.AdamW(p),
    ):
        assert not is_plain_descent(other, p)


@pytest.mark.parametrize(("saved", "now", "scale"), [
    (True, True, 0.5), (True, False, None), (False, True, 1.0), (False, False, None),
])  # fmt: skip
def test_the_settings_of_a_resumed_run_decide_whether_it_has_a_trust_region(saved, now, scale):
    def watch(trust_region):
        method = HamuQ(0.1, "relative", stopping="off")
        return Watched(slopes(), method, trust_region=trust_region).watch

    earlier = watch(saved)
    earlier.scale = 0.5 if saved else None
    resumed = watch(now)
    resumed.load_state_dict(earlier.state_dict())
    assert resumed.scale == scale
