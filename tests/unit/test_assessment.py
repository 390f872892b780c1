"""The assessment as a whole: its figures against direct ones, its verdict, and that nothing is changed."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import gram_at
from torch import nn
from torch.utils.data import Dataset

from hamu import HamuError, HamuQ, HamuU, build_method
from hamu.assess import (
    CAN_IMPROVE,
    MUST_HURT,
    WILL_COST,
    Hessian,
    assess_model,
    assessment,
    bootstrap,
    conjugate_gradients,
    frontier,
    judge,
    lanczos,
    second_order,
)
from hamu.assess.gradients import (
    AssessedModel,
    PartedGram,
    affordable_parts,
    parted_gradient,
)
from hamu.assess.hardness import Hardness, constraint_status


class Points(Dataset):
    """Random points with labels."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"pixel_values": self.x[i], "labels": self.y[i]}


def collate(items):
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


RETAIN, FORGET = Points(90, 1), Points(40, 2)


def gradient(model, data):
    model.eval()
    loss = nn.functional.cross_entropy(model(data.x), data.y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_its_figures_are_those_of_the_mean_gradients():
    model = network()
    g_r, g_f = gradient(model, RETAIN), gradient(model, FORGET)
    found = assess_model(model, RETAIN, FORGET, collate=collate, max_grad_norm=None, batch_size=7)
    assert found.gradient_norms == pytest.approx((g_r.norm().item(), g_f.norm().item()))
    assert found.hamu_q.kappa == pytest.approx(g_r.dot(g_f).item())
    for side in ("forget", "retain"):
        assert found.conflicts[side].values.mean().item() == pytest.approx(
            g_r.dot(g_f).item(), rel=1e-5
        )
    assert found.blocks.kappa.sum().item() == pytest.approx(found.hamu_q.kappa)
    assert found.intervals.kappa[0] < found.hamu_q.kappa < found.intervals.kappa[1]
    assert sum(found.intervals.regimes.values()) == pytest.approx(1)
    found.record()


def test_the_parts_of_a_gradient_reweigh_to_any_sample():
    assessed = AssessedModel(network().eval(), RETAIN, FORGET, collate, batch_size=10)
    retain, forget = parted_gradient(assessed, "retain", 5), parted_gradient(assessed, "forget", 4)
    assert retain.shares.sum() == pytest.approx(1)
    parted = PartedGram.of(assessed, retain, forget)
    once = PartedGram.of(
        assessed, parted_gradient(assessed, "retain", 1), parted_gradient(assessed, "forget", 1)
    )
    torch.testing.assert_close(parted.gram().dot, once.gram().dot)
    # the first part twice, the last never: the mean over that sample
    records = assessed.positions("retain").tensor_split(5)
    sample = torch.cat([records[0], records[0], *records[1:4]])
    drawn = Points(1, 0)
    drawn.x, drawn.y = RETAIN.x[sample], RETAIN.y[sample]
    direct = gradient(assessed.model, drawn).norm().item()
    gram = parted.gram(torch.tensor([2, 1, 1, 1, 0]))
    assert gram.retain_sq.sum().sqrt().item() == pytest.approx(direct)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Against many draws of data from one source: a 90% interval for κ covers the source's κ in most of them."""
    model = network().eval()
    truth = gradient(model, Points(20_000, 5)).dot(gradient(model, Points(20_000, 6))).item()
    covered, widths, kappas = 0, [], []
    for seed in range(40):
        assessed = AssessedModel(
            model, Points(200, 100 + seed), Points(200, 200 + seed), collate, seed=seed
        )
        parted = PartedGram.of(
            assessed, *(parted_gradient(assessed, side, 16) for side in ("retain", "forget"))
        )
        low, high = bootstrap(parted, HamuQ(0.5, "relative"), None, replicates=100, level=0.9).kappa
        covered += low <= truth <= high
        widths.append(high - low)
        kappas.append(parted.gram().dot.sum().item())
    assert covered >= 30
    spread = torch.tensor(kappas).std().item()
    assert 2 * spread < sum(widths) / len(widths) < 5 * spread, "3.3 standard deviations, about"


def test_too_few_parts_give_no_interval():
    assert affordable_parts([torch.zeros(1000)], memory=1e-6) == 1
    assert affordable_parts([torch.zeros(1000)], memory=5.5e-5) == 1
    assert affordable_parts([torch.zeros(1000)], memory=7.5e-5) == 9
    assert affordable_parts([torch.zeros(1000)], memory=1.0) == 16
    assert affordable_parts([torch.zeros(1000, dtype=torch.bfloat16)], memory=7.5e-5) == 9, (
        "kept as float32"
    )
    assert (
        assess_model(network(), RETAIN, FORGET, collate=collate, bootstrap_memory=0).intervals
        is None
    )
    assert assess_model(network(), Points(7, 1), FORGET, collate=collate).intervals is None
    assert assess_model(network(), Points(8, 1), FORGET, collate=collate).intervals.parts == 8


@pytest.mark.parametrize("batch_size", [500, 4])
def test_the_graph_of_a_single_batch_is_made_once(batch_size, monkeypatch):
    """What is counted is what was done: 3.3 records' worth for the first product of a record, 2.3 for each other."""
    model, passes, products = network(), [], []
    product, score = Hessian.product, AssessedModel.score
    monkeypatch.setattr(
        AssessedModel,
        "score",
        lambda assessed, batch: passes.append(len(products)) or score(assessed, batch),
    )
    monkeypatch.setattr(
        Hessian, "product", lambda hessian, vector: products.append(1) or product(hessian, vector)
    )
    found = assess_model(
        model,
        RETAIN,
        FORGET,
        collate=collate,
        batch_size=batch_size,
        conflicts=False,
        curvature_samples=12,
    )
    passes = [done for done in passes if done]
    assert set(passes) == ({1} if batch_size == 500 else set(range(1, len(products) + 1)))
    assert len(passes) == (1 if batch_size == 500 else 3 * len(products))
    following = 2.3 if batch_size == 500 else 3.3
    assert found.epochs == pytest.approx(1 + 12 * (3.3 + (len(products) - 1) * following) / 130)


def test_it_looks_at_no_more_batches_than_it_is_told_to():
    found = assess_model(
        network(),
        RETAIN,
        FORGET,
        collate=collate,
        batch_size=10,
        most_batches=2,
        curvature_samples=0,
    )
    assert len(found.conflicts["retain"].values) == 20
    assert found.epochs == pytest.approx(2 * 20 * (1 + 2 / 3) / 130)
    assert found.curvature is None
    assert found.verdict.learning_rate is None


def test_a_loss_with_an_infinite_slope_has_no_curvature():
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(
        HamuError, match="the Hessian is not finite: the loss has infinite slopes at these weights"
    ):
        lanczos(Hessian(lambda batch: x.abs().pow(1.5).sum(), [None], [x]).product, [x])


def spread(size=12, smallest=0.5):
    generator = torch.Generator().manual_seed(3)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(smallest, 4.0, size, dtype=torch.float64)
    vectors = torch.randn(2, size, generator=generator, dtype=torch.float64)
    return q @ torch.diag(values) @ q.T, vectors[0], vectors[1]


def spectrum_of(h, steps=None, tolerance=1e-9):
    like = torch.zeros(len(h), dtype=torch.float64)
    return lanczos(lambda v: [h @ v[0]], [like], steps=steps or len(h), tolerance=tolerance)


def test_conjugate_gradients_solve():
    h, g, _ = spread()
    found = conjugate_gradients(lambda v: h @ v, g, tolerance=1e-10)
    torch.testing.assert_close(found.x, torch.linalg.solve(h, g))
    assert found.relative_residual < 1e-10
    assert conjugate_gradients(lambda v: -h @ v, g).negative


@pytest.mark.parametrize("demand", [0.01, 1.0, 30.0])
def test_the_second_order_condition_is_the_constrained_minimum(demand):
    """F against the problem of App. B.5 solved through its optimality conditions as one linear system."""
    h, g_r, g_f = spread()
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum_of(h), demand, steps=50)
    free = torch.linalg.solve(h, -g_r)
    if g_f.dot(free) < demand:
        system = torch.cat(
            [torch.cat([h, -g_f[:, None]], 1), torch.cat([g_f, torch.zeros(1)])[None].double()]
        )
        free = torch.linalg.solve(
            system, torch.cat([-g_r, torch.tensor([demand], dtype=torch.float64)])
        )[:-1]
    least = (g_r.dot(free) + 0.5 * free @ h @ free).item()
    assert found.least_retain_change == pytest.approx(least, rel=1e-3)
    assert found.unavoidable == (least > 0)
    assert found.positive_definite
    assert found.damping == 0
    if found.kappa > found.bound_threshold:
        assert found.unavoidable, "Lemma B.1 is only ever sufficient"


@pytest.mark.parametrize("span", [1.0, 1.5, 2.6, 4.0])
def test_a_solver_that_has_not_arrived_gives_no_verdict(span):
    """Ten products underestimate g'H⁻¹g: demands short of Q* = √(AB) - C would be called unavoidable."""
    values = torch.logspace(0, -span, 400, dtype=torch.float64)
    h = torch.diag(values)
    generator = torch.Generator().manual_seed(0)
    spectrum = spectrum_of(h, steps=12, tolerance=1e-2)
    told = 0
    for share in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 10.0):
        g_r, g_f = torch.randn(2, 400, generator=generator, dtype=torch.float64)
        a, b, c = ((x * y / values).sum() for x, y in ((g_f, g_f), (g_r, g_r), (g_r, g_f)))
        found = second_order(
            lambda v: values * v, g_r, g_f, spectrum, share * ((a * b).sqrt() - c).item()
        )
        if found.unavoidable is None:
            assert found.least_retain_change is None
            assert (
                found.undecided
                == f"the solver left a residual of {found.residual:.2g} after 10 products"
            )
        else:
            told += 1
            assert found.damping > 0 or found.unavoidable == (share > 1)
            assert found.undecided == ""
    assert (told == 0) if span > 2 else (told > 3)


def test_on_a_sphere_both_conditions_agree():
    _, g_r, g_f = spread()
    h = 2.0 * torch.eye(len(g_r), dtype=torch.float64)
    for demand in (0.1, 3.0, 30.0):
        found = second_order(lambda v: h @ v, g_r, g_f, spectrum_of(h), demand)
        assert found.unavoidable == found.spherical_unavoidable
        assert found.spherical_threshold == pytest.approx(
            (g_r.norm() * g_f.norm()).item() - 2 * demand
        )


def test_a_hessian_that_is_not_positive_definite_is_said_to_be():
    h, g_r, g_f = spread(smallest=-1.0)
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum_of(h), 0.1, steps=50)
    assert not found.positive_definite
    assert found.damping > 1.0
    spectrum = replace(spectrum_of(h), smallest=0.1)  # as if Lanczos had not come down there
    found = second_order(lambda v: h @ v, g_r, g_f, spectrum, 0.1, steps=50)
    assert found.unavoidable is None
    assert found.undecided == "there is a direction of negative curvature"


def test_the_error_ratio_is_that_of_the_step_that_will_be_taken():
    """½λ‖Δw‖²/(‖g_r‖‖Δw‖): HAMU-U's step is as long as the forget gradient, not the retain gradient."""
    model = network()
    for method in (HamuQ(0.5, "relative"), HamuU(0.5, "relative")):
        found = assess_model(
            model,
            RETAIN,
            FORGET,
            collate=collate,
            method=method,
            max_grad_norm=None,
            learning_rate=0.1,
        )
        n_r, n_f = found.gradient_norms
        length = 0.1 * (n_r if isinstance(method, HamuQ) else n_f)
        assert found.error_ratio == pytest.approx(0.5 * found.curvature.size * length / n_r)
        assert found.trusted_rate(found.error_ratio) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("cos", "constraint", "mode", "code", "headline"),
    [
        (-0.5, 0.5, "relative", CAN_IMPROVE, "can improve both"),
        (0.5, 0.5, "relative", CAN_IMPROVE, "can improve both"),
        (0.5, 0.95, "relative", WILL_COST, "retain loss per 1 of forget loss"),
        (0.9999, 0.5, "relative", MUST_HURT, "stop: next to nothing is free"),
        (1.0, 0.5, "relative", MUST_HURT, "stop: every step must hurt"),
        (0.9992, 0.02, "relative", CAN_IMPROVE, "can improve both, by next to nothing"),
        (0.5, 100.0, "absolute", MUST_HURT, "stop: the constraint cannot be met"),
    ],
)
def test_the_verdict(cos, constraint, mode, code, headline):
    method = HamuQ(constraint, mode)
    found = judge(frontier(gram_at([2.0], [1.0], [cos]), method), method, (1.0, 1.0), 0.0129)
    assert found.code == code
    assert headline in found.headline
    assert found.learning_rate == 0.012
    clamped = HamuQ(constraint, mode, on_infeasible="clamp")
    found = judge(frontier(gram_at([2.0], [1.0], [cos]), method), clamped, (1.0, 1.0), None)
    assert found.code == (WILL_COST if mode == "absolute" else code), (
        "clamped, the most that is possible is asked"
    )


def test_the_price_in_the_verdict_is_that_of_the_step():
    gram = gram_at([2.0], [1.0], [0.5])
    for method in (HamuQ(0.95, "relative"), HamuU(0.95, "relative")):
        weights = method.weigh(gram)
        retain = -(weights.retain * gram.retain_sq + weights.forget * gram.dot).item()
        forget = -(weights.retain * gram.dot + weights.forget * gram.forget_sq).item()
        price = abs(retain / forget) if method.name == "hamu-q" else abs(forget / retain)
        headline = judge(frontier(gram, method, points=401), method, (1.0, 1.0), None).headline
        assert f"{price:.2g}" in headline or f"{price:.3g}" in headline


def test_nothing_of_an_assessment_is_computed_in_tf32(monkeypatch):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.cudnn.conv.fp32_precision)
            return super().forward(x)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = Watched(6, 3).double()
    found = assess_model(model, RETAIN, FORGET, collate=collate, curvature_samples=8)
    assert found.curvature is not None
    assert set(found.conflicts) == {"retain", "forget"}
    assert set(seen) == {"ieee"}
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_nothing_is_changed():
    model = network().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assess_model(model, RETAIN, FORGET, collate=collate)
    assert torch.equal(torch.rand(3), expected), "the random state"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert model[2].training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None


def random_parts(sizes=(9, 11), blocks=3):
    """Products of random parts with a direction in common, for block 2 the reverse one."""
    draw = torch.Generator().manual_seed(4)
    products = []
    for block in range(blocks):
        common = torch.randn(40, generator=draw, dtype=torch.float64)
        signs = (1, -1 if block == 2 else 1)
        noise = [1.5 * torch.randn(m, 40, generator=draw, dtype=torch.float64) for m in sizes]
        both = torch.cat([sign * common + n for sign, n in zip(signs, noise, strict=True)])
        products.append(both @ both.T / 100)
    shares = [torch.full((m,), 1 / m, dtype=torch.float64) for m in sizes]
    return PartedGram(torch.stack(products), *shares, 1e-16)


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
        yield from (gram.dot.sum(), gram.total().cos[0], gram.dot, gram.cos)
        for cls in (HamuQ, HamuU):
            shared = (method.constraint, method.constraint_mode, method.distribution)
            status = cls(*shared).weigh(gram).constraint
            phi, norms = status.fraction.clamp(max=1), (gram.retain_sq * gram.forget_sq).sqrt()
            yield from (status.direct_threshold, status.stop_threshold)
            yield from (-phi * norms, (1 - phi**2).sqrt() * norms)

    samples = []
    for _ in range(60):
        draws = [torch.randint(m, (m,), generator=generator) for m in (9, 11)]
        samples.append(
            figures(*(d.bincount(minlength=m) for d, m in zip(draws, (9, 11), strict=True)))
        )
    known, drawn = list(figures()), [torch.stack(one) for one in zip(*samples, strict=True)]
    moved = [
        (v - v.mean(0)) * (parts / (parts - 1)) ** 0.5 + k
        for v, k in zip(drawn, known, strict=True)
    ]
    levels = torch.tensor([0.1, 0.9], dtype=torch.float64)
    ends = [v.quantile(levels, dim=0).movedim(0, -1) for v in moved]
    ours = [found.kappa, found.cos, found.block_kappa, found.block_cos]
    for number, sure in enumerate(found.variants.values()):
        ours += [sure.direct_threshold, sure.stop_threshold]
        ours += [sure.block_direct_threshold, sure.block_stop_threshold]
        whole, block = (
            [(moved[kappa] > known[at + which]).double().mean(0) for which in (0, 1)]
            for kappa, at in ((0, 4 + 4 * number), (2, 6 + 4 * number))
        )
        direct, stop = (torch.cat([w[None], b]) for w, b in zip(whole, block, strict=True))
        shares = torch.stack([1 - direct, direct - stop, stop], dim=-1)
        told = torch.tensor(list(sure.regimes.values()), dtype=torch.float64)
        torch.testing.assert_close(torch.cat([told[None], sure.block_regimes]), shares)
    for mine, theirs in zip(ours, ends, strict=True):
        mine = torch.as_tensor(mine, dtype=torch.float64)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert found.regimes == found.variants[method.name].regimes


def test_the_regime_of_the_estimate_is_that_of_most_replicates_if_its_interval_is_there():
    """Resampled gradients are longer, which would pull every replicate towards an easier regime."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(200, generator=draw, dtype=torch.float64)
    noise = [2.0 * torch.randn(16, 200, generator=draw, dtype=torch.float64) for _ in range(2)]
    both = torch.cat([common + n for n in noise])
    shares = torch.full((16,), 1 / 16, dtype=torch.float64)
    parted = PartedGram((both @ both.T)[None], shares, shares, 1e-16)
    method = HamuQ(0.75, "relative")
    assert Hardness.at(constraint_status(parted.gram(), method)).regime == "unavoidable"
    found = bootstrap(parted, method, None, replicates=200)
    assert found.regimes["unavoidable"] > 0.5


def test_each_block_has_both_variants_thresholds_with_intervals():
    method = HamuU(0.05, radius=0.5)  # with its own radius each side would have the same shares
    model, settings = network(), {"collate": collate, "method": method, "curvature_samples": 0}
    record = json.loads(json.dumps(assess_model(model, RETAIN, FORGET, **settings).record()))
    assert record["intervals"]["regimes"] == record["intervals"]["hamu-u"]["regimes"]
    assert len(record["blocks"]) == len(list(model.parameters()))
    for block in record["blocks"]:
        assert block["regime"] == block["hamu-u"]["regime"]
        assert block["kappa_interval"][0] < block["kappa"] < block["kappa_interval"][1]
        for variant in ("hamu-q", "hamu-u"):
            of = block[variant]
            above = (block["kappa"] > of["direct_threshold"]) + (
                block["kappa"] > of["stop_threshold"]
            )
            assert of["regime"] == ["direct", "rectified", "unavoidable"][above]
            for key in ("direct_threshold", "stop_threshold"):
                assert of[f"{key}_interval"][0] < of[f"{key}_interval"][1]
            assert sum(of["regimes"].values()) == pytest.approx(1)
    few = assess_model(model, Points(7, 1), FORGET, **settings).record()["blocks"][0]["hamu-q"]
    assert set(few) == {"direct_threshold", "stop_threshold", "regime"}


class Untaught(nn.Embedding):
    """A language model of two tokens."""

    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm -1.0 must be positive, or None for no clipping"),
        ({"learning_rate": math.nan}, "learning_rate nan must be a positive number"),
        ({"most_batches": 0}, r"most_batches \(--assess_batches\) 0 must be at least 1"),
        ({"batch_size": 0}, "batch_size 0 must be at least 1 record"),
        ({"curvature_samples": -1}, "must not be negative; 0 for no curvature"),
        ({"bootstrap_memory": math.inf}, "bootstrap_memory inf must be a number of GB, 0 or more"),
        ({"method": build_method("gdiff")}, "method 'gdiff' has no constraint"),
        ({"method": "hamu-q"}, "method 'hamu-q' has no constraint"),
        ({"forget": Points(0, 1)}, "the forget set is empty"),
        ({"model": network().requires_grad_(False)}, "no trainable parameter"),
    ],
)
def test_what_cannot_be_assessed_is_refused(settings, message):
    usual = {"model": network(), "retain": RETAIN, "forget": FORGET, "collate": collate}
    with pytest.raises(HamuError, match=message):
        assess_model(**usual | settings)


def test_gradients_that_are_zero_not_finite_or_of_nothing_are_refused():
    model = network()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    data = Points(20, 3)
    data.y.zero_()
    with pytest.raises(HamuError, match="the gradient of the retain loss is zero"):
        assess_model(model, data, FORGET, collate=collate)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(HamuError, match="retain loss is not finite"):
        assess_model(model, RETAIN, FORGET, collate=collate)
    unscored = [{"input_ids": torch.tensor([0, 1]), "labels": torch.tensor([-100, -100])}] * 4
    with pytest.raises(HamuError, match="the retain set has nothing that is scored"):
        assess_model(Untaught(2, 2), unscored, unscored, collate=collate)


@pytest.mark.parametrize("batch_size", [4, 500])
@pytest.mark.parametrize(("retain", "forget"), [(2, 1), (3, 3), (20, 5), (90, 40), (2000, 100)])
def test_it_costs_at_most_three_epochs_and_reports_its_progress(retain, forget, batch_size):
    told, sets = [], (Points(retain, 1), Points(forget, 2))
    settings = {"collate": collate, "batch_size": batch_size}
    found = assess_model(network(), *sets, progress=lambda *of: told.append(of), **settings)
    assert found.epochs <= 3
    assert (found.curvature is None) == (found.second_order is None) == (retain + forget < 11)
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][1]
    found = assess_model(network(), *sets, curvature_samples=2, **settings)
    assert found.curvature_samples == 2, "whatever it costs"


def test_no_batch_of_a_part_is_much_smaller_than_the_others(monkeypatch):
    """1,307 and 131 records in batches of 128 are 13 passes; 16 parts of both sides would be 32."""
    sizes, score = [], AssessedModel.score
    monkeypatch.setattr(
        AssessedModel,
        "score",
        lambda one, batch: sizes.append(len(batch["labels"])) or score(one, batch),
    )
    quick = {"collate": collate, "conflicts": False, "curvature_samples": 0}
    assess_model(network(), Points(1307, 1), Points(131, 2), batch_size=128, **quick)
    assert (len(sizes[:11]), len(sizes[11:])) == (11, 8)
    assert (min(sizes[:11]), min(sizes[11:])) == (118, 16)
    sizes.clear()
    assess_model(network(), Points(10, 1), Points(7, 2), **quick)
    assert sizes == [10, 7], "without intervals no parts"


def test_the_solver_has_what_the_spectrum_leaves(monkeypatch):
    steps = []
    monkeypatch.setattr(
        assessment,
        "second_order",
        lambda *of, **by: steps.append(by["steps"]) or second_order(*of, **by),
    )
    for count in (14, 30, 80, 1000):
        found = assess_model(network(), Points(count, 1), Points(6, 2), collate=collate)
        undecided = found.second_order.undecided
        assert (steps[-1] == 0) == undecided.startswith("so few records pay for no product")
    assert steps == sorted(steps)
    assert (steps[0], steps[-2:]) == (0, [10, 10])
