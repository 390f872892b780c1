"""The assessment as a whole: its figures against direct ones, its answer, and nothing changed."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from helpers import gram_at, hamu_q_update, is_as, state_of
from torch import nn
from torch.utils.data import Dataset, default_collate

from hamu import HamuError, HamuQ, HamuU, build_method
from hamu.assess import REGIMES, assess_model, assessment, frontier, plain_answer
from hamu.assess.gradients import AssessedModel, PartedGram, kept_parts, parted_gradient
from hamu.cli.commands import _curvature, _hardness_table


class Points(Dataset):
    def __init__(self, count, seed, label=None):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (count,), generator=generator)
        if label is not None:
            self.y[count // 2] = label

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"pixel_values": self.x[i], "labels": self.y[i]}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


RETAIN, FORGET = Points(90, 1), Points(40, 2)
QUICK = {"curvature_samples": 0, "conflicts": False}


def assessed(retain=RETAIN, forget=FORGET, model=None, **settings):
    return assess_model(model or network(), retain, forget, collate=default_collate, **settings)


def gradient(model, data):
    model.eval()
    loss = nn.functional.cross_entropy(model(data.x), data.y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_curvature_that_does_not_fit_in_memory_is_left_out(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(assessment, "lanczos", full)
    with pytest.warns(UserWarning, match="the curvature is left out"):
        found = assessed(curvature_samples=20)
    assert (found.curvature, found.curvature_samples) == (None, 0)
    assert found.conflicts


def test_its_figures_are_those_of_the_mean_gradients():
    g_r, g_f = gradient(network(), RETAIN), gradient(network(), FORGET)
    n_r, n_f, kappa = g_r.norm().item(), g_f.norm().item(), g_r.dot(g_f).item()
    for method, length in ((HamuQ(0.5, "relative"), n_r), (HamuU(0.5, "relative"), n_f)):
        settings = {"method": method, "learning_rate": 0.1, "max_grad_norm": None}
        settings |= {"curvature_samples": 20}
        found = assessed(batch_size=7, **settings)
        assert found.gradient_norms == pytest.approx((n_r, n_f))
        assert found.hamu_q.kappa == pytest.approx(kappa)
        for side in ("forget", "retain"):
            assert found.conflicts[side].values.mean().item() == pytest.approx(kappa, rel=1e-5)
        low, high = found.intervals.kappa[0]
        assert low < kappa < high
        # ½λ‖Δw‖²/(‖g_r‖‖Δw‖): HAMU-U's step is as long as the forget gradient
        ratio = 0.5 * found.curvature.size * 0.1 * length / n_r
        assert found.error_ratio == pytest.approx(ratio)
        assert found.trusted_rate(found.error_ratio) == pytest.approx(0.1)
    blocks = found.record()["blocks"]
    assert sum(block["kappa"] for block in blocks) == pytest.approx(kappa)
    for block in blocks:
        ends = block["intervals"]["hamu-q"]
        thresholds = [block["hamu-q"][key] for key in ("direct_threshold", "stop_threshold")]
        passed = sum(block["kappa"] > one for one in thresholds)
        assert block["hamu-q"]["regime"] == REGIMES[passed]
        assert block["regime"] == block["hamu-u"]["regime"]
        assert all(ends[key][0] < ends[key][1] for key in ("direct_threshold", "stop_threshold"))
        assert sum(ends["regimes"].values()) == pytest.approx(1)


def test_records_in_conflict_are_told_apart_by_a_small_part_of_a_large_model():
    """A step in proportion to the trained weights alone would be lost in rounding."""
    model = network().float().eval().requires_grad_(False)
    bias = model[3].bias.requires_grad_()
    nn.init.constant_(bias, 1e-4)

    def single(items):
        floats = [item | {"pixel_values": item["pixel_values"].float()} for item in items]
        return default_collate(floats)

    found = assess_model(model, RETAIN, FORGET, collate=single, curvature_samples=0)
    sides = {"retain": RETAIN, "forget": FORGET}
    slopes = {s: model(of.x.float()).softmax(1) - torch.eye(3)[of.y] for s, of in sides.items()}
    for side, other in (("retain", "forget"), ("forget", "retain")):
        conflicts = found.conflicts[side]
        exact = (slopes[side] @ slopes[other].mean(0))[conflicts.rows].double()
        assert (conflicts.values - exact).norm() < 0.01 * exact.norm()


def test_each_side_has_its_own_clip_factor_and_each_variant_its_hardness():
    norms = {side: gradient(network(), of).norm().item() for side, of in (("retain", RETAIN), ("forget", FORGET))}  # fmt: skip
    short, long = sorted(norms, key=norms.get)
    most = (norms[short] + norms[long]) / 2
    found = assessed(method=HamuU(0.01, radius=0.05), max_grad_norm=most, learning_rate=0.02)
    record = json.loads(json.dumps(found.record()))
    assert record["gradient_norms"] == pytest.approx(norms)
    assert record["clip_factors"] == pytest.approx({short: 1.0, long: most / norms[long]}, rel=1e-5)
    assert record["records"] == {"retain": 90, "forget": 40}
    settings = [record[key] for key in ("method", "constraint", "constraint_mode")]
    assert settings == ["hamu-u", 0.01, "absolute"]
    assert record["hamu-u"] == asdict(found.hamu_u) == asdict(found.hardness)
    assert found.hamu_u.stop_threshold != pytest.approx(found.hamu_q.stop_threshold)


def test_the_curvature_is_that_of_the_mean_loss():
    """Of all records in several batches; that of the sum would double."""
    twice = torch.utils.data.ConcatDataset([RETAIN, RETAIN])
    once, again = (
        assessed(of, batch_size=15, curvature_samples=len(of), conflicts=False)
        for of in (RETAIN, twice)
    )
    assert again.curvature.largest == pytest.approx(once.curvature.largest, rel=0.02)


def test_the_screen_says_that_a_damped_problem_is_unavoidable_not_the_model():
    found = assessed(curvature_samples=90, conflicts=False)
    words = []
    for unavoidable, damping in ((True, 0.25), (True, 0.0), (False, 0.25), (None, 0.25)):
        second = replace(found.second_order, unavoidable=unavoidable, damping=damping)
        words.append([*_curvature(replace(found, second_order=second))][-1][1])
    assert words == ["unavoidable for H + 0.25·I", "unavoidable", "avoidable", "undecided"]


def test_the_screen_counts_the_regimes_of_blocks_with_a_gradient():
    """The first factor of a fresh adapter has none, as the second is zero."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False)).double()
    nn.init.zeros_(model[1].weight)
    found = assessed(model=model, **QUICK)
    assert found.blocks.regime.tolist() == [0, 1]
    names, values, *_ = (column.cells for column in _hardness_table(found).columns)
    shown = dict(zip(names, values, strict=True))
    assert shown["blocks that are direct, rectified, unavoidable"] == "0, 1, 0"
    noisy = replace(found, noise_scales={"retain": 1234.5678, "forget": 0.25})
    _, values, *_ = (column.cells for column in _hardness_table(noisy).columns)
    assert "1,234.6, 0.2" in [*values]


def test_it_looks_at_no_more_batches_than_asked():
    found = assessed(batch_size=10, most_batches=2, curvature_samples=0)
    assert len(found.conflicts["retain"].values) == 20
    assert found.epochs == pytest.approx(2 * 20 * (1 + 2 / 3) / 130)
    assert found.curvature is found.verdict.learning_rate is None


def test_a_frontier_by_a_sample_gives_at_least_what_it_demands():
    """The noise is taken off the norms, which can leave less than the product of the gradients."""
    longer = False
    for seed in range(6):
        found = assessed(batch_size=8, most_batches=2, seed=seed, **QUICK)
        points = found.frontiers["hamu-q"]
        assert (points.forget_change >= points.demand - 1e-9).all()
        limit = (found.gram.retain_sq * found.gram.forget_sq).sqrt()
        longer = longer or (found.gram.dot.abs() >= 0.999999 * limit).any()
    assert longer, "no product was too large"


def test_the_changes_in_the_verdict_are_those_of_the_losses_as_they_are():
    """Clipping shortens the gradients; the changes are those of the losses all the same."""
    model = network()
    gradients = [gradient(model, data) for data in (RETAIN, FORGET)]
    short = [g * min(1.0, 0.1 / (g.norm().item() + 1e-6)) for g in gradients]
    norms = [g.norm() for g in short]
    step, _ = hamu_q_update(*short, 0.5 * norms[0] * norms[1], norms[0])
    retain, forget = (g.dot(step).item() for g in gradients)
    settings = {"learning_rate": 0.02, "max_grad_norm": 0.1, "blocks": "model"}
    settings |= {"curvature_samples": 20}
    found = assessed(method=HamuQ(0.5, "relative"), **settings)
    changes = re.findall(r"the (\w+) loss by ([+-][\d.e-]+)·η", found.verdict.reason)
    predicted = {side: float(change) for side, change in changes}
    assert predicted == pytest.approx({"retain": retain, "forget": forget}, rel=2e-3)
    assert found.second_order.demand == pytest.approx(0.02 * forget), "Q in loss"


def test_the_parts_of_a_gradient_reweigh_to_any_sample():
    found = AssessedModel(network().eval(), RETAIN, FORGET, default_collate, batch_size=10)
    retain, forget = parted_gradient(found, "retain", 5), parted_gradient(found, "forget", 4)
    assert retain[1].sum() == pytest.approx(1)
    parted = PartedGram.of(found, retain, forget)
    once = [parted_gradient(found, side, 1) for side in ("retain", "forget")]
    torch.testing.assert_close(parted.gram().dot, PartedGram.of(found, *once).gram().dot)
    # the first part twice, the last never: the mean over that sample
    records = found.positions("retain").tensor_split(5)
    sample = torch.cat([records[0], records[0], *records[1:4]])
    drawn = Points(1, 0)
    drawn.x, drawn.y = RETAIN.x[sample], RETAIN.y[sample]
    direct = gradient(found.model, drawn).norm().item()
    gram = parted.gram(torch.tensor([2, 1, 1, 1, 0]), torch.ones(4))
    assert gram.retain_sq.sum().sqrt().item() == pytest.approx(direct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # both kept as float32
@pytest.mark.parametrize(
    ("memory", "records", "parts"), [(5.5e-5, 20, 1), (7.5e-5, 20, 9), (1.0, 20, 16), (1.0, 7, 1)]
)
def test_as_many_parts_are_kept_as_memory_allows_and_none_if_too_few(memory, dtype, records, parts):
    sets = Points(20, 1), Points(20, 2)
    found = AssessedModel(nn.Linear(999, 1).to(dtype), *sets, default_collate, batch_size=1)
    assert kept_parts(found, {"retain": 20, "forget": records}, memory)["retain"] == parts


def test_without_enough_parts_there_is_no_interval():
    few = assessed(Points(7, 1), **QUICK)
    record = few.record()
    assert few.agreement is record["intervals"] is record["blocks"][0]["intervals"] is None


@pytest.mark.parametrize(("batch_size", "following"), [(500, 2.3), (4, 3.3)])
def test_the_graph_of_a_single_batch_is_made_once(batch_size, following, monkeypatch):
    """The count is of what was done: 3.3 records for a record's first product, 2.3 for others."""
    calls = []
    product_of, score = assessment.hessian_product, AssessedModel.score

    def counted(*of):
        product = product_of(*of)
        return lambda v: calls.append("product") or product(v)

    monkeypatch.setattr(assessment, "hessian_product", counted)
    monkeypatch.setattr(AssessedModel, "score", lambda *of: calls.append("score") or score(*of))
    found = assessed(batch_size=batch_size, conflicts=False, curvature_samples=12)
    products = calls.count("product")
    passes = calls[calls.index("product") :].count("score")
    assert passes == (1 if batch_size == 500 else 3 * products)
    assert found.epochs == pytest.approx(1 + 12 * (3.3 + (products - 1) * following) / 130)


def test_nothing_of_an_assessment_is_computed_in_tf32(monkeypatch):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.cudnn.conv.fp32_precision)
            return super().forward(x)

    before = torch.backends.cudnn.conv.fp32_precision
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = assessed(model=Watched(6, 3).double(), curvature_samples=8)
    assert found.curvature is not None
    assert set(found.conflicts) == {"retain", "forget"}
    assert set(seen) == {"ieee"}
    assert torch.backends.cudnn.conv.fp32_precision == before


def test_nothing_is_changed():
    model = network().train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, random = state_of(model), torch.get_rng_state()
    assessed(model=model)
    assert torch.equal(torch.get_rng_state(), random)
    assert is_as(model, before)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None


class Untaught(nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm -1.0 must be positive, or None for no clipping"),
        ({"learning_rate": math.nan}, "learning_rate nan must be a positive number"),
        ({"most_batches": 0}, r"most_batches \(--assess_batches\) 0 must be a whole number"),
        ({"batch_size": 2.5}, "batch_size 2.5 must be a whole number from 1 on"),
        ({"learning_rate": "1e-4"}, "learning_rate '1e-4' must be a positive number"),
        ({"curvature_samples": -1}, "curvature_samples -1 must be a whole number from 0 on"),
        ({"bootstrap_memory": math.inf}, "bootstrap_memory inf must be a number of GB, 0 or more"),
        ({"method": build_method("gdiff")}, "method 'gdiff' has no constraint"),
        ({"method": "hamu-q"}, "method 'hamu-q' has no constraint"),
        ({"forget": Points(0, 1)}, "the forget set is empty"),
        ({"model": network().requires_grad_(False)}, "no trainable parameter"),
        ({"forget": Points(40, 2, label=-100)}, "label -100 does not fit the model"),
        ({"retain": Points(9, 2, label=3)}, "label 3 does not fit the model, which predicts 3"),
    ],
)
def test_what_cannot_be_assessed_is_refused(settings, message):
    with pytest.raises(HamuError, match=message):
        assessed(**settings)


def test_gradients_that_are_zero_not_finite_or_of_nothing_are_refused():
    model, data = network(), Points(20, 3)
    data.y.zero_()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    with pytest.raises(HamuError, match="the gradient of the retain loss is zero"):
        assessed(data, model=model)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(HamuError, match="retain loss is not finite"):
        assessed(model=model)
    unscored = [{"input_ids": torch.tensor([0, 1]), "labels": torch.tensor([-100, -100])}] * 4
    with pytest.raises(HamuError, match="the retain set has nothing that is scored"):
        assessed(unscored, unscored, Untaught(2, 2))


def test_a_part_in_which_nothing_is_scored_adds_no_noise():
    torch.manual_seed(0)
    tokens = torch.randint(5, (24, 4))
    labels = tokens.clone()
    drawn = AssessedModel(Untaught(5, 5), tokens, tokens, default_collate).positions("forget")
    labels[drawn[:2]] = -100
    records = [{"input_ids": ids, "labels": of} for ids, of in zip(tokens, labels, strict=True)]
    sample = {"batch_size": 16, "most_batches": 1}  # 8 parts of 2 records
    found = assessed(records, records, Untaught(5, 5), **sample, **QUICK)
    assert found.intervals.kappa.isfinite().all()
    assert all(math.isfinite(scale) for scale in found.noise_scales.values())


@pytest.mark.parametrize("batch_size", [4, 500])
@pytest.mark.parametrize(("retain", "forget"), [(2, 1), (20, 5), (70, 5), (90, 40), (2000, 100)])
def test_it_costs_at_most_three_epochs_and_reports_its_progress(retain, forget, batch_size):
    reports, sets = [], (Points(retain, 1), Points(forget, 2))
    found = assessed(*sets, batch_size=batch_size, progress=lambda *of: reports.append(of))
    assert found.epochs <= 3
    assert (found.curvature is None) == (found.second_order is None) == (retain + forget < 299)
    done = [done for done, _ in reports]
    assert done == sorted(done)
    assert done[-1] == reports[-1][1]
    found = assessed(*sets, batch_size=batch_size, curvature_samples=2)
    assert found.curvature_samples == 2, "whatever it costs"


@pytest.fixture(scope="module")
def found():
    return assessed(batch_size=10, most_batches=2, **QUICK)


def at_cosines(found, cosines, method):
    """The assessment of a method, of blocks with these cosines."""
    gram = gram_at([2.0] * len(cosines), [1.0] * len(cosines), cosines)
    frontiers = {method.name: frontier(gram, method)}
    return replace(found, method=method, gram=gram, frontiers=frontiers)


NEXT_TO_NOTHING = "It will be very hard: this demand costs nothing, but it forgets next to nothing"


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
@pytest.mark.parametrize(
    ("cosines", "constraint", "code", "answer"),
    [
        ([-0.5], 0.5, 0, "It will be easy, start: "),
        ([0.8], 0.5, 0, "It will be moderately hard, start: "),
        ([0.98], 0.1, 0, "It will be hard, start: "),
        ([0.98], 0.5, 3, "It will be hard, and this demand has a price: it will "),
        ([0.98], 0.5, 3, "start with --constraint_mode relative --constraint 0.1, which is free"),
        ([0.5], 100.0, 4, "Do not start with this demand, which no step can meet"),
        ([0.9995], 0.5, 4, "do not start: only 3.2% of what is possible is free"),
        ([0.9992], 0.02, 0, NEXT_TO_NOTHING),
        ([1.0, 1.0], 0.5, 4, "do not start: no demand is free"),
    ],
)
def test_it_answers_how_hard_it_will_be(found, variant, cosines, constraint, code, answer):
    judged = at_cosines(
        found, cosines, variant(constraint, "relative" if constraint < 1 else "absolute")
    )
    assert judged.verdict.code == code
    assert answer in plain_answer(judged)
    clamped = replace(judged, method=replace(judged.method, on_infeasible="clamp"))
    assert clamped.verdict.code == (3 if constraint > 1 else code), "the most is asked"


def test_not_all_is_free_where_a_little_has_a_price(found):
    judged = at_cosines(found, [0.07], HamuQ(0.9999, "relative"))
    assert judged.verdict.code == 3
    assert "is free (99.8%)" in judged.verdict.reason


OFF = "with --stopping off (the criterion {} is met)"


@pytest.mark.parametrize(
    ("cosines", "stopping", "answer"),
    [
        ([0.98], "aggregate", f"accept that {OFF}, "),
        ([0.98], "off", "accept that, or start"),
        ([0.5, 0.98], "any", f"start {OFF}: "),
        ([0.5, 0.98], "aggregate", "start: "),
    ],
)
def test_it_says_where_the_stopping_criterion_would_end_the_run(found, cosines, stopping, answer):
    judged = at_cosines(found, cosines, HamuQ(0.5, "relative", stopping=stopping))
    assert answer.format(stopping) in plain_answer(judged)
    small_is_stopped = stopping == "any"  # by its hardest block, whatever is asked
    assert ("--stopping off" in judged.verdict.suggestion) == small_is_stopped


@pytest.mark.parametrize(
    ("scales", "largest"),
    [((12.3, 4.0), 13), ((0.0, 0.0), 1), ((7.0, 1e6), 90), ((5.0, None), None)],
)
def test_a_batch_is_worth_its_price_up_to_the_larger_noise_scale(found, scales, largest):
    given = dict(zip(("retain", "forget"), scales, strict=True))
    assert replace(found, noise_scales=given).worthwhile_batch == largest


def test_records_that_show_nothing_but_noise_are_too_few():
    """Every point has all three labels, which the model cannot tell: the mean gradient is 0."""
    balanced, model, refused = Points(90, 1), network(), []
    balanced.x, balanced.y = balanced.x[:30].repeat(3, 1), torch.arange(3).repeat_interleave(30)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    for seed in range(10):
        try:
            assessed(balanced, model=model, batch_size=16, most_batches=1, seed=seed, **QUICK)
        except HamuError as error:
            refused.append(str(error))
    assert 2 <= len(refused) <= 8
    assert all("records measured are too few" in one for one in refused)
