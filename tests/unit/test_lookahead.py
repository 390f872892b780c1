"""Looking ahead: a point that runs before the weights on a path of fine-tuning, and leaves the model as it is."""

import pytest
import torch
from helpers import is_as, state_of
from torch import nn
from torch.nn import functional as F

from hamu import HamuError
from hamu.unlearning.lookahead import Lookahead


class Seen:
    """The loss of some rows, which notes whose they are."""

    def __init__(self, model):
        self.model, self.rows, self.factor = model, [], 1.0

    def __call__(self, batch, rows):
        self.rows.append((batch["name"], len(batch["labels"][rows])))
        logits = self.model(batch["pixel_values"][rows])
        return self.factor * F.cross_entropy(logits, batch["labels"][rows])


def batch(name, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    pixels = torch.randn(count, 6, generator=generator)
    return {"name": name, "pixel_values": pixels, "labels": labels}


def new_model():
    """With BatchNorm; one tensor is frozen and one unused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.unused = nn.Parameter(torch.ones(2))
    model[0].bias.requires_grad_(False)
    return model


def fine_tuned(model, batches):
    """Descend by Adam as anyone would, and give the model after each batch."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for one in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(one["pixel_values"]), one["labels"]).backward()
        optimizer.step()
        yield model


@pytest.fixture
def made():
    model = new_model().eval()
    model[3].train()
    loss = Seen(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, loss, Lookahead(model, trained, loss, rate=0.01, depth=3)


def joined(parts):
    """One batch of these."""
    return {name: torch.cat([one[name] for one in parts]) for name in ("pixel_values", "labels")}


def alike(ours, theirs, **within):
    """True if all these tensors are close, by default equal bit by bit."""
    within = within or {"rtol": 0, "atol": 0}
    return all(torch.allclose(a, b, **within) for a, b in zip(ours, theirs, strict=True))


def point(lookahead, model):
    with lookahead.ahead():
        return [p.detach().clone() for p in model.parameters()]


def test_a_gradient_is_taken_at_the_point_ahead_and_the_weights_stay(made):
    model, loss, lookahead = made
    before, versions = state_of(model), [p._version for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    for step in range(5):
        lookahead.advance([(batch("retain", 4, step), batch("forget", 4, step))])
    assert all(p.grad is None for p in model.parameters())
    with lookahead.ahead():
        assert not is_as(model, before)
        loss(batch("forget", 4), slice(None)).backward()
    assert is_as(model, before)
    assert [p._version for p in model.parameters()] == versions
    assert [p.data_ptr() for p in model.parameters()] == addresses
    ahead = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), point(lookahead, model), strict=True):
            parameter.copy_(value)
    loss(batch("forget", 4), slice(None)).backward()
    for parameter, grad in zip(model.parameters(), ahead, strict=True):
        assert (grad is None) == (parameter.grad is None)
        assert grad is None or grad.equal(parameter.grad)


def test_the_point_moves_along_with_the_model(made):
    model, _, lookahead = made
    lookahead.advance([(batch("retain", 4), batch("forget", 4))])
    path = [a - p for a, p in zip(point(lookahead, model), model.parameters(), strict=True)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    lookahead.advance([(batch("retain", 4), batch("forget", 4))])
    moved = [a - p for a, p in zip(point(lookahead, model), model.parameters(), strict=True)]
    # a second step of Adam from there
    assert all((b - a).abs().max() <= 0.0101 for a, b in zip(path, moved, strict=True))


def test_every_other_cycle_relearns_some_forgotten_records(made):
    _, loss, lookahead = made
    found = []
    for step in range(12):
        lookahead.advance([(batch("retain", 10, step), batch("forget", 10, step))])
        found.append(lookahead.relearns_forgotten)
        expected = [("retain", 10), ("forget", 2)] if found[-1] else [("retain", 10)]
        assert loss.rows[-len(expected) :] == expected
        assert lookahead.at_the_end_of_a_retain_cycle == (step in (2, 8))
    assert found == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    lookahead.advance([(batch("retain", 65), batch("forget", 4))])
    assert loss.rows[-2:] == [("retain", 33), ("retain", 32)], "a large batch is two steps"
    lookahead.advance([(batch("retain", 65), batch("forget", 4))])
    assert loss.rows[-1] == ("retain", 65), "one where the depth, 3, leaves no more"
    assert lookahead.at_the_end_of_a_retain_cycle
    assert lookahead.taken == 3
    lookahead.advance([(batch("retain", 4), batch("forget", 4))])
    assert loss.rows[-2:] == [("retain", 4), ("forget", 1)], "one at least"


def test_accumulated_batches_are_one_step_on_all_their_records(made):
    model, loss, lookahead = made
    for step in range(3):  # a cycle on retain records alone
        lookahead.advance([(batch("retain", 4, step), batch("forget", 4, step))])
    pairs = [
        [(batch("retain", n, 10 * step + n), batch("forget", m, 20 * step + m)) for n, m in sizes]
        for step, sizes in enumerate([((6, 3), (20, 4)), ((20, 8), (2, 1)), ((5, 5), (10, 2))])
    ]
    relearned = [(3, 2), (4, 0), (3, 0)]  # a fifth of the retain records, the first ones
    batches = []
    for step, counts in zip(pairs, relearned, strict=True):
        few = [joined([forget]) for _, forget in step]
        few = [{k: v[:n] for k, v in one.items()} for one, n in zip(few, counts, strict=True)]
        batches.append(joined([*(retain for retain, _ in step), *few]))
    for step, copy in zip(pairs, fine_tuned(new_model().eval(), batches), strict=True):
        loss.rows.clear()
        lookahead.advance(step)
        assert alike(point(lookahead, model), copy.parameters(), atol=1e-5)
    assert loss.rows == [("retain", 5), ("forget", 3), ("retain", 10)]


def test_many_accumulated_records_are_two_steps(made):
    model, loss, lookahead = made
    lookahead.advance([(batch("retain", 21, n), batch("forget", 4, n)) for n in range(3)])
    assert lookahead.taken == 1, "63 records are one"
    lookahead.restart()
    pairs = [(batch("retain", n, n), batch("forget", 4, n)) for n in (20, 22, 24)]
    lookahead.advance(pairs)
    assert lookahead.taken == 2
    assert [count for _, count in loss.rows] == [21, 21, 21, 20, 22, 24]
    steps = [joined([retain for retain, _ in some]) for some in (pairs[:2], pairs[2:])]
    *_, copy = fine_tuned(new_model().eval(), steps)
    assert alike(point(lookahead, model), copy.parameters(), atol=1e-5)


def test_a_restart_begins_with_retain_records_alone(made):
    _, _, lookahead = made
    pair = (batch("retain", 4), batch("forget", 4))
    lookahead.restart()  # before any step
    lookahead.advance([pair])
    for steps in (0, 3, 2):  # in a cycle of retain records, in one of both, in one of retain again
        for _ in range(steps):
            lookahead.advance([pair])
        assert lookahead.relearns_forgotten == (steps == 3)
        lookahead.restart()
        lookahead.advance([pair])
        assert (lookahead.taken, lookahead.relearns_forgotten) == (1, False)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_rehearsal_leaves_the_model_bit_by_bit_as_it_was(made, breaks):
    model, _, lookahead = made
    lookahead.advance([(batch("retain", 4), batch("forget", 4))])
    before, ahead = state_of(model), point(lookahead, model)
    modes = [m.training for m in model.modules()]
    versions = [p._version for p in model.parameters()]
    batches = [batch("retain", 8, seed) for seed in range(3)]
    *_, copy = fine_tuned(new_model(), batches)
    try:
        with lookahead.rehearsed(batches):
            inside = state_of(model)
            assert alike(inside.values(), copy.state_dict().values(), atol=1e-6), "as Adam would"
            assert all(m.training for m in model.modules()), "BatchNorm's statistics are trained"
            if breaks:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert breaks
    for name in ("0.weight", "1.running_mean", "1.num_batches_tracked", "3.weight"):
        assert not inside[name].equal(before[name]), name
    assert is_as(model, before)
    assert [m.training for m in model.modules()] == modes
    assert [p._version for p in model.parameters()] == versions
    assert alike(point(lookahead, model), ahead)


def test_a_loss_ahead_that_is_not_finite_is_an_error_and_the_weights_stay(made):
    model, loss, lookahead = made
    before, pair = state_of(model), (batch("retain", 4), batch("forget", 4))

    def only_ahead(given, rows):
        return loss(given, rows) * (float("nan") if torch.is_grad_enabled() else 1.0)

    lookahead._loss = only_ahead
    with pytest.raises(HamuError, match=r"a step ahead is nan; lower --lookahead_rate 0.01 or"):
        lookahead.advance([pair])
    assert is_as(model, before)


def test_a_batch_whose_loss_is_never_finite_and_a_step_broken_off_leave_no_trace(made):
    model, loss, lookahead = made
    pair = (batch("retain", 4), batch("forget", 4))
    loss.factor = float("nan")
    lookahead.advance([pair])
    assert lookahead.taken == 1
    assert not any(one.any() for one in lookahead._offset)
    loss.factor = 1.0
    with pytest.raises(KeyError):
        lookahead.advance([pair, ({"name": "broken", "labels": pair[0]["labels"]}, pair[1])])
    lookahead.restart()
    lookahead.advance([pair])
    fresh = Lookahead(model, lookahead._parameters, loss, rate=0.01, depth=3)
    fresh.advance([pair])
    assert all(map(torch.equal, lookahead._offset, fresh._offset))
