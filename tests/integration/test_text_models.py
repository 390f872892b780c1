"""Which model a command means, with which tokenizer, base and adapter, and in which precision it is asked."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from hamu.cli import main
from hamu.data import read_text
from hamu.models.language import (
    AdapterSettings,
    load_language_model,
    new_language_model,
    new_tokenizer,
    with_adapter,
)
from hamu.models.saving import save_model
from hamu.unlearning.jobs.kinds import TextTask
from hamu.unlearning.jobs.named_sources import NamedSources

DATA = ["--data", "records.jsonl", "--forget_rows", "0,1,2,3"]
FAST = [
    "--max_steps",
    "2",
    "--constraint_mode",
    "relative",
    "--stopping",
    "off",
    "--learning_rate",
    "0.5",
]
UNLEARN = ["unlearn", *DATA, *FAST]
WITHOUT_ANSWERS = ["--generate", "0"]


def run(*words):
    return main([str(word) for word in words])


def evaluation(folder):
    return json.loads((folder / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with records, two models of one tokenizer, and an adapter of rank 2 on the second."""
    folder = tmp_path_factory.mktemp("models")
    texts = read_text("miniature").records
    (folder / "records.jsonl").write_text(
        "\n".join(json.dumps(dict(row.fields)) for row in texts[:24])
    )
    tokenizer = new_tokenizer((r.prompt + r.answer for r in texts), 400)
    torch.manual_seed(0)
    for name in ("original", "other"):
        model = new_language_model(tokenizer, hidden=32, layers=1, max_length=128)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    adapted = with_adapter(model, AdapterSettings(rank=2, alpha=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.peft_config["default"].base_model_name_or_path = "other"
    (folder / "adapter").mkdir()
    save_model(adapted, folder / "adapter")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "here"))
    return Path()


def not_held(capsys, *flags):
    """The statements of the record in `run` that do not hold or cannot be checked."""
    capsys.readouterr()
    run("verify", "run", *flags)
    return re.findall(
        r"^(?:does not hold|cannot be checked) .*$", capsys.readouterr().out, re.MULTILINE
    )


def test_a_new_adapters_base_is_the_model_and_a_retain_models_its_own(here, capsys):
    job = [
        *UNLEARN,
        "--model",
        "original",
        "--lora",
        "--lora_rank",
        "2",
        "--retain_model",
        "adapter",
    ]
    assert run(*job, "--output_dir", "run") == 0
    assert not_held(capsys) == []


def test_a_new_adapters_base_is_the_model_whatever_base_is_named(here, capsys):
    job = [*UNLEARN, "--model", "original", "--lora", "--base_model", "other"]
    assert run(*job, "--output_dir", "run") == 0
    assert (
        "base_model other is not used: none of the named models is an adapter"
        in capsys.readouterr().out
    )
    assert not_held(capsys) == []


def test_the_base_that_is_named_is_that_of_the_adapter(here, capsys):
    Path("other").rename("elsewhere")
    job = [*UNLEARN, "--model", "adapter", "--base_model", "elsewhere"]
    assert run(*job, "--output_dir", "run") == 0
    assert "is not used" not in capsys.readouterr().out
    assert not_held(capsys) == []


def test_a_new_adapter_finds_its_base_from_any_folder(here, tmp_path, monkeypatch):
    assert run(*UNLEARN, "--model", "original", "--lora", "--output_dir", "run") == 0
    monkeypatch.chdir(tmp_path)
    load_language_model("here/run/model")
    named = [
        (tmp_path / "here/run" / name).read_text()
        for name in ("record.json", "record.md", "inputs.json")
    ]
    assert not any(str(tmp_path) in text for text in named)


def test_a_merged_model_is_the_adapted_one_though_its_embeddings_were_tied(here, capsys):
    job = [*UNLEARN, "--model", "original", "--lora", "--lora_targets", "q_proj,lm_head", "--merge"]
    assert run(*job, "--output_dir", "run") == 0
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        adapted, merged = (
            load_language_model(f"run/{name}").eval()(input_ids=ids).logits
            for name in ("model", "merged")
        )
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert not_held(capsys) == []


def test_a_merge_that_fails_costs_no_result(here, capsys, monkeypatch):
    def fail(self):
        raise ValueError("of another kind")

    monkeypatch.setattr("peft.tuners.lora.LoraModel.merge_and_unload", fail)
    assert run(*UNLEARN, "--model", "original", "--lora", "--merge", "--output_dir", "run") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the adapter cannot be merged into its model: of another kind; what else" in said
    assert evaluation(here / "run")["after"]["forget"]["loss"]
    assert not Path("run/merged").exists()
    assert run("verify", "run") == 0


def test_a_model_against_itself_differs_by_nothing_in_half_precision_too(here):
    assert (
        run(
            *UNLEARN,
            "--model",
            "original",
            "--retain_model",
            "original",
            "--bf16",
            "--output_dir",
            "run",
        )
        == 0
    )
    before = evaluation(here / "run")["before"]
    own = {name: before[name] for name in before["retain_model"]}
    assert own == before["retain_model"]


def test_an_evaluation_has_the_precision_of_the_run(here):
    assert run(*UNLEARN, "--model", "original", "--bf16", "--output_dir", "run") == 0
    assert (
        run(
            *UNLEARN,
            "--model",
            "original",
            "--bf16",
            "--full_precision_eval",
            "--output_dir",
            "full",
        )
        == 0
    )
    for name, flags in (("half", ["--bf16"]), ("float", [])):
        job = ["evaluate", *DATA, "--model", "run/model", *WITHOUT_ANSWERS, *flags]
        assert run(*job, "--output_dir", name) == 0
    half, full = evaluation(here / "half"), evaluation(here / "float")
    assert half["forget"] != full["forget"]
    assert half | {"goal": None} == evaluation(here / "run")["after"] | {"goal": None}
    job = ["evaluate", *DATA, "--model", "full/model", *WITHOUT_ANSWERS, "--output_dir", "check"]
    assert run(*job) == 0
    assert evaluation(here / "check") | {"goal": None} == evaluation(here / "full")["after"] | {
        "goal": None
    }


def test_figures_in_full_precision_are_verified_as_exactly(here, capsys):
    assert (
        run(
            *UNLEARN,
            "--model",
            "original",
            "--bf16",
            "--full_precision_eval",
            "--output_dir",
            "run",
        )
        == 0
    )
    recorded = json.loads((here / "run/record.json").read_text())
    assert recorded["settings"]["full_precision_eval"] is True
    capsys.readouterr()
    assert run("verify", "run") == 0
    sources = NamedSources(here / "run")
    assert sources.precision() == "float32"
    found = sources.figures("after")["sets"]["forget"]["loss"]
    assert found == pytest.approx(recorded["figures"]["after"]["sets"]["forget"]["loss"], abs=1e-7)


@pytest.fixture
def bare(here):
    """The model without its tokenizer."""
    shutil.copytree(
        "original", "bare", ignore=lambda _, names: [name for name in names if "token" in name]
    )
    return here / "bare"


def test_a_model_without_tokenizer_reads_with_the_one_that_is_named(bare, capsys):
    job = [*UNLEARN, "--model", bare, "--output_dir", "run"]
    assert run(*job) == 2
    printed = capsys.readouterr().err
    assert "the tokenizer of bare cannot be loaded: " in printed
    assert printed.endswith("; --tokenizer takes that of another model\n")
    assert run(*job, "--tokenizer", "original") == 0
    assert not_held(capsys) == []
    words = ["--model", bare, "--retain_model", bare, "--tokenizer", "original", "--generate", "1"]
    assert run("evaluate", *DATA, *words, "--original_model", bare, "--output_dir", "check") == 0
    assert run(
        "assess", *DATA, "--model", bare, "--tokenizer", "original", "--output_dir", "assessed"
    ) in (0, 3, 4)
    train = [
        "train",
        "--data",
        "records.jsonl",
        "--max_steps",
        "1",
        "--model",
        bare,
        "--tokenizer",
        "original",
    ]
    assert run(*train, "--output_dir", "trained") == 0
    shutil.rmtree("original")
    assert [line for line in not_held(capsys) if "original is not here" not in line] == []


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "adapter", "--lora_rank", "64"],
     "lora_rank 64 is for a new adapter, but adapter is one with lora_rank 2; give that, or leave it out"),
    (["--model", "adapter", "--lora", "--lora_targets", "q_proj"],
     "lora_targets q_proj is for a new adapter, but adapter is one with lora_targets q_proj,v_proj"),
    (["--model", "adapter", "--lora", "False"],
     "adapter is an adapter, which alone is trained; leave out --lora False"),
    (["--model", "original", "--lora_alpha", "2"],
     "lora_alpha 2.0 is for a new adapter; give --lora too, or leave it out"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_settings_of_an_adapter_that_can_have_no_effect_are_refused(words, message, capsys):
    for command in ("unlearn", "assess", "compare", "train"):
        data = DATA[:2] if command == "train" else DATA
        assert run(command, *data, *words, "--output_dir", "run") == 2
        assert message in capsys.readouterr().err
        assert not Path("run").exists()


def test_a_record_has_the_settings_of_the_adapter_that_was_trained(here, capsys):
    recipe = "lora: true\nlora_rank: 2\nlora_targets: v_proj,q_proj\n"
    (here / "recipe.yaml").write_text(recipe)
    for number, words in enumerate(
        (["--model", "adapter"], ["--model", "adapter", "--config", "recipe.yaml"])
    ):
        assert run(*UNLEARN, *words, "--output_dir", "run", *["--overwrite"] * number) == 0
        settings = json.loads((here / "run/record.json").read_text())["settings"]
        assert (settings["lora"], settings["lora_rank"], settings["lora_alpha"]) == (True, 2, 4)
        assert set(settings["lora_targets"].split(",")) == {"q_proj", "v_proj"}
        assert not_held(capsys) == []
    words = ["--model", "original", "--config", "recipe.yaml", "--lora", "False"]
    assert run(*UNLEARN, *words, "--output_dir", "whole") == 0
    settings = json.loads((here / "whole/record.json").read_text())["settings"]
    assert settings["lora"] is False
    assert not {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"} & settings.keys()


def plan(capsys, *words):
    """What a dry run prints, by what it is."""
    assert run(*words, "--dry_run") == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ *([a-z:, ]+?)  +([\d.,]+)", printed, re.MULTILINE)
    return dict(rows) | {"length": re.search(r"records of (\d+) tokens", printed)[1]}


@pytest.mark.usefixtures("here")
def test_a_dry_run_plans_the_run_that_follows(capsys):
    found = plan(capsys, "unlearn", *DATA, "--model", "original")
    assert found["records of each side in a step"] == "8"
    assert found["length"] == "128", "what the model can read"
    found = plan(capsys, "train", *DATA[:2], "--model", "original", "--max_length", "50")
    assert (found["training records"], found["records in a step"], found["length"]) == (
        "24",
        "8",
        "50",
    )
    found = plan(capsys, "train", *DATA, "--without_forget", "--model", "original")
    assert found["training records"] == "20"
    stated = ["--expected_retain", "1000", "--expected_forget", "100"]
    assert (
        plan(capsys, "unlearn", *DATA, *stated, "--model", "original")["retain records"] == "20"
    ), "they are here"
    assert plan(capsys, "unlearn", *stated, "--model", "original")["retain records"] == "1,000"
    found = plan(capsys, "train", *DATA[:2], "--model", "tiny-llama", "--max_length", "50")
    assert (found["training records"], found["steps"]) == ("24", "150"), (
        "of 50 epochs of three batches"
    )
    assert (
        run("train", *DATA[:2], "--model", "tiny-llama", "--max_steps", "1", "--output_dir", "new")
        == 0
    )
    made = load_language_model("new/model")
    assert int(found["parameters"].replace(",", "")) == sum(p.numel() for p in made.parameters())
    capsys.readouterr()
    whole = int(
        plan(capsys, "unlearn", *DATA, "--model", "original")["parameters"].replace(",", "")
    )
    for words in (["--lora"], [], ["--base_model", "original"]):
        found = plan(capsys, "unlearn", *DATA, "--model", "adapter", *words)
        assert int(found["trained"]) == 2 * 2 * (32 + 32), (
            "rank 2 on the query and value projection"
        )
        assert int(found["parameters"].replace(",", "")) == whole + 2 * 2 * (32 + 32)
    shutil.rmtree("other")
    assert run("unlearn", *DATA, "--model", "adapter", "--dry_run") == 2
    assert (
        "was made for the base model 'other', which is not a folder here" in capsys.readouterr().err
    )
    assert run("unlearn", *DATA, "--model", "adapter", "--lora_rank", "4", "--dry_run") == 2
    assert "lora_rank 4 is for a new adapter" in capsys.readouterr().err


@pytest.fixture
def unasked(monkeypatch):
    """No model may be asked."""

    def predict(*_):
        raise AssertionError("a model was asked")

    monkeypatch.setattr(TextTask, "predict", predict)


@pytest.mark.parametrize(("words", "message"), [
    (["--original_model", "typo"], "typo is not a saved model"),
    (["--retain_model", "adapter", "--original_model", "typo"], "typo is not a saved model"),
    (["--world_facts", "typo.jsonl"], "typo.jsonl is neither a file nor a folder"),
    (["--real_authors", "plain.jsonl"], "row 0 of plain.jsonl has no perturbed_answer"),
    (["--retain_perturbed", "long.jsonl"], "row 0 of long.jsonl has no answer token among its first 512 tokens"),
])  # fmt: skip
@pytest.mark.usefixtures("here", "unasked")
def test_what_an_evaluation_needs_is_looked_for_before_a_model_is_asked(words, message, capsys):
    Path("plain.jsonl").write_text('{"question": "a?", "answer": "b"}')
    Path("long.jsonl").write_text(
        json.dumps({"question": "a? " * 999, "answer": "b", "perturbed_answer": "c"})
    )
    assert run("evaluate", *DATA, "--model", "original", *words, "--output_dir", "check") == 2
    assert message in capsys.readouterr().err
    assert not Path("check").exists()


def test_what_was_measured_is_kept_if_answering_fails(here, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hamu.unlearning.jobs.kinds.generate_answers", fail)
    job = [
        "evaluate",
        *DATA,
        "--model",
        "original",
        "--forget_perturbed",
        "records.jsonl",
        "--generate",
        "1",
    ]
    assert run(*job, "--output_dir", "check") != 0
    assert {"forget", "retain", "tofu"} <= evaluation(here / "check").keys()
