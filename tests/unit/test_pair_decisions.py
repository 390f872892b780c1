"""When a step is not taken: non-finite gradients and infeasible constraints leave weights and optimizer untouched."""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from helpers import Holder, collect, combine, flat, pair_at_angle
from torch import nn

from hamu import HamuError, HamuQ, HamuU, PairedGradients, StoppingRule, build_method
from hamu.core.methods import Method, Weights

OFF = {"stopping": "off"}


def vectors(angle=1.0, sizes=(3, 70)):
    g = torch.Generator().manual_seed(0)
    pairs = [pair_at_angle(n, angle, g) for n in sizes]
    return [list(side) for side in zip(*pairs, strict=True)]


def snapshot(pair, optimizer):
    return [p.detach().clone() for p in pair.parameters], copy.deepcopy(optimizer.state_dict())


def assert_unmoved(pair, optimizer, before):
    weights, state = before
    assert all(torch.equal(p, w) for p, w in zip(pair.parameters, weights, strict=True))
    now = optimizer.state_dict()
    assert now["state"].keys() == state["state"].keys() != set()
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(now["state"][key][name], value), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["retain", "forget"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("name", ["hamu-q", "hamu-u", "gdiff", "gru", "pcgrad"])
def test_a_non_finite_gradient_skips_the_step_and_nothing_moves(name, max_grad_norm, side, value):
    method = build_method(name, constraint=0.3, constraint_mode="relative")
    grads = dict(zip(("retain", "forget"), vectors(), strict=True))
    pair = PairedGradients(Holder(grads["retain"]), method, max_grad_norm=max_grad_norm)
    optimizer = torch.optim.AdamW(pair.parameters, lr=0.1, weight_decay=0.1)
    for bad in (False, True):
        before = snapshot(pair, optimizer)
        for each in ("retain", "forget"):
            given = [g.clone() for g in grads[each]]
            if bad and each == side:
                given[1][5] = value
            collect(pair, each, given)
        step = pair.combine()
        optimizer.step()
    assert step.decision == "skip"
    assert not step.should_stop
    assert step.reason == "a gradient is not finite"
    assert step.cause == "not finite"
    assert all(p.grad is None for p in pair.parameters)
    assert flat(before[0]).norm() > 0, "the good step before moved the weights"
    assert_unmoved(pair, optimizer, before)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=8.0)])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(scaler):
    """Cross-entropy of a class that the model rules out is infinite, and its gradient is not."""
    logits = nn.Linear(2, 2)

    def loss(label):
        masked = torch.cat([logits(torch.ones(1, 2)), torch.full((1, 1), -math.inf)], 1)
        return nn.functional.cross_entropy(masked, torch.tensor([label]))

    pair = PairedGradients(
        logits, HamuQ(0.3, constraint_mode="relative", stopping=StoppingRule(patience=9))
    )
    optimizer = torch.optim.AdamW(pair.parameters, lr=0.1, weight_decay=0.1)
    for label in (1, 2):
        before = snapshot(pair, optimizer)
        remembered = copy.deepcopy(pair.state_dict())
        losses = []
        for side, which in (("retain", 0), ("forget", label)):
            losses.append(loss(which))
            with getattr(pair, side)():
                (losses[-1] if scaler is None else scaler.scale(losses[-1])).backward()
        step = pair.combine(scaler, losses_finite=torch.isfinite(sum(losses).detach()))
        if scaler is None:
            optimizer.step()
        elif step.decision == "step" or not step.finite:
            scaler.step(optimizer)
            scaler.update()
        assert step.decision == ("step" if label == 1 else "skip")
    assert (step.reason, step.cause) == ("a loss is not finite", "not finite")
    assert step.finite, "a loss scale is not to blame for it"
    assert pair.state_dict() == remembered, "the stopping rule has not seen it"
    assert flat(before[0]).norm() > 0
    assert_unmoved(pair, optimizer, before)


@pytest.mark.parametrize("side", ["retain", "forget"])
def test_a_non_finite_value_counts_even_where_the_other_side_is_absent(side):
    grads = {"retain": [torch.ones(2), None], "forget": [torch.ones(2), None]}
    grads[side][1] = torch.tensor([1.0, math.inf])
    step, given = combine(
        HamuQ(0.3, constraint_mode="relative"),
        [*grads["retain"], torch.ones(1)],
        [*grads["forget"], torch.ones(1)],
    )
    assert step.decision == "skip"
    assert given == [None, None, None]


def test_a_skipped_step_leaves_no_trace_in_the_next():
    retain, forget = vectors()
    pair = PairedGradients(Holder(retain), HamuQ(0.3, constraint_mode="relative"))
    collect(pair, "retain", [g * math.nan for g in retain])
    collect(pair, "forget", forget)
    pair.combine()
    collect(pair, "retain", retain)
    collect(pair, "forget", forget)
    pair.combine()
    _, expected = combine(HamuQ(0.3, constraint_mode="relative"), retain, forget)
    assert torch.equal(flat(p.grad for p in pair.parameters), flat(expected))


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize("on_infeasible", ["stop", "skip"])
def test_an_infeasible_constraint_stops_or_skips_and_says_what_is_possible(method, on_infeasible):
    retain, forget = vectors(angle=2.0)
    step, grads = combine(
        method(2.5, on_infeasible=on_infeasible), retain, forget, max_grad_norm=None
    )
    assert step.decision == on_infeasible
    assert step.should_stop == (on_infeasible == "stop")
    assert step.reason == (
        'the constraint 2.5 cannot be met: the gradients allow at most 2; lower it or use constraint_mode="relative"'
    )
    assert grads == [None, None]


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize("angle", [0.3, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("radius", ["gradient", 0.7])
def test_clamping_gains_the_most_that_the_radius_allows_and_never_steps_further(
    method, angle, radius
):
    retain, forget = vectors(angle)
    clamping = method(50.0, radius=radius, on_infeasible="clamp", **OFF)
    step, grads = combine(clamping, retain, forget, max_grad_norm=None)
    assert step.decision == "step"
    assert not step.weights.constraint.feasible
    for g_star, r, f in zip(grads, retain, forget, strict=True):
        g_o, g_c = (r, f) if method is HamuQ else (-f, -r)
        R = g_o.norm() if radius == "gradient" else radius
        assert g_star.norm() <= R * (1 + 1e-12)
        assert -g_star.dot(g_c) == pytest.approx((R * g_c.norm()).item())


def test_clamping_touches_only_the_blocks_that_cannot_meet_their_part():
    retain = [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.01, 0.0]).double()]
    forget = [torch.tensor([0.0, 1.0]).double()] * 2
    method = HamuQ(0.5, distribution="uniform", on_infeasible="clamp", **OFF)
    step, grads = combine(method, retain, forget, max_grad_norm=None)
    assert step.weights.constraint.fraction.tolist() == pytest.approx([0.25, 25.0])
    assert -grads[0][1] == pytest.approx(0.25)
    assert grads[0].norm() == pytest.approx(1.0)
    assert -grads[1][1] == pytest.approx(0.01)
    assert grads[1].norm() == pytest.approx(0.01)


@pytest.mark.parametrize("distribution", ["uniform", (3.0, 1.0)])
def test_a_share_of_what_is_possible_is_feasible_however_it_is_divided(distribution):
    retain = [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.01, 0.0]).double()]
    forget = [torch.tensor([0.0, 1.0]).double()] * 2
    for share in (0.3, 1.0):
        method = HamuQ(share, constraint_mode="relative", distribution=distribution, **OFF)
        step, _ = combine(method, retain, forget, max_grad_norm=None)
        constraint = step.weights.constraint
        assert step.decision == "step"
        most = 0.01 / (0.5 if distribution == "uniform" else 0.25)
        assert constraint.max_demand == pytest.approx(most)
        assert constraint.demand == pytest.approx(share * most)
        assert constraint.fraction.max() == pytest.approx(share)
    step, _ = combine(
        HamuQ(0.5, distribution=distribution, **OFF), retain, forget, max_grad_norm=None
    )
    assert f"allow at most {most:.4g}" in step.reason
    assert step.cause == "infeasible"


def test_each_side_is_clipped_by_its_own_global_norm():
    retain, forget = vectors()
    big, small = [100 * g for g in retain], [0.01 * g for g in forget]
    step, ours = combine(
        HamuQ(0.3, constraint_mode="relative", **OFF), big, small, max_grad_norm=2.0
    )
    norm = flat(big).norm()
    assert step.clip[0] == pytest.approx((2.0 / (norm + 1e-6)).item(), rel=1e-12)
    assert step.clip[1] == 1.0
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in big]
    for p, g in zip(parameters, big, strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(parameters, 2.0)
    clipped = [p.grad for p in parameters]
    _, theirs = combine(
        HamuQ(0.3, constraint_mode="relative", **OFF), clipped, small, max_grad_norm=None
    )
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-15)
    assert step.gram.retain_sq.sum().sqrt() == pytest.approx(2.0)


def test_what_the_step_reports_is_what_the_gradients_do():
    retain, forget = vectors(angle=1.2)
    step, grads = combine(
        HamuQ(0.3, constraint_mode="relative", **OFF), retain, forget, max_grad_norm=None
    )
    r, f, dw = flat(retain), flat(forget), -flat(grads)
    assert step.kappa == pytest.approx(r.dot(f).item())
    assert step.cos == pytest.approx((r.dot(f) / r.norm() / f.norm()).item())
    assert step.promised_retain_change == pytest.approx(r.dot(dw).item())
    assert step.promised_forget_change == pytest.approx(f.dot(dw).item())
    assert step.promised_forget_change == pytest.approx(step.weights.constraint.demand.item())
    assert step.direct_share == 0.0


@pytest.mark.parametrize(
    ("angle", "regime", "direct"), [(3.0, 0, 1.0), (1.6, 1, 0.0), (0.2, 2, 0.0)]
)
def test_the_regime_is_direct_rectified_or_unavoidable(angle, regime, direct):
    retain, forget = vectors(angle)
    step, _ = combine(HamuQ(0.5, constraint_mode="relative", **OFF), retain, forget)
    assert step.regime == regime
    assert step.direct_share == direct


def test_a_saved_pair_resumes_where_it_was():
    def make():
        return PairedGradients(
            Holder(retain),
            HamuQ(0.5, constraint_mode="relative", stopping=StoppingRule(patience=3)),
        )

    def decide(pair):
        collect(pair, "retain", retain)
        collect(pair, "forget", forget)
        return pair.combine().decision

    retain, forget = vectors(angle=0.1)
    first, second = make(), make()
    assert [decide(first), decide(first)] == ["step", "step"]
    second.load_state_dict(first.state_dict())
    assert decide(second) == "stop"
    assert decide(make()) == "step"


def test_a_pair_does_not_go_on_with_other_blocks_of_the_same_names():
    retain, _ = vectors(sizes=(3, 70, 5))

    def paired(blocks):
        return PairedGradients(Holder(retain), HamuQ(), blocks=lambda name: blocks[int(name[-1])])

    saved, other = paired("aab"), paired("abb")
    assert saved.block_names == other.block_names
    with pytest.raises(HamuError, match="saved with other settings: blocks "):
        other.load_state_dict(saved.state_dict())
    paired("aab").load_state_dict(saved.state_dict())


@dataclass(frozen=True)
class Own(Method):
    """A method of somebody else."""

    name: ClassVar[str] = "own"
    weight: float = 1.0
    shape: object = torch.nn.functional.relu
    others: object = frozenset({"b", "a"})

    def weigh(self, gram):
        return Weights(torch.full_like(gram.dot, self.weight), torch.full_like(gram.dot, -0.5))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_method_whose_weights_are_not_finite_is_named(weight):
    retain, forget = vectors()
    with pytest.raises(
        HamuError,
        match="own gave a weight that is not finite, for gradients that are; mend its weigh",
    ):
        combine(Own(weight), retain, forget)
    step, _ = combine(Own(weight), [g * math.nan for g in retain], forget)
    assert step.reason == "a gradient is not finite"


@pytest.mark.parametrize("weigh", [
    lambda gram: Weights(torch.ones_like(gram.dot), -torch.ones_like(gram.total().dot)),
    lambda gram: Weights(1.0, -1.0),
    lambda gram: Weights(gram.dot.sum(), gram.dot),
])  # fmt: skip
def test_a_method_whose_weights_are_not_one_to_a_block_is_named(weigh, monkeypatch):
    monkeypatch.setattr(Own, "weigh", lambda self, gram: weigh(gram))
    with pytest.raises(
        HamuError,
        match=r"own gave weights of shape .*, not one for each of 2 blocks; a weight of the",
    ):
        combine(Own(), *vectors())


def test_a_weight_beyond_the_range_of_its_gradient_skips_the_step():
    retain, forget = ([g.float() for g in side] for side in vectors())
    step, grads = combine(
        HamuQ(0.5, radius=1.0, **OFF), retain, [g * 1e-40 for g in forget], max_grad_norm=None
    )
    assert step.decision == "stop"  # nothing like 0.5 is possible
    relative = HamuQ(0.5, constraint_mode="relative", radius=1.0, **OFF)
    step, grads = combine(relative, retain, [g * 1e-42 for g in forget], max_grad_norm=None)
    assert step.decision == "skip"
    assert step.finite
    assert "beyond the range of float32" in step.reason
    assert step.cause == "out of range"
    assert grads == [None, None]
    assert (
        combine(Own(1e39), *vectors(), max_grad_norm=None)[0].decision == "step"
    )  # these are float64
