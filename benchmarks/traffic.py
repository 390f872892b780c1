"""Bytes that each process sends in one step, over what data-parallel training of the same model sends.

    python benchmarks/traffic.py [--quick]

Counted by wrapping the collectives (and DDP's own), as ring algorithms send them: an all-reduce of n bytes
over W processes 2(W-1)/W·n, a reduce-scatter and an all-gather (W-1)/W·n, a message n. With d parameters, plain
training sends 2(W-1)/W·d·itemsize; the paired step with sequential pairing twice that, with split pairing the same, and
the Gram. Figures: bytes over 4(W-1)/W·d·itemsize (sequential) and 2(W-1)/W·d·itemsize (split), for W = 2, 4, 8, the
Gram included; limits 1.01.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import print_report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hamu.distributed.split as split
from hamu import HamuQ, PairedGradients


class Traffic:
    """Counts what this process sends."""

    def __init__(self) -> None:
        self.sent = 0.0

    def wrap(self) -> None:
        """Count every collective that the exchange uses."""
        all_reduce, exchange = dist.all_reduce, dist.batch_isend_irecv
        scatter, gather = split._reduce_scatter, split._all_gather

        def counted_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            world = dist.get_world_size(kwargs.get("group"))
            self.sent += 2 * (world - 1) / world * tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        def counted_scatter(out: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> Any:
            world = dist.get_world_size(group)
            self.sent += (world - 1) / world * tensor.nbytes
            return scatter(out, tensor, group=group)

        def counted_gather(out: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> Any:
            world = dist.get_world_size(group)
            self.sent += (world - 1) / world * out.nbytes
            return gather(out, tensor, group=group)

        def counted_messages(operations: list[Any]) -> Any:
            self.sent += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
            return exchange(operations)

        dist.all_reduce, dist.batch_isend_irecv = counted_reduce, counted_messages
        split._reduce_scatter, split._all_gather = counted_scatter, counted_gather


def one_step(width: int, pairing: str) -> None:
    """A worker: one paired step; prints the bytes sent over those of plain training."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    pair = PairedGradients(model, HamuQ(0.5, "relative", stopping="off"))
    traffic = Traffic()
    runner: nn.Module = model
    sides: tuple[str, ...] = ("retain", "forget")
    if pairing == "split":
        layout = split.SplitPairing(pair.parameters, pair.block_of)
        pair.use(layout)
        sides = layout.sides
    else:
        runner = DistributedDataParallel(model)
        runner.register_comm_hook(None, allreduce_hook)  # DDP's own, but through Python, where it is counted
    traffic.wrap()
    for side in sides:
        with getattr(pair, side)():
            runner(torch.randn(2, width)).square().mean().backward()
    step = pair.combine()
    assert step.decision == "step"
    world = dist.get_world_size()
    size = sum(p.nbytes for p in model.parameters())
    if dist.get_rank() == 0:
        passes = 2 if pairing == "sequential" else 1
        print(json.dumps(traffic.sent / (passes * 2 * (world - 1) / world * size)))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 and 4 processes, a smaller model")
    parser.add_argument("--worker", choices=("sequential", "split"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    width = 128 if options.quick else 384
    if options.worker:
        one_step(width, options.worker)
        return
    figures = {}
    for world in (2, 4) if options.quick else (2, 4, 8):
        for pairing in ("sequential", "split"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world),
                       str(Path(__file__)), "--worker", pairing, *(["--quick"] if options.quick else [])]  # fmt: skip
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            figures[f"{pairing}_w{world}"] = json.loads(done.stdout.strip().splitlines()[-1])
            print(f"{pairing}, {world} processes: {figures[f'{pairing}_w{world}']:.5f}", flush=True)
    print_report("traffic", figures)


if __name__ == "__main__":
    main()
