"""In a training loop: any optimizer sees g* and nothing else; autocast, loss scaling and half precision."""

import copy
import math

import pytest
import torch
from helpers import flat
from torch import nn

from hamu import HamuQ, PairedGradients

METHOD = HamuQ(0.3, constraint_mode="relative", stopping="off")


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def batch(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, dtype=torch.float64, generator=g).to(dtype), torch.randint(
        4, (8,), generator=g
    )


def loss(model, seed, dtype=torch.float64):
    x, y = batch(seed, dtype)
    return nn.functional.cross_entropy(model(x), y)


def collect_both(pair, model, t, dtype=torch.float64, scale=lambda x: x):
    with pair.retain():
        scale(loss(model, 2 * t, dtype)).backward()
    with pair.forget():
        scale(loss(model, 2 * t + 1, dtype)).backward()


def clipped_gradients(model, t):
    sides = []
    for seed in (2 * t, 2 * t + 1):
        grads = torch.autograd.grad(loss(model, seed), list(model.parameters()))
        factor = (1.0 / (flat(grads).norm() + 1e-6)).clamp(max=1.0)
        sides.append([factor * g for g in grads])
    return sides


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_and_scheduler_see_the_equivalent_gradient_and_nothing_else(make):
    ours, start = make_model(), flat(make_model().parameters())
    theirs = copy.deepcopy(ours)
    pair = PairedGradients(ours, METHOD)
    optimizers = [make(model.parameters()) for model in (ours, theirs)]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) for optimizer in optimizers
    ]
    for t in range(6):
        collect_both(pair, ours, t)
        step = pair.combine()
        weights = zip(step.weights.retain, step.weights.forget, strict=True)
        for p, (a, b), r, f in zip(
            theirs.parameters(), weights, *clipped_gradients(theirs, t), strict=True
        ):
            p.grad = a * r + b * f
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=t % 2 == 0)
            scheduler.step()
        torch.testing.assert_close(
            flat(ours.parameters()), flat(theirs.parameters()), rtol=0, atol=1e-10
        )
    assert (flat(ours.parameters()) - start).norm() > 0.02


def test_a_step_of_sgd_keeps_the_promise_to_first_order():
    model, lr = make_model(), 1e-5
    pair = PairedGradients(model, METHOD, max_grad_norm=None)
    collect_both(pair, model, 0)
    step = pair.combine()
    before = [loss(model, seed).item() for seed in (0, 1)]
    torch.optim.SGD(model.parameters(), lr=lr).step()
    retain, forget = (
        loss(model, seed).item() - old for seed, old in zip((0, 1), before, strict=True)
    )
    assert forget / lr == pytest.approx(step.promised_forget_change.item(), rel=1e-3)
    assert forget / lr >= step.weights.constraint.demand * 0.999
    assert retain / lr == pytest.approx(step.promised_retain_change.item(), rel=1e-3)


def test_autocast_changes_the_losses_not_the_combine():
    model = make_model(torch.float32)
    pair = PairedGradients(model, METHOD, max_grad_norm=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [loss(model, seed, torch.float32) for seed in (0, 1)]
    sides = [
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in losses
    ]
    for context, value in zip((pair.retain, pair.forget), losses, strict=True):
        with context():
            value.backward()
    step = pair.combine()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    for p, a, b, r, f in zip(
        model.parameters(), step.weights.retain, step.weights.forget, *sides, strict=True
    ):
        torch.testing.assert_close(
            p.grad.double(), a * r.double() + b * f.double(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("loss_scale", [2.0**16, 1000.0])
def test_a_gradient_scaler_gives_the_unscaled_result(loss_scale, max_grad_norm):
    plain, scaled = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=2)
    pairs = [
        PairedGradients(model, METHOD, max_grad_norm=max_grad_norm) for model in (plain, scaled)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, scaled)]
    for t in range(4):
        collect_both(pairs[0], plain, t)
        ours = pairs[0].combine()
        optimizers[0].step()
        collect_both(pairs[1], scaled, t, scale=scaler.scale)
        theirs = pairs[1].combine(scaler)
        scaler.step(optimizers[1])
        scaler.update()
        torch.testing.assert_close(ours.gram.dot, theirs.gram.dot, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(
            flat(plain.parameters()), flat(scaled.parameters()), rtol=0, atol=1e-6
        )
    assert scaler.get_scale() == 4 * loss_scale


@pytest.mark.parametrize("side", [0, 1])
def test_an_overflow_makes_the_scaler_skip_and_lower_its_scale(side):
    model = make_model()
    pair = PairedGradients(model, METHOD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = flat(model.parameters())
    for i, context in enumerate((pair.retain, pair.forget)):
        with context():
            factor = math.inf if i == side else 1.0
            (scaler.scale(loss(model, i)) * factor).backward()
    step = pair.combine(scaler)
    assert step.decision == "skip"
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(flat(model.parameters()), before)
    assert not optimizer.state


def test_a_scaler_that_sees_only_its_own_steps_goes_through_a_row_of_infeasible_ones():
    """The loop of docs/loop.md."""
    model = make_model()
    pair = PairedGradients(model, METHOD)
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
    assert decisions == [
        ("step", True, 1024.0),
        ("skip", True, 1024.0),
        ("skip", True, 1024.0),
        ("step", True, 2048.0),
        ("skip", False, 1024.0),
        ("step", True, 1024.0),
    ]


@pytest.mark.parametrize("kind", ["dropped", "as retain loss", "on top"])
def test_another_loss_counts_where_docs_say_so(kind):
    def penalty(model):
        return sum(p.square().sum() for p in model.parameters())

    model = make_model()
    plain, pair = (PairedGradients(model, METHOD, max_grad_norm=None) for _ in range(2))
    collect_both(plain, model, 0)
    plain.combine()
    expected = [p.grad.clone() for p in model.parameters()]
    if kind == "dropped":
        penalty(model).backward()
    with pair.forget():
        loss(model, 1).backward()
    with pair.retain():
        loss(model, 0).backward()
        if kind == "as retain loss":
            penalty(model).backward()
    step = pair.combine()
    if kind == "on top":
        penalty(model).backward()
        expected = [e + 2 * p.detach() for e, p in zip(expected, model.parameters(), strict=True)]
    if kind == "as retain loss":
        direct = torch.autograd.grad(loss(model, 0) + penalty(model), list(model.parameters()))
        assert step.gram.retain_sq.sum().item() == pytest.approx(flat(direct).square().sum().item())
        return
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)


@pytest.mark.parametrize("piece", [7, 1 << 18])
def test_half_precision_parameters_get_half_precision_gradients_rounded_once(monkeypatch, piece):
    monkeypatch.setattr("hamu.core.combine.widened_at_once", lambda device: piece)
    model = make_model(torch.bfloat16)
    pair = PairedGradients(model, METHOD, max_grad_norm=None)
    sides = [
        torch.autograd.grad(loss(model, s, torch.bfloat16), list(model.parameters()))
        for s in (0, 1)
    ]
    collect_both(pair, model, 0, torch.bfloat16)
    step = pair.combine()
    for p, a, b, r, f in zip(
        model.parameters(), step.weights.retain, step.weights.forget, *sides, strict=True
    ):
        assert p.grad.dtype == torch.bfloat16
        exact = a * r.double() + b * f.double()
        # Half a unit in bfloat16's last place, and a little for the float32 sum.
        assert (
            (p.grad.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * exact.abs().max()
        ).all()


def test_a_model_of_mixed_precisions_is_combined_in_each_ones_own():
    model = make_model(torch.float32)
    model[2].to(torch.bfloat16)
    pair = PairedGradients(model, METHOD)
    for seed, context in enumerate((pair.retain, pair.forget)):
        with context():
            x, y = batch(seed, torch.float32)
            nn.functional.cross_entropy(
                model[2](model[1](model[0](x)).bfloat16()).float(), y
            ).backward()
    assert pair.combine().decision == "step"
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_gradients_are_combined_in_place_without_a_third_copy():
    model = make_model(torch.float32)
    pair = PairedGradients(model, METHOD)
    with pair.retain():
        loss(model, 0, torch.float32).backward()
        kept = [p.grad for p in model.parameters()]
    with pair.forget():
        loss(model, 1, torch.float32).backward()
    pair.combine()
    assert all(p.grad is k for p, k in zip(model.parameters(), kept, strict=True))
