"""`hamu attack` and `hamu evaluate --attacks`, and what a report makes of them."""

import json
import shutil

import pytest
import yaml
from run_files import contents, read, write_rows

from hamu import HamuError
from hamu.data import read_text
from hamu.report.run import read_run
from hamu.unlearning.jobs.tasks import Task
from hamu.unlearning.record.inputs import weights_digest

QUICK = ("--attack_steps", 20, "--attack_seeds", 1, "--attack_records", 40)
IMAGES = ("--data", "data", "--forget_class", 3, "--model", "run/model", *QUICK)
TEXTS = ("attack", "--data", "miniature", "--task", "text", "--attack_seeds", 1)


@pytest.fixture
def finished(finished_images, tmp_path):
    """A run that has unlearned a class, in the folder of the test."""
    shutil.copytree(finished_images, tmp_path, dirs_exist_ok=True)
    return tmp_path


def attacked(cli, *more):
    return cli("attack", *IMAGES, *more)


def names_in(folder):
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_an_attack_on_images_leaves_its_files_and_the_models_as_they_were(cli, finished):
    before = contents("run") | contents("original")
    others = ("--original_model", "original", "--retain_model", "original")
    code, out, err = attacked(cli, *others, "--output_dir", "out")
    assert code == 0, err
    assert names_in(finished / "out") == ["attack.json", "attack.png", "config.yaml"]
    assert contents("run") | contents("original") == before
    found = read("out/attack.json")
    assert found["verdict"] in out
    assert (found["records"]["relearned"], found["complete"]) == (10, True)
    named = {role: one["name"] for role, one in found["models"].items()}
    assert named == {"unlearned": "model", "retrained": "original", "original": "original"}
    assert found["models"]["original"]["weights"] == weights_digest(finished / "original")
    assert list(found["outcomes"]) == ["relearn-retain", "relearn-few"]
    for outcomes in found["outcomes"].values():
        assert set(outcomes) == {"unlearned", "original", "retrained"}
        assert outcomes["original"] == outcomes["retrained"]
    assert yaml.safe_load((finished / "out/config.yaml").read_text())["attack_steps"] == 20
    again = ("attack", "--config", "out/config.yaml", "--output_dir", "out")
    assert "holds a run" in cli(*again)[2]
    assert cli(*again, "--overwrite")[0] == 0
    assert read("out/attack.json") == found, "by its settings"


def test_what_one_model_was_asked_is_kept_though_another_cannot_be(cli, finished, monkeypatch):
    shutil.copytree("original", "damaged")
    (finished / "damaged/model.safetensors").write_bytes(b"no weights")
    code, _, err = attacked(cli, "--retain_model", "damaged", "--output_dir", "out")
    assert (code, "damaged" in err, (finished / "out").exists()) == (2, True, False)
    start, loaded = Task.start_model, []

    def thrice(self, source):
        if len(loaded) == 3:
            raise HamuError(f"{source} is gone")
        loaded.append(source)
        return start(self, source)

    monkeypatch.setattr(Task, "start_model", thrice)
    code, _, err = attacked(cli, "--retain_model", "original", "--output_dir", "out")
    assert (code, "original is gone" in err, loaded[1:]) == (2, True, ["original", "run/model"])
    found = read("out/attack.json")
    assert [*found["models"]] == ["unlearned"]
    assert (found["complete"], found["lasts"]) == (False, None)
    assert found["verdict"] == "Whether it lasts is open: the attacks have not come to their end."
    assert {name for one in found["outcomes"].values() for name in one} == {"unlearned"}


def test_the_report_follows_the_attack(cli, finished):
    assert cli("report", "run", "--no_models", "--output", "before.html")[0] == 0
    page = (finished / "before.html").read_text()
    assert "Does it last?" in page
    assert "Not here: attack.json" in page
    assert attacked(cli, "--attacks", "relearn-retain", "--output_dir", "run/attack")[0] == 0
    assert cli("report", "run", "--no_models")[0] == 0
    page = (finished / "run/report.html").read_text()
    answer = json.loads((finished / "run/attack/attack.json").read_text())["verdict"]
    assert "After relearn-retain" in page
    assert answer in read_run(finished / "run").attack["verdict"]
    assert "Not here: attack.json" not in page


@pytest.mark.parametrize(("given", "other"), [
    (("--model", "original"), "model"), (("--forget_class", 4), "forget set"),
])  # fmt: skip
def test_the_report_leaves_out_an_attack_on_others(cli, finished, given, other):
    of_few = ("--attacks", "relearn-retain", *given, "--output_dir", "run/attack", "--overwrite")
    code, _, err = attacked(cli, *of_few)
    assert code == 0, err
    run = read_run(finished / "run")
    assert run.attack is None
    of = f"another {other} than that of this run"
    assert run.notes == [f"attack.json is left out, as it is of {of}"]


def test_evaluate_attacks_too_where_requested(cli, finished):
    code, out, _ = cli("evaluate", *IMAGES, "--output_dir", "plain")
    assert (code, "without effect without --attacks: attack_" in out) == (0, True)
    assert "attack.json" not in names_in(finished / "plain")
    more = ("--attacks", "relearn-few", "--output_dir", "out")
    code, out, err = cli("evaluate", *IMAGES, *more)
    assert code == 0, err
    assert "relearn-few" in out
    assert {"attack.json", "attack.png", "evaluation.json"} <= set(names_in(finished / "out"))


def test_texts_are_attacked_and_miniature_is_not_unrelated_to_itself(
    cli, saved_text_model, tmp_path
):
    models = ("--model", saved_text_model, "--original_model", saved_text_model)
    few = ("--attack_steps", 3, "--attack_answers", 2, "--attack_samples", 2)
    common = (*TEXTS, *models, *few, "--forget_rows", "0,1,2,3,4,5,6,7")
    code, out, err = cli(*common, "--output_dir", "out")
    assert code == 0, err
    found = json.loads((tmp_path / "out/attack.json").read_text())
    assert list(found["outcomes"]) == ["relearn-retain", "relearn-few"]
    assert "name others with --unrelated_data" in found["skipped"]["relearn-unrelated"]
    assert "Whether it lasts is open" in out
    rows = [{"question": f"Colour {n}?", "answer": f"It is shade {n}."} for n in range(20)]
    known = read_text("miniature").records[0]
    rows += [{"question": "", "answer": f"{known.prompt} {known.answer.upper()}!"}]
    write_rows("other.jsonl", [{"text": row["question"] + " " + row["answer"]} for row in rows])
    names = "relearn-unrelated,prefill,sample"
    more = ("--attacks", names, "--unrelated_data", "other.jsonl", "--output_dir", "more")
    code, out, err = cli(*common, *more)
    assert code == 0, err
    written = (tmp_path / "more/attack.json").read_text()
    assert list(json.loads(written)["outcomes"]) == names.split(",")
    assert not any(record.answer.strip() in written for record in read_text("miniature").records)
    assert "leak@2" in out
    assert "1 of 21 unrelated texts are among those to retain or to forget" in out


def test_an_adapter_is_attacked_through_adapters(cli, saved_text_model, tmp_path):
    problem = ("--data", "miniature", "--task", "text", "--forget_rows", "0,1,2,3")
    adapter = ("--lora", "--lora_rank", 2, "--lora_targets", "all-linear")
    run = ("--max_steps", 1, "--eval_strategy", "no", "--output_dir", "run")
    run += ("--constraint_mode", "relative", "--stopping", "off")
    assert cli("unlearn", *problem, "--model", saved_text_model, *adapter, *run)[0] == 0
    models = ("--model", "run/model", "--original_model", saved_text_model)
    few = ("--attacks", "relearn-retain", "--attack_steps", 2, "--output_dir", "run/attack")
    code, _, err = cli(*TEXTS, "--forget_rows", "0,1,2,3", *models, *few)
    assert code == 0, err
    outcomes = json.loads((tmp_path / "run/attack/attack.json").read_text())["outcomes"]
    assert set(outcomes["relearn-retain"]) == {"unlearned", "original"}
    assert cli(*TEXTS, "--forget_rows", "0,1,2,3", *models, *few, "--overwrite")[0] == 0
    again = json.loads((tmp_path / "run/attack/attack.json").read_text())["outcomes"]
    assert again == outcomes, "the original's new adapter too"
