"""What is known before a run: the frontier, the curvature, the records in conflict, each against the direct way."""

import math

import pytest
import torch
from helpers import gram_at, random_gram
from scipy.stats import spearmanr
from torch import nn

from hamu import HamuError, HamuQ, HamuU
from hamu.assess import BlockHardness, Hessian, frontier, gradient_alignment, lanczos, share_of_top
from hamu.assess.gradients import AssessedModel, norm, parted_gradient
from hamu.assess.hardness import constraint_status


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 4)
    ).to(dtype)


def data(dtype=torch.float64, count=60):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 10, generator=generator, dtype=torch.float64).to(dtype), torch.arange(
        count
    ) % 4


@pytest.fixture
def problem():
    model, (x, y) = network(), data()
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    return (
        model,
        batches,
        lambda b: nn.functional.cross_entropy(model(b[0]), b[1], reduction="sum") / len(x),
    )


def dense_hessian(model, batches, loss):
    names, values = zip(*model.named_parameters(), strict=True)
    sizes = [v.numel() for v in values]

    def total(flat):
        shaped = {
            n: part.view(v.shape)
            for n, v, part in zip(names, values, flat.split(sizes), strict=True)
        }
        logits = [torch.func.functional_call(model, shaped, (x,)) for x, _ in batches]
        labels = torch.cat([y for _, y in batches])
        return nn.functional.cross_entropy(torch.cat(logits), labels)

    return torch.func.hessian(total)(torch.cat([v.detach().flatten() for v in values]))


def curvature_of(loss, batches, parameters, **settings):
    return lanczos(Hessian(loss, batches, parameters).product, parameters, **settings)


def test_a_product_with_the_hessian_is_the_dense_hessians(problem):
    model, batches, loss = problem
    vector = [torch.randn_like(p) for p in model.parameters()]
    ours = torch.cat(
        [
            part.flatten()
            for part in Hessian(loss, batches, list(model.parameters())).product(vector)
        ]
    )
    exact = dense_hessian(*problem) @ torch.cat([v.flatten() for v in vector])
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_the_curvature_of_a_quadratic_says_which_learning_rate_to_trust():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)
    found = curvature_of(lambda _: 0.5 * (scale * w * w).sum(), [None], [w], steps=10)
    assert found.largest == pytest.approx(20.0)
    assert found.error_ratio(0.001) == pytest.approx(0.01)
    assert found.trusted_rate(0.01) == pytest.approx(0.001)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 0.999), (torch.float32, 0.99)])
def test_gradient_alignment_rank_the_records_as_backward_passes_do(dtype, least):
    model, (x, y) = network(dtype), data(dtype, 80)
    parameters = list(model.parameters())
    retain = torch.autograd.grad(nn.functional.cross_entropy(model(x[:40]), y[:40]), parameters)
    before = [p.detach().clone() for p in parameters]
    ours = gradient_alignment(
        lambda: nn.functional.cross_entropy(model(x[40:]), y[40:], reduction="none").double(),
        parameters,
        retain,
    )
    exact = []
    for i in range(40, 80):
        grads = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters
        )
        exact.append(
            sum((a.double() * b.double()).sum().item() for a, b in zip(grads, retain, strict=True))
        )
    assert spearmanr(ours, exact).statistic >= least
    assert ours.mean().item() == pytest.approx(
        sum(exact) / 40, rel=1e-6 if dtype == torch.float64 else 1e-2
    )
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True)), (
        "the weights are back"
    )


def test_weights_are_restored_when_a_pass_fails():
    w = nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        gradient_alignment(lambda: 1 / 0, [w], [torch.ones(3)])
    assert torch.equal(w.detach(), torch.ones(3))
    with pytest.raises(HamuError, match=r"has length 0\.0"):
        gradient_alignment(lambda: torch.zeros(1), [w], [torch.zeros(3)])


def test_the_share_of_the_top_records():
    assert share_of_top(torch.tensor([6.0, 2.0, 1.0, 1.0, -9.0]), 0.2) == pytest.approx(0.6)
    assert share_of_top(torch.tensor([-1.0, -2.0])) == 0.0
    assert share_of_top(torch.tensor([3.0, 1.0])) == pytest.approx(0.75), (
        "of fewer than ten records, the first"
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_frontier_is_theorem_1_for_one_block(seed):
    gram = random_gram(seed, blocks=1)
    n_r, n_f, cos, sin = (
        t.item() for t in (gram.retain_norm, gram.forget_norm, gram.cos, gram.sin)
    )
    found = frontier(gram, HamuQ())
    for q, change in zip(found.demand.tolist(), found.retain_change.tolist(), strict=True):
        phi = q / (n_r * n_f)
        least = (
            -(n_r**2)
            if cos <= -phi
            else n_r**2 * (phi * cos - max(0.0, 1 - phi * phi) ** 0.5 * sin)
        )
        assert change == pytest.approx(least, rel=1e-9, abs=1e-12 * n_r**2)
    assert found.feasible_limit == pytest.approx(n_r * n_f)
    assert found.free_limit == pytest.approx(n_r * n_f * (sin if cos > 0 else 1.0))


@pytest.mark.parametrize(("cos", "regime"), [(-0.6, 0), (-0.4, 1), (0.8, 1), (0.9, 2)])
def test_the_regime_of_a_block_is_told_by_its_angle_and_the_share_of_the_demand(cos, regime):
    """At half of what is possible: direct up to -0.5, unavoidable from √(1 - 0.5²) = 0.87 on."""
    found = BlockHardness.at(
        constraint_status(gram_at([2.0, 1.0], [3.0, 1.0], [cos, 0.0]), HamuQ(0.5, "relative"))
    )
    assert found.regime.tolist() == [regime, 1]
    assert found.kappa.tolist() == pytest.approx([6 * cos, 0.0])


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
def test_no_demand_beyond_the_free_limit_is_free(variant):
    found = frontier(gram_at([2.0], [3.0], [0.6]), variant())
    cost = found.retain_change if variant is HamuQ else -found.forget_change
    free = found.demand <= found.free_limit
    assert (cost[free] <= 1e-9).all()
    assert (cost[~free] > 0).all()
    assert free.any()
    assert (~free).any()


def test_small_gradients_of_half_precision_add_up():
    """One after the other into a bfloat16 sum, what is below its last digit would be lost."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = (torch.ones(800, 16) + 0.1 * torch.randn(800, 16)).to(dtype)
        records = [{"pixel_values": one, "labels": torch.tensor(0)} for one in x]
        assessed = AssessedModel(
            nn.Linear(16, 3).to(dtype), records, records, torch.utils.data.default_collate, 4
        )
        gradient = parted_gradient(assessed, "retain", 1)
        assert {g.dtype for g in gradient.parts[0]} == {torch.float32}
        found[dtype] = math.sqrt(sum(g.double().square().sum().item() for g in gradient.total()))
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.01)


def test_the_criterion_and_the_price_of_several_blocks_set_different_limits():
    found = frontier(gram_at([1.0, 1.0], [1.0, 1.0], [0.6, -0.5]), HamuQ())
    assert found.criterion_limit == pytest.approx(0.8 + 0.75**0.5)
    assert found.free_limit == pytest.approx(1.996, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_one_entry_that_is_not_finite_shows_in_the_largest(dtype, bad):
    tensors = [torch.ones(3, dtype=dtype), torch.zeros(1000, dtype=dtype), torch.ones(0)]
    assert norm(tensors, math.inf) == 1
    assert norm([torch.zeros(3)], math.inf) == norm([]) == 0
    tensors[1][999] = bad
    assert not math.isfinite(norm(tensors, math.inf))


def test_the_length_is_that_of_one_vector_in_float64():
    tensors = [torch.randn(7, 40).T, torch.full((3,), 1e30), torch.ones(0)]
    expected = torch.cat([t.double().flatten() for t in tensors]).norm().item()
    assert norm(tensors) == pytest.approx(expected, rel=1e-14)
