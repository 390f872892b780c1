"""The report's page: its figures and sections, from whole and broken runs; data never act as code."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from report_examples import (
    NASTY,
    example_run,
    goal,
    image_observations,
    spikes,
    text_observations,
    write_run,
)

from hamu.errors import HamuError
from hamu.evaluation import Predictions
from hamu.report.charts import BUCKETS, extremes
from hamu.report.course import losses_of_runs, steps_section, trajectories
from hamu.report.images import images_section
from hamu.report.page import MARK, Reported, report_page, sections_of, several
from hamu.report.pictures import STYLES, Look, looks_of
from hamu.report.records import forgotten_section
from hamu.report.run import read_run, read_runs, run_folders, told_apart
from hamu.report.verdict import verdict
from hamu.unlearning.goals import record_losses

MOST = 5_000_000  # bytes of a report beside its script


class Elements(HTMLParser):
    """The elements of a page: names with attributes, and what the scripts hold."""

    def __init__(self, page):
        super().__init__()
        self.found, self.scripts, self._inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def charts_of(page):
    return [json.loads(text) for text in Elements(page).scripts if text.startswith("{")]


def without_script(page):
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_a_page_stands_alone(tmp_path):
    page = report_page([Reported(example_run(tmp_path), image_observations())], contents=True)
    assert MARK in page[:1000]
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href"):
            assert re.match(r"data:image/png;base64,|#|$", attributes.get(name) or ""), attributes
    assert "http://" not in without_script(page)
    assert "https://" not in without_script(page)
    assert "default-src 'none'; img-src data: blob:;" in page, "no request is allowed"


@pytest.mark.parametrize("observed", [image_observations((NASTY, "b")), text_observations()])
def test_what_the_data_say_is_never_code(tmp_path, observed):
    run = example_run(tmp_path, name="a<script>b", names=(NASTY, "b"), blocks=[NASTY, "w"])
    page = report_page([Reported(run, observed), Reported(run, None, NASTY)], contents=True)
    elements = Elements(page)
    executable = [
        a for tag, a in elements.found if tag == "script" and a.get("type") != "application/json"
    ]
    assert len(executable) == 1
    assert not [a for _, a in elements.found if any(name.startswith("on") for name in a)]
    assert not [
        a
        for tag, a in elements.found
        if tag == "img" and not a["src"].startswith("data:image/png;base64,")
    ]
    assert "window.broken" in page, "it is there, as text"
    assert "{{ 7*7 }}" in page
    assert len(charts_of(page)) == sum(text.startswith("{") for text in elements.scripts)


def test_contents_are_in_a_page_only_on_request(tmp_path):
    names = ("Ada Unlikely", "Bob Unlikely")
    run = example_run(tmp_path, names=names)
    shown = report_page([Reported(run, image_observations(names))], contents=True)
    hidden = without_script(report_page([Reported(run, image_observations(names))]))
    assert "Ada Unlikely" in shown
    assert "data:image/png" in shown
    assert "holds contents of the data" in shown
    for secret in ("Unlikely", "data:image/png", "holds contents"):
        assert secret not in hidden
    for claim in ("asked for", "--no_contents", "you "):
        assert claim not in re.sub(
            r"<style>.*?</style>|<script.*?</script>", "", shown + hidden, flags=re.DOTALL
        )
    assert "are not in this file" in hidden
    texts = report_page([Reported(run, text_observations())])
    assert "Who is" not in texts
    assert '"row 3"' not in texts
    assert '"row 3"' in report_page([Reported(run, text_observations())], contents=True)


def test_a_long_run_stays_small_and_keeps_its_peaks(tmp_path):
    blocks = [f"layers.{n}.self_attn.q_proj.weight" for n in range(300)]
    run = example_run(tmp_path, steps=100_000, blocks=blocks)
    page = report_page(
        [
            Reported(run, image_observations(count=3000)),
            Reported(run, text_observations(count=3000)),
        ],
        contents=True,
    )
    assert len(without_script(page).encode()) < MOST
    for chart in charts_of(page):
        for one in chart["data"]:
            assert len(one["x"]) <= 3000
            if one["type"] == "heatmap":
                assert len(one["z"]) * len(one["z"][0]) <= 32_000
    values = spikes()
    kept = extremes(values)
    assert len(kept) <= 2 * BUCKETS + 2
    assert {0, len(values) - 1, int(values.argmax()), int(values.argmin())} <= set(kept.tolist())


def test_a_run_under_way_has_a_report(tmp_path):
    place = write_run(tmp_path / "run", finished=False)
    with open(place / "steps.jsonl", "a") as log:
        log.write('{"step": 21, "forget_lo')  # as it is while it is written
    state = {
        "log_history": [
            {"step": s, "eval_forget_gain": s / 9, "eval_retain_gain": 0.0} for s in (0, 9)
        ]
    }
    (place / "checkpoint-9").mkdir()
    (place / "checkpoint-9/trainer_state.json").write_text(json.dumps(state))
    run = read_run(place)
    assert verdict(run).headline == "Not finished: step 20 so far"
    assert run.points == [(0.0, 0.0), (0.0, 1.0)]
    page = report_page([Reported(run, None, "the model after is not there")])
    assert "of steps.jsonl, 1 line is damaged and skipped" in page
    assert "the model after is not there" in page


LASTING = {"lasts": True, "verdict": "It lasts: so."}


@pytest.mark.parametrize(
    ("attack", "headline", "tone"),
    [
        (
            None,
            "By its losses it forgot, and does better on what is to stay; whether it lasts was not tested",
            "mixed",
        ),
        (LASTING, "It forgot, and does better on what is to stay; it lasts", "good"),
        (
            {"lasts": False, "verdict": "No."},
            "It is hidden, not forgotten: fine-tuning on the retain data",
            "bad",
        ),
        ({"lasts": None, "verdict": "Open."}, "By its losses it forgot, and does better", "mixed"),
    ],
)
def test_forgotten_means_by_its_losses_and_for_good(tmp_path, attack, headline, tone):
    run = example_run(tmp_path)
    run.evaluation["goal"] = goal(0, 20)
    for side, change in (("forget", 1.0), ("retain", -0.1)):
        before, after = (run.evaluation[role][side] for role in ("before", "after"))
        after |= {"loss": before["loss"] + change, "accuracy": before["accuracy"]}
    found = verdict(replace(run, attack=attack))
    assert found.headline.startswith(headline)
    assert found.tone == tone
    assert (attack is None) is not any(
        attack and one == attack["verdict"] for one in found.sentences
    )


@pytest.mark.parametrize(
    ("forget", "retain", "headline", "tone"),
    [
        (1.0, -0.1, "The forget loss rose, and the model does better", "open"),
        (0.0005, -0.1, "It hardly forgot", "bad"),
        (1.0, 0.0005, "The forget loss rose, and what is to stay has stayed", "open"),
        (1.0, 0.4, "The forget loss rose, at a price", "mixed"),
        (1.0, 1.4, "It lost more", "bad"),
        (-0.1, -0.1, "It did not forget", "bad"),
        (float("nan"), 0.0, "The model's losses are not finite", "bad"),
    ],
)
def test_the_verdict_follows_from_both_losses(tmp_path, forget, retain, headline, tone):
    run = example_run(tmp_path)
    for side, change in (("forget", forget), ("retain", retain)):
        before, after = (run.evaluation[role][side] for role in ("before", "after"))
        after |= {"loss": before["loss"] + change, "accuracy": before["accuracy"]}
    found = verdict(replace(run, attack=LASTING))
    assert found.headline.startswith(headline)
    assert found.tone == tone
    assert any("because the criterion is met" in sentence for sentence in found.sentences)


@pytest.mark.parametrize(
    ("counts", "more", "headline", "tone"),
    [
        ((0, 19), {}, "It forgot, and what is to stay has stayed", "good"),
        ((0, 18), {}, "It forgot in part, 18 of 20 records, and what is to stay has stayed", "mixed"),
        ((3, 3), {}, "It did not forget: 3 of 20 records are forgotten", "bad"),
        ((0, 18), {"budget": 0.02}, "It forgot in part, 18 of 20 records, and what is to stay has stayed; its goal is "
         "not reached", "mixed"),
        ((0, 19), {"budget": 0.02}, "It forgot, and what is to stay has stayed", "good"),
        ((0, 19), {"budget": 0.02, "reached": False}, "It forgot, and what is to stay has stayed; its goal is not "
         "reached", "mixed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("change", [-0.1, 0.0, 2.0])
def test_the_verdict_follows_the_records_not_their_mean(
    tmp_path, counts, more, headline, tone, change
):
    run = example_run(tmp_path)
    for side, by in (("forget", change), ("retain", 0.0)):
        before, after = (run.evaluation[role][side] for role in ("before", "after"))
        after |= {"loss": before["loss"] + by, "accuracy": before["accuracy"]}
    run.evaluation["goal"] = goal(*counts, **more)
    found = verdict(replace(run, attack=LASTING))
    words, miss, rest = headline.partition("; its goal")
    assert (found.headline, found.tone) == (
        f"{words}{'' if tone == 'bad' else '; it lasts'}{miss}{rest}",
        tone,
    )
    assert found.sentences[0].startswith(
        f"{counts[1]} of 20 records are forgotten by the goal unseen (their losses"
    )
    assert found.sentences[0].endswith(f"Before the run, {counts[0]} were.")
    assert found.tiles[0].name == "records forgotten"
    assert (found.tiles[0].before, found.tiles[0].after) == (
        f"{counts[0]} of 20",
        f"{counts[1]} of 20",
    )


@pytest.mark.parametrize("observed", [image_observations(), text_observations()])
def test_each_record_counts_in_a_section_of_its_own(tmp_path, observed):
    run = example_run(tmp_path)
    run.evaluation["goal"] = goal(1, 8)
    section = forgotten_section(run, observed)
    assert section.intro.startswith("8 of 20 records are forgotten by the goal unseen")
    assert "it asks for 95% of them" in section.intro
    quantiles, worst = section.tables
    assert [row[:2] for row in quantiles.rows] == [
        ["forget, before", "1 of 20"], ["forget, after", "8 of 20"], ["test, before", "-"],
    ]  # fmt: skip
    assert quantiles.rows[1][2:] == ["0.1", "0.575", "1.05", "1.525", "2"]
    unseen = torch.quantile(record_losses(observed.predictions["before"]["test"]), 0.5)
    assert float(quantiles.rows[2][4]) == pytest.approx(unseen.item(), rel=1e-3)
    assert len(worst.rows) == 10
    assert worst.rows[0] == ["1", "0.1", "0.225"]
    [chart] = section.charts
    assert [one.name.partition(":")[0] for one in chart.figure.data] == [
        "forget, before", "forget, after", "test, before",
    ]  # fmt: skip
    for one in chart.figure.data:
        assert list(one.x) == sorted(one.x)
        assert one.y[-1] == 1
    assert (
        section.title
        == sections_of(Reported(run, observed), looks_of(["gdiff"])[0], False)[0].title
    ), "the first"
    run.evaluation["goal"] = goal(1, 20)
    assert len(forgotten_section(run, None).tables) == 1, "none is away from the goal"


def test_what_chance_would_change_is_no_change(tmp_path):
    run = example_run(tmp_path)

    def headline(forget, retain, accuracy, retain_change=-0.2, accuracy_change=0.0):
        for figure, change in (("loss", retain_change), ("accuracy", accuracy_change)):
            run.evaluation["after"]["retain"][figure] = (
                run.evaluation["before"]["retain"][figure] + change
            )
        changes = {
            "forget": {"loss_interval": forget},
            "retain": {"loss_interval": retain, "accuracy_interval": accuracy},
        }
        found = verdict(
            replace(run, record={"figures": {"change": changes}}, attack=LASTING)
        ).headline
        return found.removesuffix("; it lasts")

    stayed, price = (f"The forget loss rose, {what}" for what in (
        "and what is to stay has stayed", "at a price on what is to stay",
    ))  # fmt: skip
    risen, fallen, unsure = [0.1, 0.3], [-0.3, -0.1], [-0.1, 0.1]
    assert headline(unsure, fallen, unsure).startswith("It hardly forgot")
    assert headline(risen, unsure, unsure) == stayed
    assert (
        headline(risen, fallen, unsure)
        == "The forget loss rose, and the model does better on what is to stay"
    )
    assert headline(risen, risen, unsure, retain_change=0.2) == price
    assert headline(risen, unsure, fallen, accuracy_change=-0.02) == price, (
        "fewer right are a price at any loss"
    )
    assert headline(risen, fallen, fallen, accuracy_change=-0.02) == price
    assert headline(risen, unsure, fallen, accuracy_change=-0.0005) == stayed, (
        "one in two thousand is none"
    )
    assert headline(risen, None, None, retain_change=0.0005) == stayed, "without intervals likewise"


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ("method: gdiff", []),
        ("method: hamu-q\nforget_objective: npo", ["forget"]),
        ("method: npo", ["forget"]),
        ("method: npo\nforget_objective: cross_entropy", []),
        ("method: kl", ["retain"]),
        ("method: scrub", ["forget", "retain"]),
        ("method: of-a-package-that-is-gone", ["forget", "retain"]),
        ("[not, settings]", ["forget", "retain"]),
    ],
)
def test_only_the_mean_loss_is_called_a_loss(tmp_path, settings, own):
    run = example_run(tmp_path)
    place = tmp_path / "run"
    (place / "config.yaml").write_text(settings)
    run = read_run(place)
    charts = {chart.title: chart for chart in steps_section(run).charts}
    assert [title for title in charts if title.startswith("Objective")] == [
        f"Objective of the method: {side}" for side in own
    ]
    losses = charts["Losses"].figure
    assert losses.layout.yaxis.title.text.startswith("loss, nats")
    drawn = [one.name for one in losses.data]
    for side in ("forget", "retain"):
        is_own = side in own
        assert (f"{side}, batches" in drawn) == (not is_own)
        assert f"{side}, evaluations" in drawn, "of which the loss is known"
        assert (f"Promise and reality: the {side} loss" in charts) == (not is_own)
        assert (f"Promise and reality: the {side} objective" in charts) == is_own
        if is_own:
            objective = charts[f"Objective of the method: {side}"].figure
            assert "nats" not in objective.layout.yaxis.title.text
            assert [one.y[0] for one in objective.data] == [
                pytest.approx(run.steps[f"{side}_loss"][0])
            ]


def test_objectives_of_methods_are_not_laid_over_losses(tmp_path):
    for name in ("gdiff", "npo", "kl"):
        (write_run(tmp_path / name) / "config.yaml").write_text(f"method: {name}\n")
    runs = [read_run(tmp_path / name) for name in ("gdiff", "npo", "kl")]
    looks = looks_of(["gdiff", "npo", "kl"])
    drawn = {
        side: [one.name for one in losses_of_runs(runs, looks, side).figure.data]
        for side in ("forget", "retain")
    }
    assert drawn == {"forget": ["gdiff", "kl"], "retain": ["gdiff", "npo"]}
    assert losses_of_runs(runs[2:], looks[2:], "retain") is None
    page = report_page([Reported(run) for run in runs])
    assert (
        "Not here: the forget loss of the steps&#39; batches of npo: what is logged there is the objective"
        in page
    )
    assert "Not here: the retain loss of the steps&#39; batches of kl: " in page


def saved_earlier(run, step):
    """The run as if the state at that evaluation had been loaded and saved at its end."""
    best = next(entry for entry in run.entries if entry["step"] == step)
    for side in ("forget", "retain"):
        run.evaluation["after"][side]["loss"] = best[f"eval_{side}_loss"]
    return replace(run, settings={**run.settings, "load_best_model_at_end": True})


def test_the_gains_are_those_of_the_model_saved(tmp_path):
    last, best = (
        example_run(tmp_path, "last"),
        saved_earlier(example_run(tmp_path, "best"), step=10),
    )
    table = several([last, best])
    assert [row[2:4] for row in table.rows] == [["+1", "+0.1111"], ["+0.5", "+0.05556"]]
    assert (
        "The model saved by best is that of step 10, not that of the last evaluation."
        in table.caption
    )
    assert "by last" not in table.caption
    chart = trajectories([last, best], looks_of(["ga", "ga"]))
    assert "best ends at (+0.0556, +0.5), ringed: the model saved is that of step 10" in chart.says
    last_line, best_line, ring = chart.figure.data
    assert (ring.x[0], ring.y[0]) == pytest.approx((0.5 / 9, 0.5))
    assert last_line.y[-1] == best_line.y[-1] == 1.0, "all of the trajectory is drawn"
    assert (
        "The model saved is that of step 10, not that of the last evaluation."
        in verdict(best).sentences
    )
    assert not any("The model saved" in sentence for sentence in verdict(last).sentences)


def test_a_state_that_no_evaluation_has_is_not_guessed_at(tmp_path):
    run = saved_earlier(example_run(tmp_path), step=10)
    run.evaluation["after"]["forget"]["loss"] += 1e-9
    assert (
        run.earlier_state
        == "not that of the last evaluation; of which step it is has not been recorded"
    )
    run = saved_earlier(example_run(tmp_path, "last"), step=20)
    run.evaluation["after"]["forget"]["loss"] += 1e-9
    assert run.earlier_state == "", "the last state, measured again"


def test_folders_of_one_name_are_told_apart_by_those_above_them(tmp_path):
    places = ("a/unlearned", "b/unlearned", "x/deep/unlearned", "y/deep/unlearned", "other")
    runs = [example_run(tmp_path, place) for place in places]
    assert [run.name for run in told_apart(runs)] == list(places)
    assert [run.name for run in told_apart([runs[1], runs[2]])] == ["b/unlearned", "deep/unlearned"]
    assert [run.name for run in told_apart([runs[2], runs[4], runs[2]])] == [
        "unlearned",
        "other",
        "unlearned",
    ]
    page = report_page([Reported(run) for run in runs[:2]])
    assert "<title>Unlearning report: a/unlearned, b/unlearned</title>" in page
    for name in ("a/unlearned", "b/unlearned"):
        assert f'<th scope="row">{name}</th>' in page
        assert f"<h2>{name}</h2>" in page
    for chart in charts_of(page)[:3]:
        assert [one["name"] for one in chart["data"]] == ["a/unlearned", "b/unlearned"]


def test_no_two_runs_look_alike():
    ours = list(STYLES)
    alone = looks_of(["a-plugin", *ours[2:]])
    assert alone[1:] == [Look(STYLES[name][0]) for name in ours[2:]], (
        "each method has its own colour"
    )
    assert alone[0] in [Look(STYLES[name][0]) for name in ours[:2]], "and another one what is left"
    twice = looks_of([*ours[:2], *ours])
    assert len(set(twice)) == 14
    assert twice[4:] == [Look(STYLES[name][0]) for name in ours[2:]]
    assert [bool(look.dash) for look in twice[:4]] == [False, False, True, True]
    assert twice[2].color == twice[0].color
    for methods in (["hamu-q"] * 100, [*ours, "one", "two"] * 9, ["unknown"] * 50):
        assert len(set(looks_of(methods))) == len(methods)


def test_folders_that_hold_no_run_are_refused(tmp_path):
    with pytest.raises(HamuError, match="there is no folder"):
        run_folders(tmp_path / "gone")
    with pytest.raises(HamuError, match="holds no run: it has neither"):
        run_folders(tmp_path)
    (tmp_path / "evaluation.json").write_text('{"retain": {}}')
    with pytest.raises(HamuError, match="has no before and after"):
        read_run(tmp_path)


def test_a_demo_and_a_comparison_stand_for_their_runs(tmp_path):
    demo = tmp_path / "demo"
    demo.mkdir()
    methods = {name: {"trajectory": [[0, 0], [0.1, 0.2]]} for name in ("hamu-q", "ft")}
    (demo / "summary.json").write_text(json.dumps({"methods": methods}))
    runs = read_runs(demo)
    assert [run.points[-1] for run in runs] == [(0.1, 0.2)] * 2
    page = report_page([Reported(run) for run in runs])
    assert "All runs" in page
    assert "more of hamu-q, ft: a demo keeps trajectories alone" in page
    assert "<article" not in page
    assert trajectories(runs, looks_of(["hamu-q", "ft"])).figure.data[0].hovertext == (
        "start",
        "epoch 1",
    )
    both = tmp_path / "compare"
    for name in ("one", "two"):
        write_run(both / name)
    (both / "comparison.json").write_text("{}")
    assert [place.name for place in run_folders(both)] == ["one", "two"]


def test_a_comparison_stands_for_its_own_runs_and_says_which_failed(tmp_path):
    both = tmp_path / "compare"
    for name in ("earlier", "finished"):
        (write_run(both / name) / "record.json").write_text("{}")
    write_run(both / "broken", finished=False)
    write_run(both / "under-way", finished=False)
    failed = [
        {"run": name, "method": "ga", "failed": "unlearning diverged"}
        for name in ("broken", "never-begun")
    ]
    rows = [{"run": "finished", "method": "hamu-q", "failed": ""}, *failed]
    (both / "comparison.json").write_text(json.dumps({"runs": rows}))
    runs = {place.name: read_run(place) for place in run_folders(both)}
    assert list(runs) == ["broken", "finished", "never-begun", "under-way"], (
        "what is not listed has been left over"
    )
    assert verdict(runs["broken"]).headline == "It failed after step 20"
    assert verdict(runs["under-way"]).headline == "Not finished: step 20 so far"
    assert runs["never-begun"].method == "ga"
    page = report_page([Reported(run, None, "no model") for run in runs.values()])
    assert page.count("unlearning diverged") == 2


def test_a_model_with_more_outputs_than_the_data_has_classes(tmp_path):
    observed = image_observations(count=40)
    wide = {
        role: {
            name: Predictions(torch.cat([one.logits, one.logits + 1], 1), one.labels)
            for name, one in sets.items()
        }
        for role, sets in observed.predictions.items()
    }
    section = images_section(replace(observed, predictions=wide), contents=True)
    confusion = section.charts[0].figure.data[0]
    assert confusion.x == ("a", "b", "output 3", "output 4")
    assert section.charts[0].says.count("0.0% of 40 images") == 1, (
        "all are taken for an output that is no class"
    )
    taken = {
        line for pictures in section.pictures.values() for one in pictures for line in one.lines
    }
    assert {"taken for output 3", "taken for output 4"} <= taken


def without(evaluation, *place):
    *above, last = place
    for name in above:
        evaluation = evaluation[name]
    del evaluation[last]


@pytest.mark.parametrize(("name", "content", "note"), [
    ("evaluation.json", lambda e: without(e, "after", "retain"), "evaluation.after has no retain"),
    ("evaluation.json", lambda e: e.update(trajectory=[1, 2]), "evaluation.trajectory[0] is not of type object"),
    ("evaluation.json", lambda e: e.update(trajectory=None), "evaluation.trajectory is not of type array"),
    ("evaluation.json", lambda e: e.update(after=None), "evaluation.after is not of type object"),
    ("evaluation.json", lambda e: e["after"]["forget"].update(loss=None), "forget.loss is not of type number"),
    ("evaluation.json", lambda e: e["after"].update(membership_inference="x"), "is not of type object or null"),
    ("evaluation.json", "[" * 200_000, "evaluation.json cannot be read: "),
    ("steps.jsonl", "[" * 200_000 + "\n", "of steps.jsonl, 1 line is damaged"),
    ("steps.jsonl", '{"step": 1, "kappa": 1' + "0" * 400 + "}\n", ""),
    ("layers.jsonl", '{"step": 0, "blocks": ["a", "b"]}\n{"step": 1, "cos": ["x", 1], "change": [1, 2]}\n', ""),
    ("layers.jsonl", '{"step": 0, "blocks": ["a"]}\n{"step": 1, "cos": 3, "change": [1]}\n', ""),
    ("layers.jsonl", '{"step": 0, "blocks": 5}\n{"step": 1, "cos": [1]}\n', "does not begin with the names"),
    ("config.yaml", None, "config.yaml cannot be read: "),
    ("config.yaml", "\x00", "config.yaml cannot be read: "),
])  # fmt: skip
def test_one_odd_file_leaves_the_rest_of_the_page(tmp_path, name, content, note):
    place = write_run(tmp_path / "run")
    if content is None:
        (place / name).unlink(missing_ok=True)
        (place / name).mkdir()
    elif isinstance(content, str):
        (place / name).write_text(content)
    else:
        evaluation = json.loads((place / name).read_text())
        content(evaluation)
        (place / name).write_text(json.dumps(evaluation))
    run = read_run(place)
    assert note in "; ".join(run.notes)
    page = report_page([Reported(run, None, "no model")])
    assert MARK in page
    (place / name).rmdir() if content is None else (place / name).unlink()
    assert name in report_page([Reported(read_run(place), None, "gone")])


def test_a_checkpoint_with_odd_evaluations_has_the_others(tmp_path):
    place = write_run(tmp_path / "run", finished=False)
    good = {"step": 3, "eval_forget_gain": 0.1, "eval_retain_gain": 0.2}
    (place / "checkpoint-99").mkdir()
    state = {
        "log_history": [1, good, {"step": 4, "eval_forget_gain": None, "eval_retain_gain": 0.1}]
    }
    (place / "checkpoint-99/trainer_state.json").write_text(json.dumps(state))
    assert read_run(place).entries == [good]
