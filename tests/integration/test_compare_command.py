"""`hamu compare`: a grid of runs that can be broken off, fails in part, and is the same however it was run."""

import csv
import json
import re
import shutil

import pytest
import torch
import yaml
from interrupting import interrupted_at

from hamu.cli import main
from hamu.data import read_text
from hamu.errors import HamuError
from hamu.models.language import new_language_model, new_tokenizer
from hamu.unlearning.compare.rows import check_same_inputs

FAST = ("--per_device_train_batch_size", 64, "--max_steps", 3, "--max_eval_samples", 100)
GRID = ("--methods", "hamu-q", "gdiff", "hamu-u", "--constraints", 0.25, 0.5)
NAMES = ["hamu-q-c0.25-lr0.1-s42", "hamu-q-c0.5-lr0.1-s42", "gdiff-lr0.1-s42", "hamu-u-c0.25-lr0.1-s42",
         "hamu-u-c0.5-lr0.1-s42"]  # fmt: skip


@pytest.fixture
def compare(capsys, tmp_path, monkeypatch, saved_model, forked_runs):
    """Runs the command in an empty folder; returns its exit code, its output and what it said on standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        given = (
            "--recipe",
            "digits",
            "--model",
            saved_model,
            *FAST,
            "--output_dir",
            "runs",
            *words,
        )
        code = main(["compare", *map(str, given)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def without_picture(monkeypatch):
    """Drawing takes longer than such runs."""
    monkeypatch.setattr("hamu.unlearning.jobs.comparison.plot_comparison", lambda *_: None)


def shown(folder):
    """Its table and its picture, in all forms that are there."""
    return {path.name for path in folder.glob("comparison.*")} - {"comparison.json"}


def without_times(folder):
    """What a comparison says, but for how long it took and where its runs are."""
    summary = json.loads((folder / "comparison.json").read_text())
    assert summary.pop("seconds").keys() == {row["run"] for row in summary["runs"]}
    for row in summary["runs"]:
        assert row.pop("seconds") > 0
    rows = list(csv.DictReader((folder / "comparison.csv").open()))
    pages = [re.sub(r"[\d.]+ (\||\\\\)$", r"\1", (folder / name).read_text(), flags=re.MULTILINE)
             for name in ("comparison.md", "comparison.tex")]  # fmt: skip
    return (
        summary,
        [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
        pages,
    )


def test_a_comparison_that_is_broken_off_goes_on_and_ends_as_if_it_had_not_been(compare, tmp_path):
    code, out, err = compare(*GRID, "--output_dir", "whole")
    assert (code, err) == (0, "")
    assert "forget 131 images (class 3), retain 1307; 5 runs, 0 of them finished before" in out
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/.comparison.json.abcdefgh").write_text(
        "{"
    )  # one that was killed in its first write
    assert compare("--methods", "gdiff", "--max_steps", 1)[0] == 0
    shutil.rmtree(tmp_path / "runs" / NAMES[2])
    (tmp_path / "runs/comparison.json").write_text('{"runs": [], "seconds": {}}')
    assert len(shown(tmp_path / "runs")) == 4
    with interrupted_at(NAMES[1], 2):
        code, out, err = compare(*GRID)
    assert code == 143
    assert err == (
        "hamu compare: interrupted by SIGTERM; 4 runs are not finished; the same command goes on with them\n"
    )
    runs = tmp_path / "runs"
    assert sorted(p.name for p in runs.iterdir() if p.is_dir()) == sorted(NAMES[:2])
    assert not shown(runs), "a table of an earlier comparison would not be that of this one"
    assert (runs / NAMES[1] / "checkpoint-2").is_dir()
    partial = json.loads((runs / "comparison.json").read_text())
    assert [row["run"] for row in partial["runs"]] == NAMES[:1]
    assert partial["seconds"].keys() == set(NAMES[:2])
    finished = {p: p.read_bytes() for p in (runs / NAMES[0]).rglob("*") if p.is_file()}

    code, out, err = compare(*GRID)
    assert (code, err) == (0, "")
    assert "5 runs, 1 of them finished before" in out
    assert without_times(runs) == without_times(tmp_path / "whole")
    assert {p: p.read_bytes() for p in finished} == finished
    assert (
        json.loads((runs / "comparison.json").read_text())["seconds"][NAMES[1]]
        > partial["seconds"][NAMES[1]]
    )
    for name in NAMES:
        for place in ("model/model.safetensors", "steps.jsonl"):
            assert (runs / name / place).read_bytes() == (
                tmp_path / "whole" / name / place
            ).read_bytes()

    before = {p: p.stat().st_mtime_ns for p in runs.rglob("model.safetensors")}
    assert compare(*GRID)[0] == 0
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("model.safetensors")} == before, (
        "nothing is run twice"
    )

    # the table says what the runs say
    rows = {row["run"]: row for row in csv.DictReader((runs / "comparison.csv").open())}
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        evaluation = json.loads((runs / name / "evaluation.json").read_text())
        record = json.loads((runs / name / "record.json").read_text())
        old, new = evaluation["before"], evaluation["after"]
        assert float(row["forget_gain"]) == new["forget"]["loss"] - old["forget"]["loss"]
        assert float(row["retain_gain"]) == old["retain"]["loss"] - new["retain"]["loss"]
        assert float(row["utility"]) == -new["retain"]["loss"]
        assert float(row["membership_auc"]) == new["membership_inference"]["auc"]
        assert (row["ended"], row["ended_because"]) == (
            "all steps",
            record["steps"]["ended_because"],
        )
        assert evaluation["ended_kind"] == row["ended"]
        assert row["environment"].startswith(
            f"cpu, hamu {record['environment']['versions']['hamu']}, "
        )
        assert row["promise_kept"] == (
            "" if name.startswith("gdiff") else str(record["promise"]["kept"])
        )
        settings = yaml.safe_load((runs / name / "config.yaml").read_text())
        assert (settings["method"], settings.get("constraint")) == (
            row["method"], float(row["constraint"]) if row["constraint"] else None
        )  # fmt: skip
        assert not settings.keys() & {"methods", "constraints", "jobs"}
    assert (runs / "comparison.png").stat().st_size > 10_000
    assert "not in this table" not in out
    assert (
        "not in this table: 4 more in runs; name their settings too"
        in compare(*GRID[:2], "--constraints", 0.25)[1]
    )
    assert main(["verify", str(runs / NAMES[0]), "--no_models"]) == 0, "each is an ordinary run"


@pytest.mark.usefixtures("without_picture")
def test_what_fails_is_noted_and_the_others_go_on(compare, tmp_path):
    grid = ("--methods", "hamu-q", "ga", "--constraint_mode", "absolute", "--constraints", 0.001, 50,
            "--learning_rates", 0.01, 1e30)  # fmt: skip
    code, out, err = compare(*grid)
    assert (code, err) == (0, "")
    infeasible = (
        "hamu-q-c50-lr0.01-s42 failed: no step can be taken: the constraint 50 cannot be met"
    )
    for page in (
        out,
        (tmp_path / "runs/comparison.md").read_text(),
        (tmp_path / "runs/comparison.tex").read_text(),
    ):
        assert infeasible in page
        assert re.search(r"ga-lr1e\+30-s42 failed: .*(diverged|finite)", page)
    rows = json.loads((tmp_path / "runs/comparison.json").read_text())["runs"]
    assert [row["run"] for row in rows if not row["failed"]] != []
    assert {row["run"] for row in rows if row["failed"]} >= {
        "hamu-q-c50-lr0.01-s42",
        "ga-lr1e+30-s42",
    }
    assert rows[0]["pareto"] is True

    code, out, err = compare("--methods", "hamu-q", "--constraint_mode", "absolute", "--constraint", 50,
                             "--output_dir", "all-fail")  # fmt: skip
    assert code == 2
    assert "failed: no step can be taken" in out
    assert (
        err
        == "hamu compare: no run finished, of 1; the reasons are printed above and in all-fail/comparison.json\n"
    )


def test_what_does_not_fit_together_is_said_before_anything_is_written(
    compare, tmp_path, saved_model
):
    for words, message in [
        (("--methods", "ft", "magic"), "method 'magic' is unknown; choose one of hamu-q"),
        (
            ("--method", "ft"),
            "compare has no --method, as it takes several, by --methods; leave it out",
        ),
        (("--seed", 1, "--seeds", 2), "--seeds takes the place of --seed; leave out one of them"),
        (
            ("--learning-rate=1", "--learning_rates", 2),
            "--learning_rates takes the place of --learning_rate",
        ),
        (
            ("--constraints", 0.5, 1.5),
            "hamu-q-c1.5-lr0.1-s42: a relative constraint is a share of what is possible",
        ),
        (("--seeds", -1), "seed -1 must be 0 to 4294967295"),
        (("--seeds",), "expected at least one argument"),
        (("--learning_rates", "fast"), "invalid float value: 'fast'"),
        (("--jobs", 0), "jobs 0 must be at least 1"),
        (
            ("--auto", "--target_forget_loss", 2, "--max_retain_increase", 0.1),
            "compare has no --auto, which is for hamu unlearn; leave it out",
        ),
        (("--model", "nowhere"), "the model nowhere is not there"),
        (("--resume",), "--resume"),
    ]:
        code, _, err = compare(*words)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    for content in ('{"mine": 1}', "mine", '{"runs": ["mine"]}'):
        (tmp_path / "runs/comparison.json").write_text(content)
        assert "the output folder runs is in use" in compare()[2]
        assert "holds comparison.json, which is not of a run" in compare("--overwrite")[2]
        assert [path.read_text() for path in (tmp_path / "runs").iterdir()] == [content]
    (tmp_path / "runs/comparison.json").unlink()
    (tmp_path / "runs/thesis.txt").write_text("mine")
    assert "the output folder runs is in use" in compare()[2]
    assert "thesis.txt, which is not of a run" in compare("--overwrite")[2]


@pytest.mark.usefixtures("without_picture")
def test_a_run_with_other_settings_is_named_and_replaced_only_on_request(compare, tmp_path):
    grid = ("--methods", "ft", "hamu-q", "--max_steps", 1)
    assert compare(*grid)[0] == 0
    ft = tmp_path / "runs/ft-lr0.1-s42/record.json"
    before = ft.read_bytes()
    code, _, err = compare(
        *grid, "--constraint_mode", "absolute", "--constraint", 0.5, "--stopping", "off"
    )
    assert code == 2
    assert (
        "runs/hamu-q-c0.5-lr0.1-s42 holds a run with constraint_mode relative, not absolute; choose another"
        in err
    )
    changed = (
        *grid,
        "--constraint_mode",
        "absolute",
        "--constraints",
        0.5,
        "--on_infeasible",
        "clamp",
        "--overwrite",
    )
    code, out, _ = compare(*changed)
    assert code == 0
    assert "2 runs, 1 of them finished before" in out, (
        "of the constraint nothing is to be seen in ft"
    )
    assert ft.read_bytes() == before
    settings = yaml.safe_load((tmp_path / "runs/hamu-q-c0.5-lr0.1-s42/config.yaml").read_text())
    assert settings["constraint_mode"] == "absolute"
    # neither does a default that is spelt out change anything
    assert "2 runs, 2 of them finished before" in compare(*changed, "--max_grad_norm", 1.0)[1]


@pytest.mark.usefixtures("without_picture")
def test_lists_come_from_a_file_too_and_seeds_have_means(compare, tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "compare:\n  methods: [ft]\n  seeds: [1, 2]\n  learning_rates: 1e-2\n  max_steps: 1\nunlearn:\n  max_steps: 7\n"
    )
    code, out, _ = compare("--config", "grid.yaml", "--max_steps", 1)
    assert code == 0
    assert "means over seeds ± standard deviation" in out
    start = json.loads((tmp_path / "runs/comparison.json").read_text())["start"]
    before = [
        json.loads((tmp_path / f"runs/ft-lr0.01-s{seed}/evaluation.json").read_text())["before"]
        for seed in (1, 2)
    ]
    attacks = [one["membership_inference"]["auc"] for one in before]
    assert attacks[0] != attacks[1], "each seed draws its own"
    assert start["membership_auc"]["mean"] == pytest.approx(sum(attacks) / 2)
    assert start["forget_accuracy"] == before[0]["forget"]["accuracy"]
    assert f"AUC {sum(attacks) / 2:.3f} ± " in out
    summary = json.loads((tmp_path / "runs/comparison.json").read_text())
    assert {row["run"] for row in summary["runs"]} == {"ft-lr0.01-s1", "ft-lr0.01-s2"}
    [mean] = summary["means"]
    gains = [row["forget_gain"] for row in summary["runs"]]
    assert mean["forget_gain"]["mean"] == pytest.approx(sum(gains) / 2)
    assert (
        compare("--config", "grid.yaml", "--max_steps", 1, "--methods", "ga", "--seeds", 3)[
            1
        ].count("ga-lr0.01-s3")
        == 1
    )


@pytest.mark.usefixtures("without_picture")
def test_runs_of_another_start_model_are_not_compared(compare, tmp_path, saved_model):
    from hamu.models import load_classifier

    load_classifier(str(saved_model)).save_pretrained("model")
    words = ("--model", "model", "--max_steps", 1)
    assert compare(*words, "--methods", "ft")[0] == 0
    other = load_classifier(str(saved_model))
    with torch.no_grad():
        other.conv.weight *= 1.01
    other.save_pretrained("model")
    ft = tmp_path / "runs/ft-lr0.1-s42/record.json"
    before = ft.read_bytes()
    for methods in (["ft"], ["ft", "ga"]):
        code, _, err = compare(*words, "--methods", *methods)
        assert code == 2
        assert (
            "runs/ft-lr0.1-s42 holds a run with another original model than there is now; choose another"
            in err
        )
    assert not (tmp_path / "runs/ga-lr0.1-s42").exists(), "it is said before anything is run"
    code, out, _ = compare(*words, "--methods", "ft", "--overwrite")
    assert (code, "1 runs, 0 of them finished before" in out) == (0, True)
    assert ft.read_bytes() != before
    broken_off = ft.with_name("inputs.json")
    for left in ("record.json", "evaluation.json"):
        ft.with_name(left).unlink()
    load_classifier(str(saved_model)).save_pretrained("model")
    assert (
        "holds a run with another original model than there is now"
        in compare(*words, "--methods", "ft")[2]
    )
    content = broken_off.read_bytes()
    broken_off.unlink()
    assert (
        "runs/ft-lr0.1-s42 holds a run with no inputs.json; choose another"
        in compare(*words, "--methods", "ft")[2]
    )
    with pytest.raises(
        HamuError,
        match=r"inputs\.json does not say what that run has read: it is missing; start a new run",
    ):
        check_same_inputs({"ft": ft.parent})
    broken_off.write_bytes(content)
    other.save_pretrained("model")
    assert compare(*words, "--methods", "ft")[0] == 0, "with the model it began with it goes on"


@pytest.mark.usefixtures("without_picture")
def test_a_damaged_file_is_named_with_what_to_remove(compare, tmp_path):
    words = ("--methods", "ft", "--max_steps", 1)
    assert compare(*words)[0] == 0
    path = tmp_path / "runs/ft-lr0.1-s42/evaluation.json"
    path.write_bytes(path.read_bytes()[:300])
    code, _, err = compare(*words)
    assert code == 2
    assert err.startswith("hamu compare: runs/ft-lr0.1-s42/evaluation.json is damaged: ")
    assert err.endswith("; remove runs/ft-lr0.1-s42 and give the same command again\n")
    shutil.rmtree(path.parent)
    assert compare(*words)[0] == 0
    (tmp_path / "runs/comparison.json").write_text('{"start": ')
    code, out, _ = compare(*words)
    assert (code, "1 runs, 1 of them finished before" in out) == (0, True), (
        "nothing but times is lost with it"
    )
    assert [
        row["seconds"]
        for row in json.loads((tmp_path / "runs/comparison.json").read_text())["runs"]
    ] == [None]


@pytest.mark.usefixtures("without_picture")
def test_texts_are_compared_by_the_probability_of_their_answers_too(
    tmp_path, monkeypatch, capsys, forked_runs
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = new_tokenizer((r.prompt + r.answer for r in read_text("miniature").records), 400)
    for part in (new_language_model(tokenizer, hidden=32, layers=1), tokenizer):
        part.save_pretrained("model")
    words = ["compare", "--data", "miniature", "--task", "text", "--forget_rows", "0,1,2,3,4,5", "--model", "model",
                 "--methods", "gdiff", "ft", "--max_steps", "1", "--learning_rate", "0.1", "--max_eval_samples", "16",
                 "--max_retain_loss", "99", "--min_forget_loss", "0.001", "--output_dir", "runs"]  # fmt: skip
    assert main(words) == 0
    assert "forget prob" in capsys.readouterr().out
    rows = json.loads((tmp_path / "runs/comparison.json").read_text())["runs"]
    assert [row["failed"] for row in rows] == ["", ""]
    for row in rows:
        after = json.loads((tmp_path / "runs" / row["run"] / "evaluation.json").read_text())[
            "after"
        ]
        assert row["utility"] == row["retain_probability"] == after["retain"]["probability"]
        assert row["membership_auc"] == after["membership_inference"]["min_k"]
    assert main(words) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out, (
        "they have read what there is"
    )


def test_real_processes_two_at_a_time(capsys, tmp_path, saved_model):
    words = [
        "--recipe",
        "digits",
        "--model",
        str(saved_model),
        *map(str, FAST),
        "--output_dir",
        str(tmp_path / "runs"),
    ]
    assert main(["compare", *words, "--methods", "ft", "ga", "--jobs", "2"]) == 0
    assert capsys.readouterr().err == ""
    rows = json.loads((tmp_path / "runs/comparison.json").read_text())["runs"]
    assert {row["run"]: (row["failed"], row["steps"]) for row in rows} == {
        "ft-lr0.1-s42": ("", 3), "ga-lr0.1-s42": ("", 3)
    }  # fmt: skip
