"""Every method in the plane of both gradients: HAMU-Q with a demand, and its first-order cost (docs/theory.md)."""

import math

import pytest
import torch
from helpers import gram_at
from hypothesis import assume, given
from hypothesis import strategies as st

from hamu import HamuQ, build_method

# φ of each method over n_r, n_f and θ, the demanded share of the largest rise of a step of its length
DEMANDS = {
    "ga": lambda r, f, θ: 1.0,
    "gdiff": lambda r, f, θ: (f - r * math.cos(θ)) / third(r, f, -math.cos(θ)),
    "gru": lambda r, f, θ: math.sin(θ) if θ < math.pi / 2 else 1.0,
    "pcgrad": lambda r, f, θ: (
        f * math.sin(θ) / third(r, f, math.cos(θ)) if θ < math.pi / 2 else DEMANDS["gdiff"](r, f, θ)
    ),
    "pcgrad-one-sided": lambda r, f, θ: (
        (f * math.sin(θ) ** 2 - r * math.cos(θ)) / math.hypot(r, f * math.sin(θ))
        if θ < math.pi / 2
        else DEMANDS["gdiff"](r, f, θ)
    ),
    "blur": lambda r, f, θ: f / math.hypot(f, r * math.sin(θ)),
    "ngdiff": lambda r, f, θ: math.sin(θ / 2),
    "munba": lambda r, f, θ: math.sin(θ / 2),
    "mgda": lambda r, f, θ: (
        1.0 if r * math.cos(math.pi - θ) >= f else r * math.sin(θ) / third(r, f, math.cos(θ))
    ),
}
NORMS = st.floats(-1, 1).map(lambda power: 10**power)
ANGLES = st.floats(0.02, math.pi - 0.02)


def third(a, b, cos):
    """Length of the sum of two vectors at this cosine."""
    return math.sqrt(a * a + b * b + 2 * a * b * cos)


def direction(weights):
    both = torch.stack([weights.retain[0], weights.forget[0]])
    return both / both.norm()


@pytest.mark.parametrize("name", DEMANDS)
@given(r=NORMS, f=NORMS, θ=ANGLES)
def test_a_method_is_hamu_q_with_its_demand_up_to_scale(name, r, f, θ):
    φ = DEMANDS[name](r, f, θ)
    assume(φ > 1e-6 and -math.cos(θ) < φ - 1e-9)  # it raises the forget loss, and is not direct
    gram = gram_at(r, f, math.cos(θ))
    found = build_method(name).weigh(gram)
    hamu = HamuQ(min(φ, 1.0), constraint_mode="relative", stopping="off").weigh(gram)
    torch.testing.assert_close(direction(found), direction(hamu), rtol=0, atol=2e-5)


@given(r=NORMS, f=NORMS, θ=ANGLES, a=st.floats(0, 10), b=st.floats(-10, 0))
def test_all_that_raises_the_forget_loss_with_these_signs_is_hamu_q(r, f, θ, a, b):
    gram = gram_at(r, f, math.cos(θ))
    weights = torch.tensor([[a], [b]], dtype=torch.float64)
    retain_change, rise = gram.changes(*weights)
    length = math.sqrt(max(0.0, float(-(a * retain_change + b * rise))))
    assume(b < 0 and length > 0 and rise > 1e-6 * length * f)
    φ = min(1.0, float(rise) / (length * f))
    hamu = HamuQ(φ, constraint_mode="relative", stopping="off").weigh(gram)
    step = weights[:, 0] * (r / length)  # at HAMU-Q's length
    best = gram.changes(hamu.retain, hamu.forget)[0]
    assert gram.changes(*step[:, None])[0] == pytest.approx(float(best), abs=1e-4 * r * r)


SPARE = ["ft", "gru", "pcgrad", "pcgrad-one-sided", "falcon", "ngdiff", "munba", "mgda"]
HURTS = {
    **dict.fromkeys(SPARE, lambda r, f, κ: False),
    "ga": lambda r, f, κ: κ > 0,
    "gdiff": lambda r, f, κ: κ > r * r,
    "blur": lambda r, f, κ: κ * (1 + κ / (f * f)) > r * r,
}


@pytest.mark.parametrize("name", HURTS)
@given(r=NORMS, f=NORMS, θ=ANGLES)
def test_methods_raise_the_retain_loss_to_first_order_exactly_where_the_table_says(name, r, f, θ):
    gram = gram_at(r, f, math.cos(θ))
    weights = build_method(name).weigh(gram)
    change = float(gram.changes(weights.retain, weights.forget)[0])
    scale = float(weights.retain.abs() * r + weights.forget.abs() * f) * r
    hurts = HURTS[name](r, f, r * f * math.cos(θ))
    assert change >= -1e-9 * scale if hurts else change <= 1e-9 * scale


@pytest.mark.parametrize("name", ["gdiff", "falcon", "pcgrad-one-sided"])
def test_these_can_lower_the_forget_loss(name):
    gram = gram_at(10.0, 1.0, 0.9)
    weights = build_method(name).weigh(gram)
    assert gram.changes(weights.retain, weights.forget)[1] < 0
