"""Time to measure and combine two gradients, over the least that the memory's bandwidth allows.

    python benchmarks/combine_bandwidth.py [--quick] [--threads N] [--device cuda]

Two gradients of a Llama of 111 M parameters in 110 tensors. Floor: the Gram must read both once, the combine must read
both and write one, so 5 bytes move for each byte of a gradient; a copy of an array as large as a gradient moves 2, and
gives the bandwidth. Ours: `pair.combine()`, clipping and weights included. A copy comes before and after each combine,
which is held against the mean of the two; the ratio is the median over all turns.

    hamu-q, gdiff       float32 in one process. Limit 1.5; exits with 1 if one of them exceeds it
    hamu-q_parts        float32 as split and sharded processes measure their parts: all sums in float64
    hamu-q_bf16         bfloat16 in one process, over the floor of a bfloat16 copy
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from _models import new_llama
from _report import print_report
from torch import nn

from hamu import HamuQ, Method, PairedGradients, build_method
from hamu.core.distributed import Layout

LIMIT = 1.5
LIMITED = ("hamu-q", "gdiff")
HAMU_Q = HamuQ(0.5, constraint_mode="relative", stopping="off")


class Parts(Layout):
    """Everything is here, and measured as if it were not."""

    is_whole = False


class Gradients:
    """Both sides' gradients of one model, at right angles, and arrays to copy. A combine uses the retain side up."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._model = nn.Module.to(new_llama(32000, 768, 12), device, dtype)
        self._parameters = list(self._model.parameters())
        self._fresh, self._forget = (
            [torch.randn_like(p) for p in self._parameters] for _ in range(2)
        )
        self._retain = [torch.empty_like(p) for p in self._parameters]
        self._source = torch.randn(
            sum(p.numel() for p in self._parameters), device=device, dtype=dtype
        )
        self._target = torch.empty_like(self._source)

    def pair(self, method: Method, in_parts: bool = False) -> PairedGradients:
        """Pair that combines them."""
        pair = PairedGradients(self._model, method)
        if in_parts:
            pair.use(Parts(pair.parameters, pair.block_of))
        return pair

    def collect(self, pair: PairedGradients) -> None:
        """As two backward passes would leave them."""
        for used, fresh in zip(self._retain, self._fresh, strict=True):
            used.copy_(fresh)
        for context, grads in ((pair.retain, self._retain), (pair.forget, self._forget)):
            with context():
                for parameter, grad in zip(self._parameters, grads, strict=True):
                    parameter.grad = grad

    def copy(self) -> None:
        """An array as large as a gradient."""
        self._target.copy_(self._source)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time until the last kernel is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def ratios(
    gradients: Gradients, pairs: dict[str, PairedGradients], turns: int
) -> dict[str, list[float]]:
    """Each pair's times over the floor."""
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in range(-1, turns):  # the first warms up
        for name, pair in pairs.items():
            device = pair.parameters[0].device
            gradients.collect(pair)
            before, combine, after = (
                seconds(work, device) for work in (gradients.copy, pair.combine, gradients.copy)
            )
            if turn >= 0:
                found[name].append(combine / (5 / 2 * (before + after) / 2))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the turns")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU (default 2)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default cpu)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, turns = torch.device(options.device), 5 if options.quick else 25
    single = Gradients(device, torch.float32)
    pairs = {
        "hamu-q": single.pair(HAMU_Q),
        "gdiff": single.pair(build_method("gdiff")),
        "hamu-q_parts": single.pair(HAMU_Q, in_parts=True),
    }
    found = ratios(single, pairs, turns)
    del single, pairs
    half = Gradients(device, torch.bfloat16)
    found |= ratios(half, {"hamu-q_bf16": half.pair(HAMU_Q)}, turns)
    figures = {name: round(statistics.median(values), 3) for name, values in found.items()}
    for name, values in found.items():
        low, _, high = statistics.quantiles(values)
        print(f"{name}: {figures[name]:.3f} of the floor (quartiles {low:.3f} and {high:.3f})")
    print_report("combine_bandwidth", figures)
    return 0 if all(figures[name] <= LIMIT for name in LIMITED) else 1


if __name__ == "__main__":
    sys.exit(main())
