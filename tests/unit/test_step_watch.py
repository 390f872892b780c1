"""What surrounds one step: what it is held to, and what of it goes on record."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hamu import HamuQ, PairedGradients, UnlearnConfig
from hamu.unlearning.trainer.monitor import Monitor

RATE = 0.1


class Slopes(nn.Module):
    """The retain loss falls along one weight, the forget loss rises by 10 along the other, less a bend."""

    def __init__(self, forget_bend=0.0, retain_bend=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.bends = {"forget": forget_bend, "retain": retain_bend}

    def total(self, side, batch):
        one = self.w[int(side == "forget")]
        return (
            10.0 * one - self.bends[side] * one**2
            if side == "forget"
            else self.bends[side] * one**2 - one
        )


def watch_of(model, method, max_grad_norm=1.0, **settings):
    pair = PairedGradients(model, method, max_grad_norm=max_grad_norm)
    args = UnlearnConfig(output_dir="unused", report_to="none", check_steps=1, **settings)
    watch = Monitor(pair, args, model.total, model)
    return watch, pair, torch.optim.SGD(model.parameters(), lr=RATE)


def take_step(watch, pair, optimizer, model):
    """Whether it was undone."""
    losses = {}
    for side in ("retain", "forget"):
        watch.passes.remember(side, {}, 1.0, 1)
        with getattr(pair, side)():
            loss = model.total(side, {})
            loss.backward()
        losses[side] = loss.detach()
    step = pair.combine(keep=watch.keep(optimizer))
    watch.before(step, optimizer, losses)
    optimizer.step()
    return watch.after()


@pytest.mark.parametrize(("share", "kept"), [(1.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("correct_steps", [False, True])
def test_a_step_is_held_to_the_demand_on_the_loss_as_it_is(correct_steps, share, kept):
    """All that is possible is demanded: a step of length η along g_f, 10 η of loss, of which a bend leaves a share.

    Of the clipped gradient, of norm 1, a tenth of that is demanded.
    """
    model = Slopes(forget_bend=10 * (1 - share) / RATE)
    watched = watch_of(model, HamuQ(1.0, "relative", stopping="off"), correct_steps=correct_steps)
    assert not take_step(*watched, model)
    watch = watched[0]
    assert watch.figures["realised_forget_change"] == pytest.approx(share * 10 * RATE, rel=1e-4)
    assert watch.record.summary()["kept"] == kept


def test_a_step_that_was_undone_is_not_on_record():
    """-s + 100 s² is below zero for steps shorter than 0.01: a sixteenth of the first is the first to be one."""
    model = Slopes(retain_bend=100.0)
    watched = watch_of(model, HamuQ(0.1, "relative", stopping="off"), trust_region=True)
    assert [take_step(*watched, model) for _ in range(5)] == [True] * 4 + [False]
    assert watched[0].record.summary()["checked"] == 1


def test_a_step_is_judged_by_losses_of_one_precision_where_its_own_are_rounded(monkeypatch):
    """What the passes of the step found is off by more than a step of this length does, as with TF32 on a GPU."""
    monkeypatch.setattr("hamu.unlearning.trainer.monitor.rounds_to_tf32", lambda model: True)
    monkeypatch.setattr("hamu.unlearning.trainer.monitor.without_tf32", lambda: exact(model))

    @contextmanager
    def exact(model):
        model.error, error = 0.0, model.error
        yield
        model.error = error

    class Rounded(Slopes):
        error = 5.0

        def total(self, side, batch):
            return super().total(side, batch) + self.error

    model = Rounded()
    watched = watch_of(model, HamuQ(1.0, "relative", stopping="off"))
    assert not take_step(*watched, model)
    assert watched[0].figures["realised_forget_change"] == pytest.approx(10 * RATE, rel=1e-4)
    assert watched[0].record.summary()["kept"] == 1.0
