"""A run prints a line per step, or nothing if silenced; logs and callbacks keep all figures."""

import re

import pytest
import torch
from torch import nn
from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.data import ImageData, UnlearningData
from hamu.data.images import collate
from hamu.models.classifiers import new_classifier
from hamu.unlearning.trainer import TrainConfig, train_original
from hamu.unlearning.trainer.logs import silence
from hamu.unlearning.trainer.trainer import quiet_trainer

LOSS = r"loss +\d+\.\d{4} \([+-]\d\.\d{4}\)"
LINE = rf"step (\d)/3  forget {LOSS}  retain {LOSS}  cosθ [+-]\d\.\d\d"


class Seen(TrainerCallback):
    """Keeps the figures that callbacks get."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


@pytest.fixture
def data():
    pixels = torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8)
    return ImageData(pixels, torch.arange(24) % 3, ("a", "b", "c"), "none", torch.arange(24))


@pytest.fixture
def trainer_of(tmp_path, data):
    retain, forget = data.select(range(16)), data.select(range(16, 24))
    problem = UnlearningData(retain=retain, forget=forget, test=None, forget_name="some")
    common = {"constraint_mode": "relative", "stopping": "off", "learning_rate": 0.05}

    def make(callbacks=(), quiet=False, **settings):
        args = UnlearnConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            check_steps=1,
            per_device_train_batch_size=8,
            **common,
            **settings,
        )
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        if quiet:
            return quiet_trainer(model, problem, args, list(callbacks), collate)
        sets = {"retain_dataset": retain, "forget_dataset": forget}
        return UnlearnTrainer(model, args, **sets, callbacks=list(callbacks))

    return make


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_run_prints_a_line_per_step_and_logs_all_figures(trainer_of, capfd, disable_tqdm):
    seen = Seen()
    trainer = trainer_of([seen], disable_tqdm=disable_tqdm)
    capfd.readouterr()
    trainer.train()
    lines = [line.strip() for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert [match[1] for line in lines if (match := re.fullmatch(LINE, line))] == ["1", "2", "3"]
    assert re.fullmatch(r"step 0/3  evaluated  forget loss +\S+  retain loss +\S+", lines[0])
    assert re.fullmatch(r"step 3/3  done in \d+\.\d s", lines[-1])
    assert not any("kappa" in line or "{" in line for line in lines)
    for logged in (seen.logs, trainer.state.log_history):
        steps = [entry for entry in logged if "taken" in entry]
        assert len(steps) == 3
        assert all({"kappa", "demand", "retain_norm"} <= entry.keys() for entry in steps)


@pytest.mark.parametrize(
    ("disable_tqdm", "own"), [(True, PrinterCallback), (False, ProgressCallback)]
)
def test_callbacks_of_ones_own_stay(trainer_of, capfd, disable_tqdm, own):
    mine = own()
    trainer = trainer_of([mine], disable_tqdm=disable_tqdm)
    assert mine in trainer.callback_handler.callbacks
    trainer.train()
    assert "'kappa': " in capfd.readouterr().out, "it prints as it does by itself"


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_silenced_trainer_prints_neither_a_bar_nor_figures(trainer_of, capfd, disable_tqdm):
    silenced = trainer_of(disable_tqdm=disable_tqdm)
    silence(silenced)
    for trainer in (silenced, trainer_of(quiet=True, disable_tqdm=disable_tqdm)):
        capfd.readouterr()
        trainer.train()
        assert trainer.steps_taken == 3
        assert capfd.readouterr() == ("", "")


def test_training_of_the_original_shows_its_bar_unless_told_not_to(tmp_path, data, capfd):
    for quiet in (True, False):
        args = TrainConfig(output_dir=str(tmp_path), max_steps=1, disable_tqdm=quiet)
        train_original(new_classifier("resnet8", data, [0.5], [0.5]), data, args)
        assert bool("".join(capfd.readouterr())) is not quiet
