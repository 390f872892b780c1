"""Where numbers end: angles that are rounding, squares below zero, models of two precisions, capacities just missed."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import combine, gram_at

from hamu import HamuQ, HamuU, PairGram, PairStep, build_method
from hamu.core.methods import Method, Weights

EPS32 = torch.finfo(torch.float32).eps
OFF = {"stopping": "off"}


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize(("sine", "length"), [(0.8, 0.5), (1.2, 1.0)])
def test_what_two_gradients_differ_by_below_rounding_is_not_made_a_step(method, sine, length):
    """Of a step of length 1, half of which the demand takes; sines in units of √(8 eps)."""
    sine *= math.sqrt(8 * EPS32)
    gram = replace(gram_at([1.0], [1.0], [math.sqrt(1 - sine**2)]), eps=EPS32)
    step = PairStep(gram, method(0.5, **OFF).weigh(gram), gram.clip_factors(None), "step")
    assert step.combined_sq.sqrt().item() == pytest.approx(length, rel=1e-4)
    sign = 1.0 if method is HamuQ else -1.0
    change = step.promised_forget_change if method is HamuQ else step.promised_retain_change
    assert (sign * change).item() == pytest.approx(0.5), "what was demanded is brought in any case"


def test_a_square_that_rounding_brings_below_zero_is_zero():
    one = torch.ones(1, dtype=torch.float64)
    gram = PairGram(one, one, torch.nextafter(one, 2 * one))
    step = PairStep(gram, build_method("gdiff").weigh(gram), gram.clip_factors(None), "step")
    assert step.combined_sq.tolist() == [0.0]


def test_a_model_of_two_precisions_is_as_exact_as_the_coarser():
    mixed = [torch.ones(3, dtype=torch.float64), torch.ones(3)]
    for sides in (mixed, mixed[::-1]):
        step, _ = combine(HamuQ(0.1, **OFF), sides, [g.clone() for g in sides])
        assert step.gram.eps == EPS32


class Huge(Method):
    """Of weights that float64 holds, and float32 does not."""

    name, summary, source = "huge", "", ""

    def weigh(self, gram):
        return Weights(torch.full_like(gram.dot, 1e39), torch.full_like(gram.dot, 1e39))


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize(("demand", "decision"), [(6.0, "step"), (6.0 * 1.001, "stop")])
def test_a_thousandth_more_than_is_possible_is_not_possible(method, demand, decision):
    retain, forget = [torch.tensor([2.0, 0.0]).double()], [torch.tensor([0.0, 3.0]).double()]
    step, _ = combine(method(demand, **OFF), retain, forget, max_grad_norm=None)
    assert (step.decision, step.cause) == (decision, "infeasible" if decision == "stop" else "")


@pytest.mark.parametrize("method", [HamuQ, HamuU])
def test_of_a_clamped_demand_all_that_is_possible_is_granted_and_every_conflict_hurts(method):
    gram = gram_at([2.0, 1.0], [3.0, 1.0], [0.6, -0.3])
    status = method(50.0, on_infeasible="clamp", **OFF).weigh(gram).constraint
    assert status.demand.item() == pytest.approx(50.0)
    assert (
        status.clipped_demand.item()
        == pytest.approx(status.max_demand.item())
        == pytest.approx(7.0)
    )
    assert status.stop_threshold.item() == 0.0
    assert status.direct_threshold.item() == pytest.approx(-math.sqrt(5.0 * 10.0))
