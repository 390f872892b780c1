"""`hamu demo`: the whole story on bundled data: train, assess, unlearn with every method, compare.

The original model is trained briefly, as long as it still has something to learn, like the paper's; then every
method starts from it with the same learning rate, batches and number of epochs.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import set_seed

from hamu.assess import measure_hardness
from hamu.cli.demo_scenarios import Digits, FictitiousAuthors, Scenario
from hamu.cli.flags import OwnParser
from hamu.core.methods import method_classes
from hamu.errors import HamuError
from hamu.files import SUMMARY, TRAJECTORIES
from hamu.report import plot_trajectories
from hamu.report.tables import plain_table
from hamu.unlearning.jobs.progress import ProgressBar, task_bar
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig, train_original
from hamu.unlearning.trainer.trainer import quiet_trainer


def run(argv: list[str], console: Console) -> int:
    """Train, assess, unlearn with every method, print one table, save the picture and summary.json."""
    scenarios = {"image": Digits, "text": FictitiousAuthors}
    parser = OwnParser("demo", __doc__ or "")
    parser.add_argument(
        "--task", default="image", help="image (digits) or text (fictitious authors)"
    )
    parser.add_argument("--output_dir", default="runs/demo", help="where the results go")
    parser.add_argument("--seed", type=int, default=42, help="seed of everything")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier demo in --output_dir"
    )
    options = parser.parse_args(argv)
    if options.task not in scenarios:
        raise HamuError(f"task {options.task!r} is unknown; choose image or text")
    folder = RunFolder(options.output_dir, overwrite=options.overwrite)
    begin = time.perf_counter()
    kind: type[Scenario] = scenarios[options.task]
    config = TrainConfig(
        output_dir=options.output_dir, seed=options.seed, disable_tqdm=True, **kind.train_settings
    )
    scenario = kind(options.seed)

    console.print(f"1. {scenario.intro}")
    set_seed(options.seed)
    original, train = scenario.new_model()
    with ProgressBar(console, "train") as bar:
        train_original(original, train, config, scenario.collate, [bar])

    console.print(f"2. {scenario.question} The more alike forget and retain data, the harder.")
    hardness = _assess(original, scenario, console)

    problem, settings = scenario.problem, scenario.unlearn_settings
    console.print(
        f"3. Forget {len(problem.forget)} records ({problem.forget_name}) with every method from the same start: "
        f"{settings['num_train_epochs']} epochs, SGD, learning rate {settings['learning_rate']:g}."
    )
    results, models = _unlearn_by_all(original, scenario, options, console)
    seconds = time.perf_counter() - begin
    summary = {
        "task": options.task,
        "seed": options.seed,
        "settings": settings,
        "hardness": hardness,
    }
    with folder:
        # the summary first: it shows whose folder this is
        folder.write_json(SUMMARY, summary | {"methods": results, "seconds": round(seconds, 1)})
        path = folder.path / TRAJECTORIES
        plot_trajectories(
            {name: result["trajectory"] for name, result in results.items()}, path, scenario.title
        )

    console.print(_table(results))
    console.print(
        "ΔL_f: rise of the forget loss. -ΔL_r: fall of the retain loss. Both should be positive."
    )
    console.print("AUC: membership inference on the forget set; 0.5 is ideal.")
    console.print(
        "stop at: the step at which the stopping criterion was first met; not enforced here.\n"
    )
    scenario.finish(console, original, models)
    console.print(
        f"The picture is in {path}, all figures in {folder.path / 'summary.json'} ({seconds:.0f} s).\n"
    )
    console.print(scenario.next)
    return 0


def _assess(model: Any, scenario: Scenario, console: Console) -> dict[str, dict[str, Any]]:
    table = plain_table(scenario.similarity, "κ", "cosθ", "κ2", "regime", right=(1, 2, 3))
    found = {}
    for name, problem in scenario.problems.items():
        hardness = measure_hardness(model, problem.retain, problem.forget, collate=scenario.collate)
        found[name] = asdict(hardness)
        figures = (
            f"{hardness.kappa:+.4f}",
            f"{hardness.cos:+.3f}",
            f"{hardness.stop_threshold:.4f}",
        )
        table.add_row(name, *figures, hardness.regime)
    console.print(table)
    return found


def _unlearn_by_all(
    original: Any, scenario: Scenario, options: argparse.Namespace, console: Console
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The figures of each method, and its model."""
    results, models = {}, {}
    with task_bar(console) as bar:
        for name in bar.track(list(method_classes()), description="unlearn"):
            set_seed(options.seed)
            args = UnlearnConfig(
                output_dir=options.output_dir,
                method=name,
                seed=options.seed,
                check_steps=0,
                **scenario.unlearn_settings,
            )
            models[name] = copy.deepcopy(original)
            trainer = quiet_trainer(models[name], scenario.problem, args, [], scenario.collate)
            trainer.train()
            if trainer.evaluated_step != trainer.state.global_step:
                trainer.evaluate()
            log = [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry]
            last = log[-1]
            results[name] = {
                "forget_gain": last["eval_forget_gain"],
                "retain_gain": last["eval_retain_gain"],
                "forget_accuracy": last["eval_forget_accuracy"],
                "retain_accuracy": last["eval_retain_accuracy"],
                "test_accuracy": last["eval_test_accuracy"],
                "membership_auc": scenario.membership_auc(trainer),
                "steps": trainer.steps_taken,
                "criterion_met_at_step": _first_stop(trainer.state.log_history),
                "trajectory": [
                    (entry["eval_retain_gain"], entry["eval_forget_gain"]) for entry in log
                ],
            }
    return results, models


def _first_stop(log: list[dict[str, Any]]) -> int | None:
    """The step at which the aggregate stopping criterion was first met, None if never (or if there is none)."""
    return next((e["step"] for e in log if e.get("criterion_met")), None)


def _table(results: dict[str, dict[str, Any]]) -> Any:
    table = plain_table(
        "method",
        "ΔL_f",
        "-ΔL_r",
        "forget acc",
        "retain acc",
        "test acc",
        "AUC",
        "stop at",
        right=tuple(range(1, 8)),
    )
    for name, row in results.items():
        both = row["forget_gain"] > 0 and row["retain_gain"] > 0
        table.add_row(
            Text(name, "bold" if both else ""),
            f"{row['forget_gain']:+.3f}",
            f"{row['retain_gain']:+.4f}",
            *(f"{row[key]:.1%}" for key in ("forget_accuracy", "retain_accuracy", "test_accuracy")),
            "-" if row["membership_auc"] is None else f"{row['membership_auc']:.3f}",
            str(row["criterion_met_at_step"] or "-"),
        )
    return table
