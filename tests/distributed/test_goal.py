"""A run by goal starts with the same settings in every process, whatever each has measured."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from rich.console import Console
from torch import nn

from hamu import UnlearnConfig
from hamu.cli import goal


def tuned(rank, place):
    """What one of two processes takes, in a file named by its rank."""
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    found = SimpleNamespace(
        trusted_rate=lambda share: 0.125 * (1 + rank),
        verdict=SimpleNamespace(constraint=0.25 + 0.5 * rank, headline="found"),
        hamu_q=SimpleNamespace(kappa=1.0, cos=0.5),
    )
    goal.assess = lambda *args, **settings: found
    args = UnlearnConfig(output_dir="unused", use_cpu=True)
    goal.tune(nn.Linear(1, 1), SimpleNamespace(retain=[], forget=[]), args, None, Console(quiet=True))
    Path(place, str(rank)).write_text(f"{args.learning_rate} {args.constraint} {args.trust_region}")
    dist.destroy_process_group()


def test_all_processes_take_what_the_main_one_has_found(tmp_path):
    fork = multiprocessing.get_context("fork")  # the libraries are loaded already
    processes = [fork.Process(target=tuned, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        process.kill()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0.125 0.25 True"] * 2
