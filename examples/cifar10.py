"""Unlearning from a ResNet-20 on CIFAR-10 after the paper's protocol (App. E), as far as a small machine goes.

Every method starts from the same model and takes the same steps: SGD without momentum, learning rate 1e-4, each side
clipped to 1, Q = U = 0.5 lr, BatchNorm statistics frozen, the stopping criterion recorded but not enforced (as in the
paper's comparisons). Two protocols of 45 steps: "paper", batches of 5,000 over 5 epochs, and "small", batches of 500.

    python examples/cifar10.py --data_dir CIFAR10 --model runs/small/model [--output docs/results] [--protocol small]

The steps run in bf16 autocast; the gains, which are small, are measured in float32 by a copy of the model.

Finished runs are kept in OUTPUT/cifar10.json and not repeated. The original model is made by `hamu train`, see there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import transformers

from hamu.assess import measure_hardness
from hamu.data import collate, forget_class, read_images
from hamu.evaluation import predict
from hamu.models import load_classifier
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.trainer import quiet_trainer

METHODS = ("hamu-q", "hamu-u", "gdiff", "ft", "ga")
RHOS = (0.0, 0.75)
PROTOCOLS: dict[str, dict[str, Any]] = {
    "paper": {
        "per_device_train_batch_size": 500,
        "gradient_accumulation_steps": 10,
        "num_train_epochs": 5,
        "eval_strategy": "no",
    },
    "small": {"per_device_train_batch_size": 500, "max_steps": 45, "eval_strategy": "no"},
}


def judge(model: Any, problem: Any) -> dict[str, float]:
    """Mean loss and accuracy on each set, in float32."""
    figures = {}
    for name, data in (
        ("retain", problem.retain),
        ("forget", problem.forget),
        ("test", problem.test),
    ):
        predictions = predict(model, data, 500)
        figures[f"{name}_loss"] = predictions.losses.mean().item()
        figures[f"{name}_accuracy"] = predictions.correct.double().mean().item()
    return figures


def unlearn(
    model_path: str, problem: Any, method: str, protocol: str, before: dict[str, float]
) -> dict[str, Any]:
    """One run: what was gained, step figures, and the trajectory."""
    model = load_classifier(model_path)
    args = UnlearnConfig(
        output_dir="runs/unused", method=method, learning_rate=1e-4, constraint=0.5, stopping="off", bf16=True,
        eval_on_start=False, check_steps=0,
        **PROTOCOLS[protocol],
    )  # fmt: skip
    trainer = quiet_trainer(model, problem, args, [])
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    copy = load_classifier(model_path)
    copy.load_state_dict(model.state_dict())
    after = judge(copy, problem)
    steps = [e for e in trainer.state.log_history if "taken" in e]
    kappas = [e["kappa"] for e in steps if "kappa" in e]
    return {
        "forget_gain": after["forget_loss"] - before["forget_loss"],
        "retain_gain": before["retain_loss"] - after["retain_loss"],
        **{f"{name}_accuracy": after[f"{name}_accuracy"] for name in ("forget", "retain", "test")},
        "steps": trainer.steps_taken,
        "skipped": trainer.steps_skipped,
        "mean_norms": {
            side: sum(e[f"{side}_norm"] for e in steps) / len(steps) for side in trainer.sides
        },
        "mean_kappa": sum(kappas) / len(kappas) if kappas else None,
        "criterion_met": sum(e["criterion_met"] for e in steps if "criterion_met" in e),
        "ended": trainer.stop_reason or "last step",
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data_dir", required=True, help="folder with train.parquet and test.parquet"
    )
    parser.add_argument("--model", required=True, help="the original model, made by hamu train")
    parser.add_argument(
        "--output", default="docs/results", help="where cifar10.json, .md and the tables go"
    )
    parser.add_argument(
        "--protocol",
        nargs="+",
        choices=PROTOCOLS,
        default=list(PROTOCOLS),
        help="what to run [both]",
    )
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache = output / "cifar10.json"
    results: dict[str, Any] = (
        json.loads(cache.read_text()) if cache.exists() else {"runs": {}, "hardness": {}}
    )

    def save() -> None:
        cache.write_text(json.dumps(results, indent=1) + "\n")

    model = load_classifier(options.model)
    train, test = (
        read_images(options.data_dir, split).normalized(
            model.config.image_mean, model.config.image_std
        )
        for split in ("train", "test")
    )
    problems = {rho: forget_class(train, test, 0, rho) for rho in RHOS}
    for rho, problem in problems.items():
        if f"{rho:g}" not in results["hardness"]:
            hardness = measure_hardness(model, problem.retain, problem.forget, collate=collate)
            results["hardness"][f"{rho:g}"] = {
                "kappa": hardness.kappa,
                "cos": hardness.cos,
                "regime": hardness.regime,
            }
            save()
            print(f"rho {rho:g}: {results['hardness'][f'{rho:g}']}", flush=True)
    before = {rho: judge(model, problem) for rho, problem in problems.items()}
    results["original"] = {f"{rho:g}": figures for rho, figures in before.items()}
    for protocol in options.protocol:
        for rho, problem in reversed(problems.items()):
            for method in METHODS:
                key = f"{protocol}/{rho:g}/{method}"
                if key not in results["runs"]:
                    run = unlearn(options.model, problem, method, protocol, before[rho])
                    results["runs"][key] = run
                    save()
                    print(
                        f"{key}: ΔL_f {run['forget_gain']:+.4f} -ΔL_r {run['retain_gain']:+.4f} ({run['seconds']} s)",
                        flush=True,
                    )
    write_tables(results, output)


def write_tables(results: dict[str, Any], output: Path) -> None:
    """The tables as Markdown, to be read with cifar10.md."""
    lines = ["| ρ | κ (full gradients, clipped) | cosθ | regime |", "|---|---|---|---|"]
    for rho, h in results["hardness"].items():
        lines.append(f"| {rho} | {h['kappa']:+.3f} | {h['cos']:+.3f} | {h['regime']} |")
    for protocol in PROTOCOLS:
        for rho in RHOS:
            runs = {m: results["runs"].get(f"{protocol}/{rho:g}/{m}") for m in METHODS}
            runs = {m: run for m, run in runs.items() if run}
            if not runs:
                continue
            lines += [
                "",
                f"Protocol {protocol}, ρ = {rho:g}:",
                "",
                "| method | ΔL_f | -ΔL_r | forget acc. | retain acc. | test acc. | mean κ | ‖g_r‖ | ‖g_f‖ | "
                "criterion met | steps |",
                "|---|---|---|---|---|---|---|---|---|---|---|",
            ]
            for method, r in runs.items():
                norms = [
                    f"{r['mean_norms'][s]:.2f}" if s in r["mean_norms"] else "-"
                    for s in ("retain", "forget")
                ]
                kappa = "-" if r["mean_kappa"] is None else f"{r['mean_kappa']:+.3f}"
                lines.append(
                    f"| {method} | {r['forget_gain']:+.4f} | {r['retain_gain']:+.4f} | {r['forget_accuracy']:.2%} | "
                    f"{r['retain_accuracy']:.2%} | {r['test_accuracy']:.2%} | {kappa} | {norms[0]} | {norms[1]} | "
                    f"{r['criterion_met'] if method.startswith('hamu') else '-'} | {r['steps']} |"
                )
    (output / "cifar10-tables.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
