"""The first side's gradient put away: the same step, or one that is off by no more than is said."""

from types import SimpleNamespace

import pytest
import torch
from helpers import collect
from torch import nn

from hamu import HamuError, HamuQ, HamuU, PairedGradients, UnlearnConfig, build_method
from hamu.core.combine import GradOffload

METHODS = (
    HamuQ(0.5, "relative", stopping="off"),
    HamuU(0.5, "relative", stopping="off"),
    build_method("gdiff"),
)


class Net(nn.Module):
    """Tensors of every kind: tiny, small, large, a scalar, unused by one side."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(3,), (60, 70), (300, 400), (), (7, 5)]
        self.tensors = nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in shapes])

    def loss(self, seed):
        generator = torch.Generator().manual_seed(seed)
        used = self.tensors if seed % 2 else self.tensors[:-1]
        return sum(
            (
                p * torch.randn(p.shape, generator=generator, dtype=p.dtype)
                + p**2 / (1 + p.numel())
            ).sum()
            for p in used
        )


def step(
    method, offload_grads, dtype=torch.float32, order=("retain", "forget"), passes=1, clip=1.0
):
    model = Net(dtype)
    pair = PairedGradients(model, method, max_grad_norm=clip, offload_grads=offload_grads)
    for turn in range(passes):
        for side in order:
            with getattr(pair, side)():
                (model.loss(2 * turn + (side == "forget")) / passes).backward()
    found = pair.combine()
    return [p.grad for p in pair.parameters], found


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("order", [("retain", "forget"), ("forget", "retain")])
@pytest.mark.parametrize("passes", [1, 3])
def test_in_the_hosts_memory_the_step_is_the_same(method, order, passes):
    expected, whole = step(method, "none", torch.float64, order, passes)
    found, put = step(method, "cpu", torch.float64, order, passes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(put.gram.dot, whole.gram.dot, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("order", [("retain", "forget"), ("forget", "retain")])
def test_in_half_the_memory_the_error_is_as_stated(method, order):
    expected, whole = step(method, "none", torch.float64, order, clip=None)
    found, put = step(method, "bf16", torch.float64, order, clip=None)
    assert not torch.equal(put.gram.dot, whole.gram.dot), "something must have been rounded"
    # every entry is off by 2^-8 at most, so a product of two by the product of their sizes times that
    bound = 2**-8 * (whole.gram.retain_sq * whole.gram.forget_sq).sqrt()
    assert ((put.gram.dot - whole.gram.dot).abs() <= bound).all()
    size = sum((g**2).sum() for g in expected).sqrt()
    off = sum(((f - g) ** 2).sum() for f, g in zip(found, expected, strict=True)).sqrt()
    assert off <= 0.05 * size
    assert all(
        f.dtype == g.dtype and f.shape == g.shape for f, g in zip(found, expected, strict=True)
    )


def test_only_the_side_that_waits_is_rounded():
    model = Net()
    pair = PairedGradients(model, METHODS[2], offload_grads="bf16")
    for side in ("retain", "forget"):
        with getattr(pair, side)():
            model.loss(int(side == "forget")).backward()
    kinds = {
        side: {g.dtype for g in pair._grads[side] if g is not None} for side in ("retain", "forget")
    }
    assert kinds == {"retain": {torch.bfloat16}, "forget": {torch.float32}}


def test_a_step_that_must_not_be_taken_leaves_what_a_scaler_understands():
    model = Net()
    pair = PairedGradients(model, METHODS[0], offload_grads="bf16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pair.retain():
        scaler.scale(model.loss(0) * float("inf")).backward()
    with pair.forget():
        scaler.scale(model.loss(1)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    assert pair.combine(scaler).decision == "skip"
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_does_not_go_together_is_said():
    with pytest.raises(
        HamuError, match="offload_grads 'disk' is unknown; choose none, bf16 or cpu"
    ):
        PairedGradients(Net(), METHODS[0], offload_grads="disk")
    pair = PairedGradients(Net(), METHODS[0], offload_grads="bf16")
    for side in ("retain", "forget"):
        collect(pair, side, [torch.ones_like(p) for p in pair.parameters])
    with pytest.raises(
        HamuError, match=r"keep 'retain' must be a collection of sides, such as \('retain',\)"
    ):
        pair.combine(keep="retain")
    with pytest.raises(
        HamuError,
        match="offload_grads 'bf16' needs both whole gradients in each process; leave it at none",
    ):
        pair.use(SimpleNamespace(is_whole=False))
    with pytest.raises(
        HamuError, match="gradients can only be kept where each process has both of them whole"
    ):
        pair.combine(keep=("retain",))
    with pytest.raises(
        HamuError, match="trust_region needs both whole gradients in each process; leave pairing at"
    ):
        UnlearnConfig(output_dir="unused", offload_grads="cpu", trust_region=True)


def test_the_host_waits_for_every_device_that_a_gradient_comes_from(monkeypatch):
    """Gradients of a model that lies on two GPUs, as far as a stash asks them."""
    recorded, waited = [], []

    def stream(device):
        event = SimpleNamespace(synchronize=lambda: waited.append(device))
        return SimpleNamespace(record_event=lambda: recorded.append(device) or event)

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(GradOffload, "_put", lambda self, grad: grad)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    grads = [
        SimpleNamespace(device=device) for device in (first, second, first, torch.device("cpu"))
    ]
    offload_grads = GradOffload("cpu")
    offload_grads.put([*grads, None])
    assert (set(recorded), len(recorded), waited) == ({first, second}, 2, [])
    offload_grads.wait()
    assert set(waited) == {first, second}
    offload_grads.wait()
    assert len(waited) == 2, "nothing is under way any more"
