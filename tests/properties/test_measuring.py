"""Measuring the Gram: memory layout, packing, missing gradients and float32's range leave it alone."""

import pytest
import torch
from helpers import combine, flat, measure

from hamu import HamuQ, HamuU
from hamu.core.gram_meter import GramMeter, gram_of_rows

SUMS = ("retain_sq", "forget_sq", "dot")


def assert_measured(gram, i, r, f):
    """To the last digits, but for large float32 gradients, whose own rounding is far coarser."""
    rtol = 1e-14 if r.dtype == torch.float64 or r.numel() <= 3 << 14 else 1e-12
    r, f = r.double().contiguous(), f.double().contiguous()
    rr, ff, rf = (r * r).sum(), (f * f).sum(), (r * f).sum()
    assert abs(gram.retain_sq[i] - rr) <= rtol * rr
    assert abs(gram.forget_sq[i] - ff) <= rtol * ff
    assert abs(gram.dot[i] - rf) <= rtol * (rr * ff).sqrt()


LAST = torch.channels_last
LAYOUTS = {
    "scalar": lambda g: torch.randn((), generator=g),
    "small": lambda g: torch.randn(3, 43, generator=g),
    "largest packed": lambda g: torch.randn(3 << 14, generator=g),
    "smallest large": lambda g: torch.randn((3 << 14) + 1, generator=g),
    "several pieces": lambda g: torch.randn(1300, 1100, generator=g),
    "one long row": lambda g: torch.randn(1, (1 << 20) + 7, generator=g),
    "transposed": lambda g: torch.randn(300, 400, generator=g).t(),
    "small transposed": lambda g: torch.randn(30, 40, generator=g).t(),
    "strided": lambda g: torch.randn(300, 800, generator=g)[:, ::2],
    "channels last": lambda g: torch.randn(80, 64, 5, 5, generator=g).to(memory_format=LAST),
    "double": lambda g: torch.randn(1300, 1100, generator=g, dtype=torch.float64),
    "half": lambda g: torch.randn(400, 400, generator=g).bfloat16(),
}


def test_every_layout_is_measured_as_a_plain_double_dot():
    g = torch.Generator().manual_seed(0)
    retain, forget = [], []
    for number, make in enumerate(LAYOUTS.values()):
        retain.append(make(g))
        forget.append(0.3 * retain[-1] + make(g).to(retain[-1].dtype))
        if number % 2:  # the two sides may differ in layout
            forget[-1] = forget[-1].contiguous()
    gram = measure(retain, forget)
    for i, (r, f) in enumerate(zip(retain, forget, strict=True)):
        assert_measured(gram, i, r, f)


def test_more_small_tensors_than_are_packed_at_once_are_measured_alike():
    g = torch.Generator().manual_seed(3)
    sizes = [45_000 + 7 * i for i in range(24)] + [60_000] + [1 + 13 * i for i in range(150)]
    meter = GramMeter([torch.empty(size) for size in sizes], range(len(sizes)))
    for exact in (False, True, False):  # one group, precision or step must not leak into another
        retain, forget = ([torch.randn(size, generator=g) for size in sizes] for _ in range(2))
        gram = meter.measure(retain, forget, exact=exact)
        for i, (r, f) in enumerate(zip(retain, forget, strict=True)):
            if exact:
                assert_measured(gram, i, r, f)
                continue
            r, f = r.double(), f.double()
            assert abs(gram.dot[i] - r.dot(f)) <= 1e-5 * r.norm() * f.norm()
            assert gram.retain_sq[i] == pytest.approx(r.dot(r).item(), rel=1e-5)


def test_a_missing_gradient_counts_as_zeros_even_after_a_present_one():
    g = torch.Generator().manual_seed(1)
    r, f = ([torch.randn(shape, generator=g) for shape in (5, 70_000, 9)] for _ in range(2))
    meter = GramMeter(r, [0, 1, 2])
    meter.measure(r, f)  # what the packed buffer holds from an earlier step must not leak
    for missing in (r, f, None):
        given = [[None if missing is side else one for one in side[:2]] + [None] for side in (r, f)]
        zeros = [
            [torch.zeros_like(r[i]) if one is None else one for i, one in enumerate(side)]
            for side in given
        ]
        ours, theirs = meter.measure(*given), meter.measure(*zeros)
        for field in SUMS:
            assert torch.equal(getattr(ours, field), getattr(theirs, field))
        assert ours.retain_sq[2] == ours.forget_sq[2] == ours.dot[2] == 0


def test_tensors_of_one_block_are_measured_together():
    g = torch.Generator().manual_seed(2)
    r, f = ([torch.randn(shape, generator=g) for shape in (5, 70_000, 9)] for _ in range(2))
    gram = GramMeter(r, [0, 1, 0]).measure(r, f)
    assert_measured(gram, 0, torch.cat([r[0], r[2]]), torch.cat([f[0], f[2]]))
    assert_measured(gram, 1, r[1], f[1])


@pytest.mark.parametrize("size", [3000, 60_000])
@pytest.mark.parametrize("method", [HamuQ, HamuU])
def test_units_of_float32_gradients_do_not_matter_over_their_whole_range(method, size):
    """Float32 sums underflow for entries below 1e-22, and overflow for those over 1e19."""
    g = torch.Generator().manual_seed(0)
    retain, forget = (torch.randn(size, generator=g) for _ in range(2))
    forget = 0.5 * retain + forget
    plan = method(0.5, constraint_mode="relative", stopping="off")
    ours, _ = combine(plan, [retain], [forget], max_grad_norm=None)
    alike = [(unit, unit) for unit in (1e-24, 1e-16, 1e19)]
    for units in [*alike, (1e-30, 1.0), (1.0, 1e-22), (1e15, 1e-15), (1.0, 1e20), (1e20, 1.0)]:
        sides = [[side * unit] for side, unit in zip((retain, forget), units, strict=True)]
        theirs, grads = combine(plan, *sides, max_grad_norm=None)
        assert theirs.decision == "step", units
        assert theirs.cos == pytest.approx(ours.cos.item(), rel=1e-4)
        assert theirs.direct_share == ours.direct_share
        side, sign = (sides[1], -1.0) if method is HamuQ else (sides[0], 1.0)
        demand = theirs.weights.constraint.demand.item()
        assert sign * flat(grads).dot(flat(side)).item() == pytest.approx(demand, rel=1e-3), units
    retain[7] = float("inf")
    step, _ = combine(plan, [retain], [forget], max_grad_norm=None)
    assert (step.decision, step.finite) == ("skip", False), "infinite is not large"


@pytest.mark.parametrize("by_matmul", [True, False])
def test_rows_have_the_same_gram_within_autocast(by_matmul):
    rows = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = gram_of_rows(rows, by_matmul)
    torch.testing.assert_close(within, torch.einsum("irn,jrn->rij", rows, rows))
