"""Nothing that a run reads can run code, reach the network or write elsewhere; what it leaves tells of no record."""

import json
import os
import pickle
import shutil
import stat
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import TrainingArguments
from watching import watched

from hamu.cli import main
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.models.language import AdapterSettings, new_language_model, new_tokenizer, with_adapter
from hamu.models.saving import save_model
from hamu.report.page import answers_page
from hamu.report.records import AnsweredRecord
from hamu.unlearning.jobs.options import REFUSED
from hamu.unlearning.trainer.checkpoints import seal

CANARY = "Quillon Trevanthe"
IMAGES = ["--data", "a.npz", "--forget_rows", "0,4"]
TEXTS = ["--data", "t.jsonl", "--forget_rows", "0,3", "--max_length", "48"]
EASY = ["--constraint_mode", "relative", "--stopping", "off", "--max_steps", "2"]
SAVING = ["--save_strategy", "steps", "--save_steps", "1"]


class Poison:
    """Unpickled, it leaves a folder behind."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Small data and models."""
    folder = tmp_path_factory.mktemp("origin")
    draw = np.random.default_rng(0)
    np.savez(
        folder / "a.npz",
        images=draw.integers(0, 256, (12, 8, 8), dtype=np.uint8),
        labels=np.arange(12) % 3,
    )
    rows = [
        {"question": f"Where does number {i} live?", "answer": f"in town {i}"} for i in range(8)
    ]
    rows[0]["answer"] = rows[3]["answer"] = f"with {CANARY}"
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SmallResNetConfig(
        depth=8, width=2, num_channels=1, num_labels=3, image_mean=[0.5], image_std=[0.3]
    )
    SmallResNet(config).save_pretrained(folder / "image")
    tokenizer = new_tokenizer(["where does number live in town"], vocabulary=300)
    model = new_language_model(tokenizer, hidden=16, layers=1, max_length=128)
    model.save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    adapted = with_adapter(model, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = "text"
    (folder / "adapter").mkdir()
    save_model(adapted, folder / "adapter")
    return folder


@pytest.fixture
def cli(origin, tmp_path, monkeypatch, capfd):
    """Runs a command in a copy of the folder; returns its exit code, its output and what it said on standard error."""
    here = tmp_path / "here"
    shutil.copytree(origin, here)
    monkeypatch.chdir(here)

    def call(*argv):
        capfd.readouterr()
        code = main([str(word) for word in argv])
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return call


def refused(cli, *argv):
    """That a command ends in one line and changes nothing; returns the line."""
    before = contents()
    code, _, err = cli(*argv)
    assert code == 2
    assert err.count("\n") == 1
    assert contents() == before
    return err


def contents():
    return {path: path.read_bytes() if path.is_file() else None for path in Path(".").rglob("*")}


@pytest.mark.parametrize(
    ("data", "model"), [(IMAGES, "image"), (TEXTS, "text"), (TEXTS, "adapter")]
)
def test_a_run_and_its_resumption_load_no_pickle_reach_no_network_and_write_nowhere_else(
    cli, data, model, monkeypatch
):
    loaded, opened = [], []
    load, np_load = torch.load, np.load

    def recorded_load(*args, **kwargs):
        loaded.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    def recorded_np_load(*args, **kwargs):
        opened.append(kwargs.get("allow_pickle", False))
        return np_load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", recorded_load)
    monkeypatch.setattr(np, "load", recorded_np_load)
    with watched() as seen:
        assert (
            cli("unlearn", *data, "--model", model, *EASY, *SAVING, "--output_dir", "out")[0] == 0
        )
        assert (
            cli(
                "evaluate", *data, "--model", "out/model", "--generate", "2", "--output_dir", "out2"
            )[0]
            == 0
        )
        shutil.rmtree("out/checkpoint-2")
        for name in ("record.json", "record.md", "evaluation.json"):
            os.remove(f"out/{name}")
        shutil.rmtree("out/model")
        assert cli("unlearn", "--resume", "--output_dir", "out")[0] == 0
        assert cli("verify", "out")[0] == 0
    assert loaded, "a resumed run reads the optimizer's state"
    assert set(loaded) == {True}
    assert not any(opened)
    assert seen.unpickled == []
    assert seen.reached == []
    assert seen.outside("out", "out2") == []


@pytest.mark.parametrize(("data", "model", "weights"), [
    (IMAGES, "image", "model.safetensors"), (TEXTS, "text", "model.safetensors"),
    (TEXTS, "adapter", "adapter_model.safetensors"),
])  # fmt: skip
def test_a_model_that_is_a_pickle_is_refused_with_the_way_out(cli, data, model, weights):
    os.remove(f"{model}/{weights}")
    pickled = {
        "model.safetensors": "pytorch_model.bin",
        "adapter_model.safetensors": "adapter_model.bin",
    }[weights]
    Path(model, pickled).write_bytes(pickle.dumps(Poison()))
    for command in ("train", "unlearn", "assess", "evaluate"):
        printed = refused(cli, command, *data, "--model", model, "--output_dir", "out")
        assert "save it again with save_pretrained" in printed


def test_arrays_of_objects_are_not_read(cli):
    np.savez("a.npz", images=np.array([Poison()] * 6), labels=np.zeros(6, int))
    assert "a.npz cannot be read as npz: Object arrays cannot be loaded" in refused(
        cli, "evaluate", *IMAGES, "--model", "image", "--output_dir", "out"
    )


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_pickle_in_it_is_refused_even_if_it_is_sealed(cli, name):
    assert (
        cli("unlearn", *IMAGES, "--model", "image", *EASY, *SAVING, "--output_dir", "out")[0] == 0
    )
    shutil.rmtree("out/checkpoint-2")
    os.remove("out/record.json")
    torch.save(Poison(), f"out/checkpoint-1/{name}")
    os.remove("out/checkpoint-1/manifest.json")
    seal(Path("out/checkpoint-1"))
    for name, lines in (
        ("steps.jsonl", 1),
        ("layers.jsonl", 2),
    ):  # a run that goes on would take out the rest itself
        log = Path("out", name)
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:lines]))
    err = refused(cli, "unlearn", "--resume", "--output_dir", "out")
    assert "the checkpoint out/checkpoint-1 cannot be restored: Weights only load failed" in err


SENTINEL = "import os\nos.mkdir('ran')\n"
CODE = (
    SENTINEL
    + "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\ndef generate(*a, **k): pass\n"
)


@pytest.mark.parametrize("changed", [
    {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model",
                  "AutoModelForImageClassification": "code.Model"}},
    {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "unheard-of"},
    {"attn_implementation": "somebody/attention"},
])  # fmt: skip
@pytest.mark.parametrize(("data", "model"), [(IMAGES, "image"), (TEXTS, "text")])
def test_code_that_comes_with_a_model_never_runs(cli, changed, data, model):
    for name, more in (
        ("config.json", changed),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer"] * 2}}),
    ):
        path = Path(model, name)
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | more))
    (Path(model) / "custom_generate").mkdir()
    for place in ("code.py", "custom_generate/generate.py"):
        Path(model, place).write_text(CODE)
    with watched() as seen:
        code, _, err = cli(
            "evaluate", *data, "--model", model, "--generate", "1", "--output_dir", "out"
        )
    assert code in (0, 2)
    assert "Traceback" not in err
    assert not Path("ran").exists()
    assert not seen.reached
    assert seen.outside("out") == []
    if "attn_implementation" in changed:
        assert "asks for code of the hub, somebody/attention, which is not run" in err


OWN_MODEL = """
import os
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        os.makedirs("ran", exist_ok=True)
"""


def test_code_that_comes_with_a_model_runs_where_that_is_asked_for_as_a_flag(
    cli, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("text/own.py").write_text(OWN_MODEL)
    path = Path("text/config.json")
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": "own", "auto_map": names})
    )
    run = ["unlearn", *TEXTS, "--model", "text", *EASY, "--output_dir", "out"]
    assert (
        "the model text is defined by code that comes with it, which is not run; if you trust it"
        in refused(cli, *run)
    )
    Path("run.yaml").write_text("trust_remote_code: true")
    err = refused(cli, *run, "--config", "run.yaml")
    assert (
        "run.yaml has trust_remote_code, which lets the code of a model do anything; give it as a flag"
        in err
    )
    assert not Path("ran").exists()
    code, said, err = cli(*run, "--trust_remote_code", *SAVING)
    assert (code, err) == (0, "")
    assert "code that comes with a model is run, and can do all that you can" in said
    assert Path("ran").is_dir()
    assert "trust_remote_code" not in Path("out/config.yaml").read_text()
    os.rmdir("ran")
    code, said, _ = cli("verify", "out")
    assert code == 0
    assert "which is not run; if you trust it" in said
    assert not Path("ran").exists()
    code, said, err = cli("verify", "out", "--trust_remote_code")
    assert (code, err) == (0, "")
    assert "which is not run" not in said
    assert Path("ran").is_dir()
    os.rmdir("ran")
    code, said, _ = cli("report", "out")
    assert code == 0
    assert "left out what the models say" in said
    assert not Path("ran").exists()
    assert cli("report", "out", "--trust_remote_code")[0] == 0
    assert Path("ran").is_dir()


@pytest.mark.parametrize("text", [
    "!!python/object/apply:os.mkdir [ran]", "seed: !!python/object/apply:os.mkdir [ran]",
    "seed: !!python/name:os.system", "data: !!python/object/new:os.mkdir [ran]", "!!python/module:os",
])  # fmt: skip
def test_a_config_is_data(cli, text):
    Path("run.yaml").write_text(text)
    printed = refused(
        cli, "unlearn", *IMAGES, "--model", "image", "--config", "run.yaml", "--output_dir", "out"
    )
    assert (
        "run.yaml is not valid YAML, line 1: could not determine a constructor for the tag"
        in printed
    )
    assert not Path("ran").exists()


OUTSIDE = {
    "push_to_hub": "true", "hub_token": "hf_secret", "hub_model_id": "a/b", "hub_strategy": "every_save",
    "hub_always_push": "true", "logging_dir": "elsewhere",
    "deepspeed": "elsewhere.json", "fsdp": "full_shard", "fsdp_config": "elsewhere.json", "debug": "underflow_overflow",
    "accelerator_config": "elsewhere.json", "resume_from_checkpoint": "elsewhere", "enable_jit_checkpoint": "true",
    "auto_find_batch_size": "true", "log_level": "debug",
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("command", ["train", "unlearn", "assess", "evaluate"])
def test_what_would_write_or_reach_elsewhere_is_refused_at_once(cli, name, command):
    valid = [command, *IMAGES, "--model", "image", "--output_dir", "out"]
    for content in ({name: OUTSIDE[name]}, {command: {name: OUTSIDE[name]}}):
        Path("run.yaml").write_text(yaml.safe_dump(content))
        err = refused(cli, *valid, "--config", "run.yaml")
        assert f"run.yaml has {name}, which has no place here: " in err
        assert "hf_secret" not in err
    if name != "debug":  # a flag of the command line's own
        assert f"the command has {name}, which has no place here: " in refused(
            cli, *valid, f"--{name}", OUTSIDE[name]
        )


def test_no_option_of_transformers_that_names_a_place_or_a_service_is_left():
    """Those of a later release too: what is new is looked at here first."""
    telling = ("dir", "hub", "project", "trackio", "push", "run_name", "deepspeed", "fsdp", "config",
               "resume", "debug", "jit_", "file", "path", "url")  # fmt: skip
    found = {
        f.name
        for f in fields(TrainingArguments)
        if f.init and any(word in f.name for word in telling)
    }
    of_a_tracker = {name for name in found if "trackio" in name} | {"project", "run_name"}
    assert {name for name in found if name not in REFUSED} == {"output_dir"} | of_a_tracker


def test_a_page_of_answers_shows_markup_and_runs_none(cli):
    nasty = '</p><script>alert(1)</script><img src=x onerror="alert(2)">&amp;'
    rows = [{"question": f"{nasty} {i}?", "answer": f"{nasty} {i}"} for i in range(4)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", "t.jsonl", "--forget_rows", "0,3", "--question_template", "{question}"]
    code, _, err = cli(
        "evaluate", *data, "--model", "text", "--generate", "2", "--output_dir", "out"
    )
    assert (code, err) == (0, "")
    everywhere = answers_page({"forget": [AnsweredRecord(nasty, nasty, ((nasty, nasty, 0.5),))]})
    for page in (Path("out/answers.html").read_text(), everywhere):
        for raw in ("<script", "<img", 'onerror="'):
            assert raw not in page
        assert "&lt;script&gt;" in page
    assert everywhere.count("&lt;script&gt;") == 4, (
        "prompt, right answer, model's name and its answer"
    )


def test_what_was_forgotten_stands_in_no_file_that_others_may_read_and_in_no_output(cli, caplog):
    data = [*TEXTS[:2], "--forget_rows", "0,3", "--max_length", "48"]
    said = ""
    for command in (
        ["unlearn", *data, "--model", "text", *EASY, *SAVING, "--output_dir", "out"],
        ["assess", *data, "--model", "text", *EASY[:4], "--output_dir", "hard"],
        [
            "evaluate",
            *data,
            "--model",
            "out/model",
            "--original_model",
            "text",
            "--generate",
            "2",
            "--output_dir",
            "check",
        ],
        ["verify", "out"],
    ):
        code, out, err = cli(*command)
        assert code in (0, 3, 4)
        said += out + err
    assert not told(said.encode() + caplog.text.encode())
    telling = {path.name: path for folder in ("out", "hard", "check") for path in Path(folder).rglob("*")
               if path.is_file() and told(path.read_bytes())}  # fmt: skip
    assert set(telling) == {"answers.html", "answers.jsonl"}, "which are there to be read"
    for path in telling.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def told(content):
    return any(word in content for word in CANARY.encode().split())
