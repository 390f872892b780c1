"""Stopping: criteria, margin, patience, window; a run without conflict is never stopped."""

import math
from functools import partial

import pytest
from helpers import gram_at, random_gram
from hypothesis import given, settings
from hypothesis import strategies as st

from hamu import HamuQ, HamuU, StoppingRule
from hamu.core.methods import StoppingMemory


@pytest.mark.parametrize(
    ("rule", "headrooms", "stopped"),
    [
        (StoppingRule(), [1.5, 1.0, 0.999, 1.2], [0, 0, 1, 0]),  # below one, not at one
        (StoppingRule(margin=0.5), [1.6, 1.5, 1.49], [0, 0, 1]),
        (StoppingRule(patience=3), [0.5, 0.5, 2.0, 0.5, 0.5, 0.5], [0, 0, 0, 0, 0, 1]),
        # means over three: 0.9, 0.97, 1.03
        (StoppingRule(window=3), [0.1, 0.1, 2.5, 0.3, 0.3], [0, 0, 1, 1, 0]),
    ],
)
def test_margin_patience_and_window_decide_when_it_stops(rule, headrooms, stopped):
    memory = StoppingMemory(rule)
    assert [memory.update(h) for h in headrooms] == stopped


def test_a_window_counts_a_step_that_need_not_hurt_as_one_with_room():
    memory = StoppingMemory(StoppingRule(window=3))
    steps = [(0.68, False), (0.68, False), (1.4, True), (0.9, True), (0.7, True)]
    # means over three: 1.13, 1.1, 1.0
    assert not any(memory.update(*step) for step in steps)
    assert memory.update(0.7)
    said = memory.explain(0.5, 0.5, 0.35, some_demand_is_free=True)
    assert said.startswith("the mean of the last 3 headrooms, 0.7667, is below 1 (aggregate);")
    said = StoppingMemory(StoppingRule(margin=0.2)).explain(0.5, 0.5, 0.5446, True)
    assert said.startswith("the demand 0.5 with its margin, 0.6, leaves no room below 0.5446, the")
    said = StoppingMemory(StoppingRule("any")).explain(0.5, 0.5, 0.0, True)  # a block of one entry
    assert said == "in a block the demand 0.5 has a price (any), and so has every smaller one"


@pytest.mark.parametrize("method", [HamuQ, HamuU])
def test_aggregate_is_the_sum_over_blocks_any_the_worst_and_global_the_whole_model(method):
    sines, whole = [math.sqrt(1 - 0.95**2), 0.8], math.sqrt(1 - (1.55 / 2) ** 2)
    for criterion, norms, sine in (
        ("aggregate", [1.0, 1.0], sum(sines) / 2),
        ("aggregate", [3.0, 1.0], (3 * sines[0] + sines[1]) / 4),  # by what blocks can reach
        ("any", [1.0, 1.0], min(sines)),
        ("global", [1.0, 1.0], whole),
    ):
        build = method(0.5, constraint_mode="relative", stopping=criterion)
        status = build.weigh(gram_at(norms, [1.0, 1.0], [0.95, 0.6])).constraint
        found = (status.free_limit / status.demand).item()
        assert found == pytest.approx(sine / 0.5), criterion


ANGLES = st.one_of(st.floats(-1, 1), st.sampled_from([1.0, 1.0, -1.0]))
BLOCKS = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), ANGLES), min_size=1, max_size=4)


def price(method, gram):
    """First-order change for the worse of the objective, gain of the other side, and the status."""
    weights = method.weigh(gram)
    retain, forget = gram.changes(weights.retain, weights.forget)
    price, gain = (retain, forget) if method.constrained == "forget" else (-forget, -retain)
    return price.item(), gain.item(), weights.constraint


@pytest.mark.parametrize("radius", ["gradient", 0.3])
@pytest.mark.parametrize("method", [HamuQ, HamuU])
@settings(deadline=None, max_examples=100)
@given(BLOCKS, st.sampled_from(["norm_product", "uniform"]))
def test_a_demand_is_free_exactly_where_the_status_says_so(method, radius, blocks, distribution):
    gram = gram_at(*zip(*blocks, strict=True))
    build = partial(method, constraint_mode="relative", distribution=distribution, radius=radius)
    scale = sum(r * r + f * f for r, f, _ in blocks)
    if price(build(0.5), gram)[2].some_demand_is_free:
        cost, gained, status = price(build(1e-13), gram)
        assert cost < 0
        assert gained >= status.demand - 1e-7 * scale
    else:
        assert all(cos > 0.999 for _, _, cos in blocks)
        costs = [price(build(share), gram)[0] for share in (1e-13, 1e-3, 0.1, 0.5, 1.0)]
        assert all(cost > 0 for cost in costs)
        assert costs == sorted(costs)
        assert costs[0] < 1e-6 * scale


@pytest.mark.parametrize("criterion", ["aggregate", "off", "global"])
@pytest.mark.parametrize("radius", ["gradient", 0.3])
@pytest.mark.parametrize("method", [HamuQ, HamuU])
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.sampled_from([0.0, 0.3]))
@settings(deadline=None, max_examples=60)
def test_the_aggregate_criterion_or_none_asks_whether_the_demand_with_its_margin_has_a_price(
    method, radius, criterion, seed, share, margin
):
    gram = random_gram(seed)
    rule = StoppingRule(criterion, margin=margin)
    status = method(share, "relative", radius=radius, stopping=rule).weigh(gram).constraint
    cost, _, _ = price(method(min(1.0, share * (1 + margin)), "relative", radius=radius), gram)
    if criterion != "global":
        assert bool(status.conflict) == bool(status.kappa > 0 and cost > 0)
    assert status.kappa > 0 or not status.conflict, "without a conflict it never stops"
