"""Parts of an assessment, each against the direct way: frontier, curvature, conflicts, intervals."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import gram_at, random_gram
from scipy.stats import spearmanr
from torch import nn

from hamu import HamuError, HamuQ, HamuU
from hamu.assess import Conflicts, frontier, second_order
from hamu.assess.curvature import hessian_product, lanczos
from hamu.assess.gradients import (
    AssessedModel,
    PartedGram,
    gradient_alignment,
    norm,
    parted_gradient,
)
from hamu.assess.hardness import MUST_HURT, bootstrap, judge

F64 = torch.float64


def network(dtype=F64):
    torch.manual_seed(0)
    layers = nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).to(dtype)


def data(dtype=F64, count=60):
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(1), dtype=F64)
    return x.to(dtype), torch.arange(count) % 4


@pytest.mark.parametrize(("dtype", "least"), [(F64, 0.999), (torch.float32, 0.99)])
def test_gradient_alignment_ranks_the_records_as_backward_passes_do(dtype, least):
    model, (x, y) = network(dtype), data(dtype, 80)
    parameters = list(model.parameters())

    def gradient(first, last):
        loss = nn.functional.cross_entropy(model(x[first:last]), y[first:last])
        return torch.autograd.grad(loss, parameters)

    def losses():
        return nn.functional.cross_entropy(model(x[40:]), y[40:], reduction="none").double()

    retain, before = gradient(0, 40), [p.detach().clone() for p in parameters]
    ours = gradient_alignment(losses, parameters, retain, parameters)
    exact = [
        sum((a.double() * b.double()).sum().item() for a, b in zip(one, retain, strict=True))
        for one in (gradient(i, i + 1) for i in range(40, 80))
    ]
    assert spearmanr(ours, exact).statistic >= least
    assert ours.mean().item() == pytest.approx(sum(exact) / 40, rel=1e-6 if dtype == F64 else 1e-2)
    unused = torch.full((10,), 1e6, dtype=dtype)  # rows of an embedding that no text has
    ours = gradient_alignment(losses, parameters, retain, [*parameters, unused])
    assert spearmanr(ours, exact).statistic >= least
    with pytest.raises(ZeroDivisionError):
        gradient_alignment(lambda: 1 / 0, parameters, retain, parameters)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True)), "they are back"


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([6.0] + 18 * [0.25] + [-9.0], 6.25 / 10.5),
        ([-1.0, -2.0], 0.0),
        ([3.0, 1.0], 0.75),
        ([3.0, 1.0, math.nan], 0.75),
    ],
)
def test_the_share_of_the_top_tenth_counts_at_least_one_record(values, share):
    found = Conflicts(torch.tensor(values), torch.arange(len(values)))
    assert found.top_share == pytest.approx(share)
    assert found.top(1) == [{"row": values.index(max(values)), "value": max(values)}]


def test_small_gradients_of_half_precision_add_up():
    """One after the other into a bfloat16 sum, what is below its last digit would be lost."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = (torch.ones(800, 16) + 0.1 * torch.randn(800, 16)).to(dtype)
        records = [{"pixel_values": one, "labels": torch.tensor(0)} for one in x]
        model, collate = nn.Linear(16, 3).to(dtype), torch.utils.data.default_collate
        assessed = AssessedModel(model, records, records, collate, 4)
        (gradient,), _ = parted_gradient(assessed, "retain", 1)
        assert {g.dtype for g in gradient} == {torch.float32}
        found[dtype] = norm(gradient)
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.01)


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
@pytest.mark.parametrize("seed", range(5))
def test_the_frontier_is_theorem_1_for_one_block_and_free_up_to_its_limit(variant, seed):
    gram = random_gram(seed, blocks=1)
    n_o, n_c = gram.retain_norm.item(), gram.forget_norm.item()
    if variant is HamuU:
        n_o, n_c = n_c, n_o
    cos, sin = gram.cos.item(), gram.sin.item()
    found = frontier(gram, variant())
    costs = found.retain_change if variant is HamuQ else -found.forget_change
    for demand, cost in zip(found.demand.tolist(), costs.tolist(), strict=True):
        phi = demand / (n_o * n_c)
        rectified = n_o**2 * (phi * cos - max(0.0, 1 - phi * phi) ** 0.5 * sin)
        least = -(n_o**2) if cos <= -phi else rectified
        assert cost == pytest.approx(least, rel=1e-9, abs=1e-12 * n_o**2)
        assert (cost <= 1e-9 * n_o**2) == (demand <= found.free_limit)
    assert found.feasible_limit == pytest.approx(n_o * n_c)
    assert found.free_limit == pytest.approx(n_o * n_c * (sin if cos > 0 else 1.0))


def test_of_several_blocks_the_price_has_another_limit_than_the_criterion():
    several = frontier(gram_at([1.0, 1.0], [1.0, 1.0], [0.6, -0.5]), HamuQ())
    assert several.criterion_limit == pytest.approx(0.8 + 0.75**0.5)
    assert several.free_limit == pytest.approx(1.996, abs=1e-3)


def test_gradients_that_share_no_parameter_allow_no_demand():
    gram = gram_at([2.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    for method in (HamuQ(0.5, "relative"), HamuU(0.5, "relative")):
        found = judge(frontier(gram, method), method, gram, (1.0, 1.0), None)
        assert (found.code, found.constraint) == (MUST_HURT, 0.0)
        assert found.answer == "It will be very hard, do not start: no demand is free"


@pytest.mark.parametrize("method", [HamuQ(0.95, "relative"), HamuU(0.95, "relative")])
def test_the_price_in_the_verdict_is_that_of_the_step(method):
    gram = gram_at([2.0], [1.0], [0.5])
    weights = method.weigh(gram)
    retain, forget = gram.changes(weights.retain, weights.forget)
    price = abs(retain / forget) if method.name == "hamu-q" else abs(forget / retain)
    found = judge(frontier(gram, method), method, gram, (1.0, 1.0), 0.0129)
    assert f"{price:.3g}" in found.answer
    assert found.learning_rate == 0.012, "rounded down"


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
def test_the_verdict_on_a_clamped_demand_is_that_on_its_step(variant):
    """Blocks are clamped one by one: the first reaches its limit long before the others."""
    gram = gram_at([1.0, 0.1], [1.0, 0.2], [0.6, 0.5])
    method = variant(50.0, distribution="uniform", on_infeasible="clamp")
    weights = method.weigh(gram)
    retain, forget = gram.changes(weights.retain, weights.forget)
    assert (retain > 0) if variant is HamuQ else (forget < 0)
    curve = frontier(gram, method)
    assert curve.free_share == 1.0
    found = judge(curve, method, gram, (1.0, 1.0), None)
    assert found.code == 3
    assert found.reason.endswith("the demand is 50, clamped to 1.02.")


def test_a_product_with_the_hessian_is_the_dense_hessians():
    model, (x, y) = network(), data()
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    parameters = dict(model.named_parameters())
    sizes = [v.numel() for v in parameters.values()]

    def total(vector):
        parts = zip(parameters.items(), vector.split(sizes), strict=True)
        shaped = {name: part.view(v.shape) for (name, v), part in parts}
        return nn.functional.cross_entropy(torch.func.functional_call(model, shaped, (x,)), y)

    def loss(batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(x)

    start = torch.cat([v.detach().flatten() for v in parameters.values()])
    vector = torch.randn(len(start), dtype=F64)
    ours = hessian_product(loss, batches, list(parameters.values()))(vector)
    exact = torch.func.hessian(total)(start) @ vector
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_infinite_slopes_have_no_curvature():
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(HamuError, match="the Hessian is not finite: the loss has infinite slopes"):
        lanczos(hessian_product(lambda _: x.abs().pow(1.5).sum(), [None], [x]), [x])


def spread(size=12, smallest=0.5):
    """A symmetric matrix with a linear spectrum, and two vectors."""
    generator = torch.Generator().manual_seed(3)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=F64)).Q
    values = torch.linspace(smallest, 4.0, size, dtype=F64)
    return q @ torch.diag(values) @ q.T, *torch.randn(2, size, generator=generator, dtype=F64)


def spectrum_of(h, steps=None, tolerance=1e-9):
    like = torch.zeros(len(h), dtype=F64)
    return lanczos(lambda v: h @ v, [like], steps=steps or len(h), tolerance=tolerance)


def test_the_size_of_a_curvature_is_that_of_its_largest_eigenvalue_of_either_sign():
    h, *_ = spread(smallest=-6.0)
    assert spectrum_of(h).size == pytest.approx(6.0)


def test_the_spectrum_of_a_model_in_bfloat16_is_found_in_float32():
    scale = torch.linspace(-1.0, 3.0, 64)
    weights = torch.zeros(64, dtype=torch.bfloat16)
    found = lanczos(lambda v: scale * v, [weights], steps=64, tolerance=1e-6)
    assert (found.largest, found.smallest) == pytest.approx((3.0, -1.0), rel=1e-4)
    loss = lambda batch: (0.5 * scale * weights.square()).sum()  # noqa: E731
    product = hessian_product(loss, [None], [weights.requires_grad_()])
    assert product(torch.ones(64)).dtype == torch.float32


@pytest.mark.parametrize("demand", [0.01, 1.0, 30.0])
def test_the_second_order_condition_is_the_constrained_minimum(demand):
    """F against the problem of App. B.5, its optimality conditions solved as one linear system."""
    h, g_r, g_f = spread()
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum_of(h), demand, steps=50)
    free = torch.linalg.solve(h, -g_r)
    if g_f.dot(free) < demand:
        row = torch.cat([g_f, torch.zeros(1, dtype=F64)])
        system = torch.cat([torch.cat([h, -g_f[:, None]], 1), row[None]])
        free = torch.linalg.solve(system, torch.cat([-g_r, torch.tensor([demand], dtype=F64)]))[:-1]
    least = (g_r.dot(free) + 0.5 * free @ h @ free).item()
    assert found.least_retain_change == pytest.approx(least, rel=1e-3)
    assert found.unavoidable == (least > 0)
    assert found.positive_definite
    assert found.damping == 0
    norms, values = (g_r.norm() * g_f.norm()).item(), torch.linalg.eigvalsh(h)
    small, large = (1 / values[end].item() for end in (-1, 0))
    threshold = ((2 * large - small) * norms - demand) / small
    assert found.unavoidable or found.kappa <= threshold, "Lemma B.1 is sufficient"
    sphere = second_order(
        lambda v: 2 * v, g_r, g_f, spectrum_of(2 * torch.eye(12, dtype=F64)), demand
    )
    assert sphere.unavoidable == (sphere.kappa > norms - 2 * demand)  # ‖g_r‖‖g_f‖ - λQ, of H = λI


@pytest.mark.parametrize("span", [1.0, 1.5, 2.6, 4.0])
def test_a_solver_that_has_not_arrived_gives_no_verdict(span):
    """Ten products underestimate g'H⁻¹g: demands short of Q* = √(AB) - C would be unavoidable."""
    values = torch.logspace(0, -span, 400, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    spectrum = spectrum_of(torch.diag(values), steps=12, tolerance=1e-2)
    decided = 0
    for share in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 10.0):
        g_r, g_f = torch.randn(2, 400, generator=generator, dtype=F64)
        a, b, c = ((x * y / values).sum() for x, y in ((g_f, g_f), (g_r, g_r), (g_r, g_f)))
        demand = share * ((a * b).sqrt() - c).item()
        found = second_order(lambda v: values * v, g_r, g_f, spectrum, demand)
        if found.unavoidable is None:
            assert found.least_retain_change is None
            left = f"the solver left a residual of {found.residual:.2g} after 10 products"
            assert found.undecided == left
        else:
            decided += 1
            assert found.damping > 0 or found.unavoidable == (share > 1)
            assert found.undecided == ""
    assert (decided == 0) if span > 2 else (decided > 3)


def test_a_hessian_that_is_not_positive_definite_is_noticed():
    h, g_r, g_f = spread(smallest=-1.0)
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum_of(h), 0.1, steps=50)
    assert not found.positive_definite
    assert found.damping > 1.0
    spectrum = replace(spectrum_of(h), smallest=0.1)  # as if Lanczos had not come down there
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum, 0.1, steps=50)
    assert found.unavoidable is None
    assert found.undecided == "there is a direction of negative curvature"


def random_parts(sizes=(9, 11), blocks=3):
    """Products of random parts with a direction in common, for block 2 the reverse one."""
    draw = torch.Generator().manual_seed(4)
    products = []
    for block in range(blocks):
        common = torch.randn(40, generator=draw, dtype=F64)
        signs = (1, -1 if block == 2 else 1)
        noise = [1.5 * torch.randn(m, 40, generator=draw, dtype=F64) for m in sizes]
        both = torch.cat([sign * common + n for sign, n in zip(signs, noise, strict=True)])
        products.append(both @ both.T / 100)
    shares = tuple(torch.full((m,), 1 / m, dtype=F64) for m in sizes)
    return PartedGram(torch.stack(products), shares, 1e-16)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(
    "method",
    [
        HamuQ(0.6, "relative"),
        HamuU(0.3, "relative", "uniform"),
        HamuQ(0.002, distribution=(1.0, 2.0, 0.0)),
    ],
)
def test_intervals_are_those_of_a_loop_over_the_samples(method, max_grad_norm):
    """κ, cosθ and κ1 to κ4 of the whole model and of each block, one sample after the other."""
    parted, parts, generator = random_parts(), 9, torch.Generator().manual_seed(7)
    found = bootstrap(parted, method, max_grad_norm, replicates=60, level=0.8, seed=7)

    def figures(*counts):
        gram = parted.gram(*counts)
        gram = gram.scaled(*gram.clip_factors(max_grad_norm))
        yield torch.cat([gram.dot.sum(0, True), gram.dot])
        yield torch.cat([gram.total().cos, gram.cos])
        for cls in (HamuQ, HamuU):
            shared = (method.constraint, method.constraint_mode, method.distribution)
            status = cls(*shared).weigh(gram).constraint
            phi, norms = status.fraction.clamp(max=1), (gram.retain_sq * gram.forget_sq).sqrt()
            yield torch.cat([status.direct_threshold[None], -phi * norms])
            yield torch.cat([status.stop_threshold[None], (1 - phi**2).sqrt() * norms])

    samples = []
    for _ in range(60):
        draws = [torch.randint(m, (m,), generator=generator) for m in (9, 11)]
        counts = (d.bincount(minlength=m) for d, m in zip(draws, (9, 11), strict=True))
        samples.append(figures(*counts))
    known, drawn = list(figures()), [torch.stack(one) for one in zip(*samples, strict=True)]
    factor = (parts / (parts - 1)) ** 0.5
    moved = [(v - v.mean(0)) * factor + k for v, k in zip(drawn, known, strict=True)]
    levels = torch.tensor([0.1, 0.9], dtype=F64)
    ours = [found.kappa, found.cos]
    for at, sure in zip((2, 4), found.variants.values(), strict=True):
        ours += [sure.direct_threshold, sure.stop_threshold]
        direct, stop = ((moved[0] > known[at + which]).double().mean(0) for which in (0, 1))
        shares = torch.stack([1 - direct, direct - stop, stop], dim=-1)
        torch.testing.assert_close(sure.regimes, shares)
    for mine, values in zip(ours, moved, strict=True):
        theirs = values.quantile(levels, dim=0).movedim(0, -1)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("measured", "records"), [(64, 64), (64, 6_400)])
def test_the_noise_scale_is_that_of_the_records_whatever_the_parts(measured, records):
    """One record's gradient has the variance 40·1.5², its expectation the squared norm 40·0.2²."""
    draw, found = torch.Generator().manual_seed(0), []
    truth = 1.5**2 / 0.2**2
    cuts = [0, 5, 11, 20, 27, 35, 44, 53, 64]  # parts of unequal size
    for _ in range(300):
        one = 0.2 + 1.5 * torch.randn(measured, 40, generator=draw, dtype=F64)
        if measured == records:  # the set is the population: its own variance, exactly centred
            one = 0.2 + (one - one.mean(0)) / one.std(0) * 1.5
        parts = torch.stack([one[a:b].sum(0) / measured for a, b in pairwise(cuts)])
        shares = torch.tensor(cuts, dtype=F64).diff() / measured
        both = torch.cat([parts, parts])
        unmeasured = (1 - measured / records, 1 - measured / records)
        parted = PartedGram((both @ both.T)[None], (shares, shares), 1e-16, unmeasured)
        scale = parted.noise_scale("forget", measured)
        assert scale == pytest.approx(parted.noise_scale("retain", measured))
        found.append(math.nan if scale is None else 1 / scale)  # its reciprocal has no pole
    mean, error = torch.tensor(found).nanmean(), torch.tensor(found).std() / math.sqrt(len(found))
    assert mean == pytest.approx(1 / truth, rel=0.15)
    assert error < 0.1 / truth


def test_a_sample_of_the_records_tells_kappa_and_the_cosine_of_all():
    """Its noise lengthens both gradients, by a fifth of their squared norms."""
    draw, parts, cos = torch.Generator().manual_seed(0), 16, 0.9
    r, v = torch.linalg.qr(torch.randn(60, 2, generator=draw, dtype=F64)).Q.T
    sides = torch.stack([r, cos * r + (1 - cos**2) ** 0.5 * v])[:, None]
    found, of_sample, widths, covered = [], [], [], {"cos": 0, "kappa": 0}
    for seed in range(60):
        noise = torch.randn(2, parts, 60, generator=draw, dtype=F64) * (0.2 * parts / 60) ** 0.5
        both, shares = ((sides + noise) / parts).flatten(0, 1), torch.full((parts,), 1 / parts)
        parted = PartedGram((both @ both.T)[None], (shares.double(),) * 2, 1e-7)
        of_sample.append(parted.gram().cos.item())
        parted = parted._replace(unmeasured=(1.0, 1.0))
        found.append([parted.gram().cos.item(), parted.gram().dot.item()])
        sure = bootstrap(parted, HamuQ(0.5), None, replicates=100, seed=seed)
        for name in covered:  # the expected gradients have norm 1, so that both are the same
            low, high = getattr(sure, name)[0].tolist()
            covered[name] += low <= cos <= high
        widths.append(high - low)
    assert torch.tensor(found).mean(0).tolist() == pytest.approx([cos, cos], abs=0.03)
    assert sum(of_sample) / 60 < 0.8
    assert min(covered.values()) >= 54
    spread = torch.tensor(found)[:, 1].std().item()
    assert 2.4 < sum(widths) / 60 / spread < 5.9, "3.9 standard deviations, about"
