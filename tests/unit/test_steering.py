"""The steering of a run by goal: what it reads of a step, and how it ends a run."""

import types

import pytest
import torch
from helpers import Holder, collect, pair_at_angle

from hamu import HamuQ, PairedGradients
from hamu.gram import SIDES
from hamu.training.goal import Goal, Standing
from hamu.training.line_search import LineSearch
from hamu.training.steering import Steering, _unclipped


def combined(angle, max_grad_norm=0.5):
    """A pair of two blocks, and the step of gradients at an angle."""
    retain, forget = zip(*(pair_at_angle(n, angle, torch.Generator().manual_seed(n)) for n in (5, 3)), strict=True)
    pair = PairedGradients(Holder(list(retain)), HamuQ(0.5, "relative", stopping="off"), max_grad_norm=max_grad_norm)
    collect(pair, "retain", list(retain))
    collect(pair, "forget", list(forget))
    return pair, pair.combine(), retain, forget


def steering(pair, measure, budget):
    ends = []
    return Steering(pair, Goal(5.0, None, budget), measure, ends.append, search=LineSearch()), ends


def test_what_is_learned_of_a_step_is_the_gram_before_clipping_in_one_transfer(monkeypatch):
    _, step, retain, forget = combined(angle=2.0)
    reads, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor) or cpu(tensor))
    for name in ("item", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: pytest.fail("a second read"))
    gram, own = _unclipped(step)
    monkeypatch.undo()
    assert len(reads) == 1
    expected = [[sum(x.flatten() * y.flatten()) for x, y in zip(a, b, strict=True)]
                for a, b in ((retain, retain), (forget, forget), (retain, forget))]  # fmt: skip
    assert torch.allclose(torch.stack(gram), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)
    for side, clip in zip(SIDES, step.clip, strict=True):
        squares = getattr(step.gram, f"{side}_sq")
        assert own[side] == pytest.approx((getattr(step.weights, side) * squares).sum().item() / clip.item())
    assert step.clip[0] < 1, "clipping is undone"


def test_without_a_budget_it_ends_where_every_step_must_cost():
    pair, step, *_ = combined(angle=0.02)
    lead, ends = steering(pair, lambda: Standing(1.0, 0.0, 1.0), budget=0.0)
    lead.on_train_begin(None, types.SimpleNamespace(global_step=0), None)
    lead.plan_from(step, rate=0.1)
    lead.plan_from(step, rate=0.1)
    assert [end.kind for end in ends] == ["criterion"], "an end is told once"
    assert ends[0].text.startswith("the criterion says that every further step must hurt: even a demand of 5%")


@pytest.mark.parametrize(
    ("angle", "paid", "kind", "said"),
    [
        (2.0, 0.0, "budget", "every further step costs more than the 0.1 that are left of the budget of 0.1: 6 times"),
        (0.02, 0.0, "criterion", "the criterion says that every further step must hurt: even a demand of 5%"),
        (0.02, 0.095, "budget", "the budget is spent: 6 times in a row further steps raised the retain loss by more"),
    ],
)
def test_it_ends_once_all_that_is_done_is_too_dear(angle, paid, kind, said):
    """Which is not to say that the budget is spent, as long as nothing of it is."""
    pair, step, *_ = combined(angle)
    standings = iter([Standing(1.0, 0.0, 1.0), *[Standing(1.2, paid, 1.0)] * (paid > 0)])
    lead, ends = steering(pair, lambda: next(standings, Standing(1.5, 9.0, 1.0)), budget=0.1)
    state = types.SimpleNamespace(global_step=0, max_steps=100)
    control = types.SimpleNamespace(should_training_stop=False)
    lead.on_train_begin(None, state, control)
    lead.plan_from(step, rate=0.1)
    if paid:
        state.global_step += 1
        lead.on_step_end(None, state, control)
    before = [p.detach().clone() for p in pair.parameters]
    while not ends:
        state.global_step += 1
        with torch.no_grad():
            for p in pair.parameters:
                p.add_(1.0)
        lead.on_step_end(None, state, control)
    assert ends[0].kind == kind
    assert state.global_step == 6 or paid, "each is measured, and taken back"
    assert ends[0].text.startswith(said)
    assert "6 times in a row" in ends[0].text
    assert all(torch.equal(p, b) for p, b in zip(pair.parameters, before, strict=True)), "it was taken back"
