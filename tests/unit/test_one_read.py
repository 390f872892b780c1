"""Reads from the device: combine() once; an assessment as often for many parameters as for few."""

import math

import pytest
import torch
from helpers import Holder, collect, pair_at_angle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from hamu import HamuQ, HamuU, PairedGradients, UnlearnConfig, build_method
from hamu.assess.gradients import AssessedModel, PartedGram, gradient_alignment, parted_gradient
from hamu.core.gram import SIDES
from hamu.unlearning.trainer.promise import StepWatch

READS = ("item", "tolist", "cpu", "numpy", "nonzero")
READS += ("__bool__", "__float__", "__int__", "__index__", "__array__")
RELATIVE = {"constraint_mode": "relative"}


class _Dispatched(TorchDispatchMode):
    """Notes reads that no method of Tensor announces."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """All that `do` reads on the host, in order."""
    calls = []

    def counting(name, original):
        def read(self, *args, **kwargs):
            calls.append(name)
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))

    def of(do, *args, **kwargs):
        del calls[:]
        with _Dispatched(calls):
            result = do(*args, **kwargs)
        return result, [*calls]

    return of


def prepared(method, forget_factor=1.0, **settings):
    g = torch.Generator().manual_seed(0)
    pairs = [pair_at_angle(n, 1.0, g) for n in (3, 70_000, 9, 1)]
    retain, forget = [[g.float() for g in side] for side in zip(*pairs, strict=True)]
    pair = PairedGradients(Holder(retain), method, **settings)
    if method.uses_retain:
        collect(pair, "retain", retain)
    if method.uses_forget:
        collect(pair, "forget", [forget_factor * f for f in forget])
    return pair


SHARES = HamuQ(0.3, **RELATIVE, distribution=[3, 1, 1, 0], stopping="off")
CASES = {
    "whole model": (HamuU(0.3, **RELATIVE), {"blocks": "model"}, "step"),
    "own shares": (SHARES, {}, "step"),
    "no clipping": (HamuQ(0.3, **RELATIVE), {"max_grad_norm": None}, "step"),
    "criterion any": (HamuQ(0.3, **RELATIVE, stopping="any"), {}, "stop"),
    "running means": (HamuQ(0.3, **RELATIVE), {"half_life": 20.0}, "step"),
    "infeasible": (HamuQ(1e9), {}, "stop"),
    "clamped": (HamuQ(1e9, on_infeasible="clamp", stopping="off"), {}, "step"),
    "not finite": (HamuQ(), {"forget_factor": math.nan}, "skip"),
}


def read_once(reads, do, *args, **kwargs):
    """Result of `do`, which reads from the device once, then only from what came of it."""
    result, found = reads(do, *args, **kwargs)
    assert found[0] == ("tolist" if len(found) == 1 else "cpu")
    assert "cpu" not in found[1:]
    return result


@pytest.mark.parametrize(("method", "settings", "decision"), CASES.values(), ids=CASES)
def test_combine_reads_from_the_device_once(reads, method, settings, decision):
    pair = prepared(method, **settings)
    assert read_once(reads, pair.combine, losses=torch.ones(2)).decision == decision


def test_estimates_for_the_criterion_come_with_the_one_read(reads):
    pair = prepared(HamuQ(0.3, **RELATIVE), half_life=1.0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(16):
        step = read_once(reads, pair.combine)
        for side in SIDES:
            collect(pair, side, [torch.randn(p.shape, generator=draw) for p in pair.parameters])
    assert step.population is not None


@pytest.mark.parametrize(("value", "decision"), [(1.0, "step"), (math.inf, "skip")])
def test_a_loss_scale_and_a_loss_that_is_not_finite_come_with_the_one_read(reads, value, decision):
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=8.0), torch.tensor([1.0, value])
    pair = prepared(HamuQ(0.3, **RELATIVE))
    step = read_once(reads, pair.combine, scaler, losses=losses)
    assert (step.decision, step.unscale) == (decision, 1 / 8)


def test_collecting_reads_nothing(reads):
    pair = PairedGradients(torch.nn.Linear(3, 2), HamuQ())
    loss = pair.parameters[0].sum()

    def collected():
        with pair.retain():
            loss.backward()

    assert reads(collected)[1] == []


def test_the_figures_of_a_checked_step_come_in_one_read_and_those_of_its_blocks_in_another(reads):
    pair = prepared(HamuQ(0.3, **RELATIVE))
    optimizer = torch.optim.SGD(pair.parameters, lr=0.1)
    args = UnlearnConfig(output_dir="unused", check_steps=1)
    watch = StepWatch(pair, args, torch.nn.ParameterList(pair.parameters))
    for side in SIDES:
        watch.passes.remember(side, lambda: sum(p.sum() for p in pair.parameters), 1)
    step = pair.combine(keep=watch.keep(optimizer))
    watch.take(step, {side: torch.ones(()) for side in SIDES})
    watch.on_pre_optimizer_step(None, None, None, optimizer)
    optimizer.step()
    read_once(reads, watch.on_optimizer_step, None, None, None)
    found = read_once(reads, watch.step_figures)
    assert found["kappa"] == pytest.approx(step.gram.dot.sum().item())
    assert found["direct_share"] == step.direct_share.item()
    change = 0.1 * (step.promised_forget_change / step.clip[1]).item()
    assert found["first_order_forget_change"] == pytest.approx(change)
    assert read_once(reads, watch.block_figures)["cos"] == step.gram.cos.tolist()


@pytest.mark.parametrize(
    ("method", "decision"),
    [
        (HamuQ(0.3, **RELATIVE), "step"),
        (HamuQ(1e9), "stop, the constraint 1e+09 cannot be met: the gradients"),
        (build_method("ga"), "step"),
    ],
)
def test_the_text_of_a_step_is_three_lines_in_one_read(reads, method, decision):
    step = prepared(method).combine()
    first, second, third = read_once(reads, repr, step).splitlines()
    assert first.startswith(f"PairStep: {decision}")
    retain, forget = (norm.item() for norm in step.gradient_norms)
    assert f"‖g_r‖ {retain:.4g}, ‖g_f‖ {forget:.4g}, cosθ {step.cos.item():+.4f}; " in second
    b = step.weights.forget
    assert "weights in 4 blocks: retain" in second
    assert f"forget {b.min().item():.4g} to {b.max().item():.4g}" in second
    assert f"forget loss {step.promised_forget_change.item():+.4g}" in third


def test_an_assessment_reads_no_parameter_by_itself(reads):
    """Both gradients, their products and the records in conflict, of 2 parameters and of 10."""
    counts = []
    for layers in (1, 5):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(layers)])
        records = [{"pixel_values": torch.randn(3), "labels": i % 3} for i in range(12)]
        assessed = AssessedModel(model, records, records[:6], default_collate, batch_size=2)
        retain, passes = reads(parted_gradient, assessed, "retain", 3)
        forget, _ = reads(parted_gradient, assessed, "forget", 3)
        _, products = reads(PartedGram.of, assessed, retain, forget)
        total = retain[0][0]
        aligned = gradient_alignment, lambda: torch.zeros(1), assessed.parameters, total, 1e-7
        counts.append((passes, products, reads(*aligned)[1]))
    assert counts[0] == counts[1]
    assert counts[0][1] == ["cpu"]
    assert counts[0][2].count("item") == 2
