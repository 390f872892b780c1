"""A process that dies takes the run with it, by name, and leaves whole checkpoints to go on from."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hamu
from hamu.cli import main
from hamu.unlearning.trainer.resumable import Checkpoints

FAST = ("--recipe", "digits", "--num_train_epochs", "1")
RUN = ("unlearn", *FAST, "--model", "original/model", "--max_steps", "8",
       "--learning_rate", "0.05", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "3",
       "--eval_strategy", "no", "--max_eval_samples", "32", "--use_cpu")  # fmt: skip


def kill_one(launcher):
    """Kill process 1 of torchrun's, and return what was printed until the end."""
    pid = launcher.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "\0RANK=1\0" in Path(f"/proc/{child}/environ").read_text():
            os.kill(int(child), signal.SIGKILL)
    said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "Root Cause" in said
    assert "rank      : 1 (local_rank: 1)" in said.split("Root Cause")[1]
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an original model, and a run from it in one process that nothing has happened to."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", *FAST, "--output_dir", "original"]) == 0
        assert main([*RUN, "--per_device_train_batch_size", "64", "--output_dir", "whole"]) == 0
    return place


def test_a_process_that_dies_ends_the_others_and_the_run_can_go_on(tmp_path, monkeypatch, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    argv = *RUN, "--per_device_train_batch_size", "32", "--shard", "--output_dir", "broken"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "hamu")
    launcher = subprocess.Popen(
        [sys.executable, *torchrun, *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not any(
        int(path.name.split("-")[1]) >= 2 for path in (tmp_path / "broken").glob("checkpoint-*")
    ):
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    said = kill_one(launcher)
    # unless torchrun ends process 0 before that notices
    told = ("process 0 lost another process of this run, which is named below", "interrupted")
    assert any(f"hamu unlearn: {one}" in said for one in told), said
    left = sorted(Path("broken").glob("checkpoint-*"))
    assert Checkpoints("broken").newest() is not None
    assert sorted(Path("broken").glob("checkpoint-*")) == left, "none was damaged"
    alone = ("--per_device_train_batch_size", "64", "--shard", "False")
    assert main(["unlearn", "--resume", "--output_dir", "broken", *alone]) == 0
    # what several processes did, one looks at
    assert {one.holds for one in hamu.verify("broken").findings} == {True}
    end, broken = (load_file(f"{name}/model/model.safetensors") for name in ("whole", "broken"))
    for name, weight in end.items():  # a step moves them by far more
        torch.testing.assert_close(broken[name], weight, rtol=0, atol=1e-5, msg=name)
    assert json.loads((tmp_path / "broken/evaluation.json").read_text())["steps_taken"] == 8
