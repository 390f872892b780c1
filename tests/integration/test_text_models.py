"""The models that a command names, with tokenizer, base and adapter, and their precision."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from run_files import read, run, write_rows

from hamu.data import read_text
from hamu.models import language
from hamu.models.storage import save_model

DATA = "--data records.jsonl --forget_rows 0,1,2,3"
FAST = "--max_steps 2 --constraint_mode relative --stopping off --learning_rate 0.5"
UNLEARN = f"unlearn {DATA} {FAST} --output_dir run"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with records, two models of one tokenizer, and an adapter on the second."""
    folder = tmp_path_factory.mktemp("models")
    texts = read_text("miniature").records
    write_rows(folder / "records.jsonl", [dict(row.fields) for row in texts[:24]])
    tokenizer = language.new_tokenizer((r.prompt + r.answer for r in texts), 400)
    torch.manual_seed(0)
    for name in ("original", "other"):
        model = language.new_language_model(tokenizer, hidden=32, layers=1, max_length=128)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    adapted = language.with_adapter(
        model, language.AdapterSettings(rank=2, alpha=4, targets="q_proj,v_proj")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.peft_config["default"].base_model_name_or_path = "other"
    (folder / "adapter").mkdir()
    save_model(adapted, folder / "adapter")
    return folder


@pytest.fixture(autouse=True)
def here(made, tmp_path, monkeypatch):
    """A copy, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "here"))


def not_held(capsys):
    """Return the statements of the record in `run` that do not hold or cannot be checked."""
    capsys.readouterr()
    run("verify run")
    lines = capsys.readouterr().out.splitlines()
    return [one for one in lines if one.startswith(("does not hold", "cannot be checked"))]


@pytest.mark.parametrize(
    "words",
    [
        "--model original --lora --lora_rank 2 --retain_model adapter",
        "--model adapter --base_model elsewhere",
    ],
)
def test_a_base_is_that_of_the_named_adapter(words, capsys):
    if "elsewhere" in words:
        Path("other").rename("elsewhere")
    assert run(f"{UNLEARN} {words}") == 0
    assert not_held(capsys) == []


def test_a_base_that_is_given_is_not_that_of_another_adapter(capsys):
    """But for the model itself, which may be put on another base than its own."""
    shutil.copytree("adapter", "moved")
    config = read("moved/adapter_config.json") | {"base_model_name_or_path": "gone"}
    Path("moved/adapter_config.json").write_text(json.dumps(config))
    losses = {}
    for out, words in (
        ("one", "--model adapter"),
        ("two", "--model moved --base_model original --retain_model adapter"),
        ("three", "--model adapter --base_model original"),
    ):
        assert run(f"evaluate {DATA} --generate 0 {words} --output_dir {out}") == 0
        losses[out] = read(f"{out}/evaluation.json")
    assert losses["two"]["retain_model"]["forget"]["loss"] == losses["one"]["forget"]["loss"]
    assert losses["three"]["forget"]["loss"] == losses["two"]["forget"]["loss"]
    assert losses["two"]["forget"]["loss"] != losses["one"]["forget"]["loss"]
    words = "--model moved --base_model original --original_model adapter --attacks relearn-retain"
    assert run(f"attack {DATA} {words} --attack_steps 1 --attack_seeds 1 --output_dir four") == 0
    said, out = "the adapter adapter is of other; ", capsys.readouterr().out
    assert [
        out.count(said + how) for how in ("--base_model puts it on original", "it stays there")
    ] == [2, 1]


def test_an_adapter_finds_its_base_from_any_folder_and_no_file_names_the_folder(
    capsys, tmp_path, monkeypatch
):
    job = f"{UNLEARN} --model original --lora --lora_targets q_proj,lm_head --merge"
    assert run(job) == 0
    assert not_held(capsys) == []
    for name in ("record.json", "record.md", "inputs.json"):
        assert str(tmp_path) not in Path("run", name).read_text()
    said = "original has other weights than the adapter run/model was made for"
    for is_changed in (False, True):
        if is_changed:
            shutil.copy("other/model.safetensors", "original")
        assert run(f"evaluate {DATA} --generate 0 --model run/model --output_dir {is_changed}") == 0
        assert (said in capsys.readouterr().out) == is_changed
    monkeypatch.chdir(tmp_path)
    language.load_language_model("here/run/model")


@pytest.mark.parametrize(("job", "unused"), [
    ("evaluate --model original --generate 0 --learning_rate 0.5 --merge", "on a measurement: learning_rate, merge"),
    ("assess --model original --bf16", "on an assessment: bf16"),
    ("assess --model original --base_model other", "base_model other has no effect: no model"),
    (f"unlearn {FAST} --model original --expected_retain 9", "without --dry_run: expected_retain"),
    ("unlearn --model original --max_steps 1 --config by_goal.yaml", "by goal: warmup_steps"),
    ("evaluate --model original --generate 0 --answer_prefix x", "answer_prefix are not used: whole.jsonl has"),
])  # fmt: skip
def test_what_has_no_effect_is_named(job, unused, capsys):
    rows = [
        {"prompt": f"{r.prompt}\n", "completion": r.answer}
        for r in read_text("miniature").records[:24]
    ]
    write_rows("whole.jsonl", rows)
    Path("by_goal.yaml").write_text("unlearn: {warmup_steps: 5, target_forget_loss: 1}")
    data = "--data whole.jsonl --forget_rows 0,1,2,3" if "prefix" in job else DATA
    run(f"{job} {data} --max_length 64 --output_dir run")
    assert unused in " ".join(capsys.readouterr().out.split())


def test_training_on_all_data_names_what_is_of_a_forget_set(capsys):
    job = "train --data records.jsonl --model original --max_steps 1 --rho 0.5 --retain_model other"
    assert run(f"{job} --output_dir run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without effect on training: retain_model" in said
    assert "without effect without --without_forget: rho" in said


def test_a_merge_that_fails_costs_no_result(capsys, monkeypatch):
    def fail(self):
        raise ValueError("of another kind")

    monkeypatch.setattr("peft.tuners.lora.LoraModel.merge_and_unload", fail)
    assert run(f"{UNLEARN} --model original --lora --merge") == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "the adapter cannot be merged into its model: of another kind; what else" in printed
    assert read("run/evaluation.json")["after"]["forget"]["loss"]
    assert not Path("run/merged").exists()
    assert run("verify run") == 0


def test_an_evaluation_has_the_precision_of_the_run_and_a_model_differs_from_itself_by_nothing(
    capsys,
):
    half = f"{UNLEARN} --model original --bf16"
    assert run(f"{half} --retain_model original") == 0
    assert run(f"{half} --full_precision_eval --output_dir full") == 0
    before = read("run/evaluation.json")["before"]
    assert {name: before[name] for name in before["retain_model"]} == before["retain_model"]
    evaluate = f"evaluate {DATA} --generate 0"
    for out, words in (
        ("half", "--model run/model --bf16"),
        ("float", "--model run/model"),
        ("again", "--model full/model"),
    ):
        assert run(f"{evaluate} {words} --output_dir {out}") == 0
    found = {out: read(f"{out}/evaluation.json") for out in ("half", "float", "again")}
    assert found["half"]["forget"] != found["float"]["forget"]
    for out, job in (("half", "run"), ("again", "full")):
        after = read(f"{job}/evaluation.json")["after"]
        same = {name: figures for name, figures in after.items() if name in found[out]}
        assert found[out] | {"goal": None} == same | {"goal": None}
    assert run("verify full") == 0


def test_a_model_without_tokenizer_reads_with_the_one_that_is_named(capsys):
    without = shutil.ignore_patterns("*token*")
    shutil.copytree("original", "bare", ignore=without)
    assert run(f"{UNLEARN} --model bare") == 2
    printed = capsys.readouterr().err
    assert "the tokenizer of bare cannot be loaded: " in printed
    assert printed.endswith("; --tokenizer takes that of another model\n")
    named = "--model bare --tokenizer original"
    assert run(f"{UNLEARN} {named}") == 0
    assert not_held(capsys) == []
    others = "--retain_model bare --original_model bare --generate 1"
    assert run(f"evaluate {DATA} {named} {others} --output_dir check") == 0
    assert run(f"assess {DATA} {named} --output_dir assessed") in (0, 3, 4)
    train = "train --data records.jsonl --max_steps 1"
    assert run(f"{train} {named} --output_dir trained") == 0
    shutil.rmtree("original")
    assert [line for line in not_held(capsys) if "original is not here" not in line] == []


def test_a_record_has_the_settings_of_the_adapter_that_was_trained(capsys):
    Path("recipe.yaml").write_text("lora: true\nlora_rank: 2\nlora_targets: v_proj,q_proj\n")
    for words in ("", "--config recipe.yaml --overwrite"):
        assert run(f"{UNLEARN} --model adapter {words}") == 0
        settings = read("run/record.json")["settings"]
        assert (settings["lora"], settings["lora_rank"], settings["lora_alpha"]) == (True, 2, 4)
        assert set(settings["lora_targets"].split(",")) == {"q_proj", "v_proj"}
        assert not_held(capsys) == []
    whole = "--model original --config recipe.yaml --lora False --overwrite"
    assert run(f"{UNLEARN} {whole}") == 0
    settings = read("run/record.json")["settings"]
    assert settings["lora"] is False
    assert not {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"} & settings.keys()


@pytest.fixture
def plan(capsys):
    """Return what a dry run prints, by what it is."""

    def call(line):
        capsys.readouterr()
        assert run(f"{line} --dry_run") == 0
        printed = capsys.readouterr().out
        rows = dict(re.findall(r"^ *([a-z:, ]+?)  +([\d.,]+)", printed, re.MULTILINE))
        found = {name: value.replace(",", "") for name, value in rows.items()}
        return found | {"length": re.search(r"records of (\d+) tokens", printed)[1]}

    return call


TRAIN = "train --data records.jsonl"
GOAL = "--target_forget_loss 2"
STATED = "unlearn --expected_retain 1000 --expected_forget 100"


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        (f"unlearn {GOAL} {DATA}", {"records of each side in a step": "8", "length": "128"}),
        (f"{TRAIN} --max_length 50", {"records in a step": "8", "length": "50"}),
        (f"train {DATA} --without_forget", {"training records": "20"}),
        (f"{STATED} {GOAL} {DATA}", {"retain records": "20"}),  # they are here
        (STATED, {"retain records": "1000"}),
    ],
)
def test_a_dry_run_counts_records_and_tokens(line, rows, plan):
    assert rows.items() <= plan(f"{line} --model original").items()


def test_a_dry_run_counts_the_parameters_of_the_run_that_follows(plan, capsys):
    job = f"{TRAIN} --model tiny-llama --max_length 50"
    found = plan(job)
    assert (found["training records"], found["steps"]) == ("24", "150"), "50 epochs of 3 batches"
    assert run(f"{job} --max_steps 1 --output_dir new") == 0
    made = language.load_language_model("new/model")
    assert int(found["parameters"]) == sum(p.numel() for p in made.parameters())
    whole = int(plan(f"unlearn {GOAL} {DATA} --model original")["parameters"])
    of_adapter = 2 * 2 * (32 + 32)  # rank 2 on the query and value projection
    for words in ("--lora", "", "--base_model original"):
        found = plan(f"unlearn {GOAL} {DATA} --model adapter {words}")
        assert int(found["trained"]) == of_adapter
        assert int(found["parameters"]) == whole + of_adapter
    shutil.rmtree("other")
    assert run(f"unlearn {GOAL} {DATA} --model adapter --dry_run") == 2
    assert "made for the base model 'other', which is not a folder" in capsys.readouterr().err


def test_what_was_measured_is_kept_if_answering_fails(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hamu.unlearning.jobs.tasks.generate_answers", fail)
    words = "--model original --forget_perturbed records.jsonl --generate 1 --output_dir check"
    assert run(f"evaluate {DATA} {words}") != 0
    assert {"forget", "retain", "tofu"} <= read("check/evaluation.json").keys()
