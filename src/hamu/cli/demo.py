"""`hamu demo`: the whole story on bundled data, in under a minute.

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
from transformers import PreTrainedModel, set_seed

from hamu.assess import measure_hardness
from hamu.cli.options import Parser
from hamu.cli.progress import ProgressBar, task_bar
from hamu.cli.tables import plain_table
from hamu.cli.unlearn import new_trainer
from hamu.data import ImageData, UnlearningData, forget_class, pixel_statistics, read_images
from hamu.evaluation import classifier_report
from hamu.methods import method_classes
from hamu.models import new_classifier
from hamu.reporting import plot_trajectories
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig, UnlearnConfig, train_original
from hamu.training.original import collate

_FORGET = 3
_RHO = 0.25
_RHOS = (0.0, 0.5, 1.0)
_TRAIN = {
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 64,
}
_UNLEARN = {
    "learning_rate": 5e-3,
    "num_train_epochs": 5,
    "per_device_train_batch_size": 128,
    # Half of what the gradients allow: an absolute demand becomes infeasible as the retain gradient shrinks.
    "constraint": 0.5,
    "constraint_mode": "relative",
    "stopping": "off",  # as in the paper's comparisons; the table says where the criterion would have stopped
}
_NEXT = """\
What next, on your own data:
  hamu train    --data IMAGES/ --model resnet20 --output_dir runs/original
  hamu unlearn  --data IMAGES/ --model runs/original/model --forget_class NAME --constraint_mode relative \\
                --output_dir runs/unlearned
  hamu evaluate --data IMAGES/ --model runs/unlearned/model --forget_class NAME --output_dir runs/check
IMAGES/ has one subfolder of images per class; .parquet, .npz and hub:OWNER/NAME do as well. To forget single
records, use --forget_rows 3,17,25. `hamu unlearn --help` shows the settings, `hamu methods` the methods."""


def run(argv: list[str], console: Console) -> int:
    """Train, assess, unlearn with every method, print one table, save the picture and summary.json."""
    parser = Parser(prog="hamu demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/demo", help="where the results go [runs/demo]")
    parser.add_argument("--seed", type=int, default=42, help="seed of everything [42]")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier demo in --output_dir")
    options = parser.parse_args(argv)
    folder = RunFolder(options.output_dir, overwrite=options.overwrite)
    begin = time.perf_counter()
    train, test = read_images("digits"), read_images("digits", "test")
    mean, std = pixel_statistics(train)
    train, test = train.normalized(mean, std), test.normalized(mean, std)

    console.print(f"1. Train a ResNet-8 on {len(train)} handwritten digits (scikit-learn's, 8x8 pixels).")
    set_seed(options.seed)
    config = TrainConfig(output_dir=options.output_dir, seed=options.seed, disable_tqdm=True, **_TRAIN)
    original = new_classifier("resnet8", train, mean, std)
    train_original(original, train, config, [ProgressBar(console, "train")])

    console.print(f"2. How hard is it to forget digit {_FORGET}? The more alike forget and retain data, the harder.")
    hardness = _assess(original, train, test, options.seed, console)

    problem = forget_class(train, test, _FORGET, _RHO, options.seed)
    console.print(
        f"3. Forget {len(problem.forget)} images ({problem.forget_name}) with every method from the same start: "
        f"{_UNLEARN['num_train_epochs']} epochs, SGD, learning rate {_UNLEARN['learning_rate']:g}."
    )
    results = _unlearn_by_all(original, problem, options, console)
    seconds = time.perf_counter() - begin

    console.print(_table(results))
    console.print("ΔL_f: rise of the forget loss. -ΔL_r: fall of the retain loss. Both should be positive.")
    console.print("AUC: membership inference on the forget set; 0.5 is ideal.")
    console.print("stop at: the step at which the stopping criterion was first met; not enforced here.\n")
    path = folder.prepare() / "trajectories.png"
    title = f"Forgetting digit {_FORGET} at ρ = {_RHO:g}: a marker per epoch"
    plot_trajectories({name: result["trajectory"] for name, result in results.items()}, path, title)
    summary = {"seed": options.seed, "rho": _RHO, "settings": _UNLEARN, "hardness": hardness, "methods": results}
    folder.write_json("summary.json", summary | {"seconds": round(seconds, 1)})
    console.print(f"The picture is in {path}, all figures in {folder.path / 'summary.json'} ({seconds:.0f} s).\n")
    console.print(_NEXT)
    return 0


def _assess(
    model: PreTrainedModel, train: ImageData, test: ImageData, seed: int, console: Console
) -> dict[str, dict[str, Any]]:
    table = plain_table("rho", "κ", "cosθ", "κ2", "regime", right=(0, 1, 2, 3))
    found = {}
    for rho in _RHOS:
        problem = forget_class(train, test, _FORGET, rho, seed)
        hardness = measure_hardness(model, problem.retain, problem.forget, collate=collate)
        found[f"{rho:g}"] = asdict(hardness)
        table.add_row(
            f"{rho:g}",
            f"{hardness.kappa:+.4f}",
            f"{hardness.cos:+.3f}",
            f"{hardness.stop_threshold:.4f}",
            hardness.regime,
        )
    console.print(table)
    return found


def _unlearn_by_all(
    original: PreTrainedModel, problem: UnlearningData, options: argparse.Namespace, console: Console
) -> dict[str, dict[str, Any]]:
    results = {}
    with task_bar(console) as bar:
        for name in bar.track(list(method_classes()), description="unlearn"):
            set_seed(options.seed)
            args = UnlearnConfig(output_dir=options.output_dir, method=name, seed=options.seed, **_UNLEARN)
            trainer = new_trainer(copy.deepcopy(original), problem, args, [], collate)
            trainer.train()
            if trainer.evaluated_step != trainer.state.global_step:
                trainer.evaluate()
            log = [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry]
            report = classifier_report(trainer.predictions, problem.retain.classes, problem.target_class)
            inference = report["membership_inference"]
            results[name] = {
                "forget_gain": log[-1]["eval_forget_gain"],
                "retain_gain": log[-1]["eval_retain_gain"],
                "forget_accuracy": report["forget"]["accuracy"],
                "retain_accuracy": report["retain"]["accuracy"],
                "test_accuracy": report["test"]["accuracy"],
                "membership_auc": None if inference is None else inference["auc"],
                "steps": trainer.steps_taken,
                "criterion_met_at_step": _first_stop(trainer.state.log_history),
                "trajectory": [(entry["eval_retain_gain"], entry["eval_forget_gain"]) for entry in log],
            }
    return results


def _first_stop(log: list[dict[str, Any]]) -> int | None:
    """The step at which the aggregate stopping criterion was first met, None if never (or if there is none)."""
    return next((e["step"] for e in log if e.get("criterion_met")), None)


def _table(results: dict[str, dict[str, Any]]) -> Any:
    table = plain_table(
        "method", "ΔL_f", "-ΔL_r", "forget acc", "retain acc", "test acc", "AUC", "stop at", right=tuple(range(1, 8))
    )
    for name, row in results.items():
        both = row["forget_gain"] > 0 and row["retain_gain"] > 0
        table.add_row(
            f"[bold]{name}[/]" if both else name,
            f"{row['forget_gain']:+.3f}",
            f"{row['retain_gain']:+.4f}",
            *(f"{row[key]:.1%}" for key in ("forget_accuracy", "retain_accuracy", "test_accuracy")),
            "-" if row["membership_auc"] is None else f"{row['membership_auc']:.3f}",
            str(row["criterion_met_at_step"] or "-"),
        )
    return table
