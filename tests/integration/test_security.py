"""Nothing that a run reads can run code, reach the network or write elsewhere; no output names a forgotten record."""

import contextlib
import json
import os
import shutil
import stat
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from run_files import POISON, contents, read_rows, run
from small_models import save_small_world
from transformers import TrainingArguments
from watching import watched

from hamu.files import remove_whole
from hamu.report.page import answers_page
from hamu.report.run import AnsweredRecord
from hamu.unlearning.jobs.options import REFUSED
from hamu.unlearning.trainer.resumable import seal

CANARY = "Quillon Trevanthe"
IMAGES = "--data a.npz --forget_rows 0,4 --model image"
TEXT_DATA = "--data t.jsonl --forget_rows 0,3 --max_length 48"
TEXTS, ADAPTER = f"{TEXT_DATA} --model text", f"{TEXT_DATA} --model adapter"
RELATIVE = "--constraint_mode relative --stopping off"
STEPS = f"{RELATIVE} --max_steps 2"
SAVING = f"{STEPS} --save_strategy steps --save_steps 1"


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    rows = [{"question": f"Where is number {i}?", "answer": f"in town {i}"} for i in range(8)]
    rows[0]["answer"] = rows[3]["answer"] = f"with {CANARY}"
    with contextlib.chdir(folder):
        save_small_world(rows)
    return folder


@pytest.fixture
def sh(origin, tmp_path, monkeypatch, capfd):
    """Runs a command line in a copy of the folder; returns exit code, output and standard error."""
    shutil.copytree(origin, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")

    def call(line):
        capfd.readouterr()
        return run(line), *capfd.readouterr()

    return call


@pytest.fixture
def refused(sh):
    """Runs a command line that must end in one line and change nothing; returns the line."""

    def call(line):
        before = contents()
        code, _, err = sh(line)
        assert (code, err.count("\n"), contents() == before) == (2, 1, True)
        return err

    return call


@pytest.mark.parametrize("settings", [IMAGES, ADAPTER])
def test_a_run_and_its_resumption_load_no_pickle_reach_no_network_and_write_nowhere_else(
    sh, settings, monkeypatch
):
    torch_load, numpy_load = (mock.Mock(side_effect=module.load) for module in (torch, np))
    monkeypatch.setattr(torch, "load", torch_load)
    monkeypatch.setattr(np, "load", numpy_load)
    data = settings.partition(" --model")[0]
    with watched() as seen:
        assert sh(f"unlearn {settings} {SAVING} --output_dir out")[0] == 0
        assert sh(f"evaluate {data} --model out/model --generate 2 --output_dir out2")[0] == 0
        for name in ("checkpoint-2", "model", "record.json", "record.md", "evaluation.json"):
            remove_whole(Path("out", name))
        assert sh("unlearn --resume --output_dir out")[0] == 0
        assert sh("verify out")[0] == 0
    assert torch_load.call_args_list, "a resumed run reads the optimizer's state"
    assert all(call.kwargs["weights_only"] is True for call in torch_load.call_args_list)
    assert not any(call.kwargs.get("allow_pickle") for call in numpy_load.call_args_list)
    assert (seen.unpickled, seen.reached, seen.outside("out", "out2")) == ([], [], [])


@pytest.mark.parametrize(("settings", "weights", "pickled"), [
    (IMAGES, "image/model.safetensors", "pytorch_model.bin"),
    (TEXTS, "text/model.safetensors", "pytorch_model.bin"),
    (ADAPTER, "adapter/adapter_model.safetensors", "adapter_model.bin"),
])  # fmt: skip
def test_a_model_that_is_a_pickle_is_refused_with_the_way_out(refused, settings, weights, pickled):
    os.remove(weights)
    Path(weights).with_name(pickled).write_bytes(POISON)
    for command in ("train --without_forget", "unlearn", "assess", "evaluate"):
        line = refused(f"{command} {settings} --output_dir out")
        assert "save it again with save_pretrained" in line


def test_a_checkpoint_with_a_pickle_in_it_is_refused_even_if_it_is_sealed(sh, refused):
    assert sh(f"unlearn {IMAGES} {SAVING} --output_dir out")[0] == 0
    shutil.rmtree("out/checkpoint-2")
    os.remove("out/record.json")
    for name, lines in (("steps", 1), ("layers", 2)):  # else the resumed run removes the rest
        log = Path(f"out/{name}.jsonl")
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:lines]))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "run.pt", "trainer_state.json"):
        path = Path("out/checkpoint-1", name)
        good = path.read_bytes()
        torch.save(Path(), path)
        os.remove("out/checkpoint-1/manifest.json")
        seal(Path("out/checkpoint-1"))
        line = refused("unlearn --resume --output_dir out")
        why = "'utf-8' codec" if name.endswith("json") else "Weights only load failed"
        assert f"out/checkpoint-1 cannot be restored: {why}" in line, name
        path.write_bytes(good)


CODE = (
    "import os\nos.mkdir('ran')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    "def generate(*a, **k): pass\n"
)


@pytest.mark.parametrize("changed", [
    {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model",
                  "AutoModelForImageClassification": "code.Model"}},
    {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "unheard-of"},
    {"attn_implementation": "somebody/attention"},
])  # fmt: skip
@pytest.mark.parametrize(("settings", "model"), [(IMAGES, "image"), (TEXTS, "text")])
def test_code_that_comes_with_a_model_never_runs(sh, changed, settings, model):
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.Tokenizer"] * 2}}
    for name, more in (("config.json", changed), ("tokenizer_config.json", tokenizer)):
        path = Path(model, name)
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | more))
    Path(model, "custom_generate").mkdir()
    for place in ("code.py", "custom_generate/generate.py"):
        Path(model, place).write_text(CODE)
    with watched() as seen:
        code, _, err = sh(f"evaluate {settings} --generate 1 --output_dir out")
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


def test_code_that_comes_with_a_model_runs_only_by_a_flag(sh, refused, monkeypatch, tmp_path):
    cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(cache, str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("text/own.py").write_text(OWN_MODEL)
    path = Path("text/config.json")
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    own = {"model_type": "own", "auto_map": names}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))

    def said(line, *, runs):
        code, out, err = sh(line)
        assert (code, err if runs else "") == (0, "")
        assert Path("ran").is_dir() == runs
        if runs:
            os.rmdir("ran")
        return out

    run = f"unlearn {TEXTS} {STEPS} --output_dir out"
    why = "which is not run; if you trust it"
    assert f"the model text is defined by code that comes with it, {why}" in refused(run)
    Path("run.yaml").write_text("trust_remote_code: true")
    line = refused(f"{run} --config run.yaml")
    assert "run.yaml has trust_remote_code" in line
    assert "give it as a flag" in line
    assert not Path("ran").exists()
    out = said(f"{run} --trust_remote_code", runs=True)
    assert "code that comes with a model is run, and can do all that you can" in out
    assert "trust_remote_code" not in Path("out/config.yaml").read_text()
    assert why in said("verify out", runs=False)
    assert "which is not run" not in said("verify out --trust_remote_code", runs=True)
    assert "left out what the models say" in said("report out", runs=False)
    said("report out --trust_remote_code", runs=True)


@pytest.mark.parametrize("command", ["train", "unlearn", "assess", "evaluate"])
def test_what_would_write_or_reach_elsewhere_is_refused_at_once(refused, command):
    valid = f"{command} {IMAGES} --output_dir out"
    for name in ("hub_token", "fsdp_config", "resume_from_checkpoint", "logging_dir"):
        for content in ({name: "hf_secret"}, {command: {name: "hf_secret"}}):
            Path("run.yaml").write_text(yaml.safe_dump(content))
            line = refused(f"{valid} --config run.yaml")
            assert f"run.yaml has {name}, which has no place here: " in line
            assert "hf_secret" not in line
        line = refused(f"{valid} --{name} hf_secret")
        assert f"the command has {name}, which has no place here: " in line


def test_no_option_of_transformers_that_names_a_place_or_a_service_is_left():
    """Those of a later release too: what is new is looked at here first."""
    telling = ("dir", "hub", "project", "trackio", "push", "run_name", "deepspeed", "fsdp", "config",
               "resume", "debug", "jit_", "file", "path", "url")  # fmt: skip
    options = [f.name for f in fields(TrainingArguments) if f.init]
    found = {name for name in options if any(word in name for word in telling)}
    of_a_tracker = {name for name in found if "trackio" in name} | {"project", "run_name"}
    assert {name for name in found if name not in REFUSED} == {"output_dir"} | of_a_tracker


def test_a_page_of_answers_shows_markup_and_runs_none():
    nasty = '</p><script>alert(1)</script><img src=x onerror="alert(2)">&amp;'
    page = answers_page({"forget": [AnsweredRecord(nasty, nasty, ((nasty, nasty, 0.5),))]})
    assert not any(raw in page for raw in ("<script", "<img", 'onerror="'))
    assert page.count("&lt;script&gt;") == 4, "prompt, right answer, model's name and answer"


def test_what_was_forgotten_is_in_no_output_and_in_no_file_that_others_may_read(sh, caplog):
    printed = ""
    for line in (
        f"unlearn {TEXTS} {SAVING} --output_dir out",
        f"assess {TEXTS} {RELATIVE} --output_dir hard",
        f"evaluate {TEXT_DATA} --model out/model --original_model text --generate 2 --output_dir check",
        "verify out",
    ):
        code, out, err = sh(line)
        assert code in (0, 3, 4)
        printed += out + err
    assert not names_canary(printed.encode() + caplog.text.encode())
    telling = {path.name: path for folder in ("out", "hard", "check") for path in Path(folder).rglob("*")
               if path.is_file() and names_canary(path.read_bytes())}  # fmt: skip
    assert set(telling) == {"answers.html", "answers.jsonl"}, "which are there to be read"
    assert all({"before", "after"} <= set(row) for row in read_rows(telling["answers.jsonl"]))
    for path in telling.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def names_canary(content):
    return any(word in content for word in CANARY.encode().split())
