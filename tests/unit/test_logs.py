"""Outputs of a run: figures of every block, bounded and the same after a resume; lines on screen."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hamu import UnlearnConfig
from hamu.data import ImageData, UnlearningData
from hamu.data.images import collate
from hamu.files import LAYERS
from hamu.models.classifiers import new_classifier
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, train_original
from hamu.unlearning.trainer.logs import LayerLog, stride
from hamu.unlearning.trainer.trainer import quiet_trainer


@pytest.fixture
def data():
    pixels = torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8)
    return ImageData(pixels, torch.arange(24) % 3, ("a", "b", "c"), "none", torch.arange(24))


@pytest.fixture
def trainer_of(tmp_path, data):
    retain, forget = data.select(range(16)), data.select(range(16, 24))
    problem = UnlearningData(retain=retain, forget=forget, test=None, forget_name="some")
    common = {"constraint_mode": "relative", "stopping": "off", "learning_rate": 0.05}
    common |= {"max_steps": 3, "check_steps": 1, "per_device_train_batch_size": 8}

    def make(**settings):
        args = UnlearnConfig(output_dir=str(tmp_path), **common | settings)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        return quiet_trainer(model, problem, args, [], collate)

    return make


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_quiet_trainer_prints_neither_a_bar_nor_figures(trainer_of, capfd, disable_tqdm):
    trainer = trainer_of(disable_tqdm=disable_tqdm)
    capfd.readouterr()
    trainer.train()
    assert trainer.steps_taken == 3
    assert capfd.readouterr() == ("", "")


def test_training_of_the_original_shows_its_bar_unless_told_not_to(tmp_path, data, capfd):
    for quiet in (True, False):
        args = TrainConfig(output_dir=str(tmp_path), max_steps=1, disable_tqdm=quiet)
        train_original(new_classifier("resnet8", data, [0.5], [0.5]), data, args)
        assert bool("".join(capfd.readouterr())) is not quiet


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
    "settings", [{}, {"optim": "adamw_torch"}, {"correct_steps": True}, {"trust_region": True}]
)
def test_the_change_of_a_block_is_that_of_the_weights(trainer_of, settings):
    trainer = trainer_of(max_steps=1, **settings)
    layer = trainer.model[1]
    before = [p.detach().clone() for p in layer.parameters()]
    trainer.train()
    found = trainer.watch.block_figures()
    moved = [(p.detach() - b).norm() for p, b in zip(layer.parameters(), before, strict=True)]
    assert trainer.pair.block_names == ["1.weight", "1.bias"]
    assert found["change"] == pytest.approx([one.item() for one in moved], rel=1e-3)
    assert all(-1 <= cos <= 1 for cos in found["cos"])
