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
from hamu.core.methods import method_classes
from hamu.unlearning.trainer.promise import StepWatch

READS = ("item", "tolist", "cpu", "numpy", "nonzero")
READS += ("__bool__", "__float__", "__int__", "__index__", "__array__")
RELATIVE = {"constraint_mode": "relative"}


class _Dispatched(TorchDispatchMode):
    """Counts reads that no method of Tensor announces."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """The names of the Tensor methods that read on the host, in the order of their calls."""
    calls = []

    def counting(name, original):
        def read(self, *args, **kwargs):
            calls.append(name)
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    return calls


def prepared(method, forget_factor=1.0, device="cpu", **settings):
    g = torch.Generator().manual_seed(0)
    pairs = [pair_at_angle(n, 1.0, g) for n in (3, 70_000, 9, 1)]
    retain, forget = [[g.float().to(device) for g in side] for side in zip(*pairs, strict=True)]
    pair = PairedGradients(Holder(retain), method, **settings)
    if method.uses_retain:
        collect(pair, "retain", retain)
    if method.uses_forget:
        collect(pair, "forget", [forget_factor * f for f in forget])
    return pair


SHARES = HamuQ(0.3, **RELATIVE, distribution=[3, 1, 1, 0], stopping="off")
CASES = {
    **{
        name: (build_method(name, constraint=0.3, **RELATIVE), {}, "step")
        for name in method_classes()
    },
    "whole model": (HamuU(0.3, **RELATIVE), {"blocks": "model"}, "step"),
    "own shares": (SHARES, {}, "step"),
    "no clipping": (HamuQ(0.3, **RELATIVE), {"max_grad_norm": None}, "step"),
    "criterion any": (HamuQ(0.3, **RELATIVE, stopping="any"), {}, "stop"),
    "running means": (HamuQ(0.3, **RELATIVE), {"half_life": 20.0}, "step"),
    "infeasible": (HamuQ(1e9), {}, "stop"),
    "clamped": (HamuQ(1e9, on_infeasible="clamp", stopping="off"), {}, "step"),
    "not finite": (HamuQ(), {"forget_factor": math.nan}, "skip"),
}


def read_once(reads, pair, *given, **how):
    """A combine of the pair, which must read once."""
    del reads[:]
    with _Dispatched() as dispatched:
        step = pair.combine(*given, **how)
    assert reads == ["tolist"]
    assert dispatched.reads == 0
    return step


@pytest.mark.parametrize(("method", "settings", "decision"), CASES.values(), ids=CASES)
def test_combine_reads_from_the_device_once(reads, method, settings, decision):
    pair, losses = prepared(method, **settings), torch.ones(2)
    assert read_once(reads, pair, losses=losses).decision == decision


def test_estimates_for_the_criterion_come_with_the_one_read(reads):
    pair = prepared(HamuQ(0.3, **RELATIVE), half_life=1.0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(16):
        step = read_once(reads, pair)
        for side in SIDES:
            collect(pair, side, [torch.randn(p.shape, generator=draw) for p in pair.parameters])
    assert step.population is not None


def test_the_scale_of_a_loss_scaler_comes_with_the_one_read(reads):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert read_once(reads, prepared(HamuQ(0.3, **RELATIVE)), scaler).unscale == 1 / 8


@pytest.mark.parametrize(("value", "decision"), [(1.0, "step"), (math.inf, "skip")])
def test_a_loss_that_is_not_finite_comes_with_the_one_read(reads, value, decision):
    losses = torch.tensor([1.0, value])
    step = read_once(reads, prepared(HamuQ(0.3, **RELATIVE)), losses=losses)
    assert step.decision == decision


def watch_of(pair):
    args = UnlearnConfig(output_dir="unused", check_steps=1)
    return StepWatch(pair, args, torch.nn.ParameterList(pair.parameters))


def test_the_figures_of_a_step_come_in_one_read_and_those_of_its_blocks_in_another(reads):
    pair = prepared(HamuQ(0.3, **RELATIVE))
    step, watch = pair.combine(), watch_of(pair)
    watch.take(step, {side: torch.ones(()) for side in SIDES})
    watch.on_pre_optimizer_step(None, None, None, torch.optim.SGD(pair.parameters, lr=0.1))
    del reads[:]
    found = watch.step_figures()
    assert reads == ["tolist"]
    blocks = watch.block_figures()
    assert reads == ["tolist"] * 2
    assert found["kappa"] == pytest.approx(step.gram.dot.sum().item())
    assert found["direct_share"] == step.direct_share.item()
    assert blocks["cos"] == step.gram.cos.tolist()
    assert blocks["change"] == (0.1 * step.combined_sq.sqrt()).tolist()


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
    del reads[:]
    with _Dispatched() as dispatched:
        text = repr(step)
    assert reads == ["tolist"]
    assert dispatched.reads == 0
    first, second, third = text.splitlines()
    assert first.startswith(f"PairStep: {decision}")
    retain, forget = (norm.item() for norm in step.gradient_norms)
    assert f"‖g_r‖ {retain:.4g}, ‖g_f‖ {forget:.4g}, cosθ {step.cos.item():+.4f}; " in second
    b = step.weights.forget
    assert "weights in 4 blocks: retain" in second
    assert f"forget {b.min().item():.4g} to {b.max().item():.4g}" in second
    assert f"forget loss {step.promised_forget_change.item():+.4g}" in third


def test_what_a_checked_step_did_comes_in_one_read(reads):
    pair = prepared(HamuQ(0.3, **RELATIVE))
    optimizer = torch.optim.SGD(pair.parameters, lr=0.1)
    watch = watch_of(pair)
    for side in SIDES:
        watch.passes.remember(side, lambda: sum(p.sum() for p in pair.parameters), 1)
    step = pair.combine(keep=watch.keep(optimizer))
    watch.take(step, {side: torch.zeros(()) for side in SIDES})
    watch.on_pre_optimizer_step(None, None, None, optimizer)
    optimizer.step()
    del reads[:]
    watch.on_optimizer_step(None, None, None)
    assert reads == ["tolist"]
    assert watch.figures["first_order_forget_change"] == pytest.approx(
        0.1 * (step.promised_forget_change / step.clip[1]).item()
    )


def test_a_side_that_is_not_used_raises_no_doubt(reads):
    pair = prepared(build_method("gdiff"))
    pair._grads["forget"] = [None if g.numel() > 9 else g for g in pair._grads["forget"]]
    assert read_once(reads, pair).decision == "step"


def test_collecting_reads_nothing(reads):
    pair = PairedGradients(torch.nn.Linear(3, 2), HamuQ())
    x = torch.ones(4, 3)
    loss = pair.parameters[0].sum() + x.sum()
    del reads[:]
    with _Dispatched() as dispatched, pair.retain():
        loss.backward()
    assert reads == []
    assert dispatched.reads == 0


def reads_of_an_assessment(reads, layers):
    """Reads of both gradients, of their products and of the records in conflict."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(layers)])
    records = [{"pixel_values": torch.randn(3), "labels": i % 3} for i in range(12)]
    assessed = AssessedModel(model, records, records[:6], default_collate, batch_size=2)
    del reads[:]
    sides = [parted_gradient(assessed, side, 3) for side in ("retain", "forget")]
    passes = [*reads]
    del reads[:]
    PartedGram.of(assessed, *sides)
    products = [*reads]
    del reads[:]
    gradient_alignment(lambda: torch.zeros(1), assessed.parameters, sides[0].total())
    return passes, products, [*reads]


def test_an_assessment_reads_no_parameter_by_itself(reads):
    few, many = reads_of_an_assessment(reads, 1), reads_of_an_assessment(reads, 5)
    assert few == many
    assert many[1:] == (["cpu"], ["item", "item"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_combine_synchronises_a_cuda_device_once(recwarn):
    for method, settings, decision in CASES.values():
        pair = prepared(method, device="cuda", **settings)
        torch.cuda.synchronize()
        recwarn.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step = pair.combine()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.decision == decision
        messages = [str(w.message) for w in recwarn]
        assert sum("synchroniz" in message for message in messages) == 1, messages
