"""Does it last? Lasting unlearning by the command, and methods at equal retain cost, each under attack.

    python -m experiments lasting classes                                every digit, by `hamu unlearn --lasting`
    python -m experiments lasting cifar --cifar_dir CIFAR10              CIFAR-10, a class
    python -m experiments lasting tofu --tofu_dir TOFU                   TOFU, forget10
    python -m experiments lasting methods [--classes 3 5 8]              digits, methods at equal retain cost

Adds to docs/results/lasting.json and prints all rows as Markdown.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed

from experiments.problems import Problem, cifar, digits, original, retrained, run, slug, tofu
from hamu import UnlearnConfig, UnlearnTrainer
from hamu.data import forget_class, read_images
from hamu.evaluation import AttackData, AttackSettings, attack
from hamu.models import load_classifier
from hamu.unlearning.lookahead import Batch, Lookahead
from hamu.unlearning.trainer.trainer import quiet_trainer

BUDGET = 0.02  # nats of retain loss that every method may pay
CIFAR_EPOCHS = 6  # of the model to start from: 90 % training accuracy
STEPS = 60  # of a method by hand
RATE = 8e-4  # AdamW's, where the controller starts on this model
METHODS: dict[str, dict[str, Any]] = {
    "ga": {"method": "ga"},
    "gdiff": {"method": "gdiff"},
    "npo": {"method": "npo"},
    "pcgrad": {"method": "pcgrad"},
    "hamu-q": {
        "method": "hamu-q",
        "constraint_mode": "relative",
        "stopping": "off",
        "on_infeasible": "clamp",
    },
    "sharpness-aware": {"auto": True, "lasting": True},
    "lasting": {"auto": True, "lasting": True},
}


class SharpnessAware(Lookahead):
    """The known way: one normalised step ahead, to where the forget loss falls fastest (Foret et al. 2021)."""

    radius = 0.05

    def advance(self, batches: Sequence[tuple[Batch, Batch]]) -> None:
        """Move the point there; each step counts as a cycle."""
        ((_, forget),) = batches
        grads = torch.autograd.grad(self._loss(forget, slice(None)), self._parameters)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        with torch.no_grad():
            torch._foreach_copy_(self._point, self._parameters)
            torch._foreach_sub_(
                self._point, torch._foreach_mul(list(grads), float(self.radius / (norm + 1e-12)))
            )
        self.taken += 2


class WithinBudget(TrainerCallback):
    """Keeps the last state of a run whose retain loss is within the budget."""

    def __init__(self) -> None:
        self.trainer: UnlearnTrainer
        self.kept: dict[str, Tensor] | None = None
        self.start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Measure the start."""
        self.start = self._retain_loss()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the state if the budget pays for it."""
        if self._retain_loss() - self.start <= BUDGET:
            self.kept = copy.deepcopy(self.trainer.model.state_dict())

    def _retain_loss(self) -> float:
        looks = self.trainer.evaluations
        return float(looks.predict(looks.some_retain).losses.mean())


def by_command(problem: Problem, work: Path) -> dict[str, Any]:
    """Unlearn for good by the command, attack, and read what came out."""
    model, retain_model = original(problem, work), retrained(problem, work)
    folder, attacked = work / f"{slug(problem.name)}-lasting", work / f"{slug(problem.name)}-attack"
    what = (*problem.data, *problem.forget)
    words = ("unlearn", *what, *problem.extra, "--model", model, "--overwrite", "--output_dir")
    seconds = {}
    for name, place, more in (
        ("plain", f"{folder}-plain", ()),
        ("lasting", str(folder), ("--lasting",)),
    ):
        began = time.monotonic()
        run(*words, place, *more)
        seconds[name] = round(time.monotonic() - began, 1)
    run("attack", *what, "--model", str(folder / "model"), "--original_model", model, "--retain_model", retain_model,
        "--attacks", "relearn-retain,relearn-few", "--output_dir", str(attacked), "--overwrite")  # fmt: skip
    found = json.loads((folder / "evaluation.json").read_text())
    return {
        "attack": json.loads((attacked / "attack.json").read_text()),
        "before": _sets(found["before"]),
        "after": _sets(found["after"]),
        "goal": found["goal"],
        "steps": found["steps_taken"],
        "ended": found["ended"],
        "seconds": seconds,
    }


def _sets(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("retain", "forget", "test", "test_without_class")
    return {
        name: {key: report[name][key] for key in ("loss", "accuracy")}
        for name in names
        if name in report
    }


@contextmanager
def _sharpness_aware(trainer: UnlearnTrainer, used: bool) -> Iterator[None]:
    if used and trainer.lookahead is not None:
        trainer.lookahead.__class__ = SharpnessAware
    yield


def by_method(name: str, label: int, work: Path) -> dict[str, Any]:
    """Unlearn a digit by one method within the budget, and attack what comes out."""
    model = load_classifier(original(digits(work)[0], work))
    config = model.config
    train, test = (read_images("digits", split).normalized(config.image_mean, config.image_std)
                   for split in ("train", "test"))  # fmt: skip
    problem = forget_class(train, test, label)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "check_steps": 0,
    } | METHODS[name]
    if "auto" in settings:
        settings |= {"max_steps": 400 if name == "sharpness-aware" else -1}
    args = UnlearnConfig(output_dir=str(work / "unused"), per_device_train_batch_size=128, eval_strategy="no",
                         use_cpu=True, **settings)  # fmt: skip
    set_seed(args.seed)
    within = WithinBudget()
    trainer = quiet_trainer(model, problem, args, [within])
    within.trainer = trainer
    with _sharpness_aware(trainer, name == "sharpness-aware"):
        trainer.train()
    if trainer.controller is None and within.kept is not None:
        model.load_state_dict(within.kept)
    report = trainer.evaluate()
    data = AttackData(problem.retain, problem.forget)
    chosen = AttackSettings(attacks="relearn-retain,relearn-few", attack_steps=40)
    outcomes = attack(model, data, chosen).outcomes
    return {
        "retain": report["eval_retain_loss"] - within.start,
        "forget_accuracy": report["eval_forget_accuracy"],
        "test_accuracy": report["eval_test_accuracy"],
        "steps": trainer.steps_taken,
        "attacks": {
            key: {"at": one["unlearned"].at, "figures": one["unlearned"].figures}
            for key, one in outcomes.items()
        },
    }


def tables(rows: Mapping[str, Any]) -> str:
    """The rows as Markdown: those of the command, then those of methods at equal retain cost."""
    by_command = [
        "| problem | steps | retain acc. | test acc. of the others, original | unlearned | after 5, 10, 20, 40, 80 "
        "steps on retain data | retrained | with a few forgotten, 20 steps | retrained |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_method = [
        "| class, method | steps | retain loss | test acc. | recognised | after 5, 10, 20, 40 steps on retain data | "
        "with ten forgotten records in every batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "attack" in row:
            by_command.append(f"| {name} | {row['steps']} | {_of_command(row)} |")
        else:
            few, retain = (_curve(row["attacks"][key]) for key in ("relearn-few", "relearn-retain"))
            by_method.append(
                f"| {name} | {row['steps']} | {row['retain']:+.4f} | {row['test_accuracy']:.1%} | "
                f"{row['forget_accuracy']:.0%} | {retain} | {few} |"
            )
    return "\n".join([*by_command, "", *by_method]) + "\n"


def _of_command(row: Mapping[str, Any]) -> str:
    others = "test_without_class" if "test_without_class" in row["before"] else "test"
    outcomes = row["attack"]["outcomes"]
    parts = [
        f"{row['after']['retain']['accuracy']:.1%}",
        *(f"{row[role][others]['accuracy']:.1%}" for role in ("before", "after")),
        *(_curve(outcomes["relearn-retain"][model]) for model in ("unlearned", "retrained")),
        *(_curve(outcomes["relearn-few"][model], [20]) for model in ("unlearned", "retrained")),
    ]
    return " | ".join(parts)


def _curve(outcome: Mapping[str, Any], at: list[int] | None = None) -> str:
    """Means over the seeds: shares recognised, or the losses of texts."""
    figures = outcome["figures"]
    rows = figures.get("recognised", figures["loss"])
    chosen = [
        row
        for step, row in zip(outcome["at"], rows, strict=True)
        if (step in at if at else step > 0)
    ]
    means = [sum(row) / len(row) for row in chosen]
    if "recognised" in figures:
        return ", ".join(f"{100 * mean:.0f}" for mean in means) + " %"
    return ", ".join(f"{mean:.2f}" for mean in means)


def main(argv: list[str]) -> None:
    """Run one part; what has a result already is not run again."""
    parser = argparse.ArgumentParser(prog="experiments lasting", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("part", choices=("classes", "cifar", "tofu", "methods"))
    parser.add_argument("--cifar_dir")
    parser.add_argument("--tofu_dir")
    parser.add_argument("--classes", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--work_dir", default="runs/experiments")
    parser.add_argument("--output", default="docs/results/lasting.json")
    options = parser.parse_args(argv)
    path, work = Path(options.output), Path(options.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    jobs: dict[str, Any] = {}
    if options.part == "classes":
        for label in options.classes:
            problem = replace(
                digits(work)[2],
                name=f"digits, class {label}",
                forget=("--forget_class", str(label)),
            )
            jobs[problem.name] = lambda problem=problem: by_command(problem, work)
    elif options.part == "cifar":
        problem = cifar(work, Path(options.cifar_dir), CIFAR_EPOCHS)[2]
        problem = replace(problem, name=f"{problem.name}, {CIFAR_EPOCHS} epochs")
        jobs[problem.name] = lambda: by_command(problem, work)
    elif options.part == "tofu":
        problem = tofu(work, Path(options.tofu_dir))[0]
        budget = ("--max_retain_increase", "0.87")  # what GDiff pays for as much forgetting
        problem = replace(problem, extra=(*problem.extra, *budget))
        jobs[problem.name] = lambda: by_command(problem, work)
    else:
        for label in options.classes:
            for name in METHODS:
                jobs[f"{name}, class {label}"] = lambda name=name, label=label: by_method(
                    name, label, work
                )
    for name, job in jobs.items():
        if name not in rows:
            rows[name] = job()
            path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
            print(name, json.dumps(rows[name], ensure_ascii=False)[:400], flush=True)
    print(tables(rows))
