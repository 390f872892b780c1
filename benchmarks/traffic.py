"""Bytes that each process sends in one step of `hamu unlearn`, over what data-parallel training of the model sends.

    python benchmarks/traffic.py [--quick]

A step of an `UnlearnTrainer` with its default settings (logged and checked), its collectives counted by wrapping them
(and DDP's own), as ring algorithms send them: an all-reduce of n bytes over W processes 2(W-1)/W·n, a
reduce-scatter and an all-gather (W-1)/W·n, a message n, a broadcast n from the process that has it, whose bytes are
given. (Not counted: DDP's note of which parameters were used, 4 bytes for each.) With d parameters, plain training
sends 2(W-1)/W·d·itemsize; the paired step with sequential pairing twice that, with split pairing the same; beyond it
the Gram, losses and counts. Figures, for W = 2, 4, 8:

    sequential_wW, split_wW    bytes over 4(W-1)/W·d·itemsize and 2(W-1)/W·d·itemsize; limits 1.01
    ..._broadcast              bytes of the broadcast Gram among them
    ..._more                   bytes beyond the formula, the broadcast Gram included
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from _report import print_report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import hamu.core.distributed as split
from hamu import UnlearnConfig, UnlearnTrainer
from hamu.core.distributed import leave
from hamu.unlearning.trainer.logs import silence

dist: Any = torch.distributed
_COUNTED = 3  # the first step compares all weights too


class Traffic:
    """Counts what this process sends.

    Attributes:
        sent: bytes.
        broadcast: those of them that were broadcast.
    """

    def __init__(self) -> None:
        self.sent = self.broadcast = 0.0

    def wrap(self) -> None:
        """Count every collective that a step uses."""
        all_reduce, exchange = dist.all_reduce, dist.batch_isend_irecv
        broadcast, gather_list = dist.broadcast, dist.all_gather
        scatter, gather = split._reduce_scatter, split._all_gather

        def counted_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            world = dist.get_world_size(kwargs.get("group"))
            self.sent += 2 * (world - 1) / world * tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        def counted_broadcast(tensor: torch.Tensor, src: int, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == src:
                self.sent += tensor.nbytes
                self.broadcast += tensor.nbytes
            return broadcast(tensor, src, *args, **kwargs)

        def counted_list(
            tensors: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            self.sent += (len(tensors) - 1) * tensor.nbytes
            return gather_list(tensors, tensor, *args, **kwargs)

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
        dist.broadcast, dist.all_gather = counted_broadcast, counted_list
        split._reduce_scatter, split._all_gather = counted_scatter, counted_gather


class CountedStep(TrainerCallback):
    """Has DDP reduce through Python, where it is counted; notes what has been sent after each step."""

    def __init__(self, trainer: UnlearnTrainer, traffic: Traffic) -> None:
        self._trainer, self._traffic = trainer, traffic
        self.sent = [0.0]
        self.broadcast = [0.0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As DDP would reduce by itself."""
        if isinstance(self._trainer.model_wrapped, DistributedDataParallel):
            self._trainer.model_wrapped.register_comm_hook(None, allreduce_hook)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step, what was logged of the one before, and the counts of its batch."""
        self.sent.append(self._traffic.sent)
        self.broadcast.append(self._traffic.broadcast)


def one_step(width: int, pairing: str) -> None:
    """A worker: some paired steps; prints what the last one sent."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    records: Any = [{"pixel_values": torch.randn(width), "labels": i} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        args = UnlearnConfig(output_dir=folder, pairing=pairing, constraint_mode="relative", stopping="off",
                             per_device_train_batch_size=2, max_steps=_COUNTED, eval_strategy="no",
                             eval_on_start=False)  # fmt: skip
        trainer = UnlearnTrainer(
            model, args, retain_dataset=records[:48], forget_dataset=records[48:]
        )
        traffic = Traffic()
        traffic.wrap()
        counted = CountedStep(trainer, traffic)
        trainer.add_callback(counted)
        silence(trainer)
        trainer.train()
    assert trainer.steps_taken == _COUNTED
    world = dist.get_world_size()
    passes = 2 if pairing == "sequential" else 1
    formula = passes * 2 * (world - 1) / world * sum(p.nbytes for p in model.parameters())
    sent, broadcast = (noted[-1] - noted[-2] for noted in (counted.sent, counted.broadcast))
    if dist.get_rank() == 0:
        print(json.dumps({"": sent / formula, "_broadcast": broadcast, "_more": sent - formula}))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 and 4 processes, a smaller model")
    parser.add_argument("--worker", choices=("sequential", "split"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    width = 128 if options.quick else 384
    if options.worker:
        one_step(width, options.worker)
        return
    figures: dict[str, float] = {}
    for world in (2, 4) if options.quick else (2, 4, 8):
        for pairing in ("sequential", "split"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world),
                       str(Path(__file__)), "--worker", pairing, *(["--quick"] if options.quick else [])]  # fmt: skip
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=environment
            )
            found = json.loads(done.stdout.strip().splitlines()[-1])
            figures |= {f"{pairing}_w{world}{name}": value for name, value in found.items()}
            print(f"{pairing}, {world} processes: {found['']:.5f}, {found['_more']:.0f} bytes beyond the formula, "
                  f"{found['_broadcast']:.0f} of them a broadcast", flush=True)  # fmt: skip
    print_report("traffic", figures)


if __name__ == "__main__":
    main()
