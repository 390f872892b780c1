"""Kernels that `combine()` launches, counted on a device of our own: by tensors, never by elements.

    python benchmarks/launches.py [--quick] [--device cuda]

The device (`_counted.py`) follows a GPU's rules on the host's memory and counts; nothing is timed. With a GPU its profiler
counts, and bytes are not known. A step of HAMU-Q
combines gradients of one tensor of 10^6, 10^7 and 10^8 elements (--quick: up to 10^7), in float32 and bfloat16, and
of 10 and 1,000 tensors. Figures:

    growth_with_elements     launches for the largest tensor over those for the smallest; limit 1.0
    host_reads               the most that a step reads; limit 1
    per_tensor_small_DTYPE   launches for one more tensor of 4,096 elements
    per_tensor_large_DTYPE   launches for one more tensor of 65,536 elements
    fixed                    launches for one small tensor: the method's own
    bytes_DTYPE              bytes that kernels read and write for the largest tensor, over those of both gradients
"""

import argparse

import _counted
import _gpu
import torch
from _counted import Count
from _report import print_report
from torch import nn

from hamu import HamuQ, PairedGradients

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def combined(sizes: list[int], dtype: torch.dtype, device: torch.device) -> Count:
    """Work of the second combine of gradients of these sizes; the first one makes what is kept."""
    generator = torch.Generator().manual_seed(0)
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes)
    model = parameters.to(device)
    counting = _gpu.counting if device.type == "cuda" else _counted.counting
    pair = PairedGradients(model, HamuQ(0.3, constraint_mode="relative", stopping="off"))
    drawn = torch.randn(2, max(sizes), dtype=dtype, generator=generator)
    for _ in range(2):
        for side, values in zip(("retain", "forget"), drawn, strict=True):
            with getattr(pair, side)():
                for parameter in model:
                    parameter.grad = values[: parameter.numel()].to(device)
        with counting() as count:
            step = pair.combine()
        assert step.decision == "step", step.reason
    return count


def main() -> None:
    """Count, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=(_counted.NAME, _gpu.NAME), default=_counted.NAME)
    options = parser.parse_args()
    largest = 10**7 if options.quick else 10**8
    present = _gpu.present if options.device == _gpu.NAME else _counted.present
    figures: dict[str, float] = {"growth_with_elements": 0.0, "host_reads": 0}
    with present() as device:
        for name, dtype in DTYPES.items():
            counts = {n: combined([n], dtype, device) for n in (10**6, 10**7, largest)}
            growth = max(count.total for count in counts.values()) / counts[10**6].total
            figures["growth_with_elements"] = max(figures["growth_with_elements"], growth)
            if options.device == _counted.NAME:
                of_both = 2 * largest * dtype.itemsize
                figures[f"bytes_{name}"] = round(counts[largest].moved / of_both, 2)
            for kind, size in (("small", 1 << 12), ("large", 1 << 16)):
                few, many = (combined([size] * count, dtype, device) for count in (10, 1000))
                figures[f"per_tensor_{kind}_{name}"] = round((many.total - few.total) / 990, 2)
                counts |= {-1: few, -2: many}
            reads = max(len(count.reads) for count in counts.values())
            figures["host_reads"] = max(figures["host_reads"], reads)
        figures["fixed"] = combined([1 << 12], torch.float32, device).total
    print_report("launches", figures)


if __name__ == "__main__":
    main()
