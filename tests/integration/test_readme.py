"""What the README tells a newcomer to type, typed."""

import json
import re
import shlex
import shutil

import numpy as np
import torch
from doc_blocks import ROOT, blocks_of
from PIL import Image

from hamu.cli import main
from hamu.data import read_text

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


def test_the_commands_run_on_a_folder_of_images(tmp_path, monkeypatch, capsys, forked_runs):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(30):
        place = tmp_path / "images" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            place / f"{number}.png"
        )
    assert len(blocks("sh")) == 2, "each is run by a test of this file"
    for line in blocks("sh")[1].commands:
        program, *argv = shlex.split(line)
        assert program == "hamu"
        shorter = ["--max_steps", "2"] if argv[0] in ("train", "assess", "unlearn") else []
        expected = (0, 3, 4) if argv[0] == "assess" else (0,)
        assert main([*argv, *shorter]) in expected, capsys.readouterr().err
    assert (tmp_path / "runs/check/evaluation.json").is_file()
    assert (tmp_path / "runs/assess/frontier.png").is_file()
    assert (tmp_path / "runs/unlearned/model/model.safetensors").is_file()
    assert (tmp_path / "runs/unlearned/report.html").is_file()


def test_the_commands_run_on_a_file_of_records(tmp_path, monkeypatch, capsys, saved_text_model):
    monkeypatch.chdir(tmp_path)
    texts = read_text("miniature")
    unseen = read_text("miniature", "test").records[:24]
    for name, chosen in (
        ("records", texts.records[:48]),
        ("gone", texts.records[:6]),
        ("unseen", unseen),
    ):
        lines = [json.dumps({key: r.fields[key] for key in ("question", "answer")}) for r in chosen]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    shutil.copytree(saved_text_model, "my-model")
    for line in blocks("sh")[0].commands:
        program, *argv = shlex.split(line)
        assert program == "hamu"
        shorter = ["--generate", "4"] if argv[0] == "evaluate" else ["--max_steps", "2"]
        assert main([*argv, *shorter]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs/check/answers.html").is_file()


def test_the_table_of_methods_is_complete():
    from hamu.core.methods import method_classes

    listed = re.findall(r"^\| `([\w-]+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == list(method_classes())
