"""The commands of the README, typed, and the notebook, run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import torch
from doc_blocks import ROOT, blocks_of, run_shortened, save_what_readers_have

from hamu.core.methods import method_classes

README = ROOT / "README.md"


def blocks(language):
    return [block for block in blocks_of(README) if block.language == language and block.is_run]


def test_the_loop_unlearns():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    loss = torch.nn.functional.cross_entropy
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    names = {
        "model": model,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "retain_batches": [(x[:30], y[:30])] * 5,
        "forget_batches": [(x[30:], y[30:])] * 5,
    }
    before = loss(model(x[30:]), y[30:]).item()
    [block] = blocks("python")
    exec(block.text, names)
    assert names["step"].decision == "step"
    assert loss(model(x[30:]), y[30:]).item() > before


def test_the_commands_run(tmp_path, monkeypatch, capsys, forked_runs, saved_text_model):
    monkeypatch.chdir(tmp_path)
    save_what_readers_have(saved_text_model)
    of_images = ("check/evaluation.json", "assess/frontier.png", "unlearned/report.html")
    of_images += ("unlearned/model/model.safetensors",)
    for block, files in zip(blocks("sh"), (["check/answers.html"], of_images), strict=True):
        shutil.rmtree("runs", ignore_errors=True)
        for line in block.commands:
            run_shortened(shlex.split(line)[1:], capsys)
        assert [name for name in files if not Path("runs", name).is_file()] == []


def test_every_method_is_named():
    named = re.findall(r"`([\w-]+)`", README.read_text(encoding="utf-8").partition("## Methods")[2])
    assert [name for name in method_classes() if name not in named] == []


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/unlearn_a_class.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["hamu"].verify(names["run"].folder).count(False) == 0
    assert names["checked"].report["forget"]["accuracy"] <= 0.05
    after = names["attacked"].result.outcomes["relearn-retain"]
    assert set(after) == {"unlearned", "original", "retrained"}
