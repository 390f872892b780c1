"""Does `--auto` reach a goal wherever a setting of a small grid of Q and learning rate does, and in how many steps?

    python examples/auto.py digits [--classes 3 8] [--output docs/results]
    python examples/auto.py cifar --data_dir CIFAR10 --model runs/small/model
    python examples/auto.py tofu --data_dir TOFU --model runs/tofu-original/model

Each case is a data set, what to forget, a target forget loss and a budget of retain loss. Every setting of the grid
runs as far as the steps go, measured after every step as `--auto` measures; a setting reaches the goal at the first
step at which the target is met within the budget. Adds to auto.json; writes auto-tables.md.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from transformers import TrainerCallback, set_seed

from hamu.assess import assess
from hamu.cli.demo_digits import Digits
from hamu.data import TextCollator, UnlearningData, encode, forget_class, forget_data, read_images, read_text
from hamu.data.images import collate
from hamu.methods import HamuQ
from hamu.models import load_classifier
from hamu.models.language import load_language_model, load_tokenizer
from hamu.training import TrainConfig, UnlearnConfig, train_original
from hamu.training.auto import apply_assessment
from hamu.training.goal import Goal
from hamu.training.quiet import quiet_trainer

SHARES = (0.25, 0.5, 0.75, 0.95)  # of what is possible, the constraint
GOALS = ((1.0, 0.01), (1.0, 0.1), (3.0, 0.1))  # how far the forget loss must rise, how far the retain loss may
SMALL_GOALS = ((0.1, 0.01), (0.1, 0.1), (0.3, 0.1))  # of the grid on TOFU no setting came near the others in 40 steps

MOST = 2  # times the steps of the fastest setting of the grid that `--auto` may take


@dataclass
class Case:
    """One problem: a model, its data, and the grid of learning rates."""

    name: str
    model: Any
    problem: UnlearningData[Any]
    collate: Any
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    measured_on: int = 1000  # records of each side
    goals: tuple[tuple[float, float], ...] = GOALS


def digits(options: argparse.Namespace) -> Iterator[Case]:
    for target, rho in product(options.classes, (0.0, 0.5, 1.0)):
        set_seed(target)
        scenario = Digits(target)
        model, train = scenario.new_model()
        config = TrainConfig(output_dir="runs/unused", seed=target, disable_tqdm=True, **scenario.train_settings)
        train_original(model, train, config, collate)
        problem = forget_class(train, None, target, rho, target)
        yield Case(f"digits, class {target}, ρ = {rho:g}", model, problem, collate, 128, 60, (3e-3, 1e-2, 3e-2, 1e-1))


def cifar(options: argparse.Namespace) -> Iterator[Case]:
    model = load_classifier(options.model)
    train = read_images(options.data_dir).normalized(model.config.image_mean, model.config.image_std)
    for rho in (0.0, 0.75):
        problem = forget_class(train, None, 0, rho)
        yield Case(f"CIFAR-10, ρ = {rho:g}", model, problem, collate, 250, 40, (3e-3, 1e-2, 3e-2))


def tofu(options: argparse.Namespace) -> Iterator[Case]:
    tokenizer = load_tokenizer(options.model)
    folder = Path(options.data_dir)
    records = forget_data(read_text(str(folder / "full.json")), None, read_text(str(folder / "forget10.json")))
    retain, forget = (encode(data, tokenizer, 256) for data in (records.retain, records.forget))
    problem = UnlearningData(retain, forget, None, records.forget_name)
    collator = TextCollator(tokenizer.pad_token_id)
    model, rates = load_language_model(options.model), (3e-2, 3e-1)
    yield Case("TOFU forget10", model, problem, collator, 16, 40, rates, 200, SMALL_GOALS)


class Standings(TrainerCallback):
    """How the model stands after every step of a run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.measure: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure."""
        self.seen.append(self.measure())


def settings(case: Case, goal: Goal) -> UnlearnConfig:
    return UnlearnConfig(
        output_dir="runs/unused", per_device_train_batch_size=case.batch_size, max_steps=case.steps, eval_strategy="no",
        eval_on_start=False, target_forget_loss=goal.forget_loss, max_retain_increase=goal.max_retain_increase,
        auto=True, max_eval_samples=case.measured_on,
    )  # fmt: skip


def by_grid(case: Case, share: float, rate: float) -> tuple[Any, list[Any]]:
    """How the model stood at the start and after every step, at one setting of the grid."""
    model = copy.deepcopy(case.model)
    seen = Standings()
    # the same measure as the steering's; it is the goal that it never reaches, so it ends nothing
    args = settings(case, Goal(1e9, None, 1e9))
    args.auto = False
    args.method, args.constraint_mode, args.constraint, args.stopping = "hamu-q", "relative", share, "off"
    args.learning_rate, args.check_steps, args.target_forget_loss = rate, 0, None
    trainer = quiet_trainer(model, case.problem, args, [seen], case.collate)
    args.max_retain_increase, args.target_forget_loss = 1e9, 1e9
    seen.measure = trainer.evaluations.standing
    start = seen.measure()
    trainer.train()
    return start, seen.seen


def by_auto(case: Case, goal: Goal, steps: int) -> dict[str, Any]:
    """A run by goal, of this many steps at most."""
    model = copy.deepcopy(case.model)
    found = assess(model, case.problem.retain, case.problem.forget, collate=case.collate, most_batches=10,
                   method=HamuQ(0.5, "relative"), batch_size=case.batch_size, conflicts=False)  # fmt: skip
    args = settings(case, goal)
    apply_assessment(args, found)
    args.max_steps = steps
    trainer = quiet_trainer(model, case.problem, args, [], case.collate)
    trainer.train()
    steering = trainer.steering
    assert steering is not None
    reached = steering.ended and goal.reached(steering._now)
    return {
        "reached": reached,
        "steps": trainer.state.global_step,
        "forget_loss": steering._now.forget_loss,
        "retain_increase": steering._now.retain_loss - steering._start.retain_loss,
        "ended": trainer.stop_reason or "the steps are over",
        "epochs_of_assessment": found.epochs,
    }


def run(case: Case, results: dict[str, Any], save: Any) -> None:
    """The whole grid once, then every goal by `--auto`."""
    grid = results.setdefault(case.name, {"grid": {}, "goals": {}})
    for share, rate in product(SHARES, case.rates):
        key = f"{share:g}/{rate:g}"
        if key not in grid["grid"]:
            start, seen = by_grid(case, share, rate)
            grid["start"] = vars(start)
            grid["grid"][key] = [(s.forget_loss, s.retain_loss - start.retain_loss) for s in seen]
            save()
            print(case.name, key, [f"{x:+.3f}" for x in grid["grid"][key][-1]], flush=True)
    for rise, budget in case.goals:
        target = grid["start"]["forget_loss"] + rise
        key = f"+{rise:g} for {budget:g}"
        if key in grid["goals"]:
            continue
        reached = {}
        for setting, points in grid["grid"].items():
            step = next((n for n, (f, r) in enumerate(points, 1) if f >= target and r <= budget), None)
            if step is not None:
                reached[setting] = step
        best = min(reached.items(), key=lambda item: item[1], default=None)
        auto = by_auto(case, Goal(target, None, budget), max(case.steps, MOST * (best or ("", 0))[1]))
        grid["goals"][key] = {"grid": best, "reaching": len(reached), "auto": auto}
        save()
        print(case.name, key, "grid:", best, f"({len(reached)} of {len(grid['grid'])})", "auto:", auto, flush=True)


def write(results: dict[str, Any], path: Path) -> None:
    """The table as Markdown, to be read with auto.md."""
    lines = [
        "| case | forget loss | retain budget | settings that do | fewest steps (φ, η) | `--auto` | steps | paid |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in results.items():
        for key, row in found["goals"].items():
            rise, budget = key.split(" for ")
            best = "-" if row["grid"] is None else f"{row['grid'][1]} ({row['grid'][0].replace('/', ', ')})"
            auto = row["auto"]
            lines.append(
                f"| {case} | {rise} | {budget} | {row['reaching']} of {len(found['grid'])} | {best} | "
                f"{'reached' if auto['reached'] else 'not reached'} | {auto['steps']} | "
                f"{auto['retain_increase']:+.4f} |"
            )
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("digits", "cifar", "tofu"))
    parser.add_argument("--classes", nargs="+", type=int, default=[8, 5], help="digits to forget [8 5]")
    parser.add_argument("--data_dir", help="folder of CIFAR-10 or TOFU")
    parser.add_argument("--model", help="the original model, made by hamu train")
    parser.add_argument("--output", default="docs/results", help="where auto.json and the table go")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache = output / "auto.json"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    for case in {"digits": digits, "cifar": cifar, "tofu": tofu}[options.case](options):
        run(case, results, lambda: cache.write_text(json.dumps(results) + "\n"))
        write(results, output / "auto-tables.md")
    Console().print((output / "auto-tables.md").read_text(), markup=False)


if __name__ == "__main__":
    main()
