"""In a training loop: optimizers see g* and nothing else; autocast, loss scaling, half precision."""

import copy
import math

import pytest
import torch
from helpers import flat, loss, network, passes
from torch import nn

from hamu import HamuQ, HamuU, PairedGradients, build_method
from hamu.core.gram import SIDES

METHOD = HamuQ(0.3, constraint_mode="relative", stopping="off")


def collect_both(pair, model, t=0, **settings):
    passes(pair, model, 2 * t, 2 * t + 1, **settings)


def gradients(model, t=0):
    parameters = list(model.parameters())
    return [torch.autograd.grad(loss(model, 2 * t + seed), parameters) for seed in (0, 1)]


def exact_sum(step, sides):
    weights = (step.weights.retain, step.weights.forget)
    return [a * r.double() + b * f.double() for a, b, r, f in zip(*weights, *sides, strict=True)]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_and_scheduler_see_the_equivalent_gradient_and_nothing_else(make):
    ours, start = network(), flat(network().parameters())
    theirs = copy.deepcopy(ours)
    pair = PairedGradients(ours, METHOD)
    optimizers = [make(model.parameters()) for model in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 8) for one in optimizers]
    for t in range(6):
        collect_both(pair, ours, t)
        step = pair.combine()
        clipped = []
        for grads in gradients(theirs, t):
            factor = (1.0 / (flat(grads).norm() + 1e-6)).clamp(max=1.0)
            clipped.append([factor * g for g in grads])
        for p, grad in zip(theirs.parameters(), exact_sum(step, clipped), strict=True):
            p.grad = grad
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=t % 2 == 0)
            scheduler.step()
        after = [flat(model.parameters()) for model in (ours, theirs)]
        torch.testing.assert_close(*after, rtol=0, atol=1e-10)
    assert (flat(ours.parameters()) - start).norm() > 0.02


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("loss_scale", [2.0**16, 1000.0])
def test_a_gradient_scaler_gives_the_unscaled_result(loss_scale, max_grad_norm):
    loss_scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=2)
    found = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), loss_scaler):
        model, steps = network(), []
        pair = PairedGradients(model, METHOD, max_grad_norm=max_grad_norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for t in range(4):
            collect_both(pair, model, t, scale=scaler.scale)
            dots = pair.combine(scaler).gram.dot
            scaler.step(optimizer)
            scaler.update()
            steps.append(torch.cat([dots, flat(model.parameters())]))
        found.append(torch.stack(steps))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert scaler.get_scale() == 4 * loss_scale


@pytest.mark.parametrize("offload", ["none", "bf16"])
def test_a_scaler_that_gets_only_its_own_steps_goes_through_a_row_of_infeasible_ones(offload):
    """The loop of docs/loop.md; of one that overflows it lowers its scale."""
    model = network()
    pair = PairedGradients(model, METHOD, offload_grads=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    decisions = []
    for t, factor in enumerate((1.0, 1.0, 1.0, 1.0, math.inf, 1.0)):
        pair.method = HamuQ(1e6, on_infeasible="skip") if t in (1, 2) else METHOD
        before = flat(model.parameters())
        collect_both(pair, model, t, scale=lambda x, factor=factor: scaler.scale(x) * factor)
        step = pair.combine(scaler)
        if step.decision == "step" or not step.finite:
            scaler.step(optimizer)
            scaler.update()
        decisions.append((step.decision, step.finite, scaler.get_scale()))
        assert torch.equal(flat(model.parameters()), before) == (step.decision == "skip")
    step, skipped = ("step", True, 1024.0), ("skip", True, 1024.0)
    grown, lowered = ("step", True, 2048.0), ("skip", False, 1024.0)
    assert decisions == [step, skipped, skipped, grown, lowered, step]


def test_a_gradient_from_outside_both_contexts_is_dropped():
    model = network()
    plain, pair = (PairedGradients(model, METHOD, max_grad_norm=None) for _ in range(2))
    collect_both(plain, model)
    plain.combine()
    expected = [p.grad.clone() for p in model.parameters()]
    sum(p.square().sum() for p in model.parameters()).backward()
    collect_both(pair, model)
    pair.combine()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("piece", [7, 1 << 18])
def test_half_precision_parameters_get_half_precision_gradients_rounded_once(monkeypatch, piece):
    monkeypatch.setattr("hamu.core.combine.widened_at_once", lambda *devices: piece)
    model = network(torch.bfloat16)
    pair = PairedGradients(model, METHOD, max_grad_norm=None)
    sides = gradients(model)
    collect_both(pair, model)
    for p, exact in zip(model.parameters(), exact_sum(pair.combine(), sides), strict=True):
        assert p.grad.dtype == torch.bfloat16
        # half a unit in bfloat16's last place, and a little for the float32 sum
        most = 2.0**-8 * exact.abs() + 1e-5 * exact.abs().max()
        assert ((p.grad.double() - exact).abs() <= most).all()


def test_a_model_of_mixed_precisions_is_combined_in_each_ones_own():
    model = network(torch.float32)
    model[2].to(torch.bfloat16)
    pair = PairedGradients(model, METHOD)
    for context in (pair.retain, pair.forget):
        with context():
            hidden = model[1](model[0](torch.randn(8, 6))).bfloat16()
            model[2](hidden).float().exp().sum().backward()
    step = pair.combine()
    assert (step.decision, step.gram.eps) == ("step", torch.finfo(torch.float32).eps)
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


METHODS = (METHOD, HamuU(0.5, "relative", stopping="off"), build_method("gdiff"))


class Net(nn.Module):
    """Tensors of every kind: tiny, small, large, a scalar, unused by one side, not contiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(3,), (60, 70), (300, 400), (), (7, 5)]
        self.tensors = nn.ParameterList([torch.randn(shape).double() for shape in shapes])
        self.tensors.append(torch.randn(9, 8).double().t())

    def loss(self, seed):
        generator = torch.Generator().manual_seed(seed)
        used = [p for n, p in enumerate(self.tensors) if seed % 2 or n != 4]
        factors = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in used]
        terms = zip(used, factors, strict=True)
        return sum((p * factor + p**2 / (1 + p.numel())).sum() for p, factor in terms)


def offloaded(method, place, order):
    model = Net()
    pair = PairedGradients(model, method, max_grad_norm=None, offload_grads=place)
    for side in order:
        with getattr(pair, side)():
            model.loss(int(side == "forget")).backward()
    step = pair.combine()
    return [p.grad for p in pair.parameters], step.gram


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("order", [SIDES, SIDES[::-1]])
def test_with_offload_to_half_precision_the_error_is_as_stated(monkeypatch, method, order):
    expected, whole = offloaded(method, "none", order)
    found, put = offloaded(method, "bf16", order)
    assert not torch.equal(put.dot, whole.dot), "something must have been rounded"
    # every entry is off by 2^-8 at most, so a product by the product of their sizes times that
    bound = 2**-8 * (whole.retain_sq * whole.forget_sq).sqrt()
    assert ((put.dot - whole.dot).abs() <= bound).all()
    assert (flat(found) - flat(expected)).norm() <= 0.05 * flat(expected).norm()
    assert [(g.dtype, g.shape) for g in found] == [(g.dtype, g.shape) for g in expected]
    monkeypatch.setattr("hamu.core.combine.widened_at_once", lambda *devices: 50)
    in_pieces, _ = offloaded(method, "bf16", order)
    assert all(torch.equal(a, b) for a, b in zip(in_pieces, found, strict=True))


def test_a_model_that_changes_its_precision_is_measured_in_the_new_one():
    model = network(torch.float32)
    old = PairedGradients(model, METHOD)
    model.double()
    grams = []
    for pair in (old, PairedGradients(model, METHOD)):
        collect_both(pair, model)
        grams.append(pair.combine().gram)
        model.zero_grad()
    assert grams[0].eps == grams[1].eps == torch.finfo(torch.float64).eps
    assert torch.equal(grams[0].dot, grams[1].dot)
