"""The promise on the step that an optimizer really takes."""

import pytest
import torch
from helpers import Holder, collect, network, passes

from hamu import HamuError, HamuQ, HamuU, PairedGradients, StepGuard, build_method
from hamu.core import guard as module

SIDES = ("retain", "forget")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "two rates": lambda p: torch.optim.SGD(
        [{"params": p[:2]}, {"params": p[2:], "lr": 1e-3}], 1e-2
    ),
}
both_variants = pytest.mark.parametrize("variant", [HamuQ, HamuU])


def relative(variant):
    return variant(0.5, constraint_mode="relative", stopping="off")


def run(method, name, *, dtype=torch.float64, steps=8, blocks="tensor", scaler=None, **settings):
    """Steps of a run; yields guard, step, and the weights before and after each."""
    model = network(dtype)
    pair = PairedGradients(model, method, blocks=blocks)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    guard = StepGuard(pair, optimizer, **settings)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for number in range(steps):
        # other records each time: the momentum lags behind
        passes(pair, model, 2 * number, 2 * number + 1, scaler.scale)
        step = pair.combine(scaler, keep=guard.keep)
        before = [p.detach().clone() for p in model.parameters()]
        with guard.around(step):
            scaler.step(optimizer)
        scaler.update()
        yield guard, step, before, list(model.parameters())


@both_variants
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 0.9999), (torch.float32, 0.999)])
def test_every_block_gains_what_was_demanded_with_any_optimizer(variant, name, dtype, least):
    for guard, step, before, after in run(relative(variant), name, dtype=dtype):
        side, sign = guard.keep[0], 1.0 if variant is HamuQ else -1.0
        clip = step.clip[SIDES.index(side)].item()
        for block, (b, a, g) in enumerate(zip(before, after, step.kept[side], strict=True)):
            gain = sign * clip * ((a.double() - b.double()) * g.double()).sum().item()
            assert gain >= least * guard.taken.demand[block].item(), f"block {block}"
            assert guard.taken.gain[block].item() == pytest.approx(gain, rel=1e-6, abs=1e-12)


def test_without_correction_adamw_breaks_the_promise_and_plain_sgd_does_not():
    """Else the test above could not fail."""
    uncorrected = run(relative(HamuU), "adamw", correct_steps=False)
    taken = [guard.taken for guard, *_ in uncorrected]
    assert any((t.gain < 0.9 * t.demand).any() for t in taken)
    assert all(t.corrected is None for t in taken)
    for guard, *_ in run(relative(HamuQ), "sgd"):
        assert not guard.taken.corrected.any()


@pytest.mark.parametrize("demand", [0.5, 1e3])
def test_the_demand_is_the_methods_times_the_rate_and_no_more_than_the_radius_allows(demand):
    """Else the guard would push a clamped step beyond its radius."""
    clamping = HamuQ(demand, on_infeasible="clamp", stopping="off")
    for guard, step, *_ in run(clamping, "sgd", steps=3):
        constraint, taken = step.weights.constraint, guard.taken
        fraction = constraint.fraction.clamp(max=1)
        expected = 1e-2 * fraction * constraint.radius * step.gram.forget_norm
        torch.testing.assert_close(taken.demand, expected)
        assert (fraction == 1).all() or demand < 1e3
        assert (taken.lengths <= 1e-2 * constraint.radius * (1 + 1e-6)).all()


@both_variants
def test_the_scale_of_a_loss_scaler_is_no_part_of_a_step(variant):
    scaler, corrected = torch.amp.GradScaler("cpu", init_scale=1024.0), False
    scaled = run(relative(variant), "adamw", keep=SIDES, scaler=scaler)
    for ours, theirs in zip(scaled, run(relative(variant), "adamw", keep=SIDES), strict=True):
        assert ours[1].unscale == 1 / 1024
        one, other = vars(ours[0].taken), vars(theirs[0].taken)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)
        torch.testing.assert_close(ours[3], theirs[3], rtol=1e-12, atol=1e-14)
        corrected |= bool(ours[0].taken.corrected.any())
    assert corrected


def guarded_ones(lr, value=0.0, dtype=torch.float32, **settings):
    ones = [torch.ones(64, dtype=dtype)]
    pair = PairedGradients(Holder(ones), relative(HamuQ), **settings)
    pair.parameters[0].data.fill_(value)
    optimizer = torch.optim.SGD(pair.parameters, lr=lr)
    for side in SIDES:
        collect(pair, side, ones)
    return pair, optimizer, StepGuard(pair, optimizer)


def test_a_step_that_is_lost_in_the_weights_own_rounding_is_pushed_until_it_shows():
    """Steps of 1e-5 change no float32 number of 1000, whose last digit is 6e-5."""
    pair, optimizer, guard = guarded_ones(lr=1.6e-4, value=1000.0)
    with guard.around(pair.combine(keep=guard.keep)):
        optimizer.step()
    assert guard.taken.corrected.all()
    assert guard.taken.gain.item() >= 0.999 * guard.taken.demand.item() > 0


def test_a_correction_is_the_smallest_one_along_the_constrained_gradient():
    runs = (run(relative(HamuU), "adamw", correct_steps=exact) for exact in (False, True))
    for plain, exact in zip(*runs, strict=True):  # noqa: B007
        taken = exact[0].taken
        if taken.corrected.any():
            break  # up to here the runs are the same
    tensors = zip(plain[3], exact[3], exact[1].kept["retain"], strict=True)
    for block, (a, b, g) in enumerate(tensors):
        moved, g = (b - a).detach().flatten(), g.flatten()
        if not taken.corrected[block]:
            assert not moved.any()
            continue
        along = g * (moved.dot(g) / g.square().sum())
        torch.testing.assert_close(moved, along, rtol=1e-6, atol=1e-12)
        assert taken.gain[block].item() == pytest.approx(taken.demand[block].item(), rel=1e-4)
    assert taken.corrected.any()


@pytest.mark.parametrize("piece", [50, 1 << 20])
@pytest.mark.parametrize("keep", [SIDES, ("retain",), ("forget",), ()])
@both_variants
def test_kept_gradients_change_nothing_and_are_measured_along(variant, keep, piece, monkeypatch):
    monkeypatch.setattr(module, "WIDENED", piece)
    settings = {"correct_steps": False, "steps": 3}
    plain = list(run(relative(variant), "sgd", **settings))[-1][3]
    guard, step, before, after = list(run(relative(variant), "sgd", keep=keep, **settings))[-1]
    # the side whose memory is written to orders the sum
    torch.testing.assert_close(plain, after, rtol=1e-12, atol=1e-14)
    moved = [a.detach() - b for a, b in zip(after, before, strict=True)]
    for side in keep:
        pairs = zip(moved, step.kept[side], strict=True)
        change = sum((m * g).sum().item() for m, g in pairs)
        assert getattr(guard.taken, f"{side}_change").item() == pytest.approx(change)
        promised = getattr(step, f"promised_{side}_change") / step.clip[SIDES.index(side)]
        assert change == pytest.approx(1e-2 * promised.item())
    assert (guard.taken.retain_change is None) == ("retain" not in guard.keep)
    assert guard.taken.lengths.tolist() == pytest.approx([m.norm().item() for m in moved])


def test_a_model_may_change_its_precision_between_two_steps():
    runs = run(relative(HamuQ), "sgd", dtype=torch.float32, steps=2)
    guard, *_ = next(runs)
    model = guard._pair._model.double()
    guard, step, before, after = next(runs)
    moved = after[0].detach() - before[0]
    gain = step.clip[1].item() * (moved * step.kept["forget"][0]).sum().item()
    assert guard.taken.gain[0].item() == pytest.approx(gain, rel=1e-9)
    guard.undo()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_step_that_is_not_finite_is_warned_of():
    runs = run(relative(HamuQ), "adamw", dtype=torch.float32, steps=2)
    guard, *_ = next(runs)
    guard._optimizer.param_groups[0]["lr"] = float("inf")
    with pytest.warns(
        UserWarning, match="of its demand: its step is not finite; lower the learning"
    ):
        next(runs)


def test_whole_model_blocks_and_undo():
    for guard, _, before, after in run(relative(HamuQ), "adamw", blocks="model"):  # noqa: B007
        assert guard.taken.gain.shape == (1,)
    assert guard.taken.length.item() > 0
    guard.undo()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_step_that_is_not_taken_leaves_the_weights():
    for guard, step, before, after in run(HamuQ(1e9, on_infeasible="skip"), "sgd", steps=2):
        assert (step.decision, step.kept) == ("skip", {})
        assert not torch.cat([guard.taken.gain, guard.taken.demand]).any()  # a loop compares them
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_step_that_kept_nothing_is_refused_before_the_weights_move():
    pair, optimizer, guard = guarded_ones(lr=0.1)
    step = pair.combine()
    message = r"has not kept what the guard needs; call pair\.combine\(keep=guard\.keep\)"
    with pytest.raises(HamuError, match=message), guard.around(step):
        optimizer.step()
    assert not pair.parameters[0].any()


def test_methods_and_optimizers_that_cannot_be_guarded_are_named():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    pair = PairedGradients(model, build_method("gdiff"))
    with pytest.raises(HamuError, match="gdiff promises nothing"):
        StepGuard(pair, optimizer)
    pair.layout.is_whole = False  # it would sum over all processes what each of them measured whole
    with pytest.raises(HamuError, match="leave it out, or sharding and split pairing"):
        StepGuard(pair, optimizer, correct_steps=False)
    some = torch.optim.SGD(list(model.parameters())[1:], lr=1)
    with pytest.raises(HamuError, match="not in the optimizer"):
        StepGuard(PairedGradients(model, HamuQ()), some)


@pytest.mark.parametrize("rate", [1e-2, 1e-5])
def test_a_step_that_half_precision_cannot_hold_is_warned_of(rate, recwarn):
    pair, optimizer, guard = guarded_ones(rate, 1.0, torch.bfloat16, max_grad_norm=0.01)
    with guard.around(pair.combine(keep=["forget"])):
        optimizer.step()
    warned = [str(one.message) for one in recwarn if "falls short" in str(one.message)]
    assert len(warned) == (rate == 1e-5)
    assert all("keep them in float32" in one for one in warned)


def test_without_a_step_there_is_nothing_to_measure_or_undo():
    pair, optimizer, guard = guarded_ones(lr=0.1)
    guard.release()
    for call in (guard.after, guard.undo):
        with pytest.raises(HamuError, match=r"no step was begun, or it was released; wrap the"):
            call()
    with guard.around(pair.combine(keep=guard.keep)):
        optimizer.step()
    guard.release()
    guard.release()
    with pytest.raises(HamuError, match="no step was begun, or it was released"):
        guard.undo()
