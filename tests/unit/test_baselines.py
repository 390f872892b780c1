"""The baselines against explicit vectors: which is projected, off what, on which sign of conflict."""

import pickle

import pytest
import torch
from helpers import combine, flat, gram_at, pair_at_angle
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from hamu import build_method
from hamu.core.methods import method_classes


def vectors(angle, seed=0):
    return pair_at_angle(12, angle, torch.Generator().manual_seed(seed), 3.0, 0.5)


def combined(name, g_r, g_f):
    parts = [[v[:5], v[5:6], v[6:]] for v in (g_r, g_f)]
    _, grads = combine(build_method(name), *parts, max_grad_norm=None)
    return flat(grads)


def off(vector, direction):
    return vector - vector.dot(direction) / direction.dot(direction) * direction


@given(st.floats(0.05, 3.1), st.integers(0, 1000), st.sampled_from([1e-12, 1.0, 1e12]))
def test_cagrad_improves_the_worse_objective_as_much_as_its_ball_allows(angle, seed, scale):
    g_r, g_f = (scale * g for g in vectors(angle, seed))
    mean = (g_r - g_f) / 2
    update = combined("cagrad", g_r, g_f)
    radius = 0.4 * mean.norm()
    assert (update - mean).norm() <= radius * (1 + 1e-9)

    def dual(w):
        """Its smallest value is the worse improvement of the best update (Liu et al., Sec. 3.1)."""
        g_w = w * g_r - (1 - w) * g_f
        return float((g_w.dot(mean) + radius * g_w.norm()) / scale**2)

    best = minimize_scalar(dual, bounds=(0, 1), method="bounded", options={"xatol": 1e-12}).fun
    best = min(best, dual(0.0), dual(1.0))
    worse = min(float(update.dot(g_r)), float(-update.dot(g_f))) / scale**2
    assert worse == pytest.approx(best, abs=1e-5)


def by_block(rule, g_r, g_f):
    blocks = (slice(0, 5), slice(5, 6), slice(6, None))
    return torch.cat([rule(g_r[block], g_f[block]) for block in blocks])


def rectified(g_r, g_f):
    """The ascent -g_f, off g_r if the angle between both is obtuse (Wang et al. 2025)."""
    return off(-g_f, g_r) if g_f.dot(g_r) > 0 else -g_f


def falcon(g_r, g_f):
    """Conflict-aware combination of one tensor (Hu et al. 2025)."""
    return 1.2 * g_r + 0.8 * rectified(g_r, g_f) if g_f.dot(g_r) > 0 else 1.9 * g_r - 0.1 * g_f


def pcgrad(g_r, g_f):
    """The mean of both descents, each off the other on conflict (Yu et al. 2020)."""
    return (rectified(g_r, g_f) + rectified(-g_f, -g_r)) / 2


def one_sided(g_r, g_f):
    """The retain gradient is the anchor, the forget descent gives way (Xiao et al. 2026)."""
    return g_r + rectified(g_r, g_f)


def nash(g_r, g_f):
    """Bargaining by its first-order condition, (GᵀG)α = 1/α, solved by Newton's method."""
    both = torch.stack([g_r, -g_f])
    gram, alpha = both @ both.T, 1 / both.norm(dim=1)
    for _ in range(60):
        residual = gram @ alpha - 1 / alpha
        step = torch.linalg.solve(gram + torch.diag(alpha**-2), residual)
        share = (alpha / step.abs()).min().clamp(max=2) / 2  # stays positive
        alpha = alpha - share * step
    torch.testing.assert_close(gram @ alpha, 1 / alpha)
    return alpha @ both


def shortest(g_r, g_f):
    """The shortest convex combination, by search over its weight."""
    length = lambda w: float((w * g_r - (1 - w) * g_f).square().sum())  # noqa: E731
    found = minimize_scalar(length, bounds=(0, 1), method="bounded", options={"xatol": 1e-12}).x
    w = min((0.0, 1.0, found), key=length)
    return w * g_r - (1 - w) * g_f


RULES = {
    "gru": rectified,
    "pcgrad": pcgrad,
    "blur": lambda g_r, g_f: off(g_r, g_f) - 1.0 * g_f,
    "ngdiff": lambda g_r, g_f: g_r / g_r.norm() - g_f / g_f.norm(),
    "munba": nash,
    "mgda": shortest,
    "falcon": lambda g_r, g_f: by_block(falcon, g_r, g_f),
    "pcgrad-one-sided": lambda g_r, g_f: by_block(one_sided, g_r, g_f),
}


@pytest.mark.parametrize("name", RULES)
@given(angle=st.floats(0.05, 3.1), seed=st.integers(0, 1000))
def test_a_published_rule_of_two_vectors_is_met(name, angle, seed):
    g_r, g_f = vectors(angle, seed)
    expected = RULES[name](g_r, g_f)
    tolerance = 1e-6 if name in ("mgda", "munba") else 1e-12
    torch.testing.assert_close(combined(name, g_r, g_f), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_a_rule_has_no_unit(name, scale):
    """Both gradients in another unit: the same weights, or (ngdiff, munba) the same step."""
    gram = gram_at([1.0, 2.0], [0.5, 3.0], [0.3, -0.2])
    here, there = (build_method(name).weigh(g) for g in (gram, gram.scaled(scale, scale)))
    unit = scale if name in ("ngdiff", "munba") else 1.0
    torch.testing.assert_close(there.retain * unit, here.retain)
    torch.testing.assert_close(there.forget * unit, here.forget)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("retain", "forget", "cos"), [
    (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, -1.0),
])  # fmt: skip
def test_zero_and_parallel_gradients_have_finite_weights(name, retain, forget, cos):
    weights = build_method(name).weigh(gram_at(retain, forget, cos))
    assert torch.isfinite(torch.cat([weights.retain, weights.forget])).all()
    if (name, cos) == ("munba", 1.0):
        assert weights.retain == weights.forget == 0, "nothing to agree on"


MIXED = ["gdiff", "kl", "scrub", "npo", "simnpo"]
CONSTANT = [("ft", {}, 1, 0), ("ga", {}, 0, -1)]
CONSTANT += [(name, {}, 0.5, -0.5) for name in MIXED]
CONSTANT += [(name, {"forget_weight": 0.125}, 0.875, -0.125) for name in MIXED]


@pytest.mark.parametrize(("name", "settings", "retain", "forget"), CONSTANT)
def test_constant_weights(name, settings, retain, forget):
    weights = build_method(name, **settings).weigh(gram_at([1.0], [2.0], [0.3]))
    assert (weights.retain.item(), weights.forget.item()) == (retain, forget)
    g_r, g_f = vectors(1.0)
    if not settings:
        torch.testing.assert_close(combined(name, g_r, g_f), retain * g_r + forget * g_f)


@pytest.mark.parametrize("name", method_classes())
def test_every_method_can_be_sent_to_another_process(name):
    method = build_method(name)
    sent = pickle.loads(pickle.dumps(method))
    assert (type(sent), vars(sent)) == (type(method), vars(method))
