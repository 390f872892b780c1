"""The stopping criterion with noisy batches (App. C and G.3 of the paper), on the bundled digits.

A ResNet-8 unlearns by HAMU-Q with the criterion off, once for each ρ, batch size and seed. Each step's headroom is
recorded as its batches give it, and every few steps the headroom of the gradients over all retain and all forget data,
which says when to stop. Then every rule is replayed on the records.

    python examples/stopping_noise.py [--seeds 14] [--quick --output_dir runs/stopping]

Finished runs are kept in --work and not repeated; OUTPUT_DIR gets stopping.json and, as Markdown, stopping-tables.md.
"""

from __future__ import annotations

import argparse
import copy
import json
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from hamu.cli.demo import TRAIN, Scenario
from hamu.core.forward import predict_logits
from hamu.core.methods import HamuQ
from hamu.core.methods.base import StoppingMemory, StoppingRule
from hamu.core.objectives import CrossEntropy, Scored
from hamu.core.pair import PairedGradients
from hamu.data import ImageData, UnlearningData, forget_class
from hamu.data.images import collate
from hamu.unlearning.trainer import TrainConfig, train_original

FORGET = 3
RHOS = (0.75, 1.0)
LEARNING_RATE = 5e-3  # so that the criterion is met after some dozens of steps
BATCH_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
MARGINS = (0.0, 0.1, 0.3)
PATIENCE_AND_WINDOW = ((1, 1), (3, 1), (5, 1), (10, 1), (1, 5), (1, 10), (1, 20), (5, 10))
EVERY = 4  # steps between two gradients over all data
FURTHER = 60  # steps of a run after the criterion was first met on all data
MOST = 240  # steps of a run in which it is not met
WHOLE_SEEDS = 4  # runs of batches that hold everything: nothing in them is drawn but the model and the forget set

FULL = ("headroom", "retain", "forget")  # what is measured on all data
Run = dict[str, list[float]]


def original_model(seed: int, work: Path) -> tuple[PreTrainedModel, ImageData]:
    """The demo's original model, and the data that it was trained on."""
    set_seed(seed)
    scenario = Scenario("image", seed)
    model, train = scenario.new_model()
    config = TrainConfig(output_dir=str(work), seed=seed, disable_tqdm=True, **TRAIN["image"])
    return train_original(model, train, config, collate), train


def measure(
    pair: PairedGradients, model: PreTrainedModel, batches: list[dict[str, Tensor]]
) -> dict[str, float]:
    """Step of a retain and a forget batch; g* is left in `.grad`."""
    losses = []
    for side, batch in zip((pair.retain, pair.forget), batches, strict=True):
        with side():
            scored = Scored.of(predict_logits(model, batch), batch["labels"])
            loss = CrossEntropy().total(scored, None) / len(scored.labels)
            loss.backward()
        losses.append(loss.item())
    constraint = pair.combine().weights.constraint
    assert constraint is not None
    headroom = (constraint.free_limit / constraint.clipped_demand).item()
    return {
        "headroom": headroom,
        "conflict": float(constraint.conflict),
        "retain": losses[0],
        "forget": losses[1],
    }


def unlearn(
    model: PreTrainedModel, problem: UnlearningData[ImageData], size: int, seed: int
) -> Run:
    """One run: step by step what the batches say, and what all data say (interpolated between measurements)."""
    model = copy.deepcopy(model).eval()
    pair = PairedGradients(model, HamuQ(0.5, constraint_mode="relative", stopping="off"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sides = [
        side.__getitems__(torch.arange(len(side))) for side in (problem.retain, problem.forget)
    ]
    noiseless = size >= max(len(side["labels"]) for side in sides)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, float]] = []
    full: dict[int, dict[str, float]] = {}
    met: int | None = None
    while len(rows) < (MOST if met is None else met + FURTHER):
        step = len(rows)
        if step % EVERY == 0 and not noiseless:
            full[step] = measure(pair, model, sides)
        drawn = [
            (side, torch.randperm(len(side["labels"]), generator=generator)[:size])
            for side in sides
        ]
        batches = [{key: values[i] for key, values in side.items()} for side, i in drawn]
        rows.append(measure(pair, model, batches))
        if noiseless:
            full[step] = rows[-1]
        if met is None and step in full and full[step]["headroom"] < 1:
            met = step
        optimizer.step()
    found = {key: [row[key] for row in rows] for key in ("headroom", "conflict")}
    for key in FULL:
        found[f"full_{key}"] = np.interp(
            range(len(rows)), list(full), [row[key] for row in full.values()]
        ).tolist()
    return {key: [round(value, 5) for value in values] for key, values in found.items()}


def first_met(run: Run) -> int | None:
    """The first step at which the criterion is met on all data."""
    return next((step for step, headroom in enumerate(run["full_headroom"]) if headroom < 1), None)


def fired(run: Run, rule: StoppingRule) -> int | None:
    """The step at which the rule stops the run."""
    memory = StoppingMemory(rule)
    figures = zip(run["headroom"], run["conflict"], strict=True)
    return next(
        (step for step, (h, conflict) in enumerate(figures) if memory.update(h, bool(conflict))),
        None,
    )


def judge(runs: list[Run], rule: StoppingRule) -> dict[str, Any]:
    """Shares that stop too early or never; how early or late the others do, and their rise in retain loss by then."""
    stops = [(run, first_met(run), fired(run, rule)) for run in runs]
    both = [(run, met, stop) for run, met, stop in stops if met is not None and stop is not None]
    late = [stop - met for _, met, stop in both if stop >= met]
    lead = [met - stop for _, met, stop in both if stop < met]
    rise = [
        run["full_retain"][stop] / run["full_retain"][met] - 1
        for run, met, stop in both
        if stop >= met
    ]
    return {
        "early": (len(lead) + sum(met is None and stop is not None for _, met, stop in stops))
        / len(stops),
        "never": sum(met is not None and stop is None for _, met, stop in stops) / len(stops),
        "steps_late": median(late) if late else None,
        "steps_early": median(lead) if lead else None,
        "retain_rise": median(rise) if rise else None,
    }


def describe(runs: list[Run]) -> dict[str, Any]:
    """First step that meets the criterion on all data, and the batches' excess headroom within 10 steps of it."""
    met = [(run, step) for run in runs if (step := first_met(run)) is not None]
    near = [(run, slice(max(step - 10, 0), step + 11)) for run, step in met]
    excess = [np.subtract(run["headroom"][part], run["full_headroom"][part]) for run, part in near]
    steps = [step for _, step in met]
    return {
        "runs": len(runs),
        "met_at_start": steps.count(0),
        "met": len(met),
        "first_met": [min(steps), median(steps), max(steps)],
        "start": {key: fmean(run[f"full_{key}"][0] for run in runs) for key in FULL},
        "when_met": {key: fmean(run[f"full_{key}"][step] for run, step in met) for key in FULL},
        "excess": fmean(map(np.mean, excess)),
        "deviation": fmean(map(np.std, excess)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=14, help="runs of each ρ and batch size [14]")
    parser.add_argument("--quick", action="store_true", help="2 seeds and 3 batch sizes")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/stopping"), help="where finished runs are kept"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("docs/results"), help="where the tables go"
    )
    options = parser.parse_args()
    seeds, sizes = (2, (32, 256, 2048)) if options.quick else (options.seeds, BATCH_SIZES)
    runs: dict[tuple[float, int], list[Run]] = {key: [] for key in product(RHOS, sizes)}
    options.work.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        model, train = original_model(seed, options.work)
        for rho, size in [key for key in runs if key[1] < max(sizes) or seed < WHOLE_SEEDS]:
            path = options.work / f"{rho:g}-{size}-{seed}.json"
            if not path.exists():
                run = unlearn(model, forget_class(train, None, FORGET, rho, seed), size, seed)
                path.write_text(json.dumps(run))
                print(
                    f"{path.stem}: met at step {first_met(run)} of {len(run['headroom'])}",
                    flush=True,
                )
            runs[rho, size].append(json.loads(path.read_text()))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    write(runs, sizes, options.output_dir)


def write(runs: dict[tuple[float, int], list[Run]], sizes: tuple[int, ...], output: Path) -> None:
    """The figures as JSON, and the tables as Markdown, to be read with stopping.md."""
    setting = {f"{rho:g}/{size}": describe(those) for (rho, size), those in runs.items()}
    rules: dict[str, dict[str, Any]] = {}
    for margin, (patience, window) in product(MARGINS, PATIENCE_AND_WINDOW):
        rule = StoppingRule("aggregate", margin, patience, window)
        judged = {f"{rho:g}/{size}": judge(those, rule) for (rho, size), those in runs.items()}
        both = {
            str(size): judge([run for rho in RHOS for run in runs[rho, size]], rule)
            for size in sizes
        }
        rules[f"{margin:g}/{patience}/{window}"] = judged | both
    content = {f"rho/batch {key}": row for key, row in setting.items()}
    content |= {f"margin/patience/window {key}": row for key, row in rules.items()}
    rounded = json.loads(json.dumps(content), parse_float=lambda figure: round(float(figure), 4))
    entries = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rounded.items()]
    (output / "stopping.json").write_text("{\n" + ",\n".join(entries) + "\n}\n")
    lines = [
        "| ρ | batch | runs | met | first met: median (range) | excess | deviation |",
        "|---" * 7 + "|",
    ]
    for key, row in setting.items():
        first, middle, last = row["first_met"]
        line = f"{key.replace('/', ' | ')} | {row['runs']} | {row['met']} | {middle:g} ({first} to {last})"
        lines.append(f"| {line} | {row['excess']:+.2f} | {row['deviation']:.2f} |")
    lines += [
        "",
        f"| margin, patience, window | {' | '.join(map(str, sizes))} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for key, judged in rules.items():
        chosen = [judged[str(size)] for size in sizes]
        late = [
            "-" if cell["steps_late"] is None else f"+{cell['steps_late']:g}" for cell in chosen
        ]
        cells = [
            f"{c['early']:.0%}, {steps}, {c['never']:.0%}"
            for c, steps in zip(chosen, late, strict=True)
        ]
        lines.append(f"| {key.replace('/', ', ')} | {' | '.join(cells)} |")
    (output / "stopping-tables.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
