"""The cells of a comparison, its figures, and its table in each form."""

import csv
import io
import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from hamu.core.methods import HamuQ, Method, build_method, method_classes
from hamu.errors import HamuError
from hamu.evaluation.gains import Level
from hamu.report.tables import (
    Fitted,
    csv_table,
    escape_latex,
    escape_markdown,
    latex_page,
    markdown_page,
    remarks,
)
from hamu.unlearning.compare import Cell, cells, random_cells
from hamu.unlearning.compare.children import Children, Ended
from hamu.unlearning.compare.runs import (
    METRIC,
    Comparison,
    Plan,
    Runs,
    check_same_inputs,
    finished_row,
    start_figures,
)
from hamu.unlearning.goals import ALL_DONE
from hamu.unlearning.jobs.comparison import run_job, run_waiting
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import unused_settings

UNMEASURED = ("retain_accuracy", "test_accuracy", "forget_probability", "retain_probability", "test_probability",
              "utility", "membership_auc")  # fmt: skip


def row(method="gdiff", seed=42, *, forget=1.0, retain=0.5, constraint=None, **figures):
    cell = Cell(method, constraint, 0.1, seed)
    found = {"forget_gain": forget, "retain_gain": retain, "joint_gain": min(forget, retain), "forget_accuracy": 0.25,
             "promise_kept": None, "ended": "all steps", "ended_because": ALL_DONE.text, "ended_at": 5, "steps": 5,
             "seconds": 12.3, "failed": ""}  # fmt: skip
    named = {"run": cell.name, "setting": cell.setting, **vars(cell)}
    return named | dict.fromkeys(UNMEASURED) | found | figures


def columns(method):
    return Cell(method, None, 0.1, 42).columns()


def failed(method="ga"):
    own, why = columns(method), "unlearning diverged"
    return {"run": f"{own['setting']}-s42", **own, "ended": "failed", "seconds": 3.0, "failed": why}


def compared(*rows):
    return Comparison(rows, {"forget_accuracy": 0.985, "membership_auc": None})


def test_further_metrics_are_columns_of_files_with_means_over_seeds():
    name = f"{METRIC}tpr_at_1_fpr"
    found = compared(*(row(seed=seed, **{name: 0.01 * seed}) for seed in (1, 3)), row("ga", 1))
    page = markdown_page(found)
    assert "| tpr_at_1_fpr |" in page
    assert "0.02 ± 0.0141" in page
    assert r"tpr\_at\_1\_fpr" in latex_page(found)
    assert name in csv_table(found.rows)


def test_a_screen_shows_the_columns_that_it_has_room_for_whole():
    figures = {"test_accuracy": 0.5, "retain_accuracy": 0.75, "membership_auc": 0.5}
    rows = [row(method, 1, utility=-0.25, **figures) for method in ("gdiff", "pcgrad-one-sided")]
    for width in (40, 60, 80, 200):
        console = Console(width=width, file=io.StringIO(), force_terminal=True, no_color=True)
        console.print(Fitted(rows))
        shown = Text.from_ansi(console.file.getvalue()).plain
        assert "…" not in shown
        assert re.search(r"pcgrad-one-sided +\+1 +\+0.5", shown)
        assert ("12" in shown) == ("no room for" not in shown) == (width == 200)
        assert max(map(len, shown.splitlines())) <= width
    piped = Console(width=40, file=io.StringIO())
    piped.print(Fitted(rows), crop=False)
    assert all(one in piped.file.getvalue() for one in ("75.0%", "12", "all steps"))


def test_constraints_multiply_only_methods_that_have_one_and_names_tell_all_cells_apart():
    close = math.nextafter(0.5, 1)
    found = cells(["hamu-q", "gdiff"], [0.5, close], [1e-4], [42])
    assert [cell.name for cell in found] == [
        "hamu-q-c0.5-lr0.0001-s42", f"hamu-q-c{close!r}-lr0.0001-s42", "gdiff-lr0.0001-s42"
    ]  # fmt: skip


def test_trials_are_the_same_points_for_every_method_and_more_of_them_keep_the_first():
    found = random_cells(["hamu-q", "gdiff", "ga"], 8, 1e-3, 7)
    ours, gdiff, ga = found[:8], found[8:16], found[16:]
    assert [one.learning_rate for one in ours] == [one.learning_rate for one in ga]
    assert random_cells(["hamu-q"], 16, 1e-3, 7)[:8] == ours
    assert random_cells(["hamu-q"], 8, 1e-3, 8) != ours
    assert len({one.setting for one in found}) == 24
    rates, shares = [one.learning_rate for one in ours], [one.constraint for one in ours]
    assert 1e-4 <= min(rates) < 2e-4 < 5e-3 < max(rates) <= 1e-2, "a factor of ten on both sides"
    assert 0.02 <= min(shares) < 0.05 < 0.4 < max(shares) <= 1
    assert all((one.constraint, one.forget_weight) == (None, None) for one in ga)
    assert all(one.constraint is None and 0.02 <= one.forget_weight <= 0.9 for one in gdiff)
    assert gdiff[0].settings({"constraint": 0.5})["forget_weight"] == gdiff[0].forget_weight


def at_level(method, gain, **figures):
    return row(method, at_gain=gain, at_step=3.5, at_test_accuracy=0.75, **figures)


def test_at_a_level_rows_are_ranked_by_the_gain_there_and_only_the_best_settings_are_shown():
    far = at_level("ft", None, forget=9.0, retain=9.0)
    rows = (far, at_level("gdiff", -0.5), at_level("ga", -0.25), failed("kl"))
    worse = at_level("ga", -2.0) | {"run": "other", "setting": "ga-lr9"}
    found = Comparison((*rows, worse), {"forget_loss": 1.5}, Level("forget", 7.0))
    assert [one["method"] for one in found.rows] == ["ga", "gdiff", "ga", "ft", "kl"]
    assert found.best_settings() == {"ga": "ga-lr0.1", "gdiff": "gdiff-lr0.1"}
    assert found.level_gain == ("forget", 5.5)
    lucky = [at_level("kl", gain) | {"seed": n} for n, gain in enumerate((-0.1, -0.9, None))]
    steady = [at_level("kl", -0.5) | {"seed": n, "setting": "kl-lr1"} for n in range(3)]
    of_seeds = Comparison((*lucky, *steady), None, Level("forget", 7.0))
    assert of_seeds.best_settings() == {"kl": "kl-lr1"}, "one run may be luck"
    assert replace(of_seeds, found=tuple(lucky)).best_settings() == {"kl": "kl-lr0.1"}
    found = replace(found, best=frozenset(found.best_settings().values()))
    assert [one["method"] for one in found.shown] == ["ga", "gdiff"]
    page = markdown_page(found)
    for said in ("| gain there | step there | test acc there |", "| -0.25 | 3.5 | 75.0% |",
                 "there: where the forget loss is 7 (by interpolation) or more, whichever is better; the gain",
                 "never there: ft\n", "hypervolume of all 4 runs over"):  # fmt: skip
        assert said in page
    assert len(found.summary()["runs"]) == 5, "comparison.json has all of them"
    both = {"forget_gain": 3.0, "retain_gain": 1.0}
    hidden = replace(found, found=(*rows, worse | both))
    assert [one["pareto"] for one in hidden.rows[:2]] == [False, False]
    starred = [[one["pareto"] for one in shown.shown] for shown in (found, hidden)]
    assert starred == [[True, True]] * 2, "a star is of the rows shown"
    nothing = "the forget loss was 7 or more before the runs, so this level compares nothing; give"
    assert nothing not in page
    assert nothing in markdown_page(replace(found, start={"forget_loss": 7.5}))


def test_a_mean_at_a_level_is_one_of_all_seeds_or_none():
    rows = [at_level("ga", -0.5, seed=1), at_level("ga", -1.0, seed=2),
            at_level("gdiff", -0.1, seed=1), at_level("gdiff", None, seed=2),
            at_level("kl", -0.2, seed=1), failed("kl") | {"seed": 2}, failed("ft")]  # fmt: skip
    ga, gdiff, kl = Comparison(tuple(rows), None, Level("retain", 1.0)).means
    assert (ga["method"], ga["at_gain"]["mean"], gdiff["at_gain"]) == ("ga", -0.75, None)
    assert (kl["method"], kl["at_gain"], kl["runs"]) == ("kl", None, 1)
    again = failed("ga") | {"run": "ga-at", "seed": 2}  # the state there, run again for an attack
    ga, *_ = Comparison((*rows, again), None, Level("retain", 1.0)).means
    assert (ga["method"], ga["at_gain"]["mean"], ga["runs"]) == ("ga", -0.75, 2)
    rows[1] |= {"failed": "the losses of its model are not finite", "relearned": 0.5}
    ga, gdiff, *_ = Comparison(tuple(rows), None, Level("retain", 1.0)).means
    assert (ga["at_gain"]["mean"], ga["runs"], ga["relearned"]) == (-0.75, 1, None)
    assert ga["at_step"]["mean"] == 3.5
    rows[3]["at_step"] = None
    _, gdiff, _ = Comparison(tuple(rows), None, Level("retain", 1.0)).means
    assert gdiff["at_step"] is None


@pytest.mark.parametrize("method", method_classes())
def test_settings_without_an_effect_on_a_method_are_left_out(method, tmp_path):
    shared = {
        "method": "hamu-q", "seed": 0, "learning_rate": 7.0, "constraint": 0.1, "constraint_mode": "relative",
        "stopping": "any", "correct_steps": True, "min_forget_loss": 0.1, "max_retain_loss": 0.4,
        "forget_objective": "npo", "max_steps": 3,
    }  # fmt: skip
    [cell] = cells([method], [0.25], [0.01], [5])
    settings = cell.settings(shared)
    args = UnlearnConfig(output_dir=str(tmp_path), **settings)
    assert (args.method, args.seed, args.learning_rate, args.max_steps) == (method, 5, 0.01, 3)
    left_out = shared.keys() - settings.keys()
    assert left_out == unused_settings(build_method(method)) & shared.keys()
    assert settings.get("constraint", 0.25) == 0.25
    assert ("max_retain_loss" in settings) == (method != "ga")
    assert ("min_forget_loss" in settings) == ("forget_objective" in settings) == (method != "ft")


@dataclass(frozen=True)
class Bounded(Method):
    """A method of another package: no constraint, but a radius, and an end of its own."""

    name = "bounded"
    radius: float = 1.0
    on_infeasible: str = "skip"
    stopping: str = "off"

    def weigh(self, gram):
        raise NotImplementedError


def test_a_method_of_another_package_is_given_what_its_fields_are_and_no_more(monkeypatch):
    unused, own = unused_settings(Bounded()), {"radius", "on_infeasible", "stopping"}
    assert not unused & {*own, "stopping_margin", "stopping_window"}
    assert unused >= {"constraint", "constraint_mode", "distribution", "correct_steps"}
    classes = {"bounded": Bounded, "hamu-q": HamuQ}
    monkeypatch.setattr("hamu.core.methods.method_classes", lambda asked=None: classes)
    first, *others = cells(["bounded", "hamu-q"], [0.25, 0.5], [0.1], [1])
    assert (first.name, [one.constraint for one in others]) == ("bounded-lr0.1-s1", [0.25, 0.5])
    taken = {"radius": "2", "on_infeasible": "clamp", "stopping_margin": 0.5}
    assert taken.items() <= first.settings({**taken, "distribution": "x"}).items()


def test_rows_are_sorted_by_joint_gain_and_what_nothing_beats_is_marked():
    found = compared(failed(), row("ft", forget=0.1, retain=2.0), row("gdiff", forget=1.0, retain=0.5),
                     row("kl", forget=0.9, retain=0.4), row("gru", forget=9.0, retain=-3.0))  # fmt: skip
    assert [(one["method"], one.get("pareto")) for one in found.rows] == [
        ("gdiff", True), ("kl", False), ("ft", True), ("gru", True), ("ga", None)
    ]  # fmt: skip


def test_means_are_over_the_seeds_of_a_setting():
    rows = [row("hamu-q", 1, constraint=0.5, forget=1.0, retain=0.0, promise_kept=1.0),
            row("hamu-q", 2, constraint=0.5, forget=3.0, retain=1.0, promise_kept=0.5),
            row("hamu-q", 2, constraint=0.25, forget=7.0, retain=-2.0),
            failed("ga")]  # fmt: skip
    best, other = compared(*rows).means
    assert (best["setting"], best["runs"], best["pareto"]) == ("hamu-q-c0.5-lr0.1", 2, True)
    assert best["forget_gain"] == {"mean": 2.0, "deviation": pytest.approx(math.sqrt(2))}
    assert best["joint_gain"]["mean"] == 0.5
    assert best["promise_kept"]["mean"] == 0.75
    assert (other["runs"], other["forget_gain"]) == (1, {"mean": 7.0, "deviation": None})
    assert other["promise_kept"] is None


@pytest.mark.parametrize(("worst", "reference"), [(-0.3, -0.3), (-50.0, -1.0), (0.2, 0.0)])
def test_the_reference_is_the_worst_retain_loss_within_limits(worst, reference):
    rows = row("ga", forget=4.0, retain=worst), row("ft", forget=2.0, retain=0.25)
    found = compared(*rows, failed("kl"))
    own = {"ft": 2.0 * (0.25 - reference), "ga": 4.0 * max(0.0, worst - reference)}
    volume = found.summary()["hypervolume"]
    assert volume == {"reference": (0.0, reference), "methods": pytest.approx(own)}


NASTY = "50% of {a_b} | #1 & $x^2$ ~ \\cmd [link](url) <b> *bold* `code`"


@pytest.mark.parametrize(("figure", "value", "shown"), [
    *(("promise_kept", kept, f"{kept:.0%}") for kept in (0.0, 0.5, 1.0)),
    ("promise_kept", 0.001, "0.1%"),  # none or all only if it is exactly that
    ("promise_kept", 0.999, "99.9%"),
    ("utility", -0.000214, "-0.000214"),
    ("at_step", 12_345.5, "12,345.5"),
])  # fmt: skip
def test_a_figure_keeps_the_digits_that_mean_something(figure, value, shown):
    assert f"| {shown} |" in markdown_page(compared(row(**{figure: value})))


def test_markdown_shows_texts_as_they_are():
    markdown = pytest.importorskip("markdown_it").MarkdownIt()  # a dependency of rich
    [parsed] = markdown.parseInline(escape_markdown(NASTY))
    assert "".join(token.content for token in parsed.children) == NASTY


def test_latex_has_no_bare_special_letters():
    assert escape_latex(NASTY) == (
        r"50\% of \{a\_b\} $|$ \#1 \& \$x\textasciicircum{}2\$ \textasciitilde{} \textbackslash{}cmd {[}link](url) "
        r"$<$b$>$ {*}bold{*} `code`"
    )
    assert [escape_latex(text) for text in ("-0.5", "-", "+1 ± 0.1", "hamu-q")] == [
        "$-$0.5", "-", r"+1 $\pm$ 0.1", "hamu-q"
    ]  # fmt: skip


def test_the_markdown_page_is_a_table_of_the_runs_with_notes():
    why = {"ended": "a|b", "ended_because": "a|b was met"}
    found = compared(row("hamu-q", constraint=0.5, promise_kept=0.9, **why), failed(), row("ft"))
    lines = markdown_page(found).splitlines()
    assert [lines[0], lines[2], lines[4]] == [
        "|   | method | c | lr | seed | ΔL_f | -ΔL_r | forget acc | kept | steps | ended | time, s |",
        "| \\* | hamu-q | 0.5 | 0.1 | 42 | +1 | +0.5 | 25.0% | 90% | 5 | a\\|b | 12 |",
        "|  | ga | - | 0.1 | 42 | - | - | - | - | - | failed | 3 |",
    ]
    assert "before: forget acc 98.5%" in lines
    assert lines[-3:] == [
        "ga-lr0.1-s42 failed: unlearning diverged",
        "",
        "hamu-q-c0.5-lr0.1-s42 ended at step 5 because a\\|b was met",
    ]


def test_the_latex_page_has_a_tabular_for_the_runs_and_one_for_the_means():
    rows = row("ft", 1, retain=-0.125), row("ft", 2, retain=-0.375)
    page = latex_page(compared(*rows, failed("a_b & c")))
    parts = (r"\begin{tabular}", r"\end{tabular}", r"\bottomrule")
    assert [page.count(part) for part in parts] == [2, 2, 2]
    gains = r"+1 $\pm$ 0 & $-$0.25 $\pm$ 0.1768 & 25.0\% $\pm$ 0.0\% & 5 $\pm$ 0"
    for said in (r" & ft & 0.1 & 1 & +1 & $-$0.125 & 25.0\% & 5 & all steps & 12 \\",
                 rf"{{*}} & ft & 0.1 & 2 & {gains} & all steps & 12 $\pm$ 0 \\",
                 r"a\_b \& c & 0.1 & 42 & - ", "% * no other row is at least as good in both gains"):  # fmt: skip
        assert said in page
    lines = page.splitlines()
    assert not any(line.startswith(("*", "[")) for line in lines), "an argument of a row's end"


def test_csv_has_every_figure_with_all_its_digits():
    found = compared(row("ft", forget=1 / 3, ended_because='he said "a, b"'), failed())
    read = list(csv.DictReader(io.StringIO(csv_table(found.rows))))
    assert [one["run"] for one in read] == ["ft-lr0.1-s42", "ga-lr0.1-s42"]
    assert float(read[0]["forget_gain"]) == 1 / 3
    assert (read[0]["ended"], read[0]["ended_because"]) == ("all steps", 'he said "a, b"')
    assert (read[1]["forget_gain"], read[1]["failed"]) == ("", "unlearning diverged")


def finished(folder, versions=("0.1.0", "2.7.0"), device="cpu"):
    """The row of a run in a folder, of which only what a row is made of is there."""
    sides = {side: {"loss": 0.25, "accuracy": 0.5} for side in ("retain", "forget")}
    report = {**sides, "membership_inference": None}
    before = {**report, "retain": {"loss": 0.75, "accuracy": 0.5}}
    evaluation = {"before": before, "after": report, "ended_kind": "all steps"}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    steps = {"taken": 3, "ended_at": 3, "ended_because": ALL_DONE.text}
    versions = dict(zip(("hamu", "torch"), versions, strict=True))
    environment = {"device": device, "versions": versions}
    record = {"promise": None, "steps": steps, "environment": environment}
    (folder / "record.json").write_text(json.dumps(record))
    return finished_row(columns("gdiff"), folder, 1.0)


def test_a_row_says_whether_a_run_was_interrupted_whatever_its_reason(tmp_path):
    class Calls:
        asked_by = 0

        def make(self, calls):
            yield Ended("ga", 1.0, "interrupted, or so it says", False)
            yield Ended("kl", 1.0, "saved", True)

    plans = [Plan(name, columns(name), {}, {}) for name in ("ga", "kl")]
    runs = Runs(RunFolder(tmp_path, resume=True), plans, lambda path: {})
    ends = [(row["ended"], row["failed"]) for row in runs.run(Calls())]
    assert ends == [("failed", "interrupted, or so it says"), ("interrupted", "saved")]


def test_a_table_says_how_many_records_each_run_forgot(tmp_path):
    finished(tmp_path)
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    evaluation["goal"] = {
        "before": {"forgotten": 1, "too_high": 0, "records": 20},
        "after": {"forgotten": 19, "too_high": 3, "records": 20},
    }
    evaluation["after"]["retain_model"] = {"membership_inference": {"auc": 0.5125}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    one = finished_row(columns("gdiff"), tmp_path, 1.0)
    assert (one["forgotten"], one["forget_records"], one["retain_model_auc"]) == (19, 20, 0.5125)
    other = {**one, "seed": 43, "forgotten": 18, "too_high": 1}  # as many as chance may bring
    measured = shutil.copytree(tmp_path, tmp_path.parent / "measured")
    evaluation["before"]["metrics"] = {"margin": 0.5}  # of a package that was not there before
    (measured / "evaluation.json").write_text(json.dumps(evaluation))
    for runs in ([tmp_path, measured], [measured, tmp_path]):
        assert start_figures(runs)["metrics.margin"] == {"mean": 0.5, "deviation": None}
    found = Comparison((one, other), start_figures([tmp_path]))
    assert remarks(found)[0].startswith("before: forgotten 1 of 20, ")
    page = markdown_page(found)
    shown = ("| forgotten |", "| AUC retrained |", "| 19 of 20, 3 too high |", "| 18 of 20 |")
    for said in (*shown, "| 0.512 |", "| 18.5 ± 0.7 of 20, 2.0 ± 1.4 too high |"):
        assert said in page


def test_rows_that_other_versions_or_devices_have_computed_are_named(tmp_path):
    one = finished(tmp_path) | {"run": "a"}
    newer = finished(tmp_path, ("0.1.0", "2.8.0")) | {"run": "b"}
    other = finished(tmp_path, device="cuda") | {"run": "c"}
    assert one["environment"] == "cpu, hamu 0.1.0, torch 2.7.0"
    [said] = remarks(compared(one, one | {"run": "d"}, failed()))[3:]
    assert said == "ga-lr0.1-s42 failed: unlearning diverged"
    assert remarks(compared(one, newer, other))[3:] == [
        "not all were computed alike: cpu, torch 2.7.0 (a); cpu, torch 2.8.0 (b); cuda, torch 2.7.0 (c)"
    ]


def test_where_nothing_is_left_to_run_there_is_no_bar_of_it():
    screen = io.StringIO()
    runs = SimpleNamespace(waiting=[], run=lambda children: iter(()))
    console = Console(file=screen, force_terminal=True)
    run_waiting(runs, Children(1, {}, run_job), console, "compare")
    assert screen.getvalue() == ""


def test_runs_that_read_other_data_or_models_are_not_put_together(tmp_path):
    """As when a file changes while a comparison is under way."""
    places = {}
    for name, data, model in (("ft", 1, 3), ("ga", 1, 3), ("kl", 2, 3), ("npo", 1, 4)):
        places[name] = tmp_path / name
        places[name].mkdir()
        read = {"forget set": {"source": name, "sha256": data}}
        read |= {"original model": {"weights": model}}
        (places[name] / "inputs.json").write_text(json.dumps(read))
    check_same_inputs({name: places[name] for name in ("ft", "ga")})
    for other, what in (("kl", "forget set"), ("npo", "original model")):
        two = {"ft": places["ft"], other: places[other]}
        with pytest.raises(HamuError, match=f"^{other} had another {what} than ft, so that"):
            check_same_inputs(two)
    check_same_inputs({"ft": places["ft"], "kl": places["kl"]}, of=("original model",))
