"""`python -m experiments`: every experiment at the smallest scale, broken off and gone on with, and what its pages say."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
import yaml
from interrupting import interrupted_at

from experiments.__main__ import main
from experiments.paper import EXPERIMENTS
from experiments.paper.practice import Optimizers
from hamu.data import read_text
from hamu.errors import HamuError
from hamu.models.language import new_language_model, new_tokenizer
from hamu.unlearning.compare import children
from hamu.unlearning.jobs.progress import ProgressBar
from hamu.unlearning.run_folder import RunFolder

NAMES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SMALL = ("--recipe", "digits", "--fraction", 0.1)


@pytest.fixture
def reproduce(capsys, tmp_path, monkeypatch, saved_model, forked_runs):
    """Runs the command in an empty folder; returns its exit code, its output and what it said on standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        given = (*SMALL, "--model", saved_model, "--output_dir", "out", *words)
        code = main([*map(str, given)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def result(tmp_path, name):
    return json.loads((tmp_path / "out" / f"{name}.json").read_text())


def runs(tmp_path):
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in tmp_path.glob("out/work/runs/*/record.json")
    }


def test_the_test_set_chooses_the_original_that_is_trained(
    tmp_path, monkeypatch, capsys, forked_runs
):
    """As the paper's recipe says (App. E): a fraction of the training data, the whole test set."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    )
    for split, count in (("train", 80), ("test", 30)):
        images = [generator.integers(0, 255, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
        rows = datasets.Dataset.from_dict(
            {"image": images, "label": [n % 10 for n in range(count)]}, features
        )
        rows.to_parquet(str(tmp_path / f"{split}.parquet"))
    assert main(["figure-12", "--data_dir", ".", "--fraction", "0.5", "--epochs", "1"]) == 0
    original = tmp_path / "runs/reproduce/work/models/cifar10-resnet20-0.5-s42"
    state = json.loads((original / "checkpoint-50/trainer_state.json").read_text())
    seen = {
        row["step"]: row["eval_accuracy"] for row in state["log_history"] if "eval_accuracy" in row
    }
    assert list(seen) == [5 * n for n in range(1, 11)], "one step an epoch, and every 5 a look"
    assert state["best_metric"] == max(seen.values())
    figures = json.loads((original / "evaluation.json").read_text())
    assert figures["test_accuracy"] == pytest.approx(state["best_metric"])


def test_a_result_that_cannot_be_shown_is_named_before_anything_is_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["figure-1", "--output_dir", "out"]) == 0
    earlier = tmp_path / "out/figure-1.json"
    result_of_another_version = json.loads(earlier.read_text())
    del result_of_another_version["scale"]
    earlier.write_text(json.dumps(result_of_another_version))
    assert main(["figure-2", "--output_dir", "out"]) == 2
    assert (
        "figure-1.json is not as this version writes it (KeyError: 'scale')"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out/figure-2.json").exists()
    (tmp_path / "out/figure-2.json").write_text(earlier.read_text().replace("figure-1", "figure-2"))
    assert main(["figure-1", "figure-2", "--output_dir", "out"]) == 0  # replaces both
    assert "## Fig. 1: " in (tmp_path / "out/README.md").read_text()


def test_a_plan_counts_runs_and_steps_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["figure-4", "figure-5", "table-2", "--dry_run", "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    # 14 runs of 9 steps an epoch, 10 of which 4 are among them; 352, 176, 88, 44 and 22 steps an epoch
    assert re.search(r"figure-4 +14 +2 +252 *\n", out)
    assert re.search(r"table-2 +5 +2 +1364 *\n", out)
    assert "25 runs, 1724 steps" in out
    assert "trained on the same data by the settings cifar10-resnet20" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_before_anything_is_written(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in [
        (("figure-99",), "experiment 'figure-99' is unknown; did you mean figure-9?"),
        (("figure-4", "--fraction", 0), "fraction 0.0 must be a share of the data"),
        (
            ("figure-4", "--fraction", 0.5, "--train_fraction", 0.25),
            "train_fraction 0.25 must be from fraction 0.5 to",
        ),
        (
            ("figure-4", "--fraction", 1, "--train_fraction", 1.5),
            "train_fraction 1.5 must be from fraction 1.0 to",
        ),
        (
            ("figure-4", "--model", "m", "--train_fraction", 1),
            "--train_fraction is for an original model that is trai",
        ),
        (("figure-4", "--epochs", -1), "epochs -1.0 must be positive"),
        (("figure-4", "--jobs", 0), "jobs 0 must be at least 1"),
        (("figure-4", "--device", "tpu"), "device 'tpu' is unknown"),
        (("figure-4", "--device", "cuda"), "there is no CUDA device; leave --device out"),
        (("figure-4", "--recipe", "tofu-tiny"), "recipe tofu-tiny is of texts"),
        (
            ("figure-4", "--recipe", "cifar10-resnet20", "--data_dir", "nowhere"),
            "the data nowhere/train.parquet are not",
        ),
        (("figure-4", "--model", "nowhere"), "the model nowhere is not there"),
        (("figure-4", "--redraw"), "out holds no result of figure-4; leave out --redraw"),
    ]:
        code, _, err = reproduce(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
        assert not (tmp_path / "out").exists()


def test_an_original_model_that_was_not_trained_is_said_with_the_reason(
    capsys, tmp_path, monkeypatch, forked_runs
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/work/models").mkdir(parents=True)
    (tmp_path / "out/work/models/digits-0.1-s42").write_text("in the way")
    assert main(["figure-12", *map(str, SMALL), "--output_dir", "out"]) == 2
    err = capsys.readouterr().err
    assert "the original model was not trained: the output folder" in err
    assert "is a file; choose another" in err


def test_training_the_original_may_be_interrupted_and_goes_on(
    capsys, tmp_path, monkeypatch, forked_runs
):
    monkeypatch.chdir(tmp_path)
    words = ["figure-12", *map(str, SMALL), "--epochs", "1", "--output_dir", "out"]
    with interrupted_at("models/digits-0.1-s42", 2):
        assert main(words) == 143
    assert "interrupted by SIGTERM while the original model was trained" in capsys.readouterr().err
    folder = tmp_path / "out/work/models/digits-0.1-s42"
    assert list(folder.glob("checkpoint-*"))
    assert not (folder / "evaluation.json").exists()
    assert main(words) == 0
    assert "2 runs, 0 of them finished before" in capsys.readouterr().out
    assert json.loads((folder / "evaluation.json").read_text())
    assert main(words) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out


def test_settings_of_ones_own_take_the_place_of_a_recipe(
    capsys, tmp_path, monkeypatch, forked_runs
):
    monkeypatch.chdir(tmp_path)
    mine = {
        "data": "digits",
        "forget_class": 5,
        "train": {"model": "resnet8", "max_steps": 1},
        "unlearn": {
            "constraint_mode": "relative",
            "max_grad_norm": 3,
            "stopping": "any",
            "num_train_epochs": 9,
            "max_steps": 2,
            "eval_on_start": False,
            "seed": 5,
        },
    }
    taken_over = "chosen by the experiments, whatever the settings say: stopping, num_train_epochs, max_steps"

    def reproduce(*words):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
        where = (
            "--config",
            "mine.yaml",
            "--fraction",
            "0.1",
            "--epochs",
            "1",
            "--output_dir",
            "out",
        )
        code = main(["figure-12", *where, *words])
        said = capsys.readouterr()
        assert code or taken_over in said.out
        return code, said.err

    assert reproduce()[0] == 0
    found = result(tmp_path, "figure-12")
    assert found["scale"]["recipe"].startswith("mine-")
    about = (tmp_path / "out/README.md").read_text()
    assert f"settings `{found['scale']['recipe']}`, 0.1 of the data" in about
    assert ", 1 epoch (in full 5), " in about
    assert found["scale"]["seed"] == 5
    for run in found["runs"].values():
        settings = yaml.safe_load(
            (tmp_path / "out/work/runs" / run["run"] / "config.yaml").read_text()
        )
        assert "max_steps" not in settings, "all of its epochs"
        assert (
            settings["forget_class"],
            float(settings["max_grad_norm"]),
            int(settings["seed"]),
        ) == ("5", 3, 5)
    originals = tmp_path / "out/work/models"
    assert len(list(originals.iterdir())) == 1
    mine["unlearn"]["max_grad_norm"] = 4
    assert reproduce()[0] == 0
    assert len(list(originals.iterdir())) == 1, "it is trained in the same way"
    mine["train"]["max_steps"] = 2
    assert reproduce()[0] == 0
    assert len(list(originals.iterdir())) == 2, "it is another"
    taken_over = "chosen by the experiments, whatever the settings say: stopping, method, num_train"
    assert reproduce("--recipe", "digits", "--dry_run")[0] == 0
    del mine["forget_class"]
    assert re.fullmatch(
        r"python -m experiments: mine-[0-9a-f]{8} has no forget_class, which these experiments need\n",
        reproduce()[1],
    )


def test_a_run_that_is_killed_is_said_to_have_failed_and_the_same_command_goes_on_with_it(
    reproduce, tmp_path, monkeypatch
):
    def on_step_end(self, args, state, control, **kwargs):
        if args.optim == "adamw_torch" and state.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, args, state, control, **kwargs)

    original = ProgressBar.on_step_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressBar, "on_step_end", on_step_end)
        code, out, err = reproduce("figure-12", "--epochs", 2)
    assert (code, err) == (0, "")
    assert "failed: killed by SIGKILL" in out
    broken = result(tmp_path, "figure-12")
    assert broken["failed"] == {"AdamW": "killed by SIGKILL"}
    assert broken["runs"]["AdamW"]["settings"]["constraint"] == 0.9, (
        "what was given, if there is no record"
    )
    assert broken["runs"]["AdamW"]["inputs"] == broken["runs"]["SGD"]["inputs"]
    assert [claim["holds"] for claim in broken["claims"]] == [None]
    finished = runs(tmp_path)
    assert len(finished) == 1

    asked = []
    child = children._Child
    monkeypatch.setattr(
        children, "_Child", lambda call, *rest: asked.append(call.argv) or child(call, *rest)
    )
    code, out, _ = reproduce("figure-12", "--epochs", 2)
    assert code == 0
    [argv] = asked
    assert argv[:2] == ("unlearn", "--resume")
    whole = result(tmp_path, "figure-12")
    assert whole["failed"] == {}
    assert runs(tmp_path).items() > finished.items()
    assert whole["figures"]["epoch"]["AdamW"] == [0, 1, 2]


def test_a_longer_run_that_begins_alike_serves_a_shorter_figure(reproduce, tmp_path):
    assert reproduce("figure-12", "--epochs", 2)[0] == 0
    longer = runs(tmp_path)
    two = result(tmp_path, "figure-12")
    assert "2 runs, 2 of them finished before" in reproduce("figure-12", "--epochs", 1)[1]
    one = result(tmp_path, "figure-12")
    assert runs(tmp_path) == longer
    for name, line in one["figures"]["trajectories"].items():
        assert line == two["figures"]["trajectories"][name][:2]
    assert reproduce("figure-12", "--epochs", 1, "--output_dir", "fresh")[0] == 0
    fresh = json.loads((tmp_path / "fresh/figure-12.json").read_text())
    assert fresh["figures"] == one["figures"]


class Longer(Optimizers):
    """The same runs, for longer."""

    name = "longer"

    def runs(self, scale):
        return {key: replace(wanted, epochs=2) for key, wanted in super().runs(scale).items()}


def test_a_longer_run_that_fails_does_not_take_the_shorter_figure_with_it(
    reproduce, tmp_path, monkeypatch
):
    def on_step_end(self, args, state, control, **kwargs):
        if args.optim == "adamw_torch" and state.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, args, state, control, **kwargs)

    original = ProgressBar.on_step_end
    monkeypatch.setattr(ProgressBar, "on_step_end", on_step_end)
    monkeypatch.setitem(EXPERIMENTS, "longer", Longer())
    code, out, _ = reproduce("figure-12", "longer", "--epochs", 1)
    assert code == 0
    assert "figure-12: 1 runs in place of longer ones that failed, 0 of them finished before" in out
    short, longer = (result(tmp_path, name) for name in ("figure-12", "longer"))
    assert (short["failed"], longer["failed"]) == ({}, {"AdamW": "killed by SIGKILL"})
    assert [short["runs"][key]["run"].rsplit("-", 1)[1] for key in ("SGD", "AdamW")] == ["e2", "e1"]
    assert [short["runs"][key]["settings"]["num_train_epochs"] for key in ("SGD", "AdamW")] == [
        2,
        1,
    ]
    assert short["figures"]["epoch"] == {"SGD": [0, 1], "AdamW": [0, 1]}


def test_both_folders_are_locked_before_anything_is_run(reproduce, tmp_path, monkeypatch):
    seen = []

    def run_stage(*_):
        for folder in ("out", "elsewhere"):
            with pytest.raises(
                HamuError, match="another run, or a process that a run left behind, is using"
            ):
                RunFolder(tmp_path / folder, resume=True)
            seen.append(folder)

    monkeypatch.setattr("experiments.reproduce._run_stage", run_stage)
    assert reproduce("figure-12", "--work_dir", "elsewhere")[0] == 0
    assert seen == ["out", "elsewhere"]
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("experiments.reproduce._run_stage", lambda *_: None)
    assert reproduce("figure-12", "--work_dir", "out")[0] == 0, "one folder may be both"


def test_runs_of_another_original_model_are_not_put_together(reproduce, tmp_path, saved_model):
    from hamu.models import load_classifier

    words = ("figure-12", "--epochs", 0.25, "--model", "model")
    load_classifier(str(saved_model)).save_pretrained("model")
    assert reproduce(*words)[0] == 0
    changed = load_classifier(str(saved_model))
    with torch.no_grad():
        changed.conv.weight *= 1.01
    changed.save_pretrained("model")
    [adam] = [
        run["run"] for key, run in result(tmp_path, "figure-12")["runs"].items() if key == "AdamW"
    ]
    shutil.rmtree(tmp_path / "out/work/runs" / adam)
    code, _, err = reproduce(*words)
    assert code == 2
    assert (
        "holds a run with another original model than there is now; choose another --work_dir, or remove"
        in err
    )


def test_every_experiment_leaves_figures_a_picture_and_what_agrees(
    reproduce, tmp_path, monkeypatch
):
    monkeypatch.setattr("experiments.paper.constraints.CONSTRAINTS", (0.1, 0.5, 0.9))  # fewer runs
    for place in (
        "experiments.paper.similarity.RHOS",
        "experiments.paper.similarity.AllBaselines.rhos",
    ):
        monkeypatch.setattr(place, (0.0, 0.75, 1.0))
    code, _, err = reproduce("all", "--epochs", 0.25)
    assert (code, err) == (0, "")
    made = runs(tmp_path)
    wanted = [run["run"] for name in EXPERIMENTS for run in result(tmp_path, name)["runs"].values()]
    assert len(wanted) > len(set(wanted)) == len(made), "what two experiments need is run once"
    page = (tmp_path / "out/README.md").read_text()
    # what computed a run and what it was is told with it, without places
    said = result(tmp_path, "figure-3")["runs"]["hamu-q 0.75"]
    record = json.loads((tmp_path / "out/work/runs" / said["run"] / "record.json").read_text())
    asked = {
        "method": "hamu-q",
        "rho": 0.75,
        "optim": "sgd",
        "blocks": "tensor",
        "num_train_epochs": 0.25,
    }
    assert said["settings"].items() >= asked.items()
    assert said["settings"] == record["settings"]
    assert said["inputs"]["original model"]["weights"] == record["models"]["before"]["weights"]
    assert said["inputs"]["forget set"]["sha256"] == record["forget_set"]["sha256"]
    assert said["date"] == record["date"]
    measured = result(tmp_path, "table-1")["measured"]
    assert measured["inputs"]["original model"] == said["inputs"]["original model"]
    assert measured["settings"].keys() >= {
        "per_device_train_batch_size",
        "learning_rate",
        "constraint",
    }
    assert "rho" not in measured["settings"], "it is 0 there, whatever the settings say"
    for environment in (said["environment"], measured["environment"]):
        assert environment.startswith(
            f"cpu, hamu {record['environment']['versions']['hamu']}, python "
        )
    computed = re.findall(r"^(.+): Computed by cpu, hamu ", page, re.MULTILINE)
    assert len(", ".join(computed).split(", ")) == len(EXPERIMENTS) - 2
    assert str(tmp_path) not in "".join(
        path.read_text() for path in (tmp_path / "out").glob("*.json")
    )
    for name, experiment in EXPERIMENTS.items():
        found = result(tmp_path, name)
        assert found["failed"] == {}
        assert found["claims"], name
        for claim in found["claims"]:
            assert claim["holds"] in (True, False, None)
        assert (tmp_path / f"out/{name}.png").stat().st_size > 5_000
        assert f"## {experiment.reference}: " in page
        assert f"({name}.png)" in page
        held = sum(claim["holds"] is True for claim in found["claims"])
        broken = sum(claim["holds"] is False for claim in found["claims"])
        row = next(
            line for line in page.splitlines() if line.startswith(f"| [{experiment.reference}]")
        )
        assert row.split("|")[-4:-2] == [f" {held} ", f" {broken} "]
    assert page.count("images in place of the paper's texts") == 3
    assert page.count("**does not agree**") == sum(
        claim["holds"] is False
        for name in EXPERIMENTS
        for claim in result(tmp_path, name)["claims"]
    )
    (tmp_path / "out/README.md").unlink()
    (tmp_path / "out/figure-8.png").unlink()
    assert reproduce("all", "--redraw")[0] == 0
    assert (tmp_path / "out/README.md").read_text() == page
    assert (tmp_path / "out/figure-8.png").is_file()
    assert runs(tmp_path) == made
    for name, run in result(tmp_path, "figure-4")["runs"].items():
        evaluation = json.loads(
            (tmp_path / "out/work/runs" / run["run"] / "evaluation.json").read_text()
        )
        method, rho = name.split()
        end = result(tmp_path, "figure-4")["figures"]["trajectories"][rho][method][-1]
        before, after = evaluation["before"], evaluation["after"]
        assert end == pytest.approx([before["retain"]["loss"] - after["retain"]["loss"],
                                     after["forget"]["loss"] - before["forget"]["loss"]])  # fmt: skip


@pytest.fixture
def tofu(tmp_path):
    """A folder like TOFU's, of a few made-up records, and the folder of a tiny model."""
    records = [r.fields for r in read_text("miniature").records[:24]]
    rows = [{key: record[key] for key in ("question", "answer")} for record in records]
    said_again = [row | {"paraphrased_answer": f"In short: {row['answer']}"} for row in rows[:6]]
    sets = {
        "full": rows[:20],
        "forget10": rows[:6],
        "holdout10": rows[20:],
        "forget10_perturbed": said_again,
    }
    for name, content in sets.items():
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in content))
    torch.manual_seed(0)
    tokenizer = new_tokenizer((row["question"] + row["answer"] for row in rows), 400)
    for part in (new_language_model(tokenizer, hidden=32, layers=1), tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    return tmp_path


def test_texts_may_be_repeated_in_what_is_retained(tofu, monkeypatch, capsys, forked_runs):
    monkeypatch.chdir(tofu)
    monkeypatch.setattr("experiments.paper.language.METHODS", ("hamu-q", "gdiff"))
    assert main(["figure-10", "--data_dir", ".", "--model", "tiny", "--fraction", "0.5", "--epochs", "0.5",
                 "--output_dir", "out"]) == 0  # fmt: skip
    found = result(tofu, "figure-10")
    assert found["failed"] == {}
    assert found["scale"]["retain"] == 7
    assert set(found["figures"]["trajectories"]) == {"dissimilar", "similar"}
    [kappa] = [claim for claim in found["claims"] if claim["text"].startswith("κ of HAMU-Q")]
    assert kappa["holds"] is None, (
        "one model serves both settings, and has not seen the paraphrases"
    )
    assert set(found["figures"]["kappa"]) == {"dissimilar", "similar"}
    sizes = {}
    for key, run in found["runs"].items():
        record = json.loads((tofu / "out/work/runs" / run["run"] / "record.json").read_text())
        sizes[key] = [record[f"{side}_set"]["records"] for side in ("forget", "retain")]
    assert sizes["gdiff dissimilar"] == [3, 7]
    assert sizes["gdiff similar"] == [3, 10]
    page = (tofu / "out/README.md").read_text()
    assert "texts of TOFU and a tiny Llama in place of WaterDrum-TOFU and Llama-2-7b" in page
