"""Peak memory of one paired step above weights and activations, in gradients: one process, and split pairing.

    python benchmarks/memory.py [--quick]

A gradient is the bytes of all trainable tensors. Weights and batches are not counted, and no optimizer has a state yet.
Three steps by HAMU-Q, the last with parallel gradients, which are measured a second time in float64. Two peaks in each:

    passes          the peak of a side's forward and backward pass, less what the same pass takes for itself: its own
                    peak with nothing else held, minus one gradient. What is left is what is held meanwhile, and the
                    gradient that the pass makes.
    combine         the peak of `pair.combine()`; no activation is left then

In one process every byte counts that torch's allocator gives out, an operator's workspace as well; with split pairing
(2 and 4 gloo processes, the one that holds most) every tensor, but not gloo's own copies. The limits:

    one process     2 gradients and a bucket: what the Gram works in (`worked_in`), and for half
                    precision the widened pieces of both sides in which the combine works
    split pairing   1 gradient and 2 buckets: what is exchanged at once, 4 M numbers or the largest tensor
    kl, scrub       beyond gdiff: one copy of the trainable tensors and of BatchNorm's statistics
    copies          0 tensors: what `combine` leaves in `.grad` lies where the retain side's backward pass put it

    evaluation      0.75 of the float32 logits of a batch whose tokens are scored by half (64 texts of 128 tokens,
                    vocabulary 32,000): those of the scored tokens, and what is computed from a piece of them

Exits with 1 if one of them is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _memory_meter import AllocationMeter, TensorMeter
from _models import new_llama
from _report import print_report
from torch import Tensor, nn

import hamu.core.distributed as exchange
from hamu import Method, PairedGradients, build_method
from hamu.core.distributed import SplitPairing
from hamu.core.forward import OriginalModel, predict_logits
from hamu.core.gram_meter import scratch_bytes, widened_at_once
from hamu.core.objectives import Scored, build_objective
from hamu.evaluation.predictions import predict_tokens
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.models.language import AdapterSettings, with_adapter

Batch = dict[str, Tensor]
STEPS = 3
WITH_ORIGINAL = ("kl", "scrub")


def resnet20() -> tuple[nn.Module, dict[str, Batch]]:
    def batch() -> Batch:
        return {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.randint(0, 10, (16,))}

    return SmallResNet(SmallResNetConfig(num_labels=10)), {"retain": batch(), "forget": batch()}


def llama_5m() -> tuple[nn.Module, dict[str, Batch]]:
    return new_llama(4096, 256, 4), texts(4096)


def llama_100m() -> tuple[nn.Module, dict[str, Batch]]:
    return new_llama(32000, 768, 12), texts(32000)


def llama_100m_bf16() -> tuple[nn.Module, dict[str, Batch]]:
    return new_llama(32000, 768, 12).bfloat16(), texts(32000)


def llama_100m_lora() -> tuple[nn.Module, dict[str, Batch]]:
    return with_adapter(
        new_llama(32000, 768, 12), AdapterSettings(rank=8, targets="q_proj,v_proj")
    ), texts(32000)


def texts(vocabulary: int) -> dict[str, Batch]:
    ids = {side: torch.randint(0, vocabulary, (2, 32)) for side in ("retain", "forget")}
    return {side: {"input_ids": tokens, "labels": tokens} for side, tokens in ids.items()}


CASES = {
    "resnet20": resnet20,
    "llama_5m": llama_5m,
    "llama_100m_lora": llama_100m_lora,
    "llama_100m": llama_100m,
    "llama_100m_bf16": llama_100m_bf16,
}
QUICK = ("resnet20", "llama_5m")


def measured(case: str, method_name: str, split: bool = False) -> dict[str, int]:
    """In bytes: a gradient, a bucket, what the original model needs, both peaks; how many tensors were moved."""
    torch.manual_seed(0)
    method = build_method(method_name, constraint_mode="relative", stopping="off")
    moved = 0
    with TensorMeter() if split else AllocationMeter() as meter:
        with meter.phase("weights"):
            model, batches = CASES[case]()
        with meter.phase("setting up"):
            pair = PairedGradients(model, method)
            if split:
                pair.use(SplitPairing(pair.parameters, pair.block_of))
            backward = new_backward(model, method)
        sides = pair.layout.sides
        for side in sides:
            with meter.phase(f"{side} alone"):
                backward(side, batches[side])
            model.zero_grad()
        for step in range(STEPS):
            for side in sides:
                batch = batches["retain" if step == STEPS - 1 else side]
                with meter.phase(f"{side} {step}"), getattr(pair, side)():
                    backward(side, batch)
                    if side == "retain":
                        places = addresses(pair)
            with meter.phase(f"combine {step}"):
                assert pair.combine().decision == "step"
            if not split:
                moved += sum(a != b for a, b in zip(addresses(pair), places, strict=True))
            model.zero_grad()
    phases = meter.phases
    gradient, weights = sum(p.nbytes for p in pair.parameters), phases["weights"].end
    passes = []
    for side in sides:
        alone = phases[f"{side} alone"]
        activations = alone.peak - alone.start - gradient
        passes += [phases[f"{side} {step}"].peak - weights - activations for step in range(STEPS)]
    return {
        "gradient": gradient,
        "bucket": exchanged_at_once(pair) if split else worked_in(pair),
        "original": gradient + statistics_bytes(model),
        "passes": max(passes),
        "combine": max(phases[f"combine {step}"].peak for step in range(STEPS)) - weights,
        "moved": moved,
    }


def addresses(pair: PairedGradients) -> list[int]:
    """Of all gradients."""
    return [p.grad.data_ptr() for p in pair.parameters if p.grad is not None]


def new_backward(model: nn.Module, method: Method) -> Callable[[str, Batch], None]:
    """The forward and backward pass of one side's batch, by the method's objective."""
    objectives = {
        "retain": build_objective(str(method.retain_objective)),
        "forget": build_objective(str(method.forget_objective)),
    }
    original = OriginalModel(model) if any(o.needs_original for o in objectives.values()) else None

    def backward(side: str, batch: Batch) -> None:
        labels, target = batch["labels"], None
        if original is not None and objectives[side].needs_original:
            target = Scored.of(original.logits(batch), labels).logits
        objectives[side].total(Scored.of(predict_logits(model, batch), labels), target).backward()

    return backward


def evaluation_peak() -> float:
    """Peak of an evaluation of texts above the weights, over the float32 logits of a batch."""
    torch.manual_seed(0)
    size, length, vocabulary = 64, 128, 32000
    ids = torch.randint(0, vocabulary, (size, length))
    labels = torch.where(torch.arange(length) < length // 2, -100, ids)
    records: Any = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    with AllocationMeter() as meter:
        with meter.phase("weights"):
            model = new_llama(vocabulary, 256, 2)
        with meter.phase("evaluation"):
            predict_tokens(model, records, size)
    phase = meter.phases["evaluation"]
    return (phase.peak - phase.start) / (4 * size * length * vocabulary)


def worked_in(pair: PairedGradients) -> int:
    """The bucket of one process: scratch, sums and products of packed rows, widened products."""
    halves = [p.numel() for p in pair.parameters if p.itemsize == 2]
    device = pair.parameters[0].device
    most = widened_at_once(device, device)
    piece = min(most, max(halves, default=0))
    measured = scratch_bytes(device) * 13 // 8 + 4 * most
    return measured + 2 * torch.float32.itemsize * piece


def exchanged_at_once(pair: PairedGradients) -> int:
    """The bucket of split pairing."""
    return max(max(exchange.BUCKET, p.numel()) * p.itemsize for p in pair.parameters)


def statistics_bytes(model: nn.Module) -> int:
    """BatchNorm's."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return sum(buffer.nbytes for norm in norms for buffer in norm.buffers())


def worker(case: str) -> None:
    """One process of split pairing; the first prints the figures of the one that holds most."""
    dist.init_process_group("gloo")
    found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, measured(case, "hamu-q", split=True))
    if dist.get_rank() == 0:
        print(json.dumps(max(found, key=peak)))
    dist.destroy_process_group()


def measured_with_split(case: str, processes: int) -> dict[str, int]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
               str(Path(__file__)), "--worker", case]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def peak(found: dict[str, int]) -> int:
    return max(found["passes"], found["combine"])


def row(name: str, found: dict[str, int], gradients: int, buckets: int) -> bool:
    """Print a row of the table; whether the limit is kept."""
    gradient = found["gradient"]
    limit = gradients * gradient + buckets * found["bucket"]
    beyond = (peak(found) - gradients * gradient) / found["bucket"]
    parts = [f"{found[key] / gradient:.3f}" for key in ("passes", "combine")]
    print(f"| {name} | {gradient / 1e6:.2f} | {found['bucket'] / 1e6:.2f} | {parts[0]} | {parts[1]} | "
          f"{gradients} + {beyond:.3f} buckets | {limit / gradient:.3f} |", flush=True)  # fmt: skip
    return peak(found) <= limit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the two smallest models, 2 processes")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        worker(options.worker)
        return 0
    figures: dict[str, float] = {}
    kept = []
    print(
        "| model, processes | gradient, MB | bucket, MB | passes | combine | peak | limit, gradients |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in QUICK if options.quick else CASES:
        alone = measured(case, "hamu-q")
        kept += [row(f"{case}, 1", alone, 2, 1), alone["moved"] == 0]
        figures |= {f"{case}": peak(alone) / alone["gradient"], f"{case}_moved": alone["moved"]}
        for processes in (2,) if options.quick else (2, 4):
            split = measured_with_split(case, processes)
            kept.append(row(f"{case}, {processes} split", split, 1, 2))
            figures[f"{case}_split{processes}"] = peak(split) / split["gradient"]
        without = measured(case, "gdiff")
        for method in WITH_ORIGINAL:
            found = measured(case, method)
            extra = max(found[key] - without[key] for key in ("passes", "combine"))
            kept.append(extra <= found["original"])
            figures[f"{case}_{method}_extra"] = extra / found["gradient"]
            print(f"| {case}, {method} beyond gdiff | | | | | {extra / found['gradient']:.4f} | "
                  f"{found['original'] / found['gradient']:.4f} |", flush=True)  # fmt: skip
    figures["evaluation"] = evaluation_peak()
    kept.append(figures["evaluation"] <= 0.75)
    print(f"an evaluation takes {figures['evaluation']:.3f} of a batch's logits")
    print_report("memory", {name: round(value, 4) for name, value in figures.items()})
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
