"""A process that dies takes the run with it, by name, and leaves whole checkpoints to go on from."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from accelerate.state import PartialState
from safetensors.torch import load_file

import hamu
from hamu.cli import main
from hamu.unlearning.trainer.resumable import Checkpoints

FAST = ("--recipe", "digits", "--num_train_epochs", "1")
RUN = ("unlearn", *FAST, "--model", "original/model", "--max_steps", "8", "--optim", "adamw_torch",
       "--learning_rate", "1e-4", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "3",
       "--eval_strategy", "no", "--max_eval_samples", "32", "--use_cpu")  # fmt: skip


class Launched:
    """The command in two processes of torchrun."""

    def __init__(self, argv, folder):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
                    "hamu"]  # fmt: skip
        self._launcher = subprocess.Popen(
            [*torchrun, *argv],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check_running(self):
        assert self._launcher.poll() is None, self._launcher.communicate()[0]

    def kill_one(self):
        """Kill process 1, and return what was printed until the end."""
        pid = self._launcher.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if "\0RANK=1\0" in Path(f"/proc/{child}/environ").read_text():
                os.kill(int(child), signal.SIGKILL)
        said = self._launcher.communicate(timeout=120)[0]
        assert self._launcher.returncode != 0
        assert "Root Cause" in said
        assert "rank      : 1 (local_rank: 1)" in said.split("Root Cause")[1]
        return said


class Forked:
    """The same in two forks, which need not load the libraries."""

    def __init__(self, argv, folder):
        self._said, context = folder / "said", multiprocessing.get_context("fork")
        port = str(10_000 + os.getpid() % 20_000)  # of those that the system gives to nobody
        group = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._both = [
            context.Process(target=self._run, args=(argv, str(rank), group), daemon=True)
            for rank in range(2)
        ]
        for one in self._both:
            one.start()

    def _run(self, argv, rank, group):
        os.environ |= {**group, "RANK": rank, "LOCAL_RANK": rank}
        PartialState._shared_state.clear()  # is of the one process that forked
        with self._said.open("a") as said, redirect_stdout(said), redirect_stderr(said):
            code = main([*argv])
        os._exit(code)

    def check_running(self):
        assert all(one.is_alive() for one in self._both), self._said.read_text()

    def kill_one(self):
        self._both[1].kill()
        self._both[0].join(120)
        assert self._both[0].exitcode == 2
        return self._said.read_text()


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


@pytest.mark.parametrize(("start", "layout"), [(Launched, ()), (Forked, ("--shard",))])
def test_a_process_that_dies_ends_the_others_and_the_run_can_go_on(
    tmp_path, monkeypatch, start, layout, whole
):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    argv = *RUN, "--per_device_train_batch_size", "32", *layout, "--output_dir", "broken"
    both = start(argv, tmp_path)
    while not any(
        int(path.name.split("-")[1]) >= 2 for path in (tmp_path / "broken").glob("checkpoint-*")
    ):
        both.check_running()
        time.sleep(0.05)
    said = both.kill_one()
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
