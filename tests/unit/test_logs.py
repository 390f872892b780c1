"""Outputs of a run: figures of every block, bounded and the same after a resume; lines on screen."""

import json

import pytest
import torch
from small_models import drawn_images
from torch import nn
from torch.nn import functional as F

from hamu import HamuError, UnlearnConfig
from hamu.data import UnlearningData
from hamu.files import LAYERS
from hamu.models.classifiers import new_classifier
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, logs, train_original
from hamu.unlearning.trainer.trainer import quiet_trainer


@pytest.fixture
def data():
    return drawn_images(24)


@pytest.fixture
def trainer_of(tmp_path, data):
    retain, forget = data.select(range(16)), data.select(range(16, 24))
    problem = UnlearningData(retain=retain, forget=forget, test=None, forget_name="some")
    common = {"constraint_mode": "relative", "stopping": "off", "learning_rate": 0.05}
    common |= {"max_steps": 3, "check_steps": 1, "per_device_train_batch_size": 8}

    def make(callbacks=(), **settings):
        args = UnlearnConfig(output_dir=str(tmp_path), **common | settings)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        return quiet_trainer(model, problem, args, [*callbacks])

    return make


def test_training_of_the_original_shows_its_bar_unless_told_not_to(tmp_path, data, capfd):
    for quiet in (True, False):
        args = TrainConfig(output_dir=str(tmp_path), max_steps=1, disable_tqdm=quiet)
        train_original(new_classifier("resnet8", data, [0.5], [0.5]), data, args)
        assert bool("".join(capfd.readouterr())) is not quiet


class WithOwnLoss(nn.Sequential):
    def forward(self, pixel_values, labels=None):
        logits = super().forward(pixel_values)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def test_a_short_last_part_of_a_batch_weighs_by_its_records(tmp_path, data):
    weights = []
    for size, parts in ((24, 1), (10, 3)):
        args = TrainConfig(output_dir=str(tmp_path), max_steps=2, learning_rate=0.1,
                           per_device_train_batch_size=size, gradient_accumulation_steps=parts,
                           eval_strategy="steps", eval_steps=1)  # fmt: skip
        torch.manual_seed(0)
        model = WithOwnLoss(nn.Flatten(), nn.Linear(16, 3))
        train_original(model, data, args, eval_data=data)
        weights.append(model[1].weight)
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dataloader_drop_last": True, "per_device_train_batch_size": 25},
            "dataloader_drop_last leaves no batch of 25 of 24 records; leave it out, or give a sm",
        ),
        ({"train_sampling_strategy": "group_by_length"}, "goes by lengths, which images have none"),
        ({"label_smoothing_factor": 1.0}, r"label_smoothing_factor 1.0 must be in \[0, 1\)"),
    ],
)
def test_the_original_is_not_trained_by_what_would_train_nothing(tmp_path, data, settings, message):
    def train():
        args = TrainConfig(output_dir=str(tmp_path), max_steps=2, **settings)
        train_original(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), data, args)

    with pytest.raises(HamuError, match=message):
        train()


@pytest.mark.parametrize(
    ("logged", "most", "steps"),
    [(1, 9, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6]), (2, 9, [2, 4, 6]), (2, 1, [])],
)
def test_the_log_of_the_layers_is_bounded(trainer_of, tmp_path, monkeypatch, logged, most, steps):
    monkeypatch.setattr(logs, "_MOST_LINES", most)
    monkeypatch.setattr(logs, "_FEWEST_LINES", 0)
    folder = RunFolder(tmp_path / "run")
    log = logs.StepLog(folder, lambda: folder.begin({}, {}), resume=False)
    log.trainer = trainer_of(max_steps=7, logging_steps=logged, callbacks=[log])
    log.trainer.train()
    head, *rest = map(json.loads, (tmp_path / "run" / LAYERS).read_text().splitlines())
    assert head == {"step": 0, "blocks": ["1.weight", "1.bias"]}
    assert [one["step"] for one in rest] == steps
    for one in rest:
        assert all(value == float(f"{value:.4g}") for value in (*one["cos"], *one["change"]))


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
