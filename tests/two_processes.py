"""A function in two processes that know of each other."""

import datetime
import multiprocessing

import torch.distributed as dist


def in_two_processes(job, folder):
    """Results of `job(rank)` in two forked processes, in the order of their ranks."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    meeting = {"init_method": f"file://{folder}/meeting", "world_size": 2}

    def main(rank):
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", rank=rank, timeout=limit, **meeting)
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
