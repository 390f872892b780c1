"""A run of ten thousand steps on a small model: does its memory stay, can its log be read while it is written?

    python benchmarks/long_run.py [--steps 10000]

Resident memory after the last step over that after a tenth of the steps: at most 1.01. The log is opened and read from
its beginning every thousand steps; each of its lines must be whole. Ends with code 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from _report import print_report
from torch import nn
from transformers import TrainerCallback, set_seed

from hamu.data import UnlearningData, forget_class, pixel_statistics, read_images
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.logs import StepLog
from hamu.unlearning.trainer.trainer import quiet_trainer


def resident() -> float:
    """Resident memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Watch(TrainerCallback):
    """Notes the memory, reads the log."""

    def __init__(self, log: Path, steps: int) -> None:
        self._log, self._every = log, steps // 10
        self.memory: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every tenth of the run."""
        if state.global_step % self._every == 0:
            self.memory.append(resident())
            with open(
                self._log, encoding="utf-8"
            ) as file:  # line by line: the reader is to take no memory itself
                for number, line in enumerate(file, 1):
                    assert json.loads(line)["step"] == number, "a line is missing"
            assert number == state.global_step - 1, "a line is missing"


def problem() -> UnlearningData[Any]:
    train = read_images("digits")
    return forget_class(train.normalized(*pixel_statistics(train)), None, 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    set_seed(0)
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
        args = UnlearnConfig(
            output_dir=str(folder.path), max_steps=options.steps, per_device_train_batch_size=16, eval_strategy="no",
            constraint_mode="relative", stopping="off", learning_rate=1e-4, check_steps=5, save_strategy="no",
        )  # fmt: skip
        log = StepLog(folder, lambda: folder.begin({}, {}), resume=False)
        watch = Watch(folder.path / "steps.jsonl", options.steps)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        trainer = quiet_trainer(model, problem(), args, [log, watch])
        log.trainer = trainer
        trainer.train()
    growth = watch.memory[-1] / watch.memory[0]
    print("MiB:", ", ".join(f"{value:.1f}" for value in watch.memory))
    print_report("long_run", {"steps": options.steps, "memory_growth": round(growth, 4)})
    return int(growth > 1.01)


if __name__ == "__main__":
    sys.exit(main())
