"""Steps not taken leave weights and optimizer untouched; clipping, clamping, and what a step says."""

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from helpers import Holder, collect, combine, flat, gram_at, pair_at_angle, step_of

from hamu import HamuError, HamuQ, HamuU, PairedGradients, PairStep, StoppingRule, build_method
from hamu.core.methods import Method, Weights

OFF = {"stopping": "off"}
RELATIVE = {"constraint_mode": "relative", **OFF}
EPS32 = torch.finfo(torch.float32).eps
both_variants = pytest.mark.parametrize("method", [HamuQ, HamuU])


def vectors(angle=1.0, sizes=(3, 70)):
    g = torch.Generator().manual_seed(0)
    pairs = [pair_at_angle(n, angle, g) for n in sizes]
    return [list(side) for side in zip(*pairs, strict=True)]


def steps_of(pair, optimizer, *given):
    """Steps with AdamW of (retain, forget, losses), and that the last moved nothing."""
    for retain, forget, losses in given:
        weights = [p.detach().clone() for p in pair.parameters]
        state, memory = copy.deepcopy((optimizer.state_dict()["state"], pair.state_dict()))
        step = step_of(pair, retain, forget, losses=losses)
        optimizer.step()
    assert flat(weights).norm() > 0, "the good step before moved the weights"
    assert all(torch.equal(p, w) for p, w in zip(pair.parameters, weights, strict=True))
    assert all(p.grad is None for p in pair.parameters)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert pair.state_dict() == memory, "the stopping rule has not counted it"
    assert (step.decision, step.should_stop, step.cause) == ("skip", False, "not finite")
    return step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("name", ["hamu-q", "hamu-u", "gdiff", "gru", "pcgrad"])
def test_a_non_finite_gradient_skips_the_step_and_nothing_moves(name, max_grad_norm, side, value):
    method = build_method(name, constraint=0.3, constraint_mode="relative")
    good, bad = vectors(), copy.deepcopy(vectors())
    bad[side][1][5] = value
    pair = PairedGradients(Holder(good[0]), method, max_grad_norm=max_grad_norm)
    optimizer = torch.optim.AdamW(pair.parameters, lr=0.1, weight_decay=0.1)
    step = steps_of(pair, optimizer, (*good, None), (*bad, None))
    assert (step.reason, step.finite) == ("a gradient is not finite", False)


@pytest.mark.parametrize("losses", [[1.0, 2.0], torch.tensor(1.0), torch.ones(3)])
def test_losses_that_are_not_one_of_each_side_are_refused(losses):
    pair = PairedGradients(Holder(vectors()[0]), build_method("gdiff"))
    with pytest.raises(HamuError, match="must be a tensor of two"):
        pair.combine(losses=losses)


@pytest.mark.parametrize("bad", [[1.0, math.inf], [math.nan, 1.0]])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(bad):
    """Cross-entropy of a class that the model rules out is infinite, and its gradient is not."""
    rule = StoppingRule(patience=9)
    method = HamuQ(0.3, constraint_mode="relative", stopping=rule)
    pair = PairedGradients(Holder(vectors()[0]), method)
    optimizer = torch.optim.AdamW(pair.parameters, lr=0.1, weight_decay=0.1)
    step = steps_of(
        pair, optimizer, *((*vectors(), torch.tensor(one)) for one in ([1.0, 2.0], bad))
    )
    assert step.reason == "a loss is not finite"
    assert step.finite, "a loss scale is not to blame for it"


@pytest.mark.parametrize("side", [0, 1])
def test_a_non_finite_value_counts_even_where_the_other_side_is_absent(side):
    sides = [[torch.ones(2), None, torch.ones(1)] for _ in range(2)]
    sides[side][1] = torch.tensor([1.0, math.inf])
    step, given = combine(HamuQ(0.3, **RELATIVE), *sides)
    assert (step.decision, given) == ("skip", [None, None, None])


@both_variants
@pytest.mark.parametrize("on_infeasible", ["stop", "skip"])
def test_an_infeasible_constraint_stops_or_skips_and_says_what_is_possible(method, on_infeasible):
    build = method(2.5, on_infeasible=on_infeasible)
    step, grads = combine(build, *vectors(angle=2.0), max_grad_norm=None)
    assert (step.decision, step.cause) == (on_infeasible, "infeasible")
    assert step.should_stop == (on_infeasible == "stop")
    why = "cannot be met: the gradients allow at most 2; lower it or use constraint_mode"
    assert f"the constraint 2.5 {why} relative" == step.reason
    assert grads == [None, None]


@both_variants
@pytest.mark.parametrize("angle", [0.3, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("radius", ["gradient", 0.7])
def test_clamping_gains_the_most_that_the_radius_allows(method, angle, radius):
    retain, forget = vectors(angle)
    clamping = method(50.0, radius=radius, on_infeasible="clamp", **OFF)
    step, grads = combine(clamping, retain, forget, max_grad_norm=None)
    status = step.weights.constraint
    assert step.decision == "step"
    assert not status.feasible
    assert status.demand.item() == pytest.approx(50.0)
    assert status.clipped_demand.item() == pytest.approx(status.max_demand.item())
    for g_star, r, f in zip(grads, retain, forget, strict=True):
        g_o, g_c = (r, f) if method is HamuQ else (-f, -r)
        R = g_o.norm() if radius == "gradient" else radius
        assert g_star.norm() <= R * (1 + 1e-12)
        assert -g_star.dot(g_c) == pytest.approx((R * g_c.norm()).item())


UNEQUAL = [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.01, 0.0]).double()]
ACROSS = [torch.tensor([0.0, 1.0]).double()] * 2


def test_clamping_touches_only_the_blocks_that_cannot_meet_their_part():
    method = HamuQ(0.5, distribution="uniform", on_infeasible="clamp", **OFF)
    step, grads = combine(method, UNEQUAL, ACROSS, max_grad_norm=None)
    assert step.weights.constraint.fraction.tolist() == pytest.approx([0.25, 25.0])
    for grad, gain, length in zip(grads, (0.25, 0.01), (1.0, 0.01), strict=True):
        assert -grad[1] == pytest.approx(gain)
        assert grad.norm() == pytest.approx(length)


def test_what_the_step_reports_is_what_the_gradients_do():
    retain, forget = vectors(angle=1.2)
    step, grads = combine(HamuQ(0.3, **RELATIVE), retain, forget, max_grad_norm=None)
    r, f, dw = flat(retain), flat(forget), -flat(grads)
    assert step.kappa == pytest.approx(r.dot(f).item())
    assert step.cos == pytest.approx((r.dot(f) / r.norm() / f.norm()).item())
    assert step.promised_retain_change == pytest.approx(r.dot(dw).item())
    assert step.promised_forget_change == pytest.approx(f.dot(dw).item())
    assert step.promised_forget_change == pytest.approx(step.weights.constraint.demand.item())
    first, second, third = repr(step).splitlines()
    assert first.startswith("PairStep: step")
    assert f"cosθ {step.cos.item():+.4f}; weights in 2 blocks" in second
    assert f"forget loss {step.promised_forget_change.item():+.4g}" in third
    clipped, grads = combine(HamuQ(0.3, **RELATIVE), retain, forget, max_grad_norm=0.1)
    assert f"forget loss {f.dot(-flat(grads)).item():+.4g}" in repr(clipped), "not of what is cut"
    norms = [norm.item() for norm in clipped.gradient_norms]
    assert norms == pytest.approx([r.norm().item(), f.norm().item()]), "likewise"


@pytest.mark.parametrize(("angle", "regime", "direct"), [(3.0, 0, 1), (1.6, 1, 0), (0.2, 2, 0)])
def test_the_regime_is_direct_rectified_or_unavoidable(angle, regime, direct):
    step, _ = combine(HamuQ(0.5, **RELATIVE), *vectors(angle))
    assert (step.regime, step.direct_share) == (regime, direct)


def test_a_method_that_is_exchanged_stops_by_its_own_rule():
    gradients, method = vectors(angle=0.1), HamuQ(0.5, "relative", stopping="off")
    pair, decisions = PairedGradients(Holder(gradients[0]), method), []
    for stopping in ("off", "aggregate", "off"):
        pair.method = replace(method, stopping=stopping)
        decisions.append(step_of(pair, *gradients).decision)
    assert decisions == ["step", "stop", "step"]


def test_a_saved_pair_resumes_where_it_was():
    """A criterion that is met by two means of two steps in a row stops the third step."""
    both, rule = vectors(angle=0.1), StoppingRule(patience=2, window=2)
    method = HamuQ(0.5, constraint_mode="relative", stopping=rule)
    first, second, third = (PairedGradients(Holder(both[0]), method) for _ in range(3))
    assert [step_of(first, *both).decision for _ in range(2)] == ["step", "step"]
    second.load_state_dict(first.state_dict())
    assert [step_of(one, *both).decision for one in (second, third)] == ["stop", "step"]


class Renamed(Holder):
    def named_parameters(self, *args, **kwargs):
        return ((f"other{name}", p) for name, p in super().named_parameters(*args, **kwargs))


def test_a_pair_resumes_with_equal_numbers_and_not_with_another_model_or_other_blocks():
    (retain, _), (fewer, _) = vectors(sizes=(3, 70, 5)), vectors(sizes=(3, 60, 5))

    def pair_of(model, keys="aab", one=1):
        blocks = lambda name: keys[int(name[-1])]  # noqa: E731
        return PairedGradients(model, HamuQ(one), max_grad_norm=one, blocks=blocks)

    saved = pair_of(Holder(retain))
    pair_of(Holder(retain), one=1.0).load_state_dict(saved.state_dict())
    for other in (pair_of(Holder(fewer)), pair_of(Renamed(retain)), pair_of(Holder(retain), "abb")):
        assert other.block_names == saved.block_names
        with pytest.raises(HamuError, match="saved with other settings: blocks "):
            other.load_state_dict(saved.state_dict())
    for state, keys in (({}, "nothing"), (torch.nn.Linear(2, 2).state_dict(), "weight, bias")):
        with pytest.raises(HamuError, match=f"the state has {keys}; give what a pair's state_dict"):
            saved.load_state_dict(state)


@dataclass(frozen=True)
class Own(Method):
    name: ClassVar[str] = "own"
    weight: float = 1.0

    def weigh(self, gram):
        return Weights(torch.full_like(gram.dot, self.weight), torch.full_like(gram.dot, -0.5))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_method_whose_weights_are_not_finite_is_named(weight):
    retain, forget = vectors()
    with pytest.raises(HamuError, match="own gave a weight that is not finite; mend its weigh"):
        combine(Own(weight), retain, forget)
    step, _ = combine(Own(weight), [g * math.nan for g in retain], forget)
    assert step.reason == "a gradient is not finite"


NOT_ONE_EACH = "own gave no Weights with one for each of 2 blocks"


def weighing(*weights):
    return lambda self, gram: Weights(*weights)


@pytest.mark.parametrize(("attribute", "value", "message"), [
    ("weigh", weighing(torch.ones(2), -torch.ones(1)), NOT_ONE_EACH),
    ("weigh", weighing(1.0, -1.0), NOT_ONE_EACH),
    ("weigh", weighing(torch.tensor(1.0), torch.ones(2)), NOT_ONE_EACH),
    ("constrained", "forget", "own gave Weights without constraint; let weigh set it"),
    ("first_memory", (1.0,), "own gave Weights without memory; let weigh set it"),
    ("name", None, "the class Own has no name; give it one"),
])  # fmt: skip
def test_a_method_that_leaves_out_what_it_announces_is_named(
    attribute, value, message, monkeypatch
):
    monkeypatch.setattr(Own, attribute, value)
    with pytest.raises(HamuError, match=message):
        combine(Own(), *vectors(), losses=torch.ones(2))


def test_what_a_methods_own_code_raises_names_the_method(monkeypatch):
    monkeypatch.setattr(Own, "weigh", lambda self, gram: {}["x"])
    with pytest.raises(KeyError) as raised:
        combine(Own(), *vectors())
    assert raised.value.__notes__ == [f"in the method own of {__name__}"]


def test_a_weight_beyond_the_range_of_its_gradient_skips_the_step():
    retain, forget = ([g.float() for g in side] for side in vectors())
    relative = HamuQ(0.5, radius=1.0, **RELATIVE)
    step, grads = combine(relative, retain, [g * 1e-42 for g in forget], max_grad_norm=None)
    assert (step.decision, step.cause, step.finite) == ("skip", "out of range", True)
    assert "beyond the range of float32" in step.reason
    assert grads == [None, None]
    in_float64, _ = combine(Own(1e39), *vectors(), max_grad_norm=None)
    assert in_float64.decision == "step"


@both_variants
@pytest.mark.parametrize(("sine", "length"), [(0.8, 0.5), (1.2, 1.0)])
def test_a_perpendicular_below_rounding_is_not_made_a_step(method, sine, length):
    """Of a step of length 1, half of which the demand takes; sines in units of √(8 eps)."""
    sine *= math.sqrt(8 * EPS32)
    gram = replace(gram_at([1.0], [1.0], [math.sqrt(1 - sine**2)]), eps=EPS32)
    step = PairStep(gram, method(0.5, **OFF).weigh(gram), gram.clip_factors(None), "step")
    assert step.combined_sq.sqrt().item() == pytest.approx(length, rel=1e-4)
    change = step.promised_forget_change if method is HamuQ else -step.promised_retain_change
    assert change.item() == pytest.approx(0.5), "the demand is met in any case"


@both_variants
def test_of_a_clamped_demand_the_thresholds_are_those_of_the_whole_reach(method):
    gram = gram_at([2.0, 1.0], [3.0, 1.0], [0.6, -0.3])
    status = method(50.0, on_infeasible="clamp", **OFF).weigh(gram).constraint
    assert status.max_demand.item() == pytest.approx(7.0)
    assert status.stop_threshold.item() == 0.0
    assert status.direct_threshold.item() == pytest.approx(-math.sqrt(5.0 * 10.0))


@pytest.mark.parametrize("enabled", [False, True])
def test_an_abandoned_step_leaves_the_weights(enabled):
    """An abandoned step leaves an enabled scaler NaN, at which it passes over the step."""
    both = vectors()
    pair = PairedGradients(Holder(both[0]), HamuQ(0.3, **RELATIVE))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    scaler.scale(torch.ones(()))  # as a loss
    for side, grads in zip(("retain", "forget"), both, strict=True):
        collect(pair, side, grads)
    pair.abandon(scaler)
    assert enabled or all(p.grad is None for p in pair.parameters)
    scaler.step(torch.optim.SGD(pair.parameters, lr=1.0))
    assert not flat(pair.parameters).any()


@pytest.mark.parametrize("keep", [("retain",), ("forget",), ("retain", "forget")])
@pytest.mark.parametrize("absent", ["retain", "forget"])
def test_a_kept_gradient_stays_where_the_other_side_has_none(keep, absent):
    sides = dict(zip(("retain", "forget"), vectors(), strict=True))
    sides[absent][1] = None
    pair = PairedGradients(Holder(vectors()[0]), build_method("gdiff"), max_grad_norm=None)
    step = step_of(pair, **sides, keep=keep)
    for side in keep:
        for kept, g in zip(step.kept[side], sides[side], strict=True):
            assert (kept is None and g is None) or torch.equal(kept, g)


def test_only_blocks_of_a_doubtful_angle_are_measured_again():
    generator = torch.Generator().manual_seed(0)
    retain = [torch.randn(60_000, generator=generator) for _ in range(2)]
    forget = [torch.randn(60_000, generator=generator), 0.5 * retain[1]]
    step, _ = combine(HamuQ(0.3, **RELATIVE), retain, forget, max_grad_norm=None)
    dots = [r.double().dot(f.double()).item() for r, f in zip(retain, forget, strict=True)]
    assert step.gram.dot[0].item() == pytest.approx(dots[0], abs=0.6)  # 1e-5 of the norms
    assert step.gram.dot[1].item() == pytest.approx(dots[1], rel=1e-12)
