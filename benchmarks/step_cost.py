"""Time of a paired step over its floor.

Floor: two backward passes and the optimizer's step, no clipping, no combine. Ours: the same two passes collected
apart, clipped, weighed by HAMU-Q per tensor and combined, and the same optimizer's step. Both run in turn in one
process on one model, and the ratio is the median over pairs; the model is made anew every so often, because where
its tensors happen to lie in memory moves the ratio as much as the step does. Host synchronisations are counted in one
step, page faults over all steps. `_plain` is the least that any method of its kind does, over the floor: the passes
apart, three dot products of each tensor, one weighted sum of both gradients; no clipping, weighing or decision, and
float32 sums. `_means` is the time of a paired step with running means (`half_life`) over one without. `trainer` and `trainer_bf16` are the time of a run of `UnlearnTrainer` with its
defaults over one that checks and logs nothing, ResNet-20 on the CPU or the GPU that is there. Like the commands it lets glibc keep freed memory (`MALLOC_TRIM_THRESHOLD_` or another
`MALLOC_` variable in the environment prevents that).

    python benchmarks/step_cost.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from _report import print_report
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hamu import HamuQ, PairedGradients, StoppingRule, UnlearnConfig, UnlearnTrainer
from hamu.cli import keep_freed_memory
from hamu.models import SmallResNet, SmallResNetConfig

Loss = Callable[[], Tensor]
_ROUNDS = 4
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


def resnet20(batch: int) -> tuple[nn.Module, Loss, Loss]:
    model = SmallResNet(SmallResNetConfig(num_labels=10)).train()
    sides = [(torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))) for _ in range(2)]
    retain, forget = (
        lambda s=s: nn.functional.cross_entropy(model(s[0]).logits, s[1]) for s in sides
    )
    return model, retain, forget


def llama_5m() -> tuple[nn.Module, Loss, Loss]:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).train()
    sides = [torch.randint(0, 4096, (4, 64)) for _ in range(2)]
    retain, forget = (lambda s=s: model(input_ids=s, labels=s).loss for s in sides)
    return model, retain, forget


def steps(model: nn.Module, retain: Loss, forget: Loss) -> tuple[Callable[[], None], ...]:
    """(the floor's step, the paired step, the same with running means, the plain one), on one model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    method = HamuQ(0.5, constraint_mode="relative", stopping="off")
    pair = PairedGradients(model, method, max_grad_norm=1.0)
    judged = HamuQ(0.5, constraint_mode="relative", stopping=StoppingRule(patience=10**9))
    with_means = PairedGradients(model, judged, max_grad_norm=1.0, half_life=80)

    def floor() -> None:
        retain().backward()
        forget().backward()
        optimizer.step()
        optimizer.zero_grad()

    def paired(pair: PairedGradients) -> None:
        with pair.retain():
            retain().backward()
        with pair.forget():
            forget().backward()
        pair.combine()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        retain().backward()
        first = [p.grad for p in parameters]
        optimizer.zero_grad()
        forget().backward()
        second = [p.grad for p in parameters]
        for r, f in zip(first, second, strict=True):
            r, f = r.flatten(), f.flatten()
            torch.stack([r.dot(r), f.dot(f), r.dot(f)])
        torch._foreach_mul_(second, 0.5)
        torch._foreach_add_(second, first, alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()

    return floor, partial(paired, pair), partial(paired, with_means), plain


def ratios(floor: Callable[[], None], paired: Callable[[], None], pairs: int) -> list[float]:
    """time(paired) / time(floor) of each pair; the order within a pair alternates."""
    for _ in range(3):
        floor()
        paired()
    found = []
    for number in range(pairs):
        times = {}
        for step in (floor, paired) if number % 2 else (paired, floor):
            begin = time.perf_counter()
            step()
            times[step] = time.perf_counter() - begin
        found.append(times[paired] / times[floor])
    return found


def run_of_trainer(steps: int, bf16: bool, **settings: object) -> float:
    """Seconds that a run of so many steps trains."""
    torch.manual_seed(0)
    model = SmallResNet(SmallResNetConfig(num_labels=10))
    images, labels = torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
    items = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        args = UnlearnConfig(
            output_dir=folder,
            max_steps=steps,
            bf16=bf16,
            constraint=0.3,
            constraint_mode="relative",
            stopping="off",
            eval_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            **settings,  # type: ignore[arg-type]  # the two below
        )
        trainer = UnlearnTrainer(
            model, args, retain_dataset=items[:3584], forget_dataset=items[3584:]
        )
        with contextlib.redirect_stdout(None):
            return float(trainer.train().metrics["train_runtime"])


def cost_of_checks(steps: int, bf16: bool, rounds: int) -> float:
    """Time of a run with the defaults over that of one that checks and logs nothing."""
    bare = {"check_steps": 0, "logging_strategy": "no"}
    found = []
    for number in range(rounds):
        times = {}
        for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
            times[name] = run_of_trainer(steps, bf16, **(bare if name == "bare" else {}))
        found.append(times["ours"] / times["bare"])
    return statistics.median(found)


@contextlib.contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Collects the name of every call that would make the host wait for the device."""
    seen: list[str] = []
    originals = {name: getattr(Tensor, name) for name in _READS}

    def spy(name: str) -> Callable[..., object]:
        def call(self: Tensor, *args: object, **kwargs: object) -> object:
            seen.append(name)
            return originals[name](self, *args, **kwargs)

        return call

    for name in _READS:
        setattr(Tensor, name, spy(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    quick = parser.parse_args().quick
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    cases = {
        "resnet20_b128": (lambda: resnet20(128), 80),
        "resnet20_b16": (lambda: resnet20(16), 200),
        "llama_5m": (llama_5m, 100),
    }
    reads = 0
    for name, (build, pairs) in cases.items():
        found: list[float] = []
        of_means: list[float] = []
        of_plain: list[float] = []
        faults = taken = 0
        for _ in range(_ROUNDS):
            floor, paired, with_means, plain = steps(*build())
            floor(), paired()  # what stays is allocated once
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found += ratios(floor, paired, max(2, pairs // (10 if quick else 1) // _ROUNDS))
            faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            taken += 2 * max(2, pairs // (10 if quick else 1) // _ROUNDS)
            of_means += ratios(paired, with_means, max(2, pairs // (10 if quick else 1) // _ROUNDS))
            of_plain += ratios(floor, plain, max(2, pairs // (10 if quick else 1) // _ROUNDS))
        figures[name] = round(statistics.median(found), 4)
        figures[f"{name}_means"] = round(statistics.median(of_means), 4)
        figures[f"{name}_plain"] = round(statistics.median(of_plain), 4)
        figures[f"{name}_page_faults"] = round(faults / taken)
        with counted_reads() as of_floor:
            floor()
        with counted_reads() as of_paired:
            paired()
        reads = max(reads, len(of_paired) - len(of_floor))
        print(f"{name}: {figures[name]:.3f} of the floor")
    for name, bf16 in (("trainer", False), ("trainer_bf16", True)):
        figures[name] = round(cost_of_checks(20 if quick else 120, bf16, 1 if quick else 5), 4)
        print(f"{name}: {figures[name]:.3f} of a run without checks and log")
    figures["host_syncs"] = reads
    print_report("step_cost", figures)


if __name__ == "__main__":
    main()
