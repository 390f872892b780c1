"""The report's page: its figures and sections, from whole and broken runs."""

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from report_examples import (
    NASTY,
    example_run,
    goal,
    image_observations,
    text_observations,
    write_run,
)
from rich.console import Console

from hamu import HamuError
from hamu.assess import frontier
from hamu.core.gram import PairGram
from hamu.core.methods import HamuQ, HamuU
from hamu.data import forget_class, read_images
from hamu.data.forget_sets import subset
from hamu.evaluation import AttackResult, Predictions
from hamu.evaluation.attacks import QUANTIZE, RELEARN_RETAIN, RETRAINED, UNLEARNED, Outcome
from hamu.evaluation.gains import Gains
from hamu.report import pictures
from hamu.report.charts import step_charts, trajectories
from hamu.report.page import MARK, report_page, several, verdict
from hamu.report.pictures import STYLES, draw_trajectories, looks_of, new_figure
from hamu.report.run import ROLES, read_run, run_folders, told_apart
from hamu.report.tables import further_table, report_table
from hamu.unlearning.jobs import review

LASTING = {"lasts": True, "verdict": "It lasts: so.", "kind": "image", "outcomes": {}}
LASTING |= {"skipped": {}, "records": {"forget": 20, "measured": 20}, "settings": {}}
STAYED = "and what is to stay has stayed"
BETTER = "and the model does better on what is to stay"


class Elements(HTMLParser):
    """The elements of a page: names with attributes, the contents of its scripts, and its text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.scripts, self.words = [], [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem is None:
            self.words.append(data)
        elif self.cdata_elem == "script":
            self.scripts.append(data)


def charts_of(page):
    return [json.loads(text) for text in Elements(page).scripts if text.startswith("{")]


def without_script(page):
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def words_of(*runs, **settings):
    return Elements(report_page(runs, **settings)).text


def settle(run, *, forget=1.0, retain=-0.1, accuracy=0.0):
    for side, by, right in (("forget", forget, 0.0), ("retain", retain, accuracy)):
        before, after = (run.evaluation[role][side] for role in ("before", "after"))
        after |= {"loss": before["loss"] + by, "accuracy": before["accuracy"] + right}


def judged(folder, goal, attack=LASTING, **changes):
    """A run with this goal, attacks and changes of the losses."""
    run = replace(example_run(folder), attack=attack)
    settle(run, **changes)
    run.evaluation["goal"] = goal
    return run


@pytest.mark.parametrize("observed", [image_observations((NASTY, "b")), text_observations()])
def test_a_page_stands_alone_and_its_data_are_never_code(tmp_path, observed):
    names = {"names": (NASTY, "b"), "blocks": [NASTY, "w"]}
    run = example_run(tmp_path, "a<script>b", observed, **names)
    page = report_page([run, replace(run, observed=None, unobserved=NASTY)], contents=True)
    assert MARK in page[:1000]
    assert not re.search("https?://", without_script(page))
    assert "default-src 'none'; img-src data: blob:;" in page, "no request is allowed"
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "object", "base")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert re.match(r"data:image/png;base64,|#|$", attributes.get(name) or ""), attributes
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert len([one for one in scripts if one.get("type") != "application/json"]) == 1
    assert len(charts_of(page)) == len(scripts) - 1
    assert "window.broken" in page, "it is there, as text"
    assert "{{ 7*7 }}" in page


def test_contents_are_in_a_page_only_on_request(tmp_path):
    names = ("Ada Unlikely", "Bob Unlikely")
    run = example_run(tmp_path, observed=image_observations(names), names=names)
    shown = report_page([run], contents=True)
    hidden = without_script(report_page([run]))
    for secret in ("Ada Unlikely", "data:image/png", "holds contents of the data"):
        assert secret in shown
        assert secret not in hidden
    run = replace(run, observed=text_observations())
    for contents in (True, False):
        texts = report_page([run], contents=contents)
        assert ("Who is" in texts) == ('"row 3"' in texts) == contents


def test_a_long_run_stays_small_and_keeps_its_peaks(tmp_path):
    blocks = [f"layers.{n}.self_attn.q_proj.weight" for n in range(300)]
    observed = image_observations(count=3000)
    run = example_run(tmp_path, observed=observed, steps=20_000, blocks=blocks)
    run.layers["cos"].iloc[7, 77] = -0.9999
    run.steps.loc[13_333, "forget_loss"] = 7
    runs = [run, replace(run, observed=text_observations(count=3000))]
    page = report_page(runs, contents=True)
    assert len(without_script(page).encode()) < 5_000_000
    series = [one for chart in charts_of(page) for one in chart["data"]]
    assert all(len(one["x"]) <= 3000 for one in series)
    maps = [one["z"] for one in series if one["type"] == "heatmap"]
    assert max(len(z) * len(z[0]) for z in maps) <= 32_000
    assert any(-0.9999 in row for z in maps for row in z)
    assert any(7 in one["y"] for one in series)


def test_a_run_under_way_has_a_report(tmp_path):
    place = write_run(tmp_path / "run", finished=False)
    with open(place / "steps.jsonl", "a") as log:
        log.write('{"step": 1e999}\n{"step": 21, "forget_lo')  # as it is while it is written
    lines = (place / "layers.jsonl").read_text().splitlines()
    (place / "layers.jsonl").write_text("\n".join([*lines, '{"step": 21, "cos": ["x"]}']))
    run = replace(read_run(place), unobserved="the model after is not there")
    assert verdict(run).headline == "Not finished: step 20 so far"
    words = words_of(run)
    assert "of steps.jsonl, 2 lines are damaged and skipped" in words
    assert "layers.jsonl cannot be read" in words
    assert "the model after is not there" in words
    assert "it takes two finite evaluations in evaluation.json" in words, "there may have been some"
    run.steps.loc[run.steps.index[-1], "retain_loss"] = math.nan
    assert verdict(run) == ("Not finished: a loss of step 20 is not finite", "bad")


def test_the_end_of_a_run_is_its_records_where_its_last_steps_were_not_logged(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert "It ended at step 20 " in (words := words_of(run))
    assert "(figures of that step's batches)" in words
    by_means = {"ended": "the criterion is met; confidence 90% by this estimate alone"}
    said = words_of(replace(run, evaluation=run.evaluation | by_means))
    assert "alone (figures of running means over batches); " in said
    assert replace(run, record={"steps": {"ended_at": 26}}).last_step == 26


BY_LOSSES = f"By its losses it forgot, {BETTER}; whether it lasts"
ALL, MOST = goal(0, 20), goal(0, 19)
LIMITED = goal(0, 19, budget=0.02, reached=False)
FORGOT = f"It forgot, {STAYED}; it lasts"


@pytest.mark.parametrize(("asked", "lasts", "forget", "retain", "headline", "tone"), [
    (None, True, 1.0, -0.1, f"The forget loss rose, {BETTER}", "open"),
    (None, True, 0.0005, -0.1, "It did not forget: the loss", "bad"),
    (None, True, 1.0, 0.0005, f"The forget loss rose, {STAYED}", "open"),
    (None, True, 1.0, 0.4, "The forget loss rose, at a price", "mixed"),
    (None, True, 1.0, 1.4, "It lost more", "bad"),
    (None, True, -0.1, -0.1, "It did not forget", "bad"),
    (None, True, float("nan"), 0.0, "The model's losses are not finite", "bad"),
    # the records count, not their mean
    (MOST, True, -0.1, 0.0, FORGOT, "good"),
    (goal(0, 18), True, 2.0, 0.0, f"It forgot in part, 18 of 20 records, 0 before, {STAYED}", "mixed"),
    (goal(18, 19), True, 2.0, 0.0, f"It forgot 19 of 20 records, 18 before, {STAYED}; it lasts", "good"),
    (goal(20, 19), True, 2.0, 0.0, "Fewer count as forgotten: 19 of 20 records, 20 before, "
     f"{STAYED}; the rise lasts", "open"),
    (goal(20, 19), False, -0.5, 0.0, f"Fewer count as forgotten: 19 of 20 records, 20 before, {STAYED}", "open"),
    (goal(3, 2), True, -0.1, 0.0, "It did not forget: 2 of 20 records, 3 before", "bad"),
    (goal(3, 3), True, 2.0, 0.0, "The forget loss rose, but no more are forgotten: 3 of 20 records, "
     f"3 before, {STAYED}; the rise lasts", "mixed"),
    (goal(19, 19), True, 2.0, 0.0, "Before the run, too, 19 of 20 records counted as fo", "open"),
    (LIMITED, True, 2.0, 0.0, f"{FORGOT}; its goal is not reached", "mixed"),
    (ALL | {"sampled_from": 90}, True, 1.0, 0.0, "It forgot in a sample of 20 of 90 rec", "good"),
    (goal(0, 18) | {"sampled_from": 90}, True, 2.0, 0.0, "It forgot in part, 18 of 20 records in a sample of 90, 0", "mixed"),
    (goal(0, 10) | {"share": 0.5}, True, 1.0, 0.0, "It forgot 10 of 20 records, as many as its", "good"),
    (ALL | {"share": 0.5}, True, 1.0, 0.0, FORGOT, "good"),
    (ALL | {"doubts": ["few"]}, True, 1.0, 0.0, "Whether it forgot can hardly be told", "open"),
    (goal(3, 2) | {"doubts": ["few"]}, True, -0.1, 0.0, "It did not forget: 2 of 20 records", "bad"),
    # forgotten means by the losses and lasting
    (ALL, "no attack", 1.0, -0.1, f"{BY_LOSSES} was not tested", "mixed"),
    (ALL | {"lasting": True}, "no attack", 1.0, -0.1, f"{BY_LOSSES} was only rehearsed", "mixed"),
    (ALL | {"lasting": True, "reached": False}, "no attack", 1.0, -0.1,
     f"{BY_LOSSES} was not shown in rehearsal", "mixed"),
    (ALL, None, 1.0, -0.1, f"{BY_LOSSES} is open", "mixed"),
    (ALL, True, 1.0, -0.1, f"It forgot, {BETTER}; it lasts", "good"),
    (ALL | {"after": ALL["after"] | {"too_high": 1}}, True, 1.0, 0.0, FORGOT, "good"),
    (ALL | {"after": ALL["after"] | {"too_high": 2}}, True, 1.0, 0.0, f"{FORGOT}; 2 stand out", "mixed"),
    (ALL | {"kind": "erased"}, None, 1.0, 0.0, "By its predictions it forgot", "mixed"),
    (ALL, False, 1.0, -0.1, "It does not last: fine-tuning on the retain data", "bad"),
])  # fmt: skip
def test_the_verdict_follows_all_figures(tmp_path, asked, lasts, forget, retain, headline, tone):
    attack = None if lasts == "no attack" else LASTING | {"lasts": lasts}
    found = verdict(judged(tmp_path, asked, attack, forget=forget, retain=retain))
    assert (found.headline[: len(headline)], found.tone) == (headline, tone)


def test_a_model_that_is_worse_than_chance_is_of_no_use_whatever_it_forgot(tmp_path):
    run = judged(tmp_path, ALL, retain=0.5)
    assert verdict(run).tone == "mixed"
    run.evaluation["guessing_loss"] = run.evaluation["after"]["retain"]["loss"] - 0.1
    found = verdict(run)
    assert (found.headline[:24], found.tone) == ("The model is of no use: ", "bad")


TELLS = "; an attacker tells the forget records from unseen ones (by min k plus plus, AUC {:.2f})"
BESIDE = TELLS[:-1] + "; the retain model's {:.2f})"
DIFFERS = (
    "; the model's AUC of membership inference by min k plus plus is {}, the retain model's {}"
)


@pytest.mark.parametrize(("auc", "theirs", "records", "unseen", "told"), [
    (0.03, None, 20, 20, TELLS), (0.97, 0.5, 20, 20, BESIDE), (0.97, 0.95, 20, 20, ""), (1.0, 0.88, 20, 20, BESIDE),
    (0.75, None, 20, 20, ""), (0.97, None, 9, 20, ""), (0.97, None, 20, 9, ""),
    (None, None, 20, 20, ""), (0.0, 0.0, 20, 20, ""), (0.61, 0.19, 20, 20, DIFFERS),
])  # fmt: skip
def test_the_verdict_names_a_successful_attacker(tmp_path, auc, theirs, records, unseen, told):
    run = judged(tmp_path, ALL)
    after = run.evaluation["after"]
    ours, retrained = ({"min_k": 0.5, "min_k_plus_plus": one} for one in (auc, theirs))
    after |= {"membership_inference": ours, "retain_model": {"membership_inference": retrained}}
    after["forget"]["samples"], after["test"]["samples"] = records, unseen
    found = verdict(run)
    assert found.headline == f"It forgot, {BETTER}; it lasts{told.format(auc, theirs)}"
    assert found.tone == ("mixed" if told else "good")


@pytest.mark.parametrize("observed", [image_observations(), text_observations()])
def test_each_record_counts_in_a_section_of_its_own(tmp_path, observed):
    run = example_run(tmp_path, observed=observed)
    run.evaluation.update(goal=goal(1, 8), controller=[{"step": 1}], ended_kind="criterion")
    words = words_of(run)
    assert "(figures of" not in words, "a run by goal goes by all forget records"
    assert "8 of 20 records are forgotten by the goal unseen (those whose losses" in words
    assert "Before the run, 1 were." in words
    assert "(goal unseen) 1 of 20 → 8 of 20" in words
    assert "forget, after 8 of 20 0.1 0.575 1.05 1.525 2 test, before" in words
    assert "1 0.1 0.225 2 0.2 0.325" in words, "those furthest away, with what they need"
    assert "position" not in words
    curves = charts_of(report_page([run]))[0]["data"]
    names = [one["name"].partition(":")[0] for one in curves]
    assert names == ["forget, before", "forget, after", "test, before"]
    for one in curves:
        assert one["x"] == sorted(one["x"])
        assert one["y"][-1] == 1


def test_a_class_has_one_number_on_a_page(tmp_path):
    observed = image_observations(("a", "b", "c"))
    run = example_run(tmp_path, observed=observed)
    for role in ("before", "after"):  # b is the class to forget, which the retain set lacks
        run.evaluation[role]["retain"]["per_class_accuracy"] = {"a": 1.0, "c": 0.5}
        run.evaluation[role].pop("test", None)
    bars = next(c for c in charts_of(report_page([run])) if c["data"][0]["type"] == "bar")
    assert bars["data"][0]["y"] == ["class 1", "class 3"]


def test_runs_are_compared_with_the_first_whose_inputs_are_known(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in "abc"]
    digests = [{}, {"data": {"sha256": "1"}}, {"data": {"sha256": "2"}}]
    runs = [replace(run, inputs=one) for run, one in zip(runs, digests, strict=True)]
    assert "c had another data than b" in words_of(*runs)


def test_changes_within_chance_are_no_change(tmp_path):
    risen, fallen, unsure = [0.1, 0.3], [-0.3, -0.1], [-0.1, 0.1]
    rose = "The forget loss rose"
    run = judged(tmp_path, None)
    for forget, retain, accuracy, changes, headline in (
        (unsure, fallen, unsure, (-0.2, 0.0), "It did not forget"),
        (risen, unsure, unsure, (-0.2, 0.0), f"{rose}, {STAYED}"),
        (risen, fallen, unsure, (-0.2, 0.0), f"{rose}, {BETTER}"),
        (risen, risen, unsure, (0.2, 0.0), f"{rose}, at a price"),
        (risen, unsure, fallen, (-0.2, -0.02), f"{rose}, at a price"),
        (risen, unsure, fallen, (-0.2, -0.0005), f"{rose}, {STAYED}"),
    ):
        settle(run, retain=changes[0], accuracy=changes[1])
        intervals = {"forget": {"loss_interval": forget}}
        intervals["retain"] = {"loss_interval": retain, "accuracy_interval": accuracy}
        found = verdict(replace(run, record={"figures": {"change": intervals}}))
        assert found.headline.startswith(headline)


@pytest.mark.parametrize(("settings", "own"), [
    ("method: gdiff", []),
    ("method: hamu-q\nforget_objective: npo", ["forget"]),
    ("method: npo\nforget_objective: cross_entropy", []),
    ("auto: true", ["forget"]),
    ("method: gdiff\nlasting: true", ["forget"]),
    ("method: kl", ["retain"]),
    ("method: of-a-package-that-is-gone", ["forget", "retain"]),
    ("[not, settings]", ["forget", "retain"]),
])  # fmt: skip
def test_only_the_mean_loss_is_called_a_loss(tmp_path, settings, own):
    place = write_run(tmp_path / "run")
    (place / "config.yaml").write_text(settings)
    run = read_run(place)
    charts = {chart.title: chart.figure for chart in step_charts(run)}
    assert charts["Losses"].layout.yaxis.title.text.startswith("loss, nats")
    drawn = [one.name for one in charts["Losses"].data]
    for side in ("forget", "retain"):
        is_own, title = side in own, f"Objective of the method: {side}"
        assert (title in charts) == is_own == (f"{side}, batches" not in drawn)
        assert f"{side}, evaluations" in drawn, "of which the loss is known"
        assert f"Promise and reality: {side} {'objective' if is_own else 'loss'}" in charts
        if is_own:
            assert "nats" not in charts[title].layout.yaxis.title.text
            assert charts[title].data[0].y[0] == pytest.approx(run.steps[f"{side}_loss"][0])


def test_the_gains_are_those_of_the_model_saved(tmp_path):
    last = example_run(tmp_path, "last")
    best = example_run(tmp_path, "best")  # as if the state at step 10 had been loaded at its end
    middle = next(entry for entry in best.entries if entry["step"] == 10)
    for side in ("forget", "retain"):
        best.evaluation["after"][side]["loss"] = middle[f"eval_{side}_loss"]
    best.evaluation["steps_in_model"] = 10
    table = several([last, best])
    assert [row[2:4] for row in table.rows] == [["+1", "+0.1111"], ["+0.5", "+0.05556"]]
    assert "by best is one with 10 of 19 steps behind it." in table.caption
    assert "by last" not in table.caption
    again = several([replace(best, name="best-at-10"), best, replace(last, name="look-at-10")])
    assert again.caption.count(" again, up to step") == 1
    assert "best-at-10 is best again, up to step 10, its state at the level." in again.caption
    [chart] = trajectories([last, best], looks_of(["ga", "ga"]))
    last_line, best_line, ring = chart.figure.data
    assert (ring.x[0], ring.y[0]) == pytest.approx((0.5 / 9, 0.5))
    assert last_line.y[-1] == best_line.y[-1] == 1.0, "all of the trajectory is drawn"
    assert "The model saved is one with 10 of 19 steps behind it" in words_of(best)
    assert "The model saved" not in words_of(last)


def test_a_run_that_diverged_and_went_back_has_come_to_its_end(tmp_path):
    file = write_run(tmp_path / "run") / "evaluation.json"
    content = json.loads(file.read_text())
    last = content["trajectory"][-1]
    last |= dict.fromkeys(last.keys() - {"step"})
    file.write_text(json.dumps(content))
    run = read_run(file.parent)
    assert len(run.points) == len(content["trajectory"]) - 1
    losses, *_ = step_charts(run)
    assert None not in losses.figure.data[0].y
    assert "Not finished" not in words_of(run)


def test_a_page_names_the_way_to_a_line_that_leaves_its_chart(tmp_path):
    near, far = example_run(tmp_path, "near"), example_run(tmp_path, "far")
    for entry in far.entries:
        entry["eval_forget_gain"] *= 1e9
    [chart] = trajectories([near, far], looks_of(["ga", "ga"]))
    assert chart.figure.layout.yaxis.range[1] < 2 < max(chart.figure.data[1].y)
    assert "A line may leave the chart: a double click shows it whole." in words_of(near, far)


def test_folders_of_one_name_are_told_apart_by_those_above_them(tmp_path):
    places = ("a/unlearned", "b/unlearned", "x/deep/unlearned", "y/deep/unlearned", "other")
    runs = [example_run(tmp_path, place) for place in places]
    assert [run.name for run in told_apart(runs)] == list(places)
    assert [run.name for run in told_apart(runs[1:3])] == ["b/unlearned", "x/deep/unlearned"]
    assert "<title>Unlearning report: a/unlearned, b/unlearned</title>" in report_page(runs[:2])


def test_runs_have_their_methods_colors_and_no_two_look_alike():
    colors = [color for color, _ in STYLES.values()]
    found = looks_of(["a-plugin", *STYLES, *STYLES, *["hamu-q"] * 9])
    assert [color for color, _ in found[1 : len(colors) + 1]] == colors
    assert len({*found}) == len(found)


def test_the_picture_names_cut_ends_and_rings_the_model_saved():
    paths = {"ft": [(0.0, 0.0), (0.2, 0.1)], "kl": [(0.0, 0.0), (0.1, 0.2)]}
    paths["ga"] = [(0.0, 0.0), (-0.1, 0.3), (-9.0, 60.0)]
    own = [path[-1] for path in paths.values()]
    for ends, labels, saved in (
        (own, {"ft", "kl", "ga (ends at -9, 60)"}, []),
        ([*own[:2], paths["ga"][1]], {"ft", "kl", "ga", "the model saved"}, [[[-0.1, 0.3]]]),
    ):
        axes = new_figure(5, 4).subplots()
        draw_trajectories(axes, list(paths.items()), "title", ends=ends)
        lines = axes.get_lines()
        assert labels <= {line.get_label() for line in lines}
        rings = [one.get_xydata().tolist() for one in lines if one.get_markerfacecolor() == "none"]
        assert rings == saved


def test_a_picture_shows_the_names_of_methods_as_they_are(drawn, tmp_path):
    names = ["$\\frac$", "$5 or $x_2$", "_mine"]
    runs = [(name, [Gains(0.0, 0.0), Gains(0.1, 0.2)], Gains(0.1, 0.2)) for name in names]
    pictures.plot_comparison(runs, dict.fromkeys(names, 0.1), tmp_path / "comparison.png")
    axes, bars = drawn[0].axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    for found in (texts, [text.get_text() for text in bars.get_yticklabels()]):
        assert [text.replace("\\$", "$").strip() for text in found] == names


COORDINATES = st.tuples(*[st.floats(-10, 10) | st.floats(-0.01, 0.01)] * 2)


@given(st.lists(st.lists(COORDINATES, min_size=1, max_size=4), min_size=1, max_size=7))
@example([[(0.0, 0.0), (0.001, 2.0)], [(0.0, 0.0), (0.1, 0.05)]])
def test_limits_show_two_thirds_of_the_trajectories_whole(trajectories):
    limits = pictures.limits_of(trajectories)
    whole = [
        all(low <= at <= high for point in points for at, (low, high) in zip(point, limits, strict=True))
        for points in trajectories
    ]  # fmt: skip
    assert sum(whole) >= round(len(trajectories) * 2 / 3)
    still = [(0.0, 0.0)]  # one that diverged at once, or never moved
    assert pictures.limits_of([*trajectories, still, still]) == limits


def frontiers(*gram):
    gram = PairGram(*(torch.tensor([value], dtype=torch.float64) for value in gram))
    return {one.name: frontier(gram, one) for one in (HamuQ(), HamuU())}


@pytest.fixture
def drawn(monkeypatch):
    found, save = [], pictures.save_figure
    monkeypatch.setattr(pictures, "save_figure", lambda *of: found.append(of[0]) or save(*of))
    return found


@pytest.mark.parametrize(("constraint", "mode", "label"), [
    (0.3, "absolute", ["the demand, 0.3"]), (0.5, "relative", ["the demand, 0.5"]), (7.0, "absolute", []),
])  # fmt: skip
def test_frontiers_mark_a_demand_that_can_be_met(drawn, tmp_path, constraint, mode, label):
    method = HamuQ(constraint=constraint, constraint_mode=mode)
    pictures.plot_frontiers(frontiers(1.0, 1.0, 0.5), method, tmp_path / "frontier.png")
    for axes, marked in zip(drawn[0].axes, (label, []), strict=True):
        labels = [line.get_label() for line in axes.get_lines()]
        assert [text for text in labels if text.startswith("the")] == marked


def test_no_two_ticks_of_small_gains_run_into_each_other(drawn, tmp_path):
    runs = [(name, [Gains(0.0, 0.0), Gains(0.0177, 0.2)], Gains(0.0177, 0.2)) for name in STYLES]
    runs += [("ga", [Gains(0.0, 0.0), Gains(-0.065, -0.0965)], Gains(-0.065, -0.0965))]
    pictures.plot_comparison(runs, {"pcgrad-one-sided": 0.0213}, tmp_path / "comparison.png")
    method = HamuQ(0.5, "relative")
    pictures.plot_frontiers(frontiers(6e-4, 9e-4, -5e-4), method, tmp_path / "frontier.png")
    for figure in drawn:
        labels = [one for one in figure.axes[0].get_xticklabels() if one.get_text()]
        boxes = [one.get_window_extent() for one in labels]
        assert len(boxes) > 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_comparison_stands_for_its_runs_and_names_the_failed(tmp_path):
    write_run(tmp_path / "finished")
    for name in ("broken", "under-way"):
        write_run(tmp_path / name, finished=False)
    rows = [{"run": "finished", "failed": ""}, {"run": "broken", "failed": "it diverged"}]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": rows}))
    runs = {place.name: read_run(place) for place in run_folders(tmp_path)}
    assert list(runs) == ["broken", "finished", "under-way"]
    assert verdict(runs["broken"]).headline == "It failed after step 20"
    assert words_of(*runs.values()).count("it diverged") == 1


def test_a_model_may_have_more_outputs_than_the_data_have_classes(tmp_path):
    observed = image_observations()
    for sets in observed.predictions.values():
        for name, one in sets.items():
            sets[name] = Predictions(torch.cat([one.logits, one.logits + 1], 1), one.labels)
    run = example_run(tmp_path, observed=observed)
    page, words = report_page([run], contents=True), words_of(run, contents=True)
    maps = [c["data"][0] for c in charts_of(page) if c["data"][0]["type"] == "heatmap"][-2:]
    for confusion in maps:
        assert confusion["x"] == ["a", "b", "output 3", "output 4"]
        assert sum(confusion["z"][0]) == pytest.approx(1, abs=1e-4)
        assert confusion["z"][0][:2] == [0, 0]
    assert words.count("0.0% of 40 images recognised") == 2


@pytest.mark.parametrize(("name", "content", "note"), [
    ("evaluation.json", {"after": None}, "evaluation.after is not of type object"),
    ("evaluation.json", {"after": {"forget": {}}}, "evaluation.after has no retain"),
    ("attack.json", "{", "attack.json cannot be read: "),
    ("record.json", "{}", "record.json cannot be read: record has no"),
    ("steps.jsonl", "[\n", "of steps.jsonl, 1 line is damaged"),
    ("layers.jsonl", '{"step": 0}\n', ""),
    ("config.yaml", "\x00", "config.yaml cannot be read: "),
    ("config.yaml", None, "config.yaml is missing"),
])  # fmt: skip
def test_one_odd_file_leaves_the_rest_of_the_page(tmp_path, name, content, note):
    place = write_run(tmp_path / "run") / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(place.read_text()) | content)
    place.unlink(missing_ok=True)
    if content is not None:
        place.write_text(content)
    words = words_of(read_run(place.parent))
    assert all(text in words for text in (note, "What was gained", "Layers"))


def test_the_picture_of_attacks_has_means_and_bands_of_each_model(drawn, tmp_path):
    outcome = Outcome((0, 5), {"recognised": ((0.0, 0.0), (0.2, 0.6))}, (0.9, 0.9))
    found = {RELEARN_RETAIN: {UNLEARNED: outcome, RETRAINED: outcome}}
    found[QUANTIZE] = {UNLEARNED: replace(outcome, at=(0, 4))}
    result = AttackResult("image", found, {"forget": 9, "measured": 9})
    pictures.plot_attacks(result, tmp_path / "attack.png")
    relearned, rounded = drawn[0].axes
    assert [line.get_label() for line in relearned.get_lines()] == [UNLEARNED, RETRAINED]
    for axes, last in ((relearned, 5), (rounded, 1)):
        assert axes.get_lines()[0].get_xydata().tolist() == [[0, 0.0], [last, 0.4]]
        assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == 0.6
    assert [one.get_text() for one in rounded.get_xticklabels()] == ["as saved", "4 bits"]


def test_the_labels_of_attacks_on_texts_fit_into_their_picture(drawn, tmp_path):
    found = {RELEARN_RETAIN: {UNLEARNED: Outcome((0, 5), {"loss": ((1.0,), (0.5,))}, (0.9,))}}
    result = AttackResult("text", found, {"forget": 9, "measured": 9})
    pictures.plot_attacks(result, tmp_path / "attack.png")
    drawn[0].set_dpi(150)
    drawn[0].canvas.draw()
    label = drawn[0].axes[0].yaxis.label.get_window_extent()
    assert 0 < label.y0 < label.y1 < drawn[0].bbox.height


def test_tables_keep_whole_headings_on_eighty_columns_and_explain_what_they_show():
    sets = {"records": 400, "loss": 1.723, "accuracy": 0.616, "probability": 0.29}
    report = {"retain": sets, "forget": sets, "test": sets}
    both = {"before": report, "after": report | {"privleak": 0.1}}
    both |= {"retain model": report | {"retain": sets | {"loss": 1.234e-05, "records": 123_456}}}
    screen = Console(width=80, file=io.StringIO())
    screen.print(report_table(both))
    shown = screen.file.getvalue()
    assert "…" not in shown
    assert all(one in shown for one in ("1.234e-05", "123,456", "probability"))
    assert "PrivLeak" in further_table(both).caption
    assert "PrivLeak" not in further_table({"before": report}).caption


def test_pictures_are_of_the_records_that_the_run_has_measured():
    problem = forget_class(read_images("digits"), None, 3)
    measured, labels = subset(problem.forget, 10, 42), torch.full((10,), 3)
    before, after = torch.zeros(10, 10), torch.zeros(10, 10)
    after[7, 3] = 5.0  # of the eighth of them
    both = zip(ROLES, (before, after), strict=True)
    found = {role: {"forget": Predictions(one, labels)} for role, one in both}

    def fitted_problem(model, problem):
        raise HamuError("no embedding")

    args = SimpleNamespace(seed=42, eval_batch_size=1)
    task = SimpleNamespace(args=args, fitted_problem=fitted_problem)
    loaded = lambda role, most: (None, found[role])  # noqa: E731
    sources = SimpleNamespace(task=task, problem=problem, loaded=loaded)
    seen = review._images(sources, 200, Console(quiet=True))
    assert seen.pictures["changed most"].rows[0] == measured.rows[7]
