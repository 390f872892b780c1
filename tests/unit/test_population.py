"""Running estimates of the expected gradients: unbiased, exact without noise, resumed bit by bit."""

import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import Holder, step_of

from hamu import HamuQ, HamuU, PairedGradients, PairGram
from hamu.core.distributed import Layout
from hamu.core.gram_meter import GramMeter
from hamu.core.population import (
    FEWEST,
    GROUPS,
    SAMPLED,
    SUMMED,
    Population,
    PopulationStatus,
    judged,
)

SIZES = (100, 120)
RELATIVE = {"constraint_mode": "relative"}


def same(numbers):
    return numbers


def expected(cos=0.6, seed=0):
    """Expected gradients of both sides, of norm 1 in each block."""
    g = torch.Generator().manual_seed(seed)
    sides = ([], [])
    for size in SIZES:
        r, v = torch.randn(2, size, generator=g)
        r /= r.norm()
        v -= v.dot(r) * r
        sides[0].append(r)
        sides[1].append(cos * r + math.sqrt(1 - cos * cos) * v / v.norm())
    return sides


def noisy(sides, deviation, generator):
    return [[g + deviation * torch.randn(g.shape, generator=generator) for g in s] for s in sides]


def populations(draws, *settings):
    """A population for each half-life and passes, after these gradients."""
    like = draws[0][0]
    found = [Population(like, range(len(like)), len(like), *each) for each in settings]
    meter = GramMeter(like, range(len(like)))
    for retain, forget, *share in draws:
        gram = meter.measure(retain, forget)
        for population in found:
            population.add(retain, forget, gram, None, *share)
    return found


def filled(draws, half_life=1e6):
    return populations(draws, (half_life,))[0]


def estimated(population):
    sums = population.sums(same)
    return population.grams(sums["ends"][0], sums["weights"], population.lines(sums["weights"])[0])


@pytest.fixture(scope="module")
def repeated():
    """100 runs: a population that forgets and one that does not, squared norms of a batch."""
    sides, generator = expected(), torch.Generator().manual_seed(1)
    found = []
    for _ in range(100):
        draws = [noisy(sides, 0.2, generator) for _ in range(64)]
        batch = torch.stack([g.double().square().sum() for g in draws[0][0]])
        found.append((*populations(draws, (64,), (1e6,)), batch))
    return found


def test_norms_dot_and_squared_dot_are_unbiased_where_those_of_a_batch_are_not(repeated):
    found = []
    for _, population, _ in repeated:
        gram, dot = estimated(population)
        one = PairGram(gram.retain_sq[:, 0], gram.forget_sq[:, 0], gram.dot[:, 0])
        found.append(torch.stack([one.retain_sq, one.forget_sq, dot, one.dot.square()]))
    found = torch.stack(found)
    truth = torch.tensor([1.0, 1.0, 0.6, 0.36], dtype=torch.float64)[:, None]
    error = found.std(0) / math.sqrt(len(found))
    assert error.max() < 0.01
    # eight means of 100 draws each: all lie within four standard errors but in 1 of 2,000 tests
    assert ((found.mean(0) - truth).abs() < 4 * error).all()
    assert (torch.stack([batch for *_, batch in repeated]).mean(0) > 1.5).all()


def test_the_standard_error_is_that_of_repeated_runs_by_the_criterion(repeated):
    """Of a block alone it is larger than of the sum over blocks."""
    errors = {}
    for criterion, method, max_norm in (
        ("aggregate", HamuQ(0.5, **RELATIVE), 1.0),
        ("any", HamuQ(0.5, **RELATIVE, stopping="any"), 1.0),
        ("absolute", HamuQ(0.5), 1.0),
        ("unclipped", HamuQ(1.0), None),
    ):
        found = [one.judge(one.sums(same), method, max_norm) for one, *_ in repeated]
        headroom, error = torch.tensor([[one.headroom, one.error] for one in found]).T
        assert error.mean().item() == pytest.approx(headroom.std().item(), rel=0.35)
        if criterion != "any":
            assert headroom.mean().item() == pytest.approx(1.6, abs=0.03)  # sinθ/φ = 0.8/0.5
        errors[criterion] = torch.stack([headroom.std(), error.mean()])
    assert (errors["any"] > 1.1 * errors["aggregate"]).all()


@pytest.mark.parametrize("method", [HamuQ(0.5, **RELATIVE), HamuU(0.5), HamuQ(0.5)])
def test_without_noise_the_estimate_is_the_batch_itself(method):
    sides = expected()  # the one record, or all of them, in every batch
    population = filled([sides] * 16, half_life=8.0)
    status = population.judge(population.sums(same), method, 1.0)
    gram = GramMeter(sides[0], range(2)).measure(*sides)
    exact = method.weigh(gram.scaled(*gram.clip_factors(1.0))).constraint
    assert status.headroom == pytest.approx((exact.free_limit / exact.clipped_demand).item(), 1e-5)
    assert status.kappa == pytest.approx(exact.kappa.item(), 1e-5)
    assert status.regime == exact.regime.item()
    assert status.error == pytest.approx(0.0, abs=1e-5)
    assert status.retain_noise == pytest.approx(0.0, abs=1e-5)
    assert status.confidence() in (pytest.approx(0.0), pytest.approx(1.0))


def test_the_noise_of_each_side_is_its_variance_over_the_squared_norm():
    sides, generator, draws = expected(), torch.Generator().manual_seed(2), []
    for _ in range(400):
        draws.append([noisy([g], d, generator)[0] for g, d in zip(sides, (0.2, 0.1), strict=True)])
    population = filled(draws, half_life=1600.0)
    status = population.judge(population.sums(same), HamuQ(0.5, **RELATIVE), 1.0)
    of_one = sum(SIZES) / len(SIZES)  # times the variance of an entry, of blocks of norm 1
    assert status.retain_noise == pytest.approx(0.2**2 * of_one, rel=0.05)
    assert status.forget_noise == pytest.approx(0.1**2 * of_one, rel=0.05)


@pytest.mark.parametrize(("headroom", "error", "margin", "confidence"), [
    (0.9, 0.1, 0.0, 0.8045), (1.1, 0.1, 0.0, 0.1955), (1.1, 0.1, 0.3, 0.9303), (0.9, 0.0, 0.0, 1.0), (1.1, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_confidence_is_that_of_an_error_of_few_groups(headroom, error, margin, confidence):
    """By the tables of Student's t with 3 degrees of freedom."""
    status = PopulationStatus(headroom, error, *[0] * 10)
    assert status.confidence(margin) == pytest.approx(confidence, abs=1e-4)


@pytest.mark.parametrize(("passes", "which", "settling"), [
    (4.5, 0, 0.4), (4.0, 1, 0.1), (7.3, 0, 0.4), (40.0, 0, 0.4), (40.0, 1, 0.1),
])  # fmt: skip
def test_an_estimate_is_the_end_of_a_line_and_keeps_the_noise_that_its_passes_leave(
    passes, which, settling
):
    steps = 90  # times begin anew after 20
    one_hot = [([row], [row]) for row in torch.eye(steps)]
    population = populations(one_hot, (20.0, (passes, math.inf)))[0]
    sums = population.sums(same)
    weights, step = sums["ends"][which, :GROUPS].sum(0).double(), torch.arange(steps)
    age = steps - 1.0 - step.double()
    counts, ridge = 0.5 ** (age / 20.0), (settling * 20.0) ** 3 / 12
    ones, ages, squares = (counts @ age**power for power in range(3))
    end_of_line = counts * (squares + ridge - ages * age) / (ones * (squares + ridge) - ages**2)
    assert weights.tolist() == pytest.approx(end_of_line.tolist(), abs=1e-5)
    begins = torch.arange(0, steps, passes)[:, None]
    in_pass = torch.minimum(begins + passes, step + 1) - torch.maximum(begins, step)
    of_passes = in_pass.clamp(min=0).double() @ weights
    left = 1.0 - of_passes.square().sum() / passes / weights.square().sum()
    found = population._noise_left(population.lines(sums["weights"])[which])
    assert found.tolist() == pytest.approx([left.item(), 1.0], abs=1e-4)


def test_an_estimate_in_doubt_must_be_further_below_one():
    assert judged(0.94, 0.1) < 1.0 < judged(0.96, 0.1)
    assert judged(0.39, 0.3) < 1.0 < judged(0.41, 0.3)
    assert judged(0.1, math.inf) == math.inf


def test_a_sample_of_a_large_tensor_stands_for_all_of_it():
    generator = torch.Generator().manual_seed(3)
    retain = [torch.randn(300, 200, generator=generator).T]  # not contiguous
    forget = [0.5 * retain[0] + torch.randn(200, 300, generator=generator)]
    gram, dot = estimated(filled([(retain, forget)] * 16))
    exact = GramMeter(retain, [0]).measure(retain, forget)
    # a mean of 128 squares of normal entries has a relative deviation of √(2/128) = 0.125
    assert gram.retain_sq[0, 0] == pytest.approx(exact.retain_sq.item(), rel=0.5)
    assert (dot / gram.retain_sq[:, 0]).item() == pytest.approx(0.5, abs=4 / math.sqrt(SAMPLED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_is_known_however_few_rows_hold_most_of_its_gradient(dtype):
    """One, some, or all alike; normal errors of the products are 1/√SUMMED of the norms."""
    generator, rows = torch.Generator().manual_seed(6), torch.arange(2000)
    for size in (1 + 500 * (rows == 7), 1 + 9 * (rows % 50 == 0), torch.ones(2000)):
        errors = []
        for columns in (64, 65, 128, 200):
            one, other = torch.randn(2, 2000, columns, generator=generator)
            pair = [size[:, None] * one, size[:, None] * (0.5 * one + other)]
            retain, forget = ([g.to(dtype)] for g in pair)
            gram, dot = estimated(filled([(retain, forget)] * 12))
            norms = torch.stack([gram.retain_sq[:, 0], gram.forget_sq[:, 0]])
            exact = GramMeter(retain, [0]).measure(retain, forget)
            squares = torch.stack([exact.retain_sq, exact.forget_sq])
            errors += (norms / squares - 1.0).flatten().tolist()
            errors.append(((dot - exact.dot) / squares.prod().sqrt()).item())
        assert torch.tensor(errors).square().mean().sqrt() < 2 / math.sqrt(SUMMED)


def test_autocast_does_not_round_the_sums_of_an_embedding():
    gradients = [torch.randn(2000, 64, generator=torch.Generator().manual_seed(8))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = filled([(gradients, gradients)] * 6).state_dict()["sums"]
    assert torch.equal(rounded, filled([(gradients, gradients)] * 6).state_dict()["sums"])


def test_the_matrices_of_adapters_are_sampled_as_others_are():
    gradients = [torch.ones(4096, 8)], [torch.ones(4096, 8)]
    sums = filled([gradients] * 12).state_dict()["sums"]
    assert SAMPLED / 2 < sums.shape[-1] < 2 * SAMPLED


def test_equal_entries_and_the_last_ones_of_an_embedding_count_as_the_others_do():
    alike, last = torch.ones(4096, 256), torch.zeros(4096, 256)
    last[-1] = 1.0
    for gradient, off in ((alike, 0.1), (last, 1e-6)):
        gram, _ = estimated(filled([([gradient], [gradient])] * 12))
        assert gram.retain_sq[0, 0] == pytest.approx(gradient.square().sum().item(), rel=off)


@pytest.mark.parametrize("shape", [(16, 6, 5, 5), (20, 100)])
def test_no_column_or_place_of_a_kernel_is_left_out(shape):
    """The distance of sampled entries divides no dimension."""
    for axis, size in enumerate(shape):
        for place in range(size):
            one = torch.zeros(shape)
            one.select(axis, place).fill_(1.0)
            gram, _ = estimated(filled([([one], [one])] * 12))
            assert gram.retain_sq[0, 0] > 0


@pytest.mark.parametrize(("records", "size"), [(40, 8), (36, 8), (8, 8), (20, 15), (1, 1)])
def test_records_drawn_once_a_pass_leave_less_noise(records, size):
    """Passes of 5 steps, of 4.5 (a batch has records of two), of one, of 1⅓, and of one record."""
    generator = torch.Generator().manual_seed(5)
    mean = expected()[0]
    own = [g + 0.5 * torch.randn(records, *g.shape, generator=generator) for g in mean]
    truth = torch.stack([g.mean(0).double().square().sum() for g in own])
    passes = records / size
    corrected, wrong = [], []
    for _ in range(40):
        order = torch.cat([torch.randperm(records, generator=generator) for _ in range(30)])
        steps = [[g[rows].mean(0) for g in own] for rows in order.split(size)]
        draws = [(step, noisy([mean], 0.1, generator)[0]) for step in steps[: int(20 * passes)]]
        both = populations(draws, (10.0, (max(1.0, passes), math.inf)), (10.0,))
        for population, norms in zip(both, (corrected, wrong), strict=True):
            norms.append(estimated(population)[0].retain_sq[:, 0])
    corrected, wrong = torch.stack(corrected), torch.stack(wrong)
    error = corrected.std(0) / math.sqrt(len(corrected))
    assert ((corrected.mean(0) - truth).abs() <= 4 * error + 0.01 * truth).all()
    if passes > 1:  # products of different steps are of different records, too small on average
        assert ((wrong.mean(0) - truth) < -8 * error).all()


@pytest.mark.parametrize(("records", "size"), [(36, 8), (17, 8), (40, 8)])
def test_a_short_step_weighs_by_its_records(records, size):
    generator = torch.Generator().manual_seed(5)
    mean = expected()[0]
    own = [g + 0.5 * torch.randn(records, *g.shape, generator=generator) for g in mean]
    truth = sum(g.mean(0).double().square().sum() for g in own)
    of_batches = sum(g.double().var(0).sum() for g in own) * (math.ceil(records / size) - 1)
    norms, squares = [], []
    for trial in range(60):  # that end at all places of a pass
        passes = [torch.randperm(records, generator=generator).split(size) for _ in range(12)]
        steps = [rows for one in passes for rows in one][: -(trial % len(passes[0])) or None]
        draws = [
            ([g[rows].mean(0) for g in own], noisy([mean], 0.1, generator)[0], len(rows) / size)
            for rows in steps
        ]
        [population] = populations(draws, (10.0, (records / size, math.inf)))
        norms.append(estimated(population)[0].retain_sq[:, 0].sum())
        line = population.lines(population._weights)[0]
        squares.append(torch.einsum("m,msl->s", line, population._squares.view(2, 2, -1))[0])
    for found, right in ((norms, truth), (squares, truth + of_batches / records)):
        found = torch.stack(found)
        assert abs(found.mean() - right) <= 4 * found.std() / math.sqrt(60)


def test_a_cosine_whose_norms_are_lost_in_noise_is_not_known():
    torch.manual_seed(0)
    pair = PairedGradients(
        Holder([torch.zeros(4)]), HamuQ(0.5, "relative"), half_life=8, steps_per_pass=None
    )
    steps = run(pair, [([torch.randn(4)], [torch.randn(4)]) for _ in range(40)])
    known = [step.population for step in steps if step.population is not None]
    assert any(math.isnan(one.cos) for one in known)
    assert all(abs(one.cos) <= 1.0 for one in known if not math.isnan(one.cos))
    assert all(math.isinf(one.error) for one in known if math.isinf(one.headroom))


def run(pair, draws):
    steps = []
    for retain, forget in draws:
        steps.append(step_of(pair, retain, forget))
        if steps[-1].should_stop:
            break
    return steps


def drawn(count, cos, seed=4, deviation=0.4):
    sides, generator = expected(cos), torch.Generator().manual_seed(seed)
    return [noisy(sides, deviation, generator) for _ in range(count)]


def pair_of(**settings):
    like = expected()[0]
    return PairedGradients(Holder(like), HamuQ(0.9, **RELATIVE), **settings)


def test_noise_hides_the_criterion_from_a_batch_but_not_from_the_population():
    draws = drawn(200, cos=0.9)  # headroom sinθ/φ = 0.48
    assert not run(pair_of(), draws)[-1].should_stop
    steps = run(pair_of(half_life=40.0), draws)
    assert steps[-1].should_stop
    assert FEWEST <= len(steps) < 100
    assert re.search(
        r"; confidence \d+% by this estimate alone(, whose angle is lost in noise)?$",
        steps[-1].reason,
    )
    status = steps[-1].population
    assert isinstance(status, PopulationStatus)
    assert status.conflict
    assert status.retain_noise > 2
    assert [step.population for step in steps[: FEWEST - 1]] == [None] * (FEWEST - 1)


@pytest.mark.parametrize(("speed", "deviation", "is_quick"), [
    (0.02, 0.0, True), (0.02, 0.05, True), (0.02, 0.5, False), (0.0, 0.05, False),
])  # fmt: skip
def test_a_headroom_that_falls_within_a_half_life_lags_only_where_noise_hides_it(
    speed, deviation, is_quick
):
    """Of two ridges the smaller is taken where their headrooms differ for certain."""
    method, off = HamuQ(0.9, **RELATIVE), []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        cos = [0.6 + speed * (t - 30) for t in range(40)]
        population = filled([noisy(expected(c), deviation, generator) for c in cos], 80.0)
        sums = population.sums(same)
        lines = zip(sums["ends"], population.lines(sums["weights"]), strict=True)
        grams = [population.grams(ends, sums["weights"], line)[0] for ends, line in lines]
        wholes = [PairGram(*(parts[:, 0] for parts in gram.sums().values())) for gram in grams]
        clipped = [gram.scaled(*gram.clip_factors(1.0)) for gram in wholes]
        both = [method.weigh(gram).constraint.headroom for gram in clipped]
        assert population.judge(sums, method, 1.0).headroom == both[is_quick]
        truth = math.sqrt(1.0 - cos[-1] ** 2) / 0.9
        off.append([abs(headroom - truth) for headroom in both])
    steady, quick = torch.tensor(off).mean(0).tolist()
    assert quick < 0.4 * steady if is_quick else steady < quick


def test_a_sustainable_demand_is_never_stopped():
    steps = run(pair_of(half_life=40.0), drawn(200, cos=0.0))
    assert len(steps) == 200
    assert steps[-1].population.headroom == pytest.approx(1 / 0.9, abs=0.15)


def test_a_resumed_run_goes_on_bit_by_bit_and_its_state_stays_as_it_was():
    draws = drawn(80, cos=0.9)
    whole, first, second = (pair_of(half_life=30.0) for _ in range(3))
    steps = run(whole, draws)
    cut = len(steps) - 5
    run(first, draws[:cut])
    state = first.state_dict()
    run(first, draws[cut:])  # the run that left the state goes on, too
    second.load_state_dict(state)
    rest = run(second, draws[cut:])
    assert repr([step.population for step in rest]) == repr([one.population for one in steps[cut:]])
    ours, theirs = second.state_dict()["population"], whole.state_dict()["population"]
    assert all(torch.equal(ours[n].nan_to_num(), theirs[n].nan_to_num()) for n in ours)


def test_running_means_begin_anew_from_a_state_without_and_end_in_a_pair_without():
    """A run may go on in another layout, which has none."""
    draws = drawn(20, cos=0.0)
    with_means, without = pair_of(half_life=30.0), pair_of()
    with_means.load_state_dict(without.state_dict())
    run(with_means, draws)
    without.load_state_dict(with_means.state_dict())
    assert run(without, draws)[-1].population is None


@pytest.mark.parametrize("finite", [0, 1, 2])
def test_too_few_finite_gradients_give_no_estimate(finite):
    draws, pair = drawn(24, cos=0.9, deviation=0.1), pair_of(half_life=8.0)
    for number, (retain, _) in enumerate(draws[: 16 - finite]):
        retain[number % 2][0] = math.nan
    status = run(pair, draws[:16])[-1].population
    assert status is None or status.error == math.inf, "nothing is concluded"
    assert run(pair, draws[16:])[-1].population is not None


def test_the_scale_of_a_loss_scaler_drops_out():
    draws = drawn(20, cos=0.2, deviation=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, scaled = pair_of(half_life=30.0), pair_of(half_life=30.0)
    steps = run(plain, draws)
    for retain, forget in draws:
        step = step_of(
            scaled, *([1024 * g for g in one] for one in (retain, forget)), scaler=scaler
        )
    assert vars(step.population) == pytest.approx(vars(steps[-1].population))


def test_a_tensor_that_only_one_side_reaches_has_no_conflict():
    generator, like = torch.Generator().manual_seed(0), [torch.zeros(5), torch.zeros(3)]
    pair = PairedGradients(Holder(like), HamuQ(0.9, **RELATIVE), half_life=20.0)
    draws = []
    for _ in range(20):
        g = torch.ones(5) + 0.1 * torch.randn(5, generator=generator)
        draws.append(([g, None], [g, torch.ones(3)]))
    last = run(pair, draws)[-1]
    assert last.should_stop  # by the tensor that both reach
    assert math.isfinite(last.population.headroom)


def test_without_a_criterion_nothing_is_kept():
    method = HamuQ(0.5, **RELATIVE, stopping="off")
    pair = PairedGradients(Holder(expected()[0]), method, half_life=20.0)
    assert "population" not in pair.state_dict()
    assert run(pair, drawn(20, cos=0.9))[-1].population is None


def test_a_method_with_a_memory_weighs_the_expected_gradients_by_it_too():
    class Eased(HamuQ):
        first_memory = (0.9,)

        def weigh(self, gram):
            status = HamuQ(gram.memory.item(), **RELATIVE).weigh(gram)
            return replace(status, memory=0.99 * gram.memory)

    pair = PairedGradients(Holder(expected()[0]), Eased(), half_life=20.0)
    for number, draw in enumerate(drawn(20, cos=0.0, deviation=0.0)):
        found = step_of(pair, *draw, losses=torch.ones(2)).population
        if number >= FEWEST:
            assert found.headroom == pytest.approx(1 / (0.9 * 0.99**number), rel=1e-3)


def test_processes_decide_by_the_sums_that_they_agree_on():
    class First(Layout):
        """The first process finds that both sides point the same way; this one, that they do not."""

        def agree(self, numbers):
            return torch.cat([numbers[:, :GROUPS], numbers[:, :GROUPS]], 1)

    pair = pair_of(half_life=40.0)
    pair.use(First(pair.parameters, pair.block_of))
    steps = run(pair, drawn(200, cos=0.0))
    assert (len(steps), steps[-1].should_stop) == (FEWEST, True)
