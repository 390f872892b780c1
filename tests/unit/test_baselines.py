"""The baselines against explicit vectors: which is projected, off what, on which sign; some remember."""

import copy
import math
import pickle

import pytest
import torch
from helpers import Holder, combine, flat, gram_at, pair_at_angle, step_of
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import nn

from hamu import HamuError, PairedGradients, UnlearnConfig, build_method
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


def test_every_method_has_a_transcription():
    elsewhere = {"hamu-q", "hamu-u", "cagrad"}
    constant = {name for name, *_ in CONSTANT}
    assert {*RULES, *REMEMBERING} | constant | elsewhere == {*method_classes()}


@pytest.mark.parametrize("name", method_classes())
def test_every_method_can_be_sent_to_another_process(name):
    method = build_method(name)
    sent = pickle.loads(pickle.dumps(method))
    assert (type(sent), vars(sent)) == (type(method), vars(method))


STEPS = 8


def gradients():
    """Per step both gradients, on two tensors, and both losses."""
    g = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        draws = torch.randn(2, 8, generator=g, dtype=torch.float64)
        yield (
            *(list(side.split((5, 3))) for side in draws),
            1.0 + torch.rand(2, generator=g, dtype=torch.float64),
        )


def steps(pair, given):
    for one in given:
        assert step_of(pair, *one[:2], losses=one[2]).decision == "step"
        yield flat(p.grad for p in pair.parameters)


def pair_of(name):
    like = [torch.zeros(n, dtype=torch.float64) for n in (5, 3)]
    return PairedGradients(Holder(like), build_method(name), max_grad_norm=None)


def transcribed_pdu(given):
    """Primal descent on L_flat + λ(L_r - ε), then dual ascent, projected (Entesari et al. 2025)."""
    multiplier, limit = 1.0, None
    for retain, forget, losses in given:
        limit = 1.1 * float(losses[0]) if limit is None else limit
        yield multiplier * flat(retain) - flat(forget)
        multiplier = max(0.0, multiplier + 1.0 * (float(losses[0]) - limit))


def transcribed_gru(given):
    """Ascent projected off the mean of the retain gradients, from a mean of 0 (Wang et al. 2025)."""
    mean = 0.0
    for retain, forget, _ in given:
        mean = 0.8 * flat(retain) + 0.2 * mean
        ascent = -flat(forget)
        if ascent @ mean < 0:
            ascent = ascent - (ascent @ mean) / (mean @ mean) * mean
        yield ascent


REMEMBERING = {"pdu": transcribed_pdu, "gru-ema": transcribed_gru}


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_run_is_the_published_rule_step_by_step(name):
    given = list(gradients())
    for found, expected in zip(steps(pair_of(name), given), REMEMBERING[name](given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_saved_pair_goes_on_bit_by_bit_also_after_a_step_that_is_not_taken(name):
    given, first = list(gradients()), pair_of(name)
    list(steps(first, given[:4]))
    second = pair_of(name)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _, forget, losses = given[4]
    nothing = [g * math.nan for g in given[4][0]]
    assert step_of(second, nothing, forget, losses=losses).decision == "skip"
    rest, again, fresh = (list(steps(one, given[4:])) for one in (first, second, pair_of(name)))
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(rest, fresh, strict=True)), "memory matters"


def test_the_dual_variable_falls_to_0_and_rises_above_the_limit():
    pair, retain = pair_of("pdu"), [torch.ones(5).double(), torch.ones(3).double()]
    losses = [torch.tensor([value, 0.0]) for value in (2.0, 1.0, 0.5, 2.5)]
    given = [(retain, [0 * g for g in retain], one) for one in losses]
    weights = [float(step[0]) for step in steps(pair, given)]
    assert weights == pytest.approx([1.0, 0.8, 0.0, 0.0])
    assert pair.state_dict()["memory"] == pytest.approx([0.3, 2.2])


def test_the_retain_gradient_of_a_step_is_kept_beside_the_mean():
    pairs = pair_of("gru-ema"), pair_of("gru-ema")
    for retain, forget, _ in gradients():
        step = step_of(pairs[0], retain, forget, keep=("retain", "forget"))
        step_of(pairs[1], retain, forget)
        assert torch.equal(flat(step.kept["retain"]), flat(retain))
        assert torch.equal(flat(step.kept["forget"]), flat(forget))
        both = ([p.grad for p in pair.parameters] for pair in pairs)
        assert torch.equal(*map(flat, both))


def test_no_retain_gradient_is_one_of_zero_for_the_mean():
    pairs = pair_of("gru-ema"), pair_of("gru-ema")
    (retain, forget, losses), (later, *_) = list(gradients())[:2]
    for pair, none in zip(pairs, (None, torch.zeros(3).double()), strict=True):
        given = [(retain, forget, losses), ([later[0], none], forget, losses)]
        *_, found = steps(pair, given * 2)
        pair.found = found
    assert torch.equal(*(pair.found for pair in pairs))


def test_pdu_without_losses_and_gru_ema_with_parts_or_a_scaler_are_refused(tmp_path):
    (*both, losses), (pdu, gru_ema) = next(gradients()), map(pair_of, REMEMBERING)
    with pytest.raises(HamuError, match=r"pdu needs the losses of the step; give combine\(losses="):
        step_of(pdu, *both)
    with pytest.raises(HamuError, match="gru-ema averages gradients, which a GradScaler rescales"):
        step_of(gru_ema, *both, scaler=torch.amp.GradScaler("cpu"))
    for pair in (pdu, gru_ema):  # the gradients are still there
        assert pair.combine(losses=losses).decision == "step"
    keeps = "gru-ema keeps a third gradient and needs both others whole in each process; leave"
    with pytest.raises(HamuError, match=keeps):
        PairedGradients(nn.Linear(2, 2), gru_ema.method, offload_grads="bf16")
    with pytest.raises(HamuError, match="gru-ema needs both whole gradients in each process"):
        UnlearnConfig(output_dir=str(tmp_path), method="gru-ema", offload_grads="cpu")
