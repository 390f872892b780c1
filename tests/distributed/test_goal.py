"""A run by goal in two processes measures, adapts and ends as in one."""

import json
import subprocess
import sys

import pytest

from hamu.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("goal")
    assert (
        main(
            [
                "train",
                "--recipe",
                "digits",
                "--num_train_epochs",
                "2",
                "--output_dir",
                f"{folder}/original",
            ]
        )
        == 0
    )
    return folder


def run(place, processes):
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
        "-m",
    ]
    subprocess.run([*start, "hamu", "unlearn", "--data", "digits", "--forget_class", "3", "--model",
                    f"{place}/original/model", "--per_device_train_batch_size", str(64 // processes), "--max_steps", "40",
                    "--output_dir", f"{place}/{processes}"], check=True, timeout=300, capture_output=True)  # fmt: skip
    return json.loads((place / f"{processes}/evaluation.json").read_text())


def test_two_processes_go_the_way_of_one(place):
    one, two = (run(place, processes) for processes in (1, 2))
    assert (one["steps_taken"], one["ended_kind"]) == (two["steps_taken"], two["ended_kind"])
    assert len(one["controller"]) == len(two["controller"])
    for alone, shared in zip(one["controller"], two["controller"], strict=True):
        assert (alone["step"], alone["demand"]) == (shared["step"], shared["demand"])
        assert shared["retain_loss"] == pytest.approx(alone["retain_loss"], rel=1e-3)
        assert abs(shared["forgotten"] - alone["forgotten"]) <= 2
