"""The paper's experiments without a run: what is planned, how figures are taken, when a claim holds."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from helpers import random_gram
from run_files import read, write_rows

from experiments.falling import DEMAND, FallingHamu, RisingFalcon, falls
from experiments.league import DEFAULT, _mean, added, entries, ranked, table
from experiments.paper import EXPERIMENTS, Scale, Trained
from experiments.paper.batches import Batches
from experiments.paper.common import BASELINES, METHODS, pearson_of
from experiments.paper.constraints import line_through_origin, reached
from experiments.paper.cost import median_interval
from experiments.paper.finished_run import FinishedRun
from experiments.paper.page import check_output, page, results_in
from experiments.paper.planning import PaperRun, batches_of, longest, run_of, settings_of_run
from experiments.paper.results import refreshed_result, result_of
from experiments.paper.sampling import Sample, sample_images
from experiments.paper.similarity import volumes_of
from experiments.paper.stage import Stage
from experiments.stopping import row
from hamu import HamuQ, build_method
from hamu.data import read_images, read_text
from hamu.errors import HamuError
from hamu.unlearning.run_folder import RunFolder

BASE = {"data": "train.parquet", "data_dir": "somewhere"}
BASE |= {"per_device_train_batch_size": 500, "learning_rate": 1e-4}
SCALE = Scale("cifar10-resnet20", BASE, False, 0.1, None, None, 42)


def settings(wanted, retain=4500):
    sample = Sample({"data": "sample.npz"}, retain)
    return settings_of_run(wanted, BASE, sample, batches_of(wanted, BASE, retain), "model", 42, {})


@pytest.mark.parametrize("retain", [45_000, 4_500, 1_307, 261, 100])
def test_an_epoch_has_the_papers_number_of_steps_at_any_scale(retain):
    for name in ("figure-3", "figure-8"):
        for wanted in EXPERIMENTS[name].runs(SCALE).values():
            found = settings(wanted, retain)
            batch = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]
            assert math.ceil(retain / batch) == 9
            assert found["per_device_train_batch_size"] <= 500
            assert wanted.steps == 45
    for key, wanted in EXPERIMENTS["table-2"].runs(SCALE).items():
        found = settings(wanted, 45_000)
        batch = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]
        assert batch == pytest.approx(int(key), rel=0.01)


def test_the_same_run_wanted_twice_is_one_run_and_any_other_setting_makes_another():
    run = run_of(settings(SCALE.wanted("hamu-q", 5, rho=0.0)))
    assert run == run_of(settings(SCALE.wanted("hamu-q", 5, rho=0.0)))
    assert run.setting == run_of(settings(SCALE.wanted("hamu-q", 25, rho=0.0))).setting
    for other in (SCALE.wanted("hamu-q", 5, rho=0.25), SCALE.wanted("hamu-q", 5, rho=0.0, blocks="model"),
                  SCALE.wanted("hamu-u", 5, rho=0.0)):  # fmt: skip
        assert run.setting != run_of(settings(other)).setting


def test_a_longer_run_serves_a_shorter_one_only_if_it_begins_alike_and_may_be_cut():
    short, long, longer = (PaperRun("ft", "abc", epochs) for epochs in (5.0, 10.0, 25.0))
    other = PaperRun("ft", "def", 5.0)
    served = {short: longer, longer: longer, other: other}
    assert longest({key: {} for key in served}, [], ()) == served
    assert longest({short: {}}, [long, longer], ()) == {short: long}, "the shortest finished one"
    assert longest({longer: {}}, [short], ()) == {longer: longer}
    assert longest({short: {}}, [longer], {short}) == {short: short}
    assert longest({short: {"lr_scheduler_type": "linear"}}, [longer], ()) == {short: short}
    wanted = {short: {}, long: {}, longer: {}}
    # what failed serves no other
    assert longest(wanted, [], (), [longer]) == {short: long, long: long, longer: longer}
    alone = {one: one for one in wanted}
    assert longest(wanted, [longer], (), [longer, long]) == alone


def test_a_sample_has_the_same_share_of_each_class_and_is_drawn_once(tmp_path):
    base = {"data": "digits", "forget_class": "3"}
    folder = RunFolder(tmp_path / "data", resume=True)
    tenth = sample_images(base, 0.1, 1, folder)
    whole = sample_images(base, 1.0, 1, folder)
    assert whole.settings == {"data": "digits"}
    assert tenth.retain == pytest.approx(0.1 * whole.retain, abs=5)
    path = tmp_path / "data/images-0.1-s1.npz"
    assert tenth.settings == {"data": str(path)}
    before = path.read_bytes()
    assert sample_images(base, 0.1, 1, folder) == tenth
    assert path.read_bytes() == before
    assert sample_images(base, 0.1, 2, folder).settings != tenth.settings


def test_a_sample_keeps_the_names_of_classes_and_knows_when_its_source_has_changed(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (20, 4, 4, 3), dtype=np.uint8)
    source = tmp_path / "source.npz"
    np.savez(source, image=pixels, label=np.arange(20) % 2, classes=np.array(["cat", "dog"]))
    folder = RunFolder(tmp_path / "data", resume=True)
    base = {"data": str(source), "forget_class": "dog"}
    sample = sample_images(base, 0.5, 1, folder)
    assert sample.retain == 5
    assert read_images(sample.settings["data"]).classes == ("cat", "dog")
    assert sample_images(base, 0.5, 1, folder) == sample
    np.savez(source, image=255 - pixels, label=np.arange(20) % 2, classes=np.array(["cat", "dog"]))
    with pytest.raises(HamuError, match=r"holds a sample of .*source\.npz, not of .* as it is now"):
        sample_images(base, 0.5, 1, folder)
    line = r"fraction 0.01 of .*source\.npz leaves no image of class cat, which has 10; choose a larger one"
    with pytest.raises(HamuError, match=line):
        sample_images(base, 0.01, 1, folder)
    assert not folder.has("images-0.01-s1.npz")


def texts_stage(folder, records, forget):
    """A stage of so many records, of which some are to be forgotten and stand in other words elsewhere."""
    rows = [{"question": f"Who is {i}?", "answer": f"A person, {i}."} for i in range(records)]
    again = [row | {"paraphrased_answer": f"In short: {row['answer']}"} for row in rows[:forget]]
    for name, content in {"all": rows, "forget": rows[:forget], "again": again}.items():
        write_rows(folder / f"{name}.jsonl", content)
    base = {"data": "all.jsonl", "forget_data": "forget.jsonl", "data_dir": str(folder)}
    scale = Scale("small", base, True, 1.0, None, None, 1, has_similar=True)
    places = str(folder / "again.jsonl"), folder / "work"
    return Stage(scale, {"model": "tiny-llama"}, {}, None, 1.0, *places)


@pytest.mark.parametrize("similar", [False, True])
def test_an_original_may_be_trained_on_more_data_than_the_runs_read(similar, tmp_path):
    whole = texts_stage(tmp_path, 40, 8)
    stage = replace(whole, scale=replace(whole.scale, fraction=0.25))

    def prompts(settings):
        return {record.prompt: record for record in read_text(settings["data"]).records}

    call = stage.training(similar)
    training = call.options
    run = stage.settings(replace(stage.scale.wanted("gdiff", 1), similar=similar))
    assert len(prompts(training)) == 40
    assert len(prompts(run)) == 10
    assert prompts(run).keys() < prompts(training).keys()
    assert training["per_device_train_batch_size"] == 128, "it shrinks with the data"
    assert Path(run["model"]).is_relative_to(Path(call.options["output_dir"]).resolve())
    assert stage.description()["model"] == "trained on all of the data"
    assert whole.description()["model"] == "trained on the same data"


# as in TOFU, and half of all
@pytest.mark.parametrize(("forget", "batch", "epoch"), [(40, 5, 80), (200, 3, 134)])
def test_paraphrases_make_an_epoch_longer_and_no_batch_larger(tmp_path, forget, batch, epoch):
    stage = texts_stage(tmp_path, 400, forget)
    runs = EXPERIMENTS["figure-10"].runs(stage.scale)
    found = {name: stage.batches(runs[f"gdiff {name}"]) for name in ("dissimilar", "similar")}
    assert [batches.records for batches in found.values()] == [batch, batch]
    assert found["similar"].steps == epoch
    assert [runs[f"gdiff {name}"].paper_epochs for name in found] == [10, 9]
    assert [runs[f"gdiff {name}"].steps for name in found] == [720, 720]


def write_evaluation(folder, losses, retain_gain, **more):
    trajectory = [
        {"step": 9 * n, "eval_forget_loss": loss}
        | {"eval_forget_gain": loss - losses[0], "eval_retain_gain": retain_gain * n}
        for n, loss in enumerate(losses)
    ]
    (folder / "evaluation.json").write_text(json.dumps({"trajectory": trajectory} | more))


def test_a_finished_run_ends_where_the_figure_does(tmp_path):
    write_evaluation(tmp_path, [0.2, 0.5, float("nan"), 0.9], 0.01)
    kappa = [{"step": n, "kappa": float(n), "taken": float(n != 3)} for n in range(1, 28)]
    write_rows(tmp_path / "steps.jsonl", kappa)
    nine = Batches(5, 1, 9)
    two = FinishedRun(tmp_path, 2, nine)
    assert [point["epoch"] for point in two.points] == [0, 1], "that of NaN is left out"
    assert two.trajectory == [(0.0, 0.0), (0.01, pytest.approx(0.3))]
    assert two.by_epoch("kappa") == [pytest.approx((45 - 3) / 8), 14.0]
    assert two.mean("kappa") == pytest.approx((171 - 3) / 17)
    assert two.mean("demand") is None
    step = {"learning_rate": 0.1, "promised_retain_change": -0.5, "taken": 1.0}
    steps = [step | {"step": 1, "retain_norm": 4.0}, step | {"step": 2, "retain_norm": 0.5}]
    write_rows(tmp_path / "steps.jsonl", steps)
    part = FinishedRun(tmp_path, 2 / 9, nine)
    assert part.promised("retain", 1.0) == pytest.approx(-0.05 * (4 + 1))
    assert part.promised("retain", 0.0) == pytest.approx(-0.05 * 2)
    assert FinishedRun(tmp_path, 3, nine).last["epoch"] == 3


def test_lines_correlations_and_volumes_of_known_points():
    exact = line_through_origin((1, 2, 3), (2, 4, 6))
    assert exact == pytest.approx({"slope": 2, "r_squared": 1, "r_squared_uncentred": 1})
    apart = line_through_origin((1, 2, 3), (3, 3, 4))
    assert apart["slope"] == pytest.approx(21 / 14)
    assert apart["r_squared"] < 0 < apart["r_squared_uncentred"]
    assert line_through_origin((1, 2), (1, None))["r_squared"] is None
    assert pearson_of((0, 1, 2), (3, 2, 1)) == pytest.approx(-1)
    assert pearson_of((0, 1, 2), (3, None, 1)) is None
    volumes = volumes_of({"hamu-q": [(0, 0), (2, 3)], "ga": [(0, 0), (-0.5, 9)]})
    assert (volumes["start"]["hamu-q"], volumes["start"]["ga"]) == (6, 0)
    assert (volumes["worst"]["hamu-q"], volumes["worst"]["reference"]) == (3 * 2.5, (0, -0.5))


@pytest.mark.parametrize(
    ("losses", "ended", "epoch"),
    [
        ((0.2, 0.7, 0.985), "all steps", 2.0),
        ((0.2, 0.7, 0.97), "all steps", None),
        ((0.2, 0.7, 0.97), "target", 2.0),  # its last batch was there, the whole set is not quite
        ((0.2, 0.7, 0.8, 0.97), "target", None),  # it ended later than is looked at
    ],
)
def test_a_run_is_at_its_target_by_its_own_end_or_by_the_whole_set(tmp_path, losses, ended, epoch):
    write_evaluation(tmp_path, losses, -1, ended_kind=ended)
    found = reached(FinishedRun(tmp_path, 2, Batches(5, 1, 9)), 1.0)
    there = {"epoch": epoch, "retain_gain": -2.0, "forget_loss": losses[2]}
    assert found == (None if epoch is None else there)


SCALE_SAID = {
    "recipe": "digits", "is_text": False, "fraction": 0.5, "retain": 100, "seed": 1, "device": "cpu", "model": "given",
}  # fmt: skip


def test_who_dominates_is_told_from_the_trajectories():
    baselines = EXPERIMENTS["figure-4"]
    best = {key: [[0, 0], [0.1, 0.1]] for key in BASELINES}
    best |= {key: [[0, 0], [0.2, 0.2]] for key in ("hamu-q", "hamu-u")}
    worst = best | {"ft": [[0, 0], [0.3, 0.3]]}

    def verdicts(easy, hard):
        lines = {"0": easy, "0.75": hard}
        volumes = {rho: volumes_of(by) for rho, by in lines.items()}
        figures = {"trajectories": lines, "hypervolumes": volumes}
        return [claim.holds for claim in baselines.claims(figures)]

    lone = {m: [[0, 0], [0.2, 0.2] if m.startswith("hamu") else [-0.1, 0.3]] for m in METHODS}
    assert verdicts(lone, lone) == [True] * 6
    assert verdicts(worst, worst) == [False] * 6
    assert verdicts({}, {m: line for m, line in best.items() if m != "kl"}) == [None] * 6


TRAINED = [name for name, one in EXPERIMENTS.items() if isinstance(one, Trained)]


def random_run(generator, wanted):
    one = FinishedRun(Path("nowhere"), wanted.epochs, Batches(5, 1, wanted.steps_per_epoch))
    epochs = int(wanted.epochs)
    points, log = [], []
    for epoch in range(epochs + 1):
        retain, forget = generator.normal(size=2) if epoch else (0.0, 0.0)
        figures = {"retain_gain": retain, "forget_gain": forget, "forget_loss": forget}
        figures |= {f"{side}_accuracy": generator.random() for side in ("retain", "forget")}
        points.append({"epoch": float(epoch)} | figures)
    figures = (
        "kappa", "cos", "demand", "free_limit", "max_demand", "stop_threshold", "direct_share", "criterion_met",
        "retain_norm", "forget_norm", "promised_retain_change", "promised_forget_change",
    )  # fmt: skip
    for step in range(1, wanted.steps + 1):
        drawn = dict(zip(figures, generator.random(len(figures)), strict=True))
        drawn["criterion_met"] = float(drawn["criterion_met"] > 0.99)
        log.append({"step": step, "taken": 1.0, "learning_rate": 0.1} | drawn)
    own = {"loss": 0.0, "accuracy": 0.5, "probability": 0.5}
    before = {"retain": own, "forget": own}
    after = {side: {name: generator.normal() for name in own} for side in before}
    after["membership_inference"] = {"auc": generator.random()}
    inputs = {"original model": {"sha256": str(wanted.similar)}}
    vars(one).update(points=points, log=log, inputs=inputs)
    vars(one).update(evaluation={"before": before, "after": after})
    return one


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_that_is_missing_never_turns_a_verdict_and_without_any_there_is_none(name, tmp_path):
    """Claims of all runs may not hold because the one that breaks it has failed, nor the other way round."""
    one, scale = EXPERIMENTS[name], replace(SCALE, has_similar=True)
    result = result_of(one, one.figures({}, scale)) | {"scale": SCALE_SAID}
    assert {claim["holds"] for claim in result["claims"]} == {None}
    one.draw(result["figures"], tmp_path / "picture.png")
    failed = result | {"failed": {"hamu-q 0": "it diverged"}}
    assert "Failed: hamu-q 0: it diverged." in page({name: failed}, EXPERIMENTS)
    told = 0
    for seed in range(12):
        generator = np.random.default_rng(seed)
        finished = {key: random_run(generator, wanted) for key, wanted in one.runs(scale).items()}
        full = {claim.text: claim.holds for claim in one.claims(one.figures(finished, scale))}
        told += sum(verdict is not None for verdict in full.values())
        for key in finished:
            left = {other: run for other, run in finished.items() if other != key}
            for claim in one.claims(one.figures(left, scale)):
                assert claim.holds in (None, full.get(claim.text)), (seed, key, claim.text)
    assert told


def test_the_interval_of_a_median_covers_it_as_often_as_it_says_whatever_the_turns_are_drawn_from():
    assert median_interval(range(5)) is None, "its extremes cover the median in 93.75% of cases"
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert median_interval(range(1, 16)) == (4, 12)
    generator = np.random.default_rng(0)
    for draw in (generator.normal, generator.exponential, generator.standard_cauchy):
        middle = np.median(draw(size=200_001))
        found = [median_interval(draw(size=15)) for _ in range(2000)]
        assert np.mean([low <= middle <= high for low, high in found]) > 0.95


def cost_figures(*ratios):
    turns = {m: [2.0 * (1.0 if m == "gdiff" else ratio) for ratio in ratios] for m in METHODS}
    middle = {m: float(np.median(times)) for m, times in turns.items()}
    return {"turns": turns, "seconds": middle, "over_gdiff": {m: t / 2 for m, t in middle.items()},
            "memory": dict.fromkeys(METHODS, 1.0)}  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "cheap", "longer", "said"),
    [
        ([1.01] * 15, True, True, "1.010 (1.010 to 1.010)"),
        ([1.1] * 15, False, True, "1.100 (1.100 to 1.100)"),
        ([0.9] * 8, True, False, "0.900 (0.900 to 0.900)"),
        ([0.9] * 8 + [1.2] * 7, None, None, "0.900 (0.900 to 1.200)"),
        ([1.0, 0.67, 2.03], None, None, "1.000, 0.670 to 2.030: 3 turns, too few for an interval"),
    ],
)
def test_a_bound_on_time_is_told_only_where_turns_tell_it(ratios, cheap, longer, said, tmp_path):
    cost = EXPERIMENTS["table-1"]
    figures = cost_figures(*ratios)
    claims = {claim.text: claim for claim in cost.claims(figures)}
    claim = claims["hamu-q takes at most 1.05 times as long as gdiff"]
    assert (claim.holds, claim.ours) == (cheap, said)
    assert claims["kl takes longer than gdiff"].holds is longer
    head, first, *_ = cost.table(figures)
    row = dict(zip(head, first, strict=True))
    assert (row["95% interval"] == "-") == (len(ratios) < 6)
    cost.draw(figures, tmp_path / "table-1.png")


PUBLISHED = Path(__file__).parents[2] / "docs/paper"


def test_the_published_page_says_what_its_files_and_this_version_say():
    results = results_in(PUBLISHED, EXPERIMENTS)
    assert results.keys() == EXPERIMENTS.keys()
    assert page(results, EXPERIMENTS) == (PUBLISHED / "README.md").read_text(encoding="utf-8")
    for name, result in results.items():
        told = refreshed_result(EXPERIMENTS[name], result)
        assert page({name: told}, EXPERIMENTS) == page({name: result}, EXPERIMENTS)


def test_entries_of_the_league_rank_by_mean_cost_then_by_what_comes_back_and_last_if_never_there():
    costs = {"never": None, "cheap": [0.01, 0.03], "ties": [0.02], "free": [-0.1]}
    rows = {name: cost and {"cost": cost, "relearned": [len(cost)]} for name, cost in costs.items()}
    assert [name for name, _ in ranked(rows)] == ["free", "ties", "cheap", "never"]
    assert [_mean(one) for one in (0.5, {"mean": 0.5, "deviation": 0.1})] == [0.5, 0.5]


def test_more_entries_join_the_known_ones_if_they_began_at_the_same_model():
    start = {"forget": 0.5, "retain": 0.25}
    old = {"level": 2.0, "start": start, "rows": {"ga": 1}, "levels": {"ga": 2}}
    new = {"level": 2.1, "start": start, "rows": {"kl": 3}, "levels": {"kl": 4}, "model": "a1"}
    both = {"rows": {"ga": 1, "kl": 3}, "levels": {"ga": 2, "kl": 4}}
    assert added(old, new) == old | both
    with pytest.raises(SystemExit, match=r"retain loss 0\.26 at the start, the known .* at 0\.25"):
        added(old, new | {"start": start | {"retain": 0.26}})
    with pytest.raises(SystemExit, match="began at the model b2, this is a1; give its --work_dir"):
        added(old | {"model": "b2"}, new)


def test_the_page_of_the_league_shows_what_was_measured():
    results = PUBLISHED.parent / "results"
    page = (results / "league.md").read_text(encoding="utf-8").splitlines()
    parts = read(results / "league.json")
    assert {*table(parts).splitlines()} <= {*page}
    cells = [line.split("|") for line in page if re.match(r"\|\d+\|", line)]
    levels = [[float(cell) for cell in row[-5:-1] if cell != "-"] for row in cells]
    assert any(map(len, levels))
    assert all(costs == sorted(costs) for costs in levels), "a higher loss counts at a lower level"
    found = [row for part in parts.values() for row in part["rows"].values() if row is not None]
    assert {len(row[name]) for row in found for name in ("cost", "relearned")} == {3}, "seeds"
    falcon, rising, ours, half, falling, _ = map(mean, read(results / "falling.json").values())
    why = (
        f"FALCON costs {falcon:.3f}, without these falls {rising:.3f}, HAMU-Q {ours:.3f}; at φ = ½ "
        f"it costs {half:.3f}, with the falls {falling:.3f}."
    )
    assert why in "\n".join(page)


def test_the_page_on_stopping_shows_what_was_measured():
    results = PUBLISHED.parent / "results"
    page = (results / "stopping.md").read_text(encoding="utf-8")
    found = read(results / "stopping.json")
    sizes = (8, 16, 32, 64, 128)

    def of(data, key, sizes=sizes, suffix=""):
        return sum(found[f"{data}/{size}{suffix}"]["population"][key] for size in sizes)

    for size in (*sizes, 512, 2048):
        assert row(str(size), found[f"digits/{size}"]) in page.splitlines()
    small, large = of("cifar", "within", sizes[:2]), of("cifar", "within", sizes[2:])
    late = of("tofu", "due", suffix="-0.9") - of("tofu", "within", suffix="-0.9")
    for said in (
        f"{of('digits', 'within')} of {of('digits', 'due')} within 20%",
        f"{of('digits', 'false')} of {of('digits', 'not due')} runs that should not stop do",
        f"of 32 to 128 {large} of 12 runs stop within 20%, of 8 and 16 {small} of 8",
        f"{late} of ten are late",
    ):
        assert said in page
    never = [of("digits", "never"), of("cifar", "never"), of("tofu", "never", suffix="-0.9")]
    assert never == [0, 0, 0]


def of_steps(gram, method):
    """Rise of the forget loss and squared length of a step by block; the weights."""
    weights = method.weigh(gram)
    a, b = weights.retain, weights.forget
    square = a * a * gram.retain_sq + 2 * a * b * gram.dot + b * b * gram.forget_sq
    return -(a * gram.dot + b * gram.forget_sq), square, torch.stack([a, b])


def test_falcon_and_hamu_trade_the_blocks_in_which_falcon_lets_the_forget_loss_fall():
    gram = random_gram(1, blocks=200)
    falcon, rising = (of_steps(gram, one) for one in (build_method("falcon"), RisingFalcon()))
    where = falls(gram)
    assert 20 < where.sum() < 180
    assert torch.equal(falcon[0] < 0, where)
    torch.testing.assert_close(rising[0][where] / falcon[0][where], 0 * rising[0][where])
    torch.testing.assert_close(rising[1], falcon[1])
    assert torch.equal(rising[2][:, ~where], falcon[2][:, ~where])
    ours, falling = (of_steps(gram, of(0.5, **DEMAND))[2] for of in (HamuQ, FallingHamu))
    assert torch.equal(falling[:, ~where], ours[:, ~where])
    assert (falling[:, where] == torch.tensor([[1.0], [0.0]])).all()


def test_the_readme_sets_the_default_beside_the_best_rival_as_measured():
    parts = read(PUBLISHED.parent / "results/league.json")

    def costs(problem, entry=DEFAULT):
        rows = entries(parts, problem)
        rivals = [row for name, row in rows.items() if row and not name.startswith(DEFAULT)]
        return mean(rows[entry]["cost"]), min(mean(row["cost"]) for row in rivals)

    def share(*of):
        ours, best = costs(*of)
        return ours / best

    airplane = "CIFAR-10, class airplane"
    texts = share("TOFU, forget10", f"{DEFAULT} 0.76"), share("TOFU, forget01", f"{DEFAULT} 0.145")
    digits = map(costs, ("digits, class 3", "digits, class 3, ρ = 0.25"))
    more = sorted(ours - best for ours, best in digits)
    readme = (PUBLISHED.parents[1] / "README.md").read_text(encoding="utf-8")
    expected = (
        f"costs [{share(airplane):.2f} and {share(f'{airplane}, ρ = 0.5'):.1f} times the best rival]"
        f"(docs/results/league.md) on CIFAR-10, {texts[0]:.2f}–{texts[1]:.2f} times on texts with a "
        f"larger budget, {more[1]:.3f} nats more on digits; it may miss"
    )
    assert expected in readme
    missed = [name for name, part in parts.items() if part["rows"].get(DEFAULT, 0) is None]
    assert missed == ["CIFAR-10, 100 rows", "TOFU, forget10", "TOFU, forget01"]


@pytest.mark.parametrize(("name", "content"), [
    ("figure-1.json", '{"axes": []}'),
    ("figure-1.json", "my notes"),
    ("figure-4.json", "[1, 2]"),
    ("figure-4.png", "mine"),
])  # fmt: skip
def test_files_of_somebody_else_are_not_taken_for_results(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    message = rf"{name} is there and is not of `python -m experiments`; choose another --output"
    with pytest.raises(HamuError, match=message):
        check_output(tmp_path, EXPERIMENTS)


def test_earlier_results_may_be_replaced(tmp_path):
    check_output(tmp_path / "new", EXPERIMENTS)
    for name in ("figure-1.json", "figure-1.png"):
        shutil.copy(PUBLISHED / name, tmp_path)
    check_output(tmp_path, EXPERIMENTS)  # broken off before its page was written
    (tmp_path / "README.md").write_text(page({}, EXPERIMENTS))
    (tmp_path / "figure-1.json").unlink()
    (tmp_path / "figure-4.json").write_text('{"name": ')
    check_output(tmp_path, EXPERIMENTS)  # that it is damaged is said when it is read
    with pytest.raises(HamuError, match=r"figure-4.json is damaged: .*; remove .*figure-4.json"):
        results_in(tmp_path, EXPERIMENTS)


EPOCHS = list(range(26))


def rising_until(peak):
    return [min(epoch, 2 * peak - epoch) * 0.01 for epoch in EPOCHS]


@pytest.mark.parametrize(
    ("values", "terminates", "slows", "timely"),
    [
        ([0.01 * e for e in EPOCHS], None, False, None),  # 13 epochs against 12 are no slowing
        ([0.01 * e - 1e-5 * e * e for e in EPOCHS], 24.2, True, None),  # it has not begun to fall
        (rising_until(20), 20.5, True, True),
        (rising_until(20), 24.0, True, False),  # a fifth of the gain is gone
        (rising_until(20), 10.0, True, False),  # early
        (rising_until(20), None, True, False),  # never met, though it falls
        ([-0.01 * e for e in EPOCHS], 24.0, False, False),  # it falls from the first step
    ],
)
def test_slowing_and_timely_stops_are_told(values, terminates, slows, timely):
    run = {"epoch": EPOCHS, "trajectory": [(value, 0.0) for value in values]}
    run |= {"kappa": [0.1 * epoch for epoch in EPOCHS[1:]], "stop_threshold": [1.0] * 25}
    run |= {"terminates": terminates, "terminates_by_means": None}
    _, slowing, stop, *_ = EXPERIMENTS["figure-9"].claims({"hamu-q": run})
    assert (slowing.holds, stop.holds) == (slows, timely)
