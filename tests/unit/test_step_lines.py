"""What a run in Python prints: a line per step, while logs and callbacks keep all figures."""

import re

import pytest
import torch
from torch import nn
from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.unlearning.trainer.logs import StepBar, StepPrinter, log_line

LOSS = r"loss +\d+\.\d{4} \([+-]\d\.\d{4}\)"
LINE = rf"step (\d)/3  forget {LOSS}  retain {LOSS}  cosθ [+-]\d\.\d\d"


class Seen(TrainerCallback):
    """Keeps the figures that callbacks get."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


def trainer_of(tmp_path, callbacks, **settings):
    torch.manual_seed(0)
    records = [{"pixel_values": torch.randn(4), "labels": i % 3} for i in range(24)]
    args = UnlearnConfig(
        output_dir=str(tmp_path), max_steps=3, constraint_mode="relative", stopping="off", learning_rate=0.05,
        per_device_train_batch_size=8, **settings,
    )  # fmt: skip
    return UnlearnTrainer(
        nn.Linear(4, 3),
        args,
        retain_dataset=records[:16],
        forget_dataset=records[16:],
        callbacks=callbacks,
    )


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_run_prints_a_line_per_step_and_logs_all_figures(tmp_path, capfd, disable_tqdm):
    seen = Seen()
    trainer = trainer_of(tmp_path, [seen], disable_tqdm=disable_tqdm)
    capfd.readouterr()
    trainer.train()
    lines = [line.strip() for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert [match[1] for line in lines if (match := re.fullmatch(LINE, line))] == ["1", "2", "3"]
    assert re.fullmatch(r"step 0/3  evaluated  forget loss +\S+  retain loss +\S+", lines[0])
    assert re.fullmatch(r"step 3/3  done in \d+\.\d s", lines[-1])
    assert not any("kappa" in line or "{" in line for line in lines)
    for logged in (seen.logs, trainer.state.log_history):
        [*steps] = [entry for entry in logged if "taken" in entry]
        assert len(steps) == 3
        assert all(
            len(entry) > 20 and {"kappa", "demand", "retain_norm"} <= entry.keys()
            for entry in steps
        )


def test_lines_are_aligned_and_brackets_hold_what_the_step_changed():
    figures = {"taken": 1.0, "forget_loss": 2.31, "retain_loss": 0.83, "cos": -0.12}
    changes = {"realised_forget_change": 0.12, "realised_retain_change": -0.004}
    one, two = (
        log_line(figures | changes, 12, 225),
        log_line(figures | changes | {"forget_loss": 12.5}, 9, 225),
    )
    assert (
        one
        == "step  12/225  forget loss   2.3100 (+0.1200)  retain loss   0.8300 (-0.0040)  cosθ -0.12"
    )
    assert len(one) == len(two)
    assert (
        log_line(figures, 12, 225)
        == "step  12/225  forget loss   2.3100  retain loss   0.8300  cosθ -0.12"
    )
    assert log_line(figures | {"taken": 0.0}, 12, 225).endswith("not taken")
    assert log_line({"forget_loss": 1.0, "taken": 1.0}, 1, 2) == "step 1/2  forget loss   1.0000"
    assert log_line({"my_figure": 3.0}, 1, 2) == "{'my_figure': 3.0}"


@pytest.mark.parametrize(
    ("disable_tqdm", "own"), [(True, PrinterCallback), (False, ProgressCallback)]
)
def test_callbacks_of_ones_own_stay(tmp_path, disable_tqdm, own):
    there = trainer_of(tmp_path, [], disable_tqdm=disable_tqdm).callback_handler.callbacks
    assert [type(one) for one in there if isinstance(one, own)] == [
        StepPrinter if disable_tqdm else StepBar
    ]
    mine = own()
    trainer = trainer_of(tmp_path, [mine], disable_tqdm=not disable_tqdm)
    assert mine in trainer.callback_handler.callbacks
    trainer.remove_callback(own)
    assert mine not in trainer.callback_handler.callbacks
