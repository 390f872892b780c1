"""`python -m experiments` at the smallest scale: broken off, gone on with, and its pages."""

import json
import re
import shutil
import signal
from dataclasses import replace
from functools import partial

import datasets
import numpy as np
import pytest
import torch
import yaml
from interrupting import FORKS, at_step, interrupted_at
from run_files import read, write_rows

from experiments.__main__ import main
from experiments.paper import EXPERIMENTS, practice
from experiments.paper.practice import Optimizers
from hamu.data import read_text
from hamu.errors import HamuError
from hamu.unlearning.compare import children
from hamu.unlearning.run_folder import RunFolder

SMALL = ("--recipe", "digits", "--fraction", 0.1)


@pytest.fixture
def experiments(capsys, tmp_path, monkeypatch, forked_runs):
    """Runs the command in an empty folder; returns its exit code, output and standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(
            [*map(str, words), *(() if "--output_dir" in words else ("--output_dir", "out"))]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def reproduce(experiments, saved_model):
    """The same at the smallest scale, with an original model that is there."""
    return lambda *words: experiments(*SMALL, "--model", saved_model, *words)


def result(tmp_path, name):
    return read(tmp_path / "out" / f"{name}.json")


def runs(tmp_path):
    records = tmp_path.glob("out/work/runs/*/record.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in records}


def test_the_test_set_chooses_the_original_that_is_trained(experiments, tmp_path):
    """As the paper's recipe says (App. E): a fraction of the training data, the whole test set."""
    generator = np.random.default_rng(0)
    names = [f"class {n}" for n in range(10)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    for split, count in (("train", 80), ("test", 30)):
        images = [generator.integers(0, 255, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
        rows = {"image": images, "label": [n % 10 for n in range(count)]}
        made = datasets.Dataset.from_dict(rows, datasets.Features(features))
        made.to_parquet(str(tmp_path / f"{split}.parquet"))
    (tmp_path / "mine.yaml").write_text("train: {num_train_epochs: 20}\nforget_class: class 3\n")
    words = ("--data_dir", ".", "--fraction", 0.5, "--epochs", 1, "--config", "mine.yaml")
    assert experiments("figure-12", "--recipe", "cifar10-resnet20", *words)[0] == 0
    [original] = (tmp_path / "out/work/models").iterdir()
    state = read(original / "checkpoint-20/trainer_state.json")
    seen = {e["step"]: e["eval_accuracy"] for e in state["log_history"] if "eval_accuracy" in e}
    assert list(seen) == [*range(2, 21, 2)], "one step an epoch, and ten looks"
    assert state["best_metric"] == max(seen.values())
    figures = read(original / "evaluation.json")
    assert figures["test_accuracy"] == pytest.approx(state["best_metric"])


def test_a_result_that_cannot_be_shown_is_named_before_anything_is_run(
    experiments, tmp_path, monkeypatch
):
    for name in ("figure-1", "figure-2"):
        monkeypatch.setattr(EXPERIMENTS[name], "draw", lambda figures, path: path.touch())
    assert experiments("figure-1")[0] == 0
    earlier = tmp_path / "out/figure-1.json"
    result_of_another_version = read(earlier)
    del result_of_another_version["scale"]
    earlier.write_text(json.dumps(result_of_another_version))
    code, _, err = experiments("figure-2")
    assert code == 2
    assert "figure-1.json is not as this version writes it (KeyError: 'scale')" in err
    assert not (tmp_path / "out/figure-2.json").exists()
    assert experiments("figure-1")[0] == 0, "it is replaced"
    assert "## Fig. 1: " in (tmp_path / "out/README.md").read_text()


def test_a_plan_counts_runs_and_steps_and_writes_nothing(experiments, tmp_path):
    code, out, _ = experiments("figure-4", "figure-5", "table-2", "--dry_run", "--epochs", 2)
    assert code == 0
    # 14 runs of 9 steps an epoch, 10 of which 4 are among them; 352, 176, 88, 44 and 22 an epoch
    assert re.search(r"figure-4 +14 +2 +252 *\n", out)
    assert re.search(r"table-2 +5 +2 +1364 *\n", out)
    assert "25 runs, 1724 steps" in out
    assert "trained on the same data by the settings cifar10-resnet20" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "message"), [
    (("--fraction", 0), "fraction 0.0 must be a share of the data"),
    (("--fraction", 0.5, "--train_fraction", 0.25), "train_fraction 0.25 must be from fraction"),
    (("--fraction", 1, "--train_fraction", 1.5), "train_fraction 1.5 must be from fraction 1.0 to"),
    (("--model", "m", "--train_fraction", 1), "--train_fraction is for an original model that is"),
    (("--epochs", -1), "epochs -1.0 must be positive"),
    (("--jobs", 0), "jobs 0 must be at least 1"),
    (("--device", "tpu"), "device 'tpu' is unknown"),
    (("--device", "cuda"), "there is no CUDA device; leave --device out"),
    (("--recipe", "tofu-tiny"), "recipe tofu-tiny is of texts"),
    (("--recipe", "cifar10-resnet20", "--data_dir", "nowhere"), "the data nowhere/train.parquet"),
    (("--model", "nowhere"), "the model nowhere is not there"),
    (("--redraw",), "out holds no result of figure-4; leave out --redraw"),
    (("figure-99",), "experiment 'figure-99' is unknown; did you mean figure-9?"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_written(
    reproduce, tmp_path, monkeypatch, words, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = reproduce("figure-4", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "out").exists()


@FORKS
def test_training_the_original_may_fail_or_be_interrupted_and_goes_on(experiments, tmp_path):
    words = ("figure-12", *SMALL, "--epochs", 0.25)
    folder = tmp_path / "out/work/models/digits-0.1-s42"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    code, _, err = experiments(*words)
    assert code == 2
    assert "the original model was not trained: the output folder" in err
    folder.unlink()
    with interrupted_at("models/digits-0.1-s42", 2):
        code, _, err = experiments(*words)
    assert code == 143
    assert "interrupted by SIGTERM while the original model was trained" in err
    assert list(folder.glob("checkpoint-*"))
    assert "2 runs, 0 of them finished before" in experiments(*words)[1]
    assert read(folder / "evaluation.json")
    assert "2 runs, 2 of them finished before" in experiments(*words)[1]


def test_settings_of_ones_own_take_the_place_of_a_recipe(experiments, tmp_path):
    train = {"model": "resnet8", "max_steps": 1}
    unlearn = {"constraint_mode": "relative", "max_grad_norm": 3, "stopping": "any", "seed": 5}
    unlearn |= {"num_train_epochs": 9, "max_steps": 2}
    mine = {"data": "digits", "forget_class": 5, "train": train, "unlearn": unlearn}

    def reproduce(*words):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
        where = ("--config", "mine.yaml", "--fraction", 0.1, "--epochs", 0.25)
        return experiments("figure-12", *where, *words)

    def original():
        planned = " ".join(reproduce("--dry_run")[1].split())
        return re.search(r"by the settings (mine-\w+)", planned)[1]

    code, out, _ = reproduce()
    assert code == 0
    assert "whatever the settings say: stopping, num_train_epochs, max_steps" in out
    found = result(tmp_path, "figure-12")
    recipe = found["scale"]["recipe"]
    assert recipe == original()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"settings {recipe}, seed 5, {device}" in (tmp_path / "out/README.md").read_text()
    for run in found["runs"].values():
        path = tmp_path / "out/work/runs" / run["run"] / "config.yaml"
        settings = yaml.safe_load(path.read_text())
        assert "max_steps" not in settings, "all of its epochs"
        taken = (settings["forget_class"], float(settings["max_grad_norm"]), int(settings["seed"]))
        assert taken == ("5", 3, 5)
    unlearn["max_grad_norm"] = 4
    assert original() == recipe, "it is trained in the same way"
    train["max_steps"] = 2
    assert original() != recipe
    del mine["forget_class"]
    assert " has no forget_class, which these experiments need\n" in reproduce()[2]


class Longer(Optimizers):
    """The same runs, for longer."""

    name = "longer"

    def runs(self, scale):
        return {key: replace(wanted, epochs=2) for key, wanted in super().runs(scale).items()}


@FORKS
def test_a_longer_run_serves_a_shorter_figure_unless_it_fails_and_goes_on(
    reproduce, tmp_path, monkeypatch
):
    killed, adam = partial(signal.raise_signal, signal.SIGKILL), "adamw_torch"
    with at_step(12, killed, lambda args: args.optim == adam) as patch:
        patch.setitem(EXPERIMENTS, "longer", Longer())
        code, out, err = reproduce("figure-12", "longer", "--epochs", 1)
    assert (code, err) == (0, "")
    assert "failed: killed by SIGKILL" in out
    assert "figure-12: 1 runs in place of longer ones that failed, 0 of them finished before" in out
    short, broken = (result(tmp_path, name) for name in ("figure-12", "longer"))
    made = [short["runs"][key]["run"].rsplit("-", 1)[1] for key in ("SGD", "AdamW")]
    assert (short["failed"], made) == ({}, ["e2", "e1"])
    assert short["figures"]["epoch"] == {"SGD": [0, 1], "AdamW": [0, 1]}
    assert broken["failed"] == {"AdamW": "killed by SIGKILL"}
    given = broken["runs"]["AdamW"]
    assert given["settings"]["constraint"] == 0.9, "of what was given, as there is no record"
    assert given["inputs"] == broken["runs"]["SGD"]["inputs"]
    assert [claim["holds"] for claim in broken["claims"]] == [None]
    finished = runs(tmp_path)

    asked, child = [], children._Child
    monkeypatch.setattr(
        children, "_Child", lambda call, *rest: asked.append(call) or child(call, *rest)
    )
    assert reproduce("figure-12", "--epochs", 2)[0] == 0
    [call] = asked
    assert (call.job, call.options["resume"]) == ("unlearn", True)
    longer, two = runs(tmp_path), result(tmp_path, "figure-12")
    assert longer.items() > finished.items()
    assert two["failed"] == {}
    assert two["figures"]["epoch"]["AdamW"] == [0, 1, 2]

    assert "2 runs, 2 of them finished before" in reproduce("figure-12", "--epochs", 1)[1]
    one = result(tmp_path, "figure-12")
    assert runs(tmp_path) == longer
    for name, line in one["figures"]["trajectories"].items():
        assert line == two["figures"]["trajectories"][name][:2]
    assert reproduce("figure-12", "--epochs", 1, "--output_dir", "fresh")[0] == 0
    assert read(tmp_path / "fresh/figure-12.json")["figures"] == one["figures"]


def test_both_folders_are_locked_before_anything_is_run(reproduce, tmp_path, monkeypatch):
    seen = []

    def run_stage(*_):
        for folder in ("out", "elsewhere"):
            with pytest.raises(HamuError, match="another run, or a process that a run left behind"):
                RunFolder(tmp_path / folder, resume=True)
            seen.append(folder)

    monkeypatch.setattr("experiments.reproduce._run_stage", run_stage)
    assert reproduce("figure-12", "--work_dir", "elsewhere")[0] == 0
    assert seen == ["out", "elsewhere"]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def fewer_runs(monkeypatch):
    """Methods, constraints and mixing ratios that suffice for every figure to be drawn."""
    values = {
        ("constraints.BASELINES", "similarity.BASELINES"): ("gdiff",),
        ("language.METHODS", "similarity.METHODS"): ("hamu-q", "hamu-u", "gdiff"),
        ("similarity.RHOS", "similarity.AllBaselines.rhos"): (0.0, 0.75, 1.0),
        ("language._ALL",): ("ft", "gdiff", "gru", "hamu-q", "hamu-u"),
        ("constraints.CONSTRAINTS",): (0.1, 0.9),
        ("practice._FACTORS",): (0.5, 1.0),
        ("practice._TABLE",): {size: practice._TABLE[size] for size in (1024, 2048)},
        ("cost._TURNS",): 2,
    }
    for names, value in values.items():
        for name in names:
            monkeypatch.setattr(f"experiments.paper.{name}", value)


@pytest.mark.usefixtures("fewer_runs")
def test_every_experiment_leaves_figures_a_picture_and_what_agrees(reproduce, tmp_path):
    code, _, err = reproduce("all", "--epochs", 0.25)
    assert (code, err) == (0, "")
    made, results = runs(tmp_path), {name: result(tmp_path, name) for name in EXPERIMENTS}
    wanted = [run["run"] for found in results.values() for run in found["runs"].values()]
    assert len(wanted) > len(set(wanted)) == len(made), "what two experiments need is run once"
    page = (tmp_path / "out/README.md").read_text()
    for name, experiment in EXPERIMENTS.items():
        verdicts = [claim["holds"] for claim in results[name]["claims"]]
        assert results[name]["failed"] == {}
        assert verdicts, name
        assert (tmp_path / f"out/{name}.png").stat().st_size > 5_000
        assert f"## {experiment.reference}: " in page
        assert f"({name}.png)" in page
        [row] = re.findall(rf"^\| \[{re.escape(experiment.reference)}\].*", page, re.MULTILINE)
        assert row.split("|")[2:4] == [f" {verdicts.count(holds)} " for holds in (True, False)]
    broken = [c for found in results.values() for c in found["claims"] if c["holds"] is False]
    assert page.count("**differs**") == len(broken)
    assert re.search(
        r"^Fig. 10, Fig. 11, Table 3: .*images in place of the paper's texts", page, re.MULTILINE
    )
    alike = re.findall(r"^(.*?): settings digits, seed ", page, re.MULTILINE)
    assert len(re.findall(r"(Fig\.|Table) ", " ".join(alike))) == len(EXPERIMENTS) - 2
    jsons = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))
    assert str(tmp_path) not in jsons
    figures_are_those_of_the_runs(tmp_path, results)
    for name in ("README.md", "figure-8.png"):
        (tmp_path / "out" / name).unlink()
    assert reproduce("figure-8", "--redraw")[0] == 0
    assert (tmp_path / "out/README.md").read_text() == page
    assert (tmp_path / "out/figure-8.png").is_file()
    assert runs(tmp_path) == made


def figures_are_those_of_the_runs(tmp_path, results):
    """Check figures, settings, inputs and environment against the runs that they are of."""
    said = results["figure-3"]["runs"]["hamu-q 0.75"]
    record = read(tmp_path / "out/work/runs" / said["run"] / "record.json")
    assert said["settings"].items() >= {"method": "hamu-q", "rho": 0.75, "optim": "sgd"}.items()
    assert (said["settings"], said["date"]) == (record["settings"], record["date"])
    inputs, original = said["inputs"], record["models"]["before"]["weights"]
    assert inputs["original model"]["weights"] == original
    assert inputs["forget set"]["sha256"] == record["forget_set"]["sha256"]
    measured = results["table-1"]["measured"]
    assert measured["inputs"]["original model"] == inputs["original model"]
    assert "rho" not in measured["settings"], "it is 0 there, whatever the settings say"
    assert measured["environment"] == said["environment"]
    found = results["figure-4"]
    for name, run in found["runs"].items():
        evaluation = read(tmp_path / "out/work/runs" / run["run"] / "evaluation.json")
        before, after = evaluation["before"], evaluation["after"]
        gains = [before["retain"]["loss"] - after["retain"]["loss"],
                 after["forget"]["loss"] - before["forget"]["loss"]]  # fmt: skip
        method, rho = name.split()
        assert found["figures"]["trajectories"][rho][method][-1] == pytest.approx(gains)


def test_texts_may_be_repeated_in_what_is_retained(
    experiments, tmp_path, monkeypatch, saved_text_model
):
    records = [r.fields for r in read_text("miniature").records[:24]]
    rows = [{key: record[key] for key in ("question", "answer")} for record in records]
    again = [row | {"paraphrased_answer": f"In short: {row['answer']}"} for row in rows[:6]]
    sets = {"full": rows[:20], "forget10": rows[:6], "holdout10": rows[20:]}
    for name, content in (sets | {"forget10_perturbed": again}).items():
        write_rows(f"{name}.json", content)
    shutil.copytree(saved_text_model, "tiny")
    monkeypatch.setattr("experiments.paper.language.METHODS", ("hamu-q", "gdiff"))
    words = ("--data_dir", ".", "--model", "tiny", "--fraction", 0.5, "--epochs", 0.5)
    assert experiments("figure-10", *words)[0] == 0
    found = result(tmp_path, "figure-10")
    assert (found["failed"], found["scale"]["retain"]) == ({}, 7)
    for name in ("trajectories", "kappa"):
        assert set(found["figures"][name]) == {"dissimilar", "similar"}
    [kappa] = [claim for claim in found["claims"] if claim["text"].startswith("κ of HAMU-Q")]
    assert kappa["holds"] is None, "one model serves both, and has not seen the paraphrases"
    for kind, retain in (("dissimilar", 7), ("similar", 10)):
        run = found["runs"][f"gdiff {kind}"]["run"]
        record = read(tmp_path / "out/work/runs" / run / "record.json")
        sizes = [record[f"{side}_set"]["records"] for side in ("forget", "retain")]
        assert sizes == [3, retain]
    page = (tmp_path / "out/README.md").read_text()
    assert "texts of TOFU and a tiny Llama in place of WaterDrum-TOFU and Llama-2-7b" in page
