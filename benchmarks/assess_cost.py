"""Cost of `hamu assess` at its defaults, in epochs: its time over that of one forward and backward pass over all.

    python benchmarks/assess_cost.py [--quick]

A ResNet-8 on the bundled digits, a ResNet-20 on made-up images of 32 by 32 pixels, and a small Llama on made-up
records. The passes that it is compared with are the median of several, measured before and after, in the same process;
by the clock, and by the time that the process had of the processor, which others on the machine do not change much.
Below each, what a product with the Hessian costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _report import print_report
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hamu.assess import assess_model
from hamu.assess.curvature import hessian_product
from hamu.assess.gradients import AssessedModel
from hamu.core.forward import evaluating, without_tf32
from hamu.data import ImageData, collate, forget_class, pixel_statistics, read_images
from hamu.models import new_classifier


def seconds(work: Callable[[], Any]) -> np.ndarray:
    """Wall time and processor time."""
    begin = np.array([time.perf_counter(), time.process_time()])
    work()
    taken: np.ndarray = np.array([time.perf_counter(), time.process_time()]) - begin
    return taken


def epoch(model: Any, retain: Any, forget: Any, collate: Any, batch_size: int) -> None:
    """One forward and backward pass over all records of both sides."""
    assessed = AssessedModel(model, retain, forget, collate, batch_size)
    with evaluating(model), without_tf32():
        for side in ("retain", "forget"):
            for batch in assessed.batches(side):
                assessed.total(assessed.score(batch)).backward()
    model.zero_grad()


def measured(
    name: str, model: Any, retain: Any, forget: Any, collate: Any, batch_size: int
) -> dict[str, float]:
    """Epochs by the clock, of the processor, and by the count of passes."""

    def one() -> np.ndarray:
        return seconds(lambda: epoch(model, retain, forget, collate, batch_size))

    one()
    epochs = [one() for _ in range(3)]
    found: list[Any] = []
    took = seconds(
        lambda: found.append(
            assess_model(model, retain, forget, collate=collate, batch_size=batch_size)
        )
    )
    epochs += [one() for _ in range(3)]
    clock, processor = took / np.median(epochs, axis=0)
    found_figures = {
        name: float(clock),
        f"{name}_processor": float(processor),
        f"{name}_counted": found[0].epochs,
    }
    return found_figures | products(name, AssessedModel(model, retain, forget, collate, batch_size))


def products(name: str, assessed: AssessedModel) -> dict[str, float]:
    """Cost of a product with the Hessian of a full batch, the first and a further one through the same graph, over
    a forward and backward pass through that batch; of the processor, the median of five.
    """
    vector = torch.randn(sum(p.numel() for p in assessed.parameters))
    taken: dict[str, list[float]] = {"pass": [], "product": [], "next_product": []}
    with evaluating(assessed.model), without_tf32():
        batch = next(assessed.batches("retain"))
        for _ in range(6):
            product = hessian_product(
                lambda one: assessed.total(assessed.score(one)), [batch], assessed.parameters
            )
            taken["pass"].append(
                seconds(lambda: assessed.total(assessed.score(batch)).backward())[1]
            )
            for which in ("product", "next_product"):
                taken[which].append(seconds(partial(product, vector))[1])
    medians = {which: float(np.median(of[1:])) for which, of in taken.items()}  # the first warms up
    return {
        f"{name}_{which}": medians[which] / medians["pass"] for which in ("product", "next_product")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer records")
    options = parser.parse_args()
    set_seed(0)
    train = read_images("digits")
    statistics_ = pixel_statistics(train)
    problem = forget_class(train.normalized(*statistics_), None, 3)
    classifier = new_classifier("resnet8", train, *map(list, statistics_))
    figures = measured("resnet8_digits", classifier, problem.retain, problem.forget, collate, 128)
    count = 400 if options.quick else 2000
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 32, 32), generator=noise, dtype=torch.uint8)
    images = ImageData(
        pixels, torch.arange(count) % 10, tuple("0123456789"), "made up", torch.arange(count)
    )
    looks = [0.5] * 3, [0.3] * 3
    drawn = forget_class(images.normalized(*looks), None, "3")
    larger = new_classifier("resnet20", images, *looks)
    figures |= measured("resnet20_32px", larger, drawn.retain, drawn.forget, collate, 128)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    texts = [torch.randint(1, 4096, (64,)) for _ in range(100 if options.quick else 440)]
    records = [{"input_ids": ids, "labels": ids} for ids in texts]
    tenth = len(records) // 11
    figures |= measured("llama_5m", llama, records[tenth:], records[:tenth], collate, 8)
    for name, value in figures.items():
        print(f"{name}: {value:.2f} {'passes' if name.endswith('product') else 'epochs'}")
    print_report("assess_cost", figures)


if __name__ == "__main__":
    main()
