"""The closed form is optimal, against SLSQP; where it must hurt, by Theorem 4.4."""

import math

import numpy as np
import pytest
import torch
from helpers import gram_at, measure, pair_at_angle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from hamu import HamuQ, HamuU

some_angles = [1e-5, 1e-3, math.pi / 2, math.pi - 1e-3]
angles = st.floats(1e-5, math.pi - 1e-5) | st.sampled_from(some_angles)
log_norms = st.floats(-9, 9)
block = st.tuples(st.integers(2, 20), angles, log_norms, log_norms)
blocks = st.lists(block, min_size=1, max_size=3)
seeds = st.integers(0, 2**32 - 1)
# Beyond 0.999 the solver's own constraint error of 1e-9 buys it more than the 1e-7 that is compared.
shares_of_reach = st.floats(1e-4, 0.999)


def problem(specs, seed, forget_constrained):
    """Gradients per block, and (g_o, g_c): minimise g_o·Δw with g_c·Δw >= Q and ‖Δw‖ <= R."""
    g = torch.Generator().manual_seed(seed)
    pairs = [pair_at_angle(n, angle, g, 10**r, 10**f) for n, angle, r, f in specs]
    retain, forget = [list(side) for side in zip(*pairs, strict=True)]
    return retain, forget, [(r, f) if forget_constrained else (-f, -r) for r, f in pairs]


def solver_optimum(g_o, g_c, phi, ours):
    """The best that SLSQP finds for unit vectors and R = 1, from several starts, one of them our step.

    None if it finds nothing feasible.
    """
    cone = {"type": "ineq", "fun": lambda x: g_c @ x - phi, "jac": lambda x: g_c}
    ball = {"type": "ineq", "fun": lambda x: 1 - x @ x, "jac": lambda x: -2 * x}
    found = []
    for start in (g_c, phi * g_c, -g_o, 0.5 * (g_c - g_o), 0 * g_c, ours):
        settings = {"method": "SLSQP", "options": {"ftol": 1e-14, "maxiter": 300}}
        problem = {"jac": lambda x: g_o, "constraints": [cone, ball]}
        result = minimize(lambda x: g_o @ x, start, **problem, **settings)
        if g_c @ result.x >= phi - 1e-9 and result.x @ result.x <= 1 + 1e-9:
            found.append(result.fun)
    return min(found, default=None)


@pytest.mark.parametrize("distribution", ["norm_product", "uniform", "custom"])
@pytest.mark.parametrize("radius", ["gradient", 0.37])
@pytest.mark.parametrize("method", [HamuQ, HamuU])
@settings(max_examples=25)
@given(specs=blocks, seed=seeds, share=shares_of_reach)
def test_no_solver_finds_a_better_step(method, radius, distribution, specs, seed, share):
    retain, forget, sides = problem(specs, seed, method is HamuQ)
    radii = [g_o.norm().item() if radius == "gradient" else radius for g_o, _ in sides]
    reach = [R * g_c.norm().item() for R, (_, g_c) in zip(radii, sides, strict=True)]
    parts = {"uniform": [1.0] * len(reach), "custom": list(range(1, len(reach) + 1))}
    parts = parts.get(distribution, reach)
    parts = [part / sum(parts) for part in parts]
    total = share * min(most / part for most, part in zip(reach, parts, strict=True))
    if distribution == "custom":
        distribution = [3.0 * part for part in parts]  # their sum says nothing
    weights = method(total, distribution=distribution, radius=radius).weigh(measure(retain, forget))
    assert weights.constraint.feasible
    assert weights.constraint.max_demand.item() == pytest.approx(total / share)

    for i, (g_o, g_c) in enumerate(sides):
        dw = -(weights.retain[i] * retain[i] + weights.forget[i] * forget[i])
        demand, R = total * parts[i], radii[i]
        assert g_c.dot(dw) >= demand - 1e-9 * reach[i]
        assert dw.norm() <= R * (1 + 1e-9)
        ours = (g_o.dot(dw) / (R * g_o.norm())).item()
        units = (np.asarray(g / g.norm()) for g in (g_o, g_c))
        best = solver_optimum(*units, demand / reach[i], np.asarray(dw / R))
        assert best is not None, "the solver failed, so nothing was compared"
        assert ours <= best + 1e-7


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@given(st.floats(-0.999, 0.999), st.floats(1e-3, 0.999), log_norms, log_norms)
def test_above_kappa_2_the_objective_must_be_hurt(method, cos, share, log_retain, log_forget):
    gram = gram_at(10**log_retain, 10**log_forget, cos)
    weights = method(share, constraint_mode="relative", stopping="global").weigh(gram)
    status, (retain, forget) = weights.constraint, gram.changes(weights.retain, weights.forget)
    cost = retain / gram.retain_sq if method is HamuQ else -forget / gram.forget_sq
    norms = 10 ** (log_retain + log_forget)
    assert status.direct_threshold == pytest.approx(-share * norms)
    assert status.stop_threshold == pytest.approx(math.sqrt(1 - share**2) * norms)
    if abs(cost) > 1e-9:
        assert (cost > 0) == (status.kappa > status.stop_threshold)
        assert (cost > 0) == (status.demand > status.free_limit)
    if abs(cos + share) > 1e-9:
        assert status.direct == (status.kappa <= status.direct_threshold) == (cos <= -share)
