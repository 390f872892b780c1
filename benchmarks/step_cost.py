"""Time of a paired step over its floor.

Floor: two backward passes and the optimizer's step, no clipping, no combine. Ours: the same two passes collected
apart, clipped, weighed by HAMU-Q per tensor and combined, and the same optimizer's step. Both run in turn in one
process on one model, and the ratio is the median over pairs; the model is made anew every so often, because where
its tensors happen to lie in memory moves the ratio as much as the step does. Page faults are counted over all steps.
`_plain` is the least that any method of its kind does, over the floor: the passes apart, three dot products of each
tensor, one weighted sum of both gradients; no clipping, weighing or decision, and float32 sums. `_means` is the time
of a paired step with running means over one without, in which 2,560 records count half, as by default; `_means_of_2`
that of a step of two micro-batches.
`trainer` and `trainer_bf16` are the time of a run of `UnlearnTrainer` with its defaults over one that checks and logs
nothing, ResNet-20 on the CPU or the GPU that is there. Like the commands it lets glibc keep freed memory (`MALLOC_TRIM_THRESHOLD_` or another `MALLOC_` variable in
the environment prevents that).

    python benchmarks/step_cost.py [--quick] [--device cuda] [--cases llama_1b_bf16 trainer]

On a GPU also the Llama of 1.1 B parameters of docs/scaling.md, `_memory`, the peak of a paired step above that of the
floor in gradients, and `_host_syncs`, how often more the host waits for it in a paired step, as CUDA warns.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _gpu
import torch
from _report import print_report
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hamu import HamuQ, PairedGradients, StoppingRule, UnlearnConfig, UnlearnTrainer
from hamu.cli import keep_freed_memory
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.models.language import AdapterSettings, with_adapter

Loss = Callable[[], Tensor]
_ROUNDS = 4
_LONG = ("b5000", "float32", "bf16", "lora")  # ends of the names of cases that have one round


def resnet20(batch: int, device: torch.device) -> tuple[nn.Module, Loss, Loss]:
    model = SmallResNet(SmallResNetConfig(num_labels=10)).train().to(device)
    sides = [
        (torch.randn(batch, 3, 32, 32).to(device), torch.randint(0, 10, (batch,)).to(device))
        for _ in range(2)
    ]
    retain, forget = (
        lambda s=s: nn.functional.cross_entropy(model(s[0]).logits, s[1]) for s in sides
    )
    return model, retain, forget


def llama_5m(device: torch.device) -> tuple[nn.Module, Loss, Loss]:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).train().to(device)
    return model, *losses_of(model, (4, 64), device)


def llama_1b(
    dtype: torch.dtype, adapter: bool, device: torch.device
) -> tuple[nn.Module, Loss, Loss]:
    """As the plan of docs/scaling.md has it: 4,096 tokens of each side, checkpointed."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.set_float32_matmul_precision("high")  # TF32
    torch.set_default_dtype(dtype)
    with device:
        model = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapter:
        model = with_adapter(model, AdapterSettings(rank=8, targets="q_proj,v_proj")).train()
    return model, *losses_of(model, (4, 1024), device)


def losses_of(model: nn.Module, shape: tuple[int, int], device: torch.device) -> tuple[Loss, Loss]:
    """Of both sides, on random texts."""
    sides = [torch.randint(0, 4096, shape).to(device) for _ in range(2)]

    def loss(side: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=side, labels=side).loss
        return found

    return partial(loss, sides[0]), partial(loss, sides[1])


def steps(
    model: nn.Module, retain: Loss, forget: Loss, half_life: float
) -> tuple[Callable[[], None], ...]:
    """(the floor's step, the paired step, the same with running means, the plain one), on one model; then the paired
    step of two micro-batches without and with running means.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    method = HamuQ(0.5, constraint_mode="relative", stopping="off")
    pair = PairedGradients(model, method, max_grad_norm=1.0)
    stopping = HamuQ(0.5, constraint_mode="relative", stopping=StoppingRule(patience=10**9))
    with_means = PairedGradients(model, stopping, max_grad_norm=1.0, half_life=half_life)

    def floor() -> None:
        retain().backward()
        forget().backward()
        optimizer.step()
        optimizer.zero_grad()

    def paired(pair: PairedGradients, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
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
        first = [p.grad for p in parameters if p.grad is not None]
        optimizer.zero_grad()
        forget().backward()
        second = [p.grad for p in parameters if p.grad is not None]
        for r, f in zip(first, second, strict=True):
            r, f = r.flatten(), f.flatten()
            torch.stack([r.dot(r), f.dot(f), r.dot(f)])
        torch._foreach_mul_(second, 0.5)
        torch._foreach_add_(second, first, alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()

    step, judged = partial(paired, pair), partial(paired, with_means)
    return floor, step, judged, plain, partial(step, 2), partial(judged, 2)


def finish(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(
    floor: Callable[[], None], paired: Callable[[], None], pairs: int, device: torch.device
) -> list[float]:
    """time(paired) / time(floor) of each pair; the order within a pair alternates."""
    for _ in range(3):
        floor()
        paired()
    found = []
    for number in range(pairs):
        times = {}
        for step in (floor, paired) if number % 2 else (paired, floor):
            finish(device)
            begin = time.perf_counter()
            step()
            finish(device)
            times[step] = time.perf_counter() - begin
        found.append(times[paired] / times[floor])
    return found


def run_of_trainer(steps: int, bf16: bool, **settings: Any) -> float:
    """Seconds that a run of so many steps trains."""
    torch.manual_seed(0)
    model = SmallResNet(SmallResNetConfig(num_labels=10))
    images, labels = torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
    items: Any = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
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
            **settings,
        )
        trainer = UnlearnTrainer(
            model, args, retain_dataset=items[:3584], forget_dataset=items[3584:]
        )
        with contextlib.redirect_stdout(None):
            return float(trainer.train().metrics["train_runtime"])


def cost_of_checks(steps: int, bf16: bool, rounds: int) -> float:
    """Time of a run with the defaults over that of one that checks and logs nothing."""
    bare: dict[str, Any] = {"check_steps": 0, "logging_strategy": "no"}
    run_of_trainer(2, bf16)  # kernels are compiled once
    found = []
    for number in range(rounds):
        times = {}
        for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
            times[name] = run_of_trainer(steps, bf16, **(bare if name == "bare" else {}))
        found.append(times["ours"] / times["bare"])
    return statistics.median(found)


def memory_of(step: Callable[[], None], device: torch.device) -> int:
    """The most bytes of a GPU that are taken during a step."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device)


def cases_on(
    device: torch.device,
) -> dict[str, tuple[Callable[[], tuple[nn.Module, Loss, Loss]], int, int]]:
    """Maker of a model and both losses of each case, its batch size, and the pairs of steps to time."""
    cases: dict[str, tuple[Callable[[], tuple[nn.Module, Loss, Loss]], int, int]] = {
        "resnet20_b128": (partial(resnet20, 128, device), 128, 80),
        "resnet20_b16": (partial(resnet20, 16, device), 16, 200),
        "llama_5m": (partial(llama_5m, device), 4, 100),
    }
    if device.type == "cuda":
        cases |= {
            "resnet20_b5000": (partial(resnet20, 5000, device), 5000, 40),
            "llama_1b_float32": (partial(llama_1b, torch.float32, False, device), 4, 8),
            "llama_1b_bf16": (partial(llama_1b, torch.bfloat16, False, device), 4, 12),
            "llama_1b_lora": (partial(llama_1b, torch.bfloat16, True, device), 4, 12),
        }
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--device", default="cpu", help="such as cuda (default cpu)")
    parser.add_argument("--cases", nargs="+", help="these alone (default all)")
    options = parser.parse_args()
    quick, device = options.quick, torch.device(options.device)
    cases, trainers = cases_on(device), {"trainer": False, "trainer_bf16": True}
    chosen = options.cases or [*cases, *trainers]
    if unknown := [name for name in chosen if name not in cases and name not in trainers]:
        parser.error(f"no case {unknown[0]}; there are {', '.join([*cases, *trainers])}")
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    for name in (name for name in cases if name in chosen):
        build, batch, pairs = cases[name]
        found: list[float] = []
        of_means: list[float] = []
        of_two: list[float] = []
        of_plain: list[float] = []
        faults = taken = 0
        rounds = 1 if name.endswith(_LONG) else _ROUNDS
        turns = max(2, pairs // (10 if quick else 1) // rounds)
        for _ in range(rounds):
            model, retain, forget = build()
            half_life = UnlearnConfig.stopping_records / batch
            floor, paired, with_means, plain, of_2, means_of_2 = steps(
                model, retain, forget, half_life
            )
            floor(), paired()  # what stays is allocated once
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found += ratios(floor, paired, turns, device)
            faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            taken += 2 * turns
            of_means += ratios(paired, with_means, turns, device)
            of_two += ratios(of_2, means_of_2, turns // 2, device)
            of_plain += ratios(floor, plain, turns, device)
        figures[name] = round(statistics.median(found), 4)
        figures[f"{name}_means"] = round(statistics.median(of_means), 4)
        figures[f"{name}_means_of_2"] = round(statistics.median(of_two), 4)
        figures[f"{name}_plain"] = round(statistics.median(of_plain), 4)
        if device.type == "cuda":
            gradient = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            more = memory_of(paired, device) - memory_of(floor, device)
            figures[f"{name}_memory"] = round(more / gradient, 4)
            begin = time.perf_counter()
            floor()
            finish(device)
            figures[f"{name}_floor_ms"] = round(1e3 * (time.perf_counter() - begin), 2)
            with _gpu.counting() as of_floor:
                floor()
            with _gpu.counting() as of_paired:
                paired()
            figures[f"{name}_host_syncs"] = len(of_paired.reads) - len(of_floor.reads)
        else:
            figures[f"{name}_page_faults"] = round(faults / taken)
        print(f"{name}: {figures[name]:.3f} of the floor", flush=True)
        del model, retain, forget, floor, paired, with_means, plain, of_2
    for name in (name for name in trainers if name in chosen):
        turns, rounds = (20, 1) if quick else (120, 5)
        figures[name] = round(cost_of_checks(turns, trainers[name], rounds), 4)
        print(f"{name}: {figures[name]:.3f} of a run without checks and log", flush=True)
    print_report("step_cost", figures)


if __name__ == "__main__":
    main()
