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
from safetensors.torch import load_file

import hamu
from hamu.cli import main
from hamu.unlearning.trainer.resumable import Checkpoints

FAST = ("--recipe", "digits", "--num_train_epochs", "1")
RUN = ("unlearn", *FAST, "--model", "original/model", "--max_steps", "8", "--optim", "adamw_torch",
       "--learning_rate", "1e-4", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "3",
       "--eval_strategy", "no", "--max_eval_samples", "32", "--use_cpu")  # fmt: skip


def launched(world_size, *argv):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size), "-m",
               "hamu", *argv]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def worker_of(launcher, rank):
    """The process id of one of a launcher's processes."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError("no such process")


def distance(one, other):
    """Of all weights of a model."""
    return (
        sum((one[name] - weight).double().square().sum().item() for name, weight in other.items())
        ** 0.5
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an original model, and a run from it in one process that nothing has happened to."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", *FAST, "--output_dir", "original"]) == 0
        assert main([*RUN, "--per_device_train_batch_size", "64", "--output_dir", "whole"]) == 0
    return place


@pytest.mark.parametrize("layout", [(), ("--shard",)])
def test_a_process_that_dies_ends_the_others_and_the_run_can_go_on(
    tmp_path, monkeypatch, layout, whole
):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    launcher = launched(
        2, *RUN, "--per_device_train_batch_size", "32", *layout, "--output_dir", "broken"
    )
    while not any(
        int(path.name.split("-")[1]) >= 2 for path in (tmp_path / "broken").glob("checkpoint-*")
    ):
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    os.kill(worker_of(launcher, 1), signal.SIGKILL)
    said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "Root Cause" in said
    assert "rank      : 1 (local_rank: 1)" in said.split("Root Cause")[1]
    # unless torchrun ends process 0 before that notices
    told = ("process 0 lost another process of this run, which is named below", "interrupted")
    assert any(f"hamu unlearn: {one}" in said for one in told), said
    left = sorted(Path("broken").glob("checkpoint-*"))
    assert Checkpoints("broken").newest() is not None
    assert sorted(Path("broken").glob("checkpoint-*")) == left, "none was damaged"
    assert main(["unlearn", "--resume", "--output_dir", "broken", "--per_device_train_batch_size", "64",
                 *(layout and ("--shard", "False"))]) == 0  # fmt: skip
    # what several processes did, one looks at
    assert {one.holds for one in hamu.verify("broken").findings} == {True}
    end, broken, one_less = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("whole/model", "broken/model", "whole/checkpoint-7")
    )
    off, step = distance(broken, end), distance(one_less, end)
    # AdamW makes whole moves of gradients that are rounding, 0.06 of a step in all; a lost step would be 1 or more
    assert off < 0.25 * step, f"{off} is {off / step} of a step"
    assert json.loads((tmp_path / "broken/evaluation.json").read_text())["steps_taken"] == 8
