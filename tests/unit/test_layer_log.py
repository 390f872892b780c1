"""Figures of every block: as they were, bounded in size, and the same after a resume."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.files import LAYERS
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.logs import LayerLog, silence, stride


def take(log, steps):
    for step in steps:
        log.take(step, ["b0", "b1"], lambda step=step: {"cos": [step / 3] * 2, "change": None})
        log.write()


def lines(folder):
    return [json.loads(line) for line in (folder.path / LAYERS).read_text().splitlines()]


def test_a_short_log_has_every_line(tmp_path):
    folder = RunFolder(tmp_path / "run")
    take(LayerLog(folder), range(10, 60, 10))
    head, *rest = lines(folder)
    assert head == {"step": 0, "blocks": ["b0", "b1"]}
    assert [(one["step"], one["number"]) for one in rest] == [(10 * n + 10, n) for n in range(5)]
    assert rest[0]["cos"] == [3.333, 3.333], "four digits"
    assert rest[0]["change"] is None


@given(st.integers(0, 10**7), st.integers(1, 10**5))
def test_the_log_is_bounded(count, blocks):
    every = stride(count, blocks)
    kept = len(range(0, count, every))
    assert kept <= 512
    assert kept * blocks * 2 <= max(400_000, 16 * 2 * blocks)
    assert every == 1 or len(range(0, count, every // 2)) > 16, "no coarser than it must be"


@pytest.mark.parametrize(("killed", "saved"), [(5, 3), (1300, 700), (40, 0)])
def test_a_resumed_log_ends_as_that_of_a_whole_run(tmp_path, killed, saved):
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    take(LayerLog(whole), range(1, 1501))
    _, *rest = lines(whole)
    assert [one["number"] for one in rest] == list(range(0, 1500, 4)), "thinned evenly"
    take(LayerLog(broken), range(1, killed + 1))
    with open(broken.path / LAYERS, "a") as file:
        file.write('{"step": 9')  # killed while it wrote
    again = LayerLog(broken)
    again.resume(saved, saved)
    take(again, range(saved + 1, 1501))
    assert (broken.path / LAYERS).read_text() == (whole.path / LAYERS).read_text()


@pytest.mark.parametrize(
    "settings",
    [{}, {"optim": "adamw_torch"}, {"correct_steps": True}, {"trust_region": True}],
)
def test_the_change_is_that_of_the_weights(tmp_path, settings):
    torch.manual_seed(0)
    data = [{"pixel_values": torch.randn(16), "labels": i % 3} for i in range(24)]
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    args = UnlearnConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        constraint_mode="relative",
        stopping="off",
        learning_rate=0.05,
        eval_strategy="no",
        eval_on_start=False,
        blocks="module",
        **settings,
    )
    trainer = UnlearnTrainer(model, args, retain_dataset=data[:16], forget_dataset=data[16:])
    silence(trainer)
    before = [[p.detach().clone() for p in model[n].parameters()] for n in (0, 2)]
    trainer.train()
    found = trainer.watch.block_figures()
    moved = [
        sum((p.detach() - was).double().square().sum() for p, was in zip(now, there, strict=True))
        for now, there in zip((model[0].parameters(), model[2].parameters()), before, strict=True)
    ]
    assert trainer.pair.block_names == ["0", "2"]
    assert found["change"] == pytest.approx([one.sqrt().item() for one in moved], rel=1e-3)
    assert all(-1 <= cos <= 1 for cos in found["cos"])
