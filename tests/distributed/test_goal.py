"""A run by goal in two processes measures, adapts and ends as in one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hamu.cli import main

GOAL = ("unlearn", "--data", "digits", "--forget_class", "3", "--max_steps", "20", "--use_cpu")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hamu")


def test_two_processes_go_the_way_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ("train", "--recipe", "digits", "--num_train_epochs", "2", "--output_dir", "original")
    assert main(list(train)) == 0
    run = [*GOAL, "--model", "original/model", "--per_device_train_batch_size"]
    assert main([*run, "64", "--output_dir", "one"]) == 0
    in_two = [sys.executable, *TWO, *run, "32", "--output_dir", "two"]
    subprocess.run(in_two, check=True, timeout=300, capture_output=True)
    one, two = (
        json.loads(Path(folder, "evaluation.json").read_text()) for folder in ("one", "two")
    )
    assert (one["steps_taken"], one["ended_kind"]) == (two["steps_taken"], two["ended_kind"])
    assert len(one["controller"]) == len(two["controller"])
    for alone, shared in zip(one["controller"], two["controller"], strict=True):
        assert (alone["step"], alone["demand"]) == (shared["step"], shared["demand"])
        assert shared["retain_loss"] == pytest.approx(alone["retain_loss"], rel=1e-3)
        assert abs(shared["forgotten"] - alone["forgotten"]) <= 2
