"""The promise under several optimizers: first-order gain over demand, and the end of each run.

    python examples/guarantee.py digits [--output docs/results]
    python examples/guarantee.py tofu --data_dir TOFU --model runs/tofu-original/model

For SGD, momentum, AdamW and Adafactor, at equal steps and batches: the method as it is, with correct_steps=True (the
step corrected along g_c), and, for AdamW, the problem solved in the optimizer's own metric: with P the diagonal that
AdamW applies (from its state before the step) the substitution u = P^(-1/2)Δw gives the same closed form, with Gram
entries g'Pg; the momentum's part of the step is known and shifts the demand. The demand is either the same as without
the metric ("metric") or the same share of what the metric allows ("metric, share"). Writes guarantee.json and
guarantee-tables.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import set_seed

from hamu import HamuQ, HamuU, PairedGradients, StepGuard
from hamu.cli.demo import TRAIN, Scenario
from hamu.core.forward import predict_logits
from hamu.core.gram_meter import GramMeter
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import (
    PairedDataset,
    UnlearningData,
    collate,
    encode,
    forget_data,
    read_text,
)
from hamu.evaluation import predict, predict_tokens
from hamu.models.language import load_language_model, load_tokenizer
from hamu.unlearning.trainer import TrainConfig, train_original

Make = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.01),
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
}
METHODS = {"hamu-q": HamuQ, "hamu-u": HamuU}


class InMetric:
    """HAMU in AdamW's metric: weighs √P·g_r and √P·g_f, so that the step -ηP(...) is the best one of its P-length."""

    def __init__(
        self, pair: PairedGradients, optimizer: torch.optim.Optimizer, by_share: bool
    ) -> None:
        self.pair, self.optimizer, self.by_share = pair, optimizer, by_share
        self.meter = GramMeter(pair.parameters, pair.block_of)
        self.blocks = torch.tensor(pair.block_of)

    def reweigh(self, step: Any) -> None:
        """Put the metric's g* into `.grad`."""
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        metric, momentum = [], []
        for p in self.pair.parameters:
            state = self.optimizer.state.get(p, {})
            if not state:
                return  # the first step: no state yet, g* stays as it is
            t = int(state["step"]) + 1
            spread = (state["exp_avg_sq"] / (1 - beta2 ** (t - 1))).sqrt() + group["eps"]
            metric.append(1.0 / spread)
            momentum.append(state["exp_avg"])
        fresh = (1 - beta1) / (1 - beta1**t)
        stale = beta1 / (1 - beta1**t)
        sides = {}
        for side, clip in zip(("retain", "forget"), step.clip, strict=True):
            sides[side] = [g * clip.to(g.dtype) for g in step.kept[side]]
        scaled = {
            side: [g * m.sqrt() for g, m in zip(grads, metric, strict=True)]
            for side, grads in sides.items()
        }
        gram = self.meter.measure(scaled["retain"], scaled["forget"])
        method: Any = self.pair.method
        forgets = isinstance(method, HamuQ)
        constrained, sign = (sides["forget"], -1.0) if forgets else (sides["retain"], 1.0)
        known = torch.stack(
            [
                sign * stale * (c * m * v).double().sum()
                for c, m, v in zip(constrained, metric, momentum, strict=True)
            ]
        )  # what the momentum alone gains, per unit of learning rate
        reach = gram.retain_norm * gram.forget_norm
        status = step.weights.constraint
        plain = status.gram.forget_norm if forgets else status.gram.retain_norm
        demand = status.fraction * (reach if self.by_share else status.radius * plain)
        gained = torch.zeros(len(reach), dtype=torch.float64).index_add_(0, self.blocks, known)
        wanted = ((demand - gained) / fresh).clamp(min=1e-12 * reach.max().item())
        shares = tuple((wanted / wanted.sum()).tolist())
        own = type(method)(
            wanted.sum().item(), distribution=shares, on_infeasible="clamp", stopping="off"
        )
        weights = own.weigh(gram)
        for i, p in enumerate(self.pair.parameters):
            a, b = weights.retain[self.blocks[i]].item(), weights.forget[self.blocks[i]].item()
            p.grad = a * sides["retain"][i] + b * sides["forget"][i]


def run(case: dict[str, Any], method: str, optimizer: str, way: str, rate: float) -> dict[str, Any]:
    """One run: gain over demand in every step, and what became of both losses."""
    set_seed(0)
    model = copy.deepcopy(case["model"]).eval()  # no dropout, statistics frozen
    pair = PairedGradients(model, METHODS[method](0.5, constraint_mode="relative", stopping="off"))
    stepper = OPTIMIZERS[optimizer](pair.parameters, rate)
    guard = StepGuard(
        pair,
        stepper,
        correct_steps=way == "exact",
        keep=("retain", "forget"),
    )
    metric = InMetric(pair, stepper, way == "metric, share") if way.startswith("metric") else None
    before = case["losses"](model)
    whole, blocks, corrected = [], [], []
    for batch in batches(case):
        for side in ("retain", "forget"):
            with getattr(pair, side)():
                scored = Scored.of(predict_logits(model, batch[side]), batch[side]["labels"])
                (CrossEntropy().total(scored, None) / len(scored.labels)).backward()
        step = pair.combine(keep=guard.keep)
        if metric is not None:
            metric.reweigh(step)
        with guard.around(step):
            stepper.step()
        taken: Any = guard.taken
        whole.append((taken.gain.sum() / taken.demand.sum()).item())
        blocks.append((taken.gain < 0.999 * taken.demand).double().mean().item())
        corrected.append(0.0 if taken.corrected is None else taken.corrected.double().mean().item())
    after = case["losses"](model)
    return {
        "median_gain_over_demand": sorted(whole)[len(whole) // 2],
        "least_gain_over_demand": min(whole),
        "steps_short": sum(w < 0.999 for w in whole) / len(whole),
        "blocks_short": fmean(blocks),
        "blocks_corrected": fmean(corrected),
        "forget_gain": after["forget"] - before["forget"],
        "retain_gain": before["retain"] - after["retain"],
        "steps": len(whole),
    }


def batches(case: dict[str, Any]) -> Iterator[Any]:
    """The same pairs of batches for every run."""
    both = (case["problem"].retain, case["problem"].forget)
    pairs = PairedDataset(*both, collate=case["collate"], seed=0)
    done, epoch = 0, 0
    while done < case["steps"]:
        pairs.set_epoch(epoch)
        for batch in DataLoader(pairs, case["batch_size"], collate_fn=lambda batch: batch):
            yield batch
            done += 1
            if done == case["steps"]:
                return
        epoch += 1


def digits() -> dict[str, Any]:
    set_seed(42)
    scenario = Scenario("image", 42)
    model, train = scenario.new_model()
    train_original(
        model,
        train,
        TrainConfig(output_dir="runs/unused", disable_tqdm=True, **TRAIN["image"]),
    )
    problem = scenario.problem(model)

    def losses(model: Any) -> dict[str, float]:
        return {n: predict(model, d, 500).losses.mean().item() for n, d in problem.sets().items()}

    rates = {"sgd": 5e-3, "momentum": 5e-4, "adamw": 1e-4, "adafactor": 1e-3}
    return {"model": model, "problem": problem, "collate": collate, "batch_size": 128, "steps": 50, "rates": rates,
            "losses": losses}  # fmt: skip


def tofu(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(options.model)
    folder = Path(options.data_dir)
    records = forget_data(
        read_text(str(folder / "full.json")), None, read_text(str(folder / "forget10.json"))
    )
    retain, forget = (encode(data, tokenizer, 256) for data in (records.retain, records.forget))
    some = UnlearningData(retain.select(range(0, len(retain), 6)), forget, None, "")

    def losses(model: Any) -> dict[str, float]:
        return {
            n: predict_tokens(model, d, 64).losses.mean().item() for n, d in some.sets().items()
        }

    problem = UnlearningData(retain, forget, None, records.forget_name)
    rates = {"adamw": 3e-5}
    return {"model": load_language_model(options.model), "problem": problem, "collate": collate, "batch_size": 48,
            "steps": options.steps, "rates": rates, "losses": losses}  # fmt: skip


def write(results: dict[str, Any], path: Path) -> None:
    """The table as Markdown, to be read with docs/results/guarantee.md."""
    lines = [
        "| data | method | optimizer | way | gain / demand: median (least) | steps short | blocks short | ΔL_f | "
        "-ΔL_r |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in results.items():
        lines.append(
            f"| {' | '.join(key.split('/'))} | {row['median_gain_over_demand']:.4g} "
            f"({row['least_gain_over_demand']:.4g}) | {row['steps_short']:.0%} | {row['blocks_short']:.0%} | "
            f"{row['forget_gain']:+.4f} | {row['retain_gain']:+.4f} |"
        )
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=("digits", "tofu"))
    parser.add_argument("--data_dir", help="folder of TOFU")
    parser.add_argument("--model", help="the original model on TOFU")
    parser.add_argument("--steps", type=int, default=75, help="steps on TOFU, an epoch [75]")
    parser.add_argument("--output", default="docs/results", help="where the results go")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache = output / "guarantee.json"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    case = digits() if options.case == "digits" else tofu(options)
    for optimizer, rate in case["rates"].items():
        ways = (
            ("as it is", "exact", "metric", "metric, share")
            if optimizer == "adamw"
            else ("as it is", "exact")
        )
        for method in METHODS:
            for way in ways:
                key = f"{options.case}/{method}/{optimizer}/{way}"
                if key in results:
                    continue
                results[key] = run(case, method, optimizer, way, rate)
                assert math.isfinite(results[key]["forget_gain"]), key
                cache.write_text(json.dumps(results, indent=1) + "\n")
                write(results, output / "guarantee-tables.md")
                print(key, {k: f"{v:.4g}" for k, v in results[key].items()}, flush=True)


if __name__ == "__main__":
    main()
