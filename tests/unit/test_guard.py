"""The promise on the step that an optimizer really takes."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import Holder, collect
from torch import nn

from hamu import HamuError, HamuQ, HamuU, PairedGradients, StepGuard, build_method

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "two rates": lambda p: torch.optim.SGD(
        [{"params": p[:2], "lr": 1e-2}, {"params": p[2:], "lr": 1e-3}]
    ),
}


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    ).to(dtype)


def run(
    method,
    make,
    *,
    dtype=torch.float64,
    correct_steps=True,
    steps=12,
    keep=(),
    blocks="tensor",
    schedule=True,
    scaler=None,
):
    """Steps of a run; yields the guard after each."""
    model = network(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 10, generator=generator).to(dtype)
    y = torch.randint(4, (64,), generator=generator)
    pair = PairedGradients(model, method, blocks=blocks)
    optimizer = make(list(model.parameters()))
    scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps) if schedule else None
    )
    guard = StepGuard(pair, optimizer, correct_steps=correct_steps, keep=keep)
    for number in range(steps):
        few = slice(
            4 * number % 32, 4 * number % 32 + 4
        )  # other records each time: the momentum lags behind
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        with pair.retain():
            scaler.scale(nn.functional.cross_entropy(model(x[:32][few]), y[:32][few])).backward()
        with pair.forget():
            scaler.scale(nn.functional.cross_entropy(model(x[32:][few]), y[32:][few])).backward()
        step = pair.combine(scaler, keep=guard.keep)
        before = [p.detach().clone() for p in model.parameters()]
        with guard.around(step):
            scaler.step(optimizer)
        scaler.update()
        yield guard, step, before, list(model.parameters())
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 0.9999), (torch.float32, 0.999)])
def test_every_block_gains_what_was_demanded_with_any_optimizer(variant, name, dtype, least):
    method = variant(0.5, constraint_mode="relative", stopping="off")
    for guard, step, before, after in run(method, OPTIMIZERS[name], dtype=dtype):
        side = guard.keep[0]
        clip = step.clip[0 if side == "retain" else 1].item()
        sign = -1.0 if side == "retain" else 1.0
        for block, (b, a, g) in enumerate(zip(before, after, step.kept[side], strict=True)):
            gain = sign * clip * ((a.double() - b.double()) * g.double()).sum().item()
            demand = guard.taken.demand[block].item()
            assert gain >= least * demand, f"block {block}"
            assert guard.taken.gain[block].item() == pytest.approx(gain, rel=1e-6, abs=1e-12)


def test_without_correction_adamw_breaks_the_promise():
    """Else the tests above could not fail."""
    method = HamuU(0.5, constraint_mode="relative", stopping="off")
    taken = [guard.taken for guard, *_ in run(method, OPTIMIZERS["adamw"], correct_steps=False)]
    assert any((t.gain < 0.9 * t.demand).any() for t in taken)
    assert all(t.corrected is None for t in taken)


def test_plain_sgd_needs_no_correction():
    method = HamuQ(0.5, constraint_mode="relative", stopping="off")
    for guard, *_ in run(method, OPTIMIZERS["sgd"]):
        assert not guard.taken.corrected.any()


def test_the_demand_is_the_methods_times_the_learning_rate():
    method = HamuQ(0.5, constraint_mode="relative", stopping="off")
    for guard, step, *_ in run(method, OPTIMIZERS["sgd"], schedule=False):
        constraint = step.weights.constraint
        assert guard.taken.demand.sum().item() == pytest.approx(
            1e-2 * constraint.clipped_demand.item()
        )
        reach = constraint.radius * step.gram.forget_norm
        torch.testing.assert_close(guard.taken.demand, 1e-2 * constraint.fraction * reach)


def test_no_more_is_demanded_than_the_radius_allows():
    """Else the guard would push a step that was clamped beyond its radius."""
    for guard, step, *_ in run(
        HamuQ(1e3, on_infeasible="clamp", stopping="off"), OPTIMIZERS["sgd"], schedule=False
    ):
        constraint = step.weights.constraint
        assert not constraint.feasible
        assert guard.taken.demand.sum().item() == pytest.approx(1e-2 * constraint.max_demand.item())
        assert (guard.taken.lengths <= 1e-2 * constraint.radius * (1 + 1e-6)).all()


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
def test_the_scale_of_a_loss_scaler_is_no_part_of_a_step(variant):
    method = variant(0.5, constraint_mode="relative", stopping="off")
    keep, corrected = ("retain", "forget"), False
    scaled = run(
        method,
        OPTIMIZERS["adamw"],
        keep=keep,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    for ours, theirs in zip(scaled, run(method, OPTIMIZERS["adamw"], keep=keep), strict=True):
        assert ours[1].unscale == 1 / 1024
        for name in ("retain_change", "forget_change", "gain", "demand", "corrected", "lengths"):
            torch.testing.assert_close(
                getattr(ours[0].taken, name), getattr(theirs[0].taken, name), rtol=1e-9, atol=0
            )
        torch.testing.assert_close(ours[3], theirs[3], rtol=1e-12, atol=1e-14)
        corrected |= bool(ours[0].taken.corrected.any())
    assert corrected


def test_a_step_that_is_lost_in_the_weights_own_rounding_is_pushed_until_it_shows():
    """Steps of 1e-5 change no float32 number of 1000, whose last digit is 6e-5, however often they are made."""
    ones = [torch.ones(64)]
    pair = PairedGradients(Holder(ones), HamuQ(0.5, constraint_mode="relative", stopping="off"))
    with torch.no_grad():
        pair.parameters[0].fill_(1000.0)
    optimizer = torch.optim.SGD(pair.parameters, lr=1.6e-4)
    guard = StepGuard(pair, optimizer)
    collect(pair, "retain", ones)
    collect(pair, "forget", ones)
    with guard.around(pair.combine(keep=guard.keep)):
        optimizer.step()
    assert guard.taken.corrected.all()
    assert guard.taken.gain.item() >= 0.999 * guard.taken.demand.item() > 0


def test_a_correction_is_the_smallest_one_along_the_constrained_gradient():
    method = HamuU(0.5, constraint_mode="relative", stopping="off")
    for plain, exact in zip(  # noqa: B007
        *(run(method, OPTIMIZERS["adamw"], correct_steps=c) for c in (False, True)),
        strict=True,
    ):
        corrected = exact[0].taken.corrected
        if corrected.any():
            break  # up to here the runs are the same
    assert corrected.any()
    for block, (a, b, g) in enumerate(
        zip(plain[3], exact[3], exact[1].kept["retain"], strict=True)
    ):
        moved = (b - a).detach().flatten()
        if not corrected[block]:
            assert not moved.any()
            continue
        along = g.flatten() * (moved.dot(g.flatten()) / g.square().sum())
        torch.testing.assert_close(moved, along, rtol=1e-6, atol=1e-12)
        assert exact[0].taken.gain[block].item() == pytest.approx(
            exact[0].taken.demand[block].item(), rel=1e-4
        )


@pytest.mark.parametrize("keep", [("retain", "forget"), ("retain",), ("forget",), ()])
@pytest.mark.parametrize("variant", [HamuQ, HamuU])
def test_kept_gradients_change_nothing_in_the_step(variant, keep):
    method = variant(0.5, constraint_mode="relative", stopping="off")
    settings = {"correct_steps": False, "schedule": False}
    plain = list(run(method, OPTIMIZERS["sgd"], **settings))[-1][3]
    kept = list(run(method, OPTIMIZERS["sgd"], keep=keep, **settings))
    for a, b in zip(plain, kept[-1][3], strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-12, atol=1e-14
        )  # which side's memory is written to orders the sum
    guard, step, before, after = kept[-1]
    for side in keep:
        change = sum(
            ((a - b) * g).sum().item()
            for a, b, g in zip(after, before, step.kept[side], strict=True)
        )
        assert getattr(guard.taken, f"{side}_change").item() == pytest.approx(change)
        promised = (
            getattr(step, f"promised_{side}_change").item() / step.clip[side == "forget"].item()
        )
        assert change == pytest.approx(promised * 1e-2)
    assert (guard.taken.retain_change is None) == ("retain" not in guard.keep)


def test_whole_model_blocks_and_undo():
    method = HamuQ(0.5, constraint_mode="relative", stopping="off")
    for guard, _, before, after in run(method, OPTIMIZERS["adamw"], blocks="model"):  # noqa: B007
        assert guard.taken.gain.shape == (1,)
    assert guard.taken.length.item() > 0
    guard.undo()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_step_that_is_not_taken_leaves_the_weights():
    method = HamuQ(1e9, on_infeasible="skip")
    for guard, step, before, after in run(method, OPTIMIZERS["sgd"], steps=2):
        assert step.decision == "skip"
        assert step.kept == {}
        assert guard.taken.gain is None
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_step_that_kept_nothing_is_refused_before_the_weights_move():
    model = network(torch.float64)
    pair = PairedGradients(model, HamuQ(0.5, constraint_mode="relative"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(pair, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for seed, context in enumerate((pair.retain, pair.forget)):
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with context():
            nn.functional.cross_entropy(model(x), torch.arange(8) % 4).backward()
    step = pair.combine()
    assert step.decision == "step"
    message = r"has not kept what the guard needs; call pair\.combine\(keep=guard\.keep\)"
    with pytest.raises(HamuError, match=message), guard.around(step):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_what_cannot_be_guarded_is_named():
    model = network(torch.float32)
    with pytest.raises(HamuError, match="gdiff promises nothing"):
        StepGuard(
            PairedGradients(model, build_method("gdiff")), torch.optim.SGD(model.parameters(), lr=1)
        )
    pair = PairedGradients(model, HamuQ())
    with pytest.raises(HamuError, match="not in the optimizer"):
        StepGuard(pair, torch.optim.SGD(list(model.parameters())[1:], lr=1))
