"""Measure how well the stopping criterion survives noisy batches (App. C and G.3 of the paper).

    python -m experiments stopping digits [cifar] [tofu] --cifar_dir CIFAR10 --tofu_dir TOFU

A model unlearns by HAMU-Q with the criterion off, once for each problem, batch size and seed; both sides are drawn
without replacement, pass by pass, as the trainer does. The learning rate of batches below 64 is proportional to their
size (linear scaling, Goyal et al. 2017). Every step records the headroom of its batches
and of the `Population`; every few steps the headroom of all data, which defines the right step to stop. `judge` replays
the criterion on these records.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel, set_seed

from experiments.problems import Problem, cifar, original, tofu
from hamu.cli.demo import TRAIN, Scenario
from hamu.core.forward import predict_logits
from hamu.core.gram import PairGram
from hamu.core.gram_meter import GramMeter
from hamu.core.methods import HamuQ
from hamu.core.objectives import CrossEntropy, Scored
from hamu.core.population import Population, judged
from hamu.data import collate, forget_class
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.tasks import choose_task
from hamu.unlearning.trainer import TrainConfig, train_original
from hamu.unlearning.trainer.logs import silent

BATCH_SIZES = (8, 16, 32, 64, 128, 512, 2048)
SCALED_BELOW = 64  # records; smaller batches have smaller rates, and more steps
HALF_LIFE = 2560  # records
EVERY = 12  # steps between two gradients over all data
FURTHER = 60  # steps of a run after the criterion was first met on all data
MOST = 240  # steps of a run in which it is not met
TOLERANCE = 0.2  # of the right step; at least 5 steps
CLOSE = 0.15  # of 1: the headroom over all data at the step of a stop

Batch = dict[str, Tensor]
Series = dict[str, list[float]]


class Sides:
    """A model with all its retain and all its forget data."""

    def __init__(
        self, model: PreTrainedModel, data: list[Any], collator: Callable[..., Any]
    ) -> None:
        self.model, self.data, self._collator = model.eval(), data, collator
        self.sizes = [len(side) for side in data]
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient(self, side: int, rows: Tensor, count: int) -> tuple[list[Tensor], int]:
        """Gradient of the summed loss of these records over `count`, or over their own count."""
        items = self.data[side].__getitems__(rows.tolist())
        batch: Batch = items if isinstance(items, dict) else self._collator(items)
        scored = Scored.of(predict_logits(self.model, batch), batch["labels"])
        loss = CrossEntropy().total(scored, None) / (count or len(scored.labels))
        return list(torch.autograd.grad(loss, self.parameters)), len(scored.labels)

    def full(self, side: int) -> list[Tensor]:
        """Gradient of the mean loss of all records of a side, in pieces."""
        found = [torch.zeros_like(p) for p in self.parameters]
        count = 0
        for rows in torch.arange(self.sizes[side]).split(100):
            grads, of_piece = self.gradient(side, rows, 1)
            torch._foreach_add_(found, grads)
            count += of_piece
        torch._foreach_div_(found, float(count))
        return found


class Passes:
    """Rows of one side without replacement, pass by pass."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count, self._generator = count, generator
        self._waiting = torch.empty(0, dtype=torch.int64)

    def draw(self, size: int) -> Tensor:
        """The next rows, each once."""
        while len(self._waiting) < size:
            further = torch.randperm(self._count, generator=self._generator)
            self._waiting = torch.cat([self._waiting, further])
        drawn, self._waiting = self._waiting.tensor_split([size])
        return torch.tensor(sorted({*drawn.tolist()}))


def record(sides: Sides, method: HamuQ, size: int, rate: float, scale: float, seed: int) -> Series:
    """Headrooms of one run, step by step; that of all data is interpolated between measurements."""
    parameters = sides.parameters
    meter = GramMeter(parameters, range(len(parameters)))
    population = Population(parameters, range(len(parameters)), len(parameters), HALF_LIFE / size,
                            tuple(max(1.0, n / size) for n in sides.sizes))  # fmt: skip
    optimizer = torch.optim.SGD(parameters, lr=rate * scale)
    generator = torch.Generator().manual_seed(seed)
    passes = [Passes(n, generator) for n in sides.sizes]
    every, further, most = (round(steps / scale) for steps in (EVERY, FURTHER, MOST))
    found: Series = {name: [] for name in ("batch", "population", "error")}
    full: dict[int, float] = {}
    end = most
    while (step := len(found["batch"])) < end:
        if step % every == 0:
            full[step] = headroom(method, meter.measure(sides.full(0), sides.full(1)))
            if end == most and full[step] < 1:
                end = min(most, step + further)
        grads = [sides.gradient(side, of.draw(size), 0)[0] for side, of in enumerate(passes)]
        gram = meter.measure(*grads)
        found["batch"].append(headroom(method, gram))
        population.add(grads[0], grads[1], gram, None)
        for name, value in zip(("population", "error"), estimate(method, population), strict=True):
            found[name].append(value)
        clip = gram.clip_factors(1.0)
        weights = method.weigh(gram.scaled(*clip))
        a, b = (weights.retain * clip[0]).tolist(), (weights.forget * clip[1]).tolist()
        for p, r, f, w, v in zip(parameters, *grads, a, b, strict=True):
            p.grad = w * r + v * f
        optimizer.step()
    steps = range(len(found["batch"]))
    found["full"] = np.interp(steps, list(full), list(full.values())).tolist()
    return {key: [round(value, 4) for value in values] for key, values in found.items()}


def estimate(method: HamuQ, population: Population) -> tuple[float, float]:
    """Headroom and its error after a step; both infinite without a new estimate."""
    status = population.judge(population.sums(lambda numbers: numbers), method, 1.0)
    return (math.inf, math.inf) if status is None else (at_least_one(status), status.error)


def at_least_one(status: Any) -> float:
    """Headroom of a status on the host or the device, at least 1 where no step has a price."""
    found = (
        float(status.free_limit / status.clipped_demand) if status.clipped_demand > 0 else math.inf
    )
    return found if status.conflict else max(found, 1.0)


def headroom(method: HamuQ, gram: PairGram) -> float:
    """Headroom of clipped gradients, at least 1 where no step has a price."""
    return at_least_one(method.weigh(gram.scaled(*gram.clip_factors(1.0))).constraint)


def digits(seed: int, rho: float, work: Path) -> Sides:
    """The demo's original model, and a class to forget at this overlap."""
    set_seed(seed)
    model, train = Scenario("image", seed).new_model()
    config = TrainConfig(output_dir=str(work), seed=seed, disable_tqdm=True, **TRAIN["image"])
    model = train_original(model, train, config)
    problem = forget_class(train, None, 3, rho, seed)
    return Sides(model, [problem.retain, problem.forget], collate)


def some_of(problem: Problem, most: tuple[int, int], seed: int, work: Path) -> Sides:
    """The original model of a larger problem, and so many random records of both sides."""
    words = (*problem.data, *problem.forget)
    named = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    task = choose_task(settings_of("unlearn", named | {"model": original(problem, work)}), silent())
    found = task.problem()
    model = task.start_model(str(task.run.model))
    found = task.fitted_problem(model, found)
    generator = torch.Generator().manual_seed(seed)
    some = []
    for side, n in zip((found.retain, found.forget), most, strict=True):
        rows = torch.randperm(len(side), generator=generator)[:n].tolist()
        if "input_ids" in side[0]:  # texts of like length together need little padding
            lengths = {row: len(side[row]["input_ids"]) for row in rows}
            rows.sort(key=lengths.__getitem__)
        some.append(Subset(side, rows))
    return Sides(model, some, collate)


def problems(options: argparse.Namespace) -> dict[str, tuple[float, Callable[[int], Sides]]]:
    """Learning rate and maker of each problem by name."""
    work = options.work_dir
    found: dict[str, tuple[float, Callable[[int], Sides]]] = {}
    for name in options.data:
        if name == "digits":
            for rho in (0.75, 1.0):
                found[f"digits {rho:g}"] = 5e-3, partial(digits, rho=rho, work=work)
        elif name == "cifar":
            problem = cifar(work, Path(options.cifar_dir))[-1]
            found["cifar"] = 5e-3, partial(some_of, problem, (1000, 500), work=work)
        else:
            problem = tofu(work, Path(options.tofu_dir))[0]
            found["tofu"] = 5e-2, partial(some_of, problem, (400, 200), work=work)
    return found


def first(values: list[float], below: float = 1.0) -> int | None:
    """First step whose headroom is below the limit."""
    return next((step for step, value in enumerate(values) if value < below), None)


def stops(run: Series) -> dict[str, int | None]:
    """The step at which each rule stops, and the right one."""
    by_means = [judged(h, e) for h, e in zip(run["population"], run["error"], strict=True)]
    return {name: first(run[name]) for name in ("full", "batch")} | {"population": first(by_means)}


def judge(runs: list[Series], rule: str) -> dict[str, Any]:
    """Shares of the runs that should stop, by when they do, and of those that should not but do."""
    pairs = [(found["full"], found[rule]) for found in map(stops, runs)]
    due = [(right, stop) for right, stop in pairs if right is not None]
    delays = [(right, stop - right) for right, stop in due if stop is not None]
    left = [
        run["full"][stop]
        for run, (right, stop) in zip(runs, pairs, strict=True)
        if right is not None and stop is not None
    ]
    within = [abs(delay) <= max(5, TOLERANCE * right) for right, delay in delays]
    return {
        "due": len(due),
        "within": sum(within),
        "never": len(due) - len(delays),
        "delay": median(delay for _, delay in delays) if delays else None,
        "close": sum(abs(h - 1.0) <= CLOSE for h in left),
        "headroom": [min(left), median(left), max(left)] if left else None,
        "false": sum(stop is not None for right, stop in pairs if right is None),
        "not due": len(pairs) - len(due),
    }


def demand(
    sides: Sides, method: HamuQ, sizes: list[int], seed: int
) -> dict[int, dict[str, list[float]]]:
    """By batch size, means over 40 batches at the start, by each batch's Gram and by that of all data.

    The share of the demand on all forget data that comes, the change of the loss on all retain data and the length
    of the step, each per unit of learning rate and for gradients over all data clipped to norm 1.
    """
    parameters = sides.parameters
    meter = GramMeter(parameters, range(len(parameters)))
    whole = [sides.full(0), sides.full(1)]
    full = meter.measure(*whole)
    clip = full.clip_factors(1.0)
    limits = method.weigh(full.scaled(*clip)).constraint
    assert limits is not None
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for size in sizes:
        rows = []
        for _ in range(40):
            drawn = [torch.randperm(n, generator=generator)[:size] for n in sides.sizes]
            grads = [sides.gradient(side, rows, 0)[0] for side, rows in enumerate(drawn)]
            own = meter.measure(*grads)
            products = [[meter.measure(g, w).dot for w in whole] for g in grads]
            for gram in (own, full):
                factors = gram.clip_factors(1.0)
                weights = method.weigh(gram.scaled(*factors))
                a, b = weights.retain * factors[0], weights.forget * factors[1]
                changes = [
                    -(a * products[0][i] + b * products[1][i]).sum() * clip[i] for i in (0, 1)
                ]
                length = a * a * own.retain_sq + 2 * a * b * own.dot + b * b * own.forget_sq
                kept = changes[1] / limits.clipped_demand
                rows.append(torch.stack([kept, changes[0], length.sum().sqrt()]))
        means = torch.stack(rows).view(40, 2, 3).mean(0).tolist()
        found[size] = dict(zip(("batch", "all"), means, strict=True))
    return found


def main(argv: list[str]) -> None:
    """Record what was not recorded yet; write and print the tables."""
    parser = argparse.ArgumentParser(prog="experiments stopping", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("data", nargs="+", choices=("digits", "cifar", "tofu"))
    parser.add_argument(
        "--cifar_dir", help="folder with train.parquet and test.parquet of CIFAR-10"
    )
    parser.add_argument("--tofu_dir", help="folder with full.json, forget10.json, ... of TOFU")
    parser.add_argument("--constraint", type=float, default=0.5, help="share of what steps allow")
    parser.add_argument("--demand", action="store_true", help="measure weights of all data instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=(2, 3, 4, 5, 12, 13))
    parser.add_argument("--sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--work_dir", type=Path, default=Path("runs/stopping"))
    parser.add_argument("--output", type=Path, default=Path("docs/results/stopping.json"))
    options = parser.parse_args(argv)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    suffix = _suffix(options)
    method = HamuQ(options.constraint, constraint_mode="relative")
    for seed, (name, (rate, make)) in product(options.seeds, problems(options).items()):
        sides = make(seed)
        start = copy.deepcopy(sides.model.state_dict())
        if options.demand:
            print(name, seed, demand(sides, method, options.sizes, seed), flush=True)
        for size in () if options.demand else options.sizes:
            path = options.work_dir / f"{name}-{size}-{seed}{suffix}.json"
            if not path.exists():
                sides.model.load_state_dict(start)
                scale = min(1.0, size / SCALED_BELOW)
                run = record(sides, method, size, rate, scale, seed)
                path.write_text(json.dumps(run))
                print(path.stem, stops(run), flush=True)
    if not options.demand:
        table(options)


def _suffix(options: argparse.Namespace) -> str:
    return "" if options.constraint == 0.5 else f"-{options.constraint:g}"


def table(options: argparse.Namespace) -> None:
    """Write the figures as JSON; print them as Markdown."""
    found: dict[str, Any] = {}
    for data in options.data:
        for size in options.sizes:
            runs = [
                json.loads(path.read_text())
                for seed in options.seeds
                for path in options.work_dir.glob(f"{data}*-{size}-{seed}{_suffix(options)}.json")
            ]
            if runs:
                rules = ("batch", "population")
                found[f"{data}/{size}{_suffix(options)}"] = {r: judge(runs, r) for r in rules}
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps(known | found, indent=1) + "\n")
    print("\n".join(row(name, by_rule) for name, by_rule in found.items()))


def row(name: str, by_rule: dict[str, Any]) -> str:
    """Line of the table: runs that should stop; in time, close, never and the delay by each rule."""
    cells = [
        f"{c['within']}, {c['close']}, {c['never']}, "
        + ("-" if c["delay"] is None else f"{c['delay']:+g}")
        for c in by_rule.values()
    ]
    return f"| {name} | {by_rule['batch']['due']} | {' | '.join(cells)} |"
