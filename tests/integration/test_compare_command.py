"""`hamu compare`: a grid of runs, broken off, failing in part, and the same in the end."""

import csv
import os
import re
import shutil
import signal
import time
from unittest.mock import Mock

import pytest
import torch
import yaml
from interrupting import FORKS, interrupted_at
from run_files import read

from hamu.cli import main
from hamu.evaluation.gains import Level, state_at
from hamu.models import load_classifier
from hamu.models.language import new_tokenizer
from hamu.unlearning.compare.children import Call

FAST = ("--per_device_train_batch_size", 64, "--max_steps", 2, "--max_eval_samples", 50)
GRID = ("--methods", "hamu-q", "gdiff", "--constraints", 0.25, 0.5, "--check_steps", 1)
NAMES = ["hamu-q-c0.25-lr0.1-s42", "hamu-q-c0.5-lr0.1-s42", "gdiff-lr0.1-s42"]
FT = "ft-lr0.1-s42"


@pytest.fixture(scope="session")
def usual(saved_model, few_digits):
    return ("--recipe", "digits", "--data", few_digits, "--model", saved_model, *FAST)


@pytest.fixture
def compare(capsys, tmp_path, monkeypatch, usual, forked_runs):
    """Runs the command in an empty folder without its picture; returns its exit code, output and standard error."""
    monkeypatch.chdir(tmp_path)
    plot = Mock(side_effect=lambda drawn, volumes, path, title, level: path.write_text(title))
    monkeypatch.setattr("hamu.unlearning.jobs.comparison.plot_comparison", plot)

    def call(*words):
        code = main(["compare", *map(str, (*usual, "--output_dir", "runs", *words))])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    call.plot = plot
    return call


def without_times(folder):
    """All that a comparison shows, but for how long it took."""
    summary = read(folder / "comparison.json")
    assert summary.pop("seconds").keys() == {row["run"] for row in summary["runs"]}
    assert all(row.pop("seconds") > 0 for row in summary["runs"])
    pages = [(folder / f"comparison.{kind}").read_text() for kind in ("md", "tex")]
    return summary, [re.sub(r"[\d.]+ (\||\\\\)$", r"\1", page, flags=re.M) for page in pages]


@FORKS
def test_a_comparison_that_is_broken_off_goes_on_and_ends_as_if_it_had_not_been(compare, tmp_path):
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    code, out, err = compare(*GRID, "--output_dir", "whole")
    assert (code, err) == (0, "")
    assert "forget 28 images (class 3), retain 272; 3 runs, 0 of them finished before" in out
    runs.mkdir()
    for name in (".hamu", ".comparison.json.abcdefgh"):  # killed in its first write
        (runs / name).touch()
    assert compare("--methods", "gdiff", "--max_steps", 1)[0] == 0
    shutil.rmtree(runs / NAMES[2])
    assert len([*runs.glob("comparison.*")]) == 5
    with interrupted_at(NAMES[1], 1):
        code, _, err = compare(*GRID)
    assert code == 143
    assert "interrupted by SIGTERM; not finished: 2; the same command goes on" in err
    assert sorted(p.name for p in runs.iterdir() if p.is_dir()) == sorted(NAMES[:2])
    assert len([*runs.glob("comparison.*")]) == 1, "a table would be that of an earlier comparison"
    partial = read(runs / "comparison.json")
    assert [row["run"] for row in partial["runs"]] == NAMES[:1]
    finished = {p: p.read_bytes() for p in (runs / NAMES[0]).rglob("*") if p.is_file()}

    assert "3 runs, 1 of them finished before" in compare(*GRID)[1]
    assert without_times(runs) == without_times(whole)
    assert {p: p.read_bytes() for p in finished} == finished
    seconds = read(runs / "comparison.json")["seconds"]
    assert seconds[NAMES[1]] > partial["seconds"][NAMES[1]]
    for name in NAMES:
        for place in (f"{name}/model/model.safetensors", f"{name}/steps.jsonl"):
            assert (runs / place).read_bytes() == (whole / place).read_bytes()
    with open(runs / "comparison.csv") as rows:
        assert sorted(row["run"] for row in csv.DictReader(rows)) == sorted(NAMES)
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("model.safetensors")}
    fewer = compare(*GRID[:2], "--constraints", 0.25, *GRID[-2:])[1]
    assert "not in this table: 2 more in runs" in fewer
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("model.safetensors")} == before
    assert main(["verify", str(runs / NAMES[0]), "--no_models"]) == 0, "each is an ordinary run"


def test_what_fails_is_noted_and_the_others_go_on(compare, tmp_path):
    absolute = ("--methods", "hamu-q", "ga", "--constraint_mode", "absolute", "--constraints", 50)
    code, out, err = compare(*absolute, "--learning_rates", 0.01, 1e30)
    assert (code, err) == (0, "")
    pages = [(tmp_path / f"runs/comparison.{kind}").read_text() for kind in ("md", "tex")]
    for page in (out, *pages):
        assert "hamu-q-c50-lr0.01-s42 failed: no step can be taken: the constraint 50" in page
        assert re.search(r"ga-lr1e\+30-s42 failed: .*(diverged|finite)", page)
    rows = read(tmp_path / "runs/comparison.json")["runs"]
    assert [row["run"] for row in rows if not row["failed"]] == ["ga-lr0.01-s42"]
    assert rows[0]["pareto"] is True
    code, _, err = compare(*absolute, "--methods", "hamu-q", "--output_dir", "all-fail")
    assert code == 2
    assert "no run finished, of 1; the reasons are above and in all-fail/comparison.json\n" in err


def test_a_run_with_other_settings_is_named_and_replaced_only_on_request(compare, tmp_path):
    grid = ("--methods", "ft", "hamu-q", "--max_steps", 1)
    absolute = ("--constraint_mode", "absolute", "--constraint", 0.5, "--on_infeasible", "clamp")
    assert compare(*grid)[0] == 0
    ft = tmp_path / "runs" / FT / "record.json"
    before = ft.read_bytes()
    code, _, err = compare(*grid, *absolute)
    assert code == 2
    assert "runs/hamu-q-c0.5-lr0.1-s42 holds a run with constraint_mode relative, not abso" in err
    _, _, err = compare(*grid, "--save_strategy", "steps", "--save_steps", 1)
    assert "holds a run with save_strategy no, not steps" in err
    code, out, _ = compare(*grid, *absolute, "--overwrite")
    assert code == 0
    assert "2 runs, 1 of them finished before" in out, "the constraint changes nothing for ft"
    assert ft.read_bytes() == before
    settings = yaml.safe_load((tmp_path / "runs/hamu-q-c0.5-lr0.1-s42/config.yaml").read_text())
    assert settings["constraint_mode"] == "absolute"
    out = compare(*grid, *absolute, "--max_grad_norm", 1.0)[1]
    assert "2 runs, 2 of them finished before" in out, "a default that is spelt out"
    damaged = ft.with_name("evaluation.json")
    damaged.write_bytes(damaged.read_bytes()[:300])
    code, _, err = compare(*grid, *absolute)
    assert code == 2
    assert err.startswith(f"hamu compare: runs/{FT}/evaluation.json is damaged: ")
    assert err.endswith(f"; remove runs/{FT} and give the same command again\n")
    damaged.write_text("{}")
    err = compare(*grid, *absolute)[2]
    assert err.startswith(f"hamu compare: a file of the run in runs/{FT} is damaged: ")
    damaged.unlink()
    assert "2 runs, 1 of them finished before" in compare(*grid, *absolute)[1]
    assert damaged.is_file()


def test_lists_come_from_a_file_too_and_seeds_have_means(compare, tmp_path):
    of_file = {"methods": ["ft"], "seeds": [1, 2], "learning_rates": "1e-2", "max_steps": 1}
    content = {"compare": of_file, "unlearn": {"max_steps": 7}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    code, out, _ = compare("--config", "grid.yaml", "--max_steps", 1, "--max_eval_samples", 100)
    assert code == 0
    assert "means over seeds ± standard deviation" in out
    summary = read(tmp_path / "runs/comparison.json")
    names = [f"ft-lr0.01-s{seed}" for seed in (1, 2)]
    assert sorted(row["run"] for row in summary["runs"]) == names
    before = [read(tmp_path / f"runs/{name}/evaluation.json")["before"] for name in names]
    first, second = (one["membership_inference"]["auc"] for one in before)
    assert first != second, "each seed draws its own"
    assert summary["start"]["membership_auc"]["mean"] == pytest.approx((first + second) / 2)
    assert summary["start"]["forget_accuracy"] == before[0]["forget"]["accuracy"]
    assert f"AUC {(first + second) / 2:.3f} ± " in out
    gains = [row["forget_gain"] for row in summary["runs"]]
    assert summary["means"][0]["forget_gain"]["mean"] == pytest.approx(sum(gains) / 2)


def test_trials_at_a_level_and_attacks_on_the_state_there(compare, tmp_path, monkeypatch):
    words = ("--methods", "gdiff", "ft", "--trials", 2, "--seeds", 1, 2, "--optim", "adamw_torch", "--learning_rate", 1e-3,
             "--max_steps", 6, "--eval_strategy", "steps", "--eval_steps", 1, "--at", "forget=1000",
             "--save_strategy", "steps", "--save_steps", 1, "--load_best_model_at_end")  # fmt: skip
    code, out, err = compare(*words)
    assert (code, err) == (0, "")
    assert "never there: ft" in out, out
    runs, first = tmp_path / "runs", read(tmp_path / "runs/comparison.json")
    by_name = {row["run"]: row for row in first["runs"]}
    assert len(by_name) == 5, "two trials of each with the first seed, the best with the second"
    [best] = first["best"]
    tried = {row["setting"]: row["at_gain"] for row in by_name.values() if row["seed"] == 1}
    assert tried[best] == max(gain for gain in tried.values() if gain is not None)
    row = by_name[f"{best}-s2"]
    entries = read(runs / row["run"] / "evaluation.json")["trajectory"]
    state = state_at(entries, Level("forget", 1000.0))
    assert (row["at_step"], row["at_gain"]) == (state["step"], state["eval_retain_gain"])
    drawn, *_, level = compare.plot.call_args.args
    assert [method for method, *_ in drawn] == ["gdiff", "gdiff"]
    assert level == ("forget", pytest.approx(1000, abs=1))

    attacks = ("--attacks", "relearn-retain", "--attack_steps", 2, "--attack_seeds", 1)
    code, out, err = compare(*words, *attacks, "--attack_records", 10)
    assert (code, err) == (0, "")
    assert "4 runs, 4 of them finished before" in out
    second = read(runs / "comparison.json")
    assert (second["best"], second["means"][0]["runs"]) == ([best], 2)
    assert second["hypervolume"] == first["hypervolume"], "by whole runs"
    for seed in (1, 2):
        [row] = [one for one in second["runs"] if one["run"] == f"{best}-s{seed}"]
        whole = read(runs / row["run"] / "evaluation.json")
        state_of = runs / f"{row['run']}-at-{int(row['at_evaluated'])}"
        found = read(state_of / "evaluation.json")
        assert found["steps_in_model"] == found["steps_taken"], "no earlier one, if better"
        state = found["trajectory"][-1]
        [there] = [one for one in whole["trajectory"] if one["step"] == state["step"]]
        gains = ("eval_forget_gain", "eval_retain_gain")
        assert [state[g] for g in gains] == pytest.approx([there[g] for g in gains])
        attacked = read(state_of / "attack/attack.json")["outcomes"]
        figures = attacked["relearn-retain"]["unlearned"]["figures"]
        assert row["relearned"] == figures["recognised"][-1][0]
    assert "relearned" in (runs / "comparison.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("attack.json")}
    assert compare(*words, *attacks, "--attack_records", 10)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("attack.json")} == before
    shutil.copytree(state_of / "attack", runs / row["run"] / "attack")  # as if of its own model
    out = compare(*words, "--constraint", 0.5, "--forget_weight", 0.5, "--attack_steps", 2)[1]
    assert not any(one.get("relearned") for one in read(runs / "comparison.json")["runs"])
    assert "not in this table" not in out, "repeated runs have no settings to name"
    unused = "without effect on these runs: attack_steps, constraint, forget_weight\n"
    assert unused in out, "no attacks; --trials draws the strengths"
    assert compare(*words, *attacks, "--at", "forget=2.5")[0] == 0
    other = {row["run"]: row for row in read(runs / "comparison.json")["runs"]}[f"{best}-s1"]
    assert other["at_evaluated"] < by_name[f"{best}-s1"]["at_evaluated"]
    assert other["relearned"] is not None, "of its own state, beside that at the first level"
    made = Mock(side_effect=Call)
    monkeypatch.setattr("hamu.unlearning.jobs.comparison.Call", made)
    again = ("--attack_records", 12, "--trust_remote_code")
    assert compare(*words, *attacks, *again)[0] == 0
    options = [options for (_, _, options), _ in made.call_args_list]
    assert [one["trust_remote_code"] for one in options] == [True, True]
    assert all(path.stat().st_mtime_ns > time for path, time in before.items()), "other attacks"

    def interrupted(**options):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("hamu.unlearning.jobs.attack", interrupted)
    code, _, err = compare(*words, *attacks, "--attack_records", 14)
    assert (code, "not finished: 2; the same command goes on" in err) == (143, True), err
    rows = read(runs / "comparison.json")["runs"]
    assert {row.get("relearned") for row in rows} == {None}, "those were of other attacks"


def test_runs_of_another_start_model_are_not_compared(compare, tmp_path, saved_model):
    original, other = (load_classifier(str(saved_model)) for _ in range(2))
    with torch.no_grad():
        other.conv.weight *= 1.01
    words = ("--model", "model", "--max_steps", 1, "--methods", "ft")
    run = tmp_path / "runs" / FT
    original.save_pretrained("model")
    assert compare(*words)[0] == 0
    other.save_pretrained("model")
    reason = f"runs/{FT} holds a run with another original model than there is now; choose another"
    assert reason in compare(*words, "ga")[2]
    assert not (tmp_path / "runs/ga-lr0.1-s42").exists(), "it is said before anything is run"
    assert "1 runs, 0 of them finished before" in compare(*words, "--overwrite")[1]
    for name in ("record.json", "evaluation.json"):
        (run / name).unlink()
    original.save_pretrained("model")
    assert reason in compare(*words)[2], "broken off, it goes on with the model it began with"


def test_a_comparison_takes_the_place_of_no_other_run(compare, tmp_path):
    (tmp_path / "runs").mkdir()
    for name in (".hamu", "config.yaml", "record.json"):
        (tmp_path / "runs" / name).write_text("{}")
    code, _, err = compare("--methods", "ft", "--overwrite")
    assert (code, "runs holds something else, which would be gone" in err) == (2, True), err
    assert sorted(one.name for one in (tmp_path / "runs").iterdir())[1:] == [
        "config.yaml",
        "record.json",
    ]


def test_texts_are_compared_by_the_probability_of_their_answers_too(
    cli, tmp_path, saved_text_model, forked_runs
):
    shutil.copytree(saved_text_model, "model")
    words = "--data miniature --task text --forget_rows 0,1,2,3,4,5 --model model --methods gdiff"
    words += " --max_steps 1 --learning_rate 0.1 --max_eval_samples 16 --output_dir runs"
    code, out, _ = cli("compare", *words.split())
    assert (code, "forget prob" in out) == (0, True)
    [row] = read(tmp_path / "runs/comparison.json")["runs"]
    after = read(tmp_path / "runs" / row["run"] / "evaluation.json")["after"]
    assert row["utility"] == row["retain_probability"] == after["retain"]["probability"]
    assert row["membership_auc"] == after["membership_inference"]["min_k"]
    assert "1 runs, 1 of them finished before" in cli("compare", *words.split())[1]
    new_tokenizer(["other words"], 400).save_pretrained("model")
    _, _, err = cli("compare", *words.split())
    assert "holds a run with another tokenization of the forget set than" in err


def test_a_run_in_a_real_process_and_a_picture(cli, tmp_path, usual):
    code, _, err = cli("compare", *usual, "--methods", "ft", "--jobs", 2, "--output_dir", "runs")
    assert (code, err) == (0, "")
    [row] = read(tmp_path / "runs/comparison.json")["runs"]
    assert (row["run"], row["failed"], row["steps"]) == (FT, "", 2)
    assert (tmp_path / "runs/comparison.png").stat().st_size > 10_000
