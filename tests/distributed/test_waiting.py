"""What one process writes or finds, the others wait for: two processes, forked for some lines of code."""

import datetime
import json
import multiprocessing
import time

import pytest
import torch.distributed as dist

from hamu import HamuError
from hamu.core.distributed import from_main
from hamu.unlearning.trainer import checkpoints
from hamu.unlearning.trainer.checkpoints import Checkpoints

LATE = 0.3  # seconds


def in_two_processes(job, folder):
    """What `job(rank)` returns in each of two processes, in the order of their ranks."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def main(rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
                                timeout=datetime.timedelta(seconds=60))  # fmt: skip
        try:
            answer = job(rank)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        answers.put((rank, answer))
        dist.barrier()
        dist.destroy_process_group()

    both = [context.Process(target=main, args=(rank,)) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
        one.kill()  # what has not ended by then waits for ever
    assert [one.exitcode for one in both] == [0, 0]
    return [answer for _, answer in sorted(answers.get() for _ in both)]


def test_a_checkpoint_holds_what_the_last_process_wrote(tmp_path):
    def save(rank):
        with Checkpoints(tmp_path / "run").writing(3) as folder:
            time.sleep(LATE * rank)
            (folder / f"rng_state_{rank}.pth").write_text("state")

    assert in_two_processes(save, tmp_path) == [None, None]
    listed = json.loads((tmp_path / "run/checkpoint-3/manifest.json").read_text())
    assert sorted(listed) == ["rng_state_0.pth", "rng_state_1.pth"]


def test_no_process_goes_on_before_the_checkpoint_is_in_its_place(tmp_path, monkeypatch):
    seal = checkpoints.seal

    def late(folder):
        time.sleep(LATE)
        seal(folder)

    def save(rank):
        run = Checkpoints(tmp_path / "run")
        with run.writing(3):
            pass
        return run.path(3).is_dir()

    monkeypatch.setattr(checkpoints, "seal", late)
    assert in_two_processes(save, tmp_path) == [True, True]


@pytest.mark.parametrize("error", [HamuError("not here"), KeyError("a")])
def test_an_error_of_the_main_process_is_raised_on_every_process(tmp_path, error):
    def find():
        raise error

    answers = in_two_processes(lambda rank: from_main(find), tmp_path)
    assert answers == [f"{type(error).__name__}: {error}"] * 2


def test_what_the_main_process_finds_is_known_to_every_process(tmp_path):
    assert (
        in_two_processes(lambda rank: from_main(lambda: f"found by {rank}"), tmp_path)
        == ["found by 0"] * 2
    )
