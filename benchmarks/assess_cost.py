"""What `hamu assess` costs at its defaults, in epochs: its time over that of one forward and backward pass over all.

    python benchmarks/assess_cost.py [--quick]

A ResNet-8 on the bundled digits, and a small Llama on made-up records. The passes that it is compared with are the
median of several, measured before and after, in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import print_report
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hamu.assess import assess
from hamu.assess.problem import Problem
from hamu.data import TextCollator, forget_class, pixel_statistics, read_images
from hamu.models import new_classifier
from hamu.training.original import collate


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def epoch(model: Any, retain: Any, forget: Any, collate: Any, batch_size: int) -> None:
    """One forward and backward pass over all records of both sides."""
    problem = Problem(model, retain, forget, collate, batch_size)
    with problem.untouched():
        for side in ("retain", "forget"):
            for batch in problem.batches(side):
                problem.total(problem.score(batch)).backward()


def measured(model: Any, retain: Any, forget: Any, collate: Any, batch_size: int) -> tuple[float, float]:
    """Epochs by the clock, and by the count of passes."""

    def one() -> float:
        return seconds(lambda: epoch(model, retain, forget, collate, batch_size))

    one()
    epochs = [one() for _ in range(3)]
    found: list[Any] = []
    took = seconds(lambda: found.append(assess(model, retain, forget, collate=collate, batch_size=batch_size)))
    epochs += [one() for _ in range(3)]
    return took / statistics.median(epochs), found[0].epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer records")
    options = parser.parse_args()
    set_seed(0)
    train = read_images("digits")
    statistics_ = pixel_statistics(train)
    problem = forget_class(train.normalized(*statistics_), None, 3)
    classifier = new_classifier("resnet8", train, *map(list, statistics_))
    figures = dict(
        zip(("resnet8_digits", "resnet8_counted"), measured(classifier, problem.retain, problem.forget, collate, 128),
            strict=True)
    )  # fmt: skip
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
    )
    texts = [torch.randint(1, 4096, (64,)) for _ in range(100 if options.quick else 440)]
    records = [{"input_ids": ids, "labels": ids} for ids in texts]
    tenth = len(records) // 11
    found = measured(llama, records[tenth:], records[:tenth], TextCollator(pad_token_id=0), 8)
    figures |= dict(zip(("llama_5m", "llama_counted"), found, strict=True))
    for name, value in figures.items():
        print(f"{name}: {value:.2f} epochs")
    print_report("assess_cost", figures)


if __name__ == "__main__":
    main()
