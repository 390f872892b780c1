"""What a trainer prints by itself, and that a silenced one prints nothing."""

import pytest
import torch
from torch import nn

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.data import ImageData, UnlearningData
from hamu.data.images import collate
from hamu.models.classifiers import new_classifier
from hamu.unlearning.trainer import TrainConfig, train_original
from hamu.unlearning.trainer.logs import silence
from hamu.unlearning.trainer.trainer import quiet_trainer

DATA = ImageData(torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
                 torch.arange(24) % 3, ("a", "b", "c"), "none", torch.arange(24))  # fmt: skip
RETAIN, FORGET = DATA.select(range(16)), DATA.select(range(16, 24))


def model_and_settings(tmp_path, **settings):
    args = UnlearnConfig(
        output_dir=str(tmp_path), max_steps=2, constraint_mode="relative", stopping="off", learning_rate=0.05,
        eval_strategy="no", eval_on_start=False, logging_steps=1, **settings,
    )  # fmt: skip
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), args


def printed(trainer, capfd):
    capfd.readouterr()
    trainer.train()
    found = capfd.readouterr()
    return found.out + found.err


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_silenced_trainer_prints_neither_a_bar_nor_figures(tmp_path, capfd, disable_tqdm):
    for is_silent in (False, True):
        model, args = model_and_settings(tmp_path, disable_tqdm=disable_tqdm)
        trainer = UnlearnTrainer(model, args, retain_dataset=RETAIN, forget_dataset=FORGET)
        if is_silent:
            silence(trainer)
        assert bool(printed(trainer, capfd)) is not is_silent


def test_a_quiet_trainer_is_silenced_from_the_start(tmp_path, capfd):
    model, args = model_and_settings(tmp_path)
    problem = UnlearningData(retain=RETAIN, forget=FORGET, test=None, forget_name="some")
    trainer = quiet_trainer(model, problem, args, [], collate)
    assert printed(trainer, capfd) == ""
    assert trainer.steps_taken == 2


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_training_of_the_original_shows_its_bar_unless_told_not_to(tmp_path, capfd, disable_tqdm):
    args = TrainConfig(
        output_dir=str(tmp_path), max_steps=1, logging_steps=1, disable_tqdm=disable_tqdm
    )
    train_original(new_classifier("resnet8", DATA, [0.5], [0.5]), DATA, args)
    found = capfd.readouterr()
    assert bool(found.out + found.err) is not disable_tqdm
