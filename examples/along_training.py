"""κ at each state of a training, by `hamu assess`.

    python examples/along_training.py --data_dir CIFAR10 --name "seed 42" runs/original/checkpoint-*

CIFAR10 holds train.parquet and test.parquet of CIFAR-10. The states are checkpoints of `hamu train --recipe
cifar10-resnet20`. Adds the training to along-training.json, and draws all of them; writes along-training-tables.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import transformers
from originals import on_test_images
from rich.console import Console

from hamu.cli import main as hamu

BATCHES = 5  # of 500 images of each side


def state_of(checkpoint: Path, data_dir: str) -> dict[str, Any]:
    """Epoch, κ with its 95% interval, and the share of test images that is right."""
    with TemporaryDirectory() as place:
        code = hamu([
            "assess", "--recipe", "cifar10-resnet20", "--data_dir", data_dir, "--bf16", "--model", str(checkpoint),
            "--assess_batches", str(BATCHES), "--curvature_samples", "0", "--conflicts", "false",
            "--output_dir", f"{place}/assess",
        ])  # fmt: skip
        if code not in (0, 3, 4):  # the verdicts; anything else is an error, which it has told
            raise SystemExit(code)
        found = json.loads(Path(place, "assess/assess.json").read_text())
    return {
        "epoch": json.loads((checkpoint / "trainer_state.json").read_text())["epoch"],
        "kappa": found["hamu-q"]["kappa"],
        "interval": found["intervals"]["kappa"],
        "gradient_norms": found["gradient_norms"],
        "test": on_test_images(str(checkpoint), data_dir),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each state of each training."""
    lines = [
        "| training | epochs | κ | 95% interval | test images | of the class |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name, states in results.items():
        for one in states:
            low, high = one["interval"]
            right = one["test"]
            lines.append(
                f"| {name} | {one['epoch']:g} | {one['kappa']:+.2f} | {low:+.2f} to {high:+.2f} | {right['all']:.1%} | "
                f"{right['forgotten']:.1%} |"
            )
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """κ against epochs, a line for each training."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name, states in results.items():
        kappas = [one["kappa"] for one in states]
        below = [kappa - one["interval"][0] for kappa, one in zip(kappas, states, strict=True)]
        above = [one["interval"][1] - kappa for kappa, one in zip(kappas, states, strict=True)]
        axes.errorbar([one["epoch"] for one in states], kappas, [below, above], marker="o", markersize=4, capsize=2,
                      linewidth=1, label=name)  # fmt: skip
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="epochs of training", ylabel="κ of the gradients, clipped to norm 1")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoints", nargs="+", type=Path, help="folders checkpoint-N of one training"
    )
    parser.add_argument("--data_dir", required=True, help="folder of CIFAR-10")
    parser.add_argument("--name", required=True, help="what to call the training")
    parser.add_argument(
        "--output", default="docs/results", help="where along-training.json and the rest go"
    )
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache = output / "along-training.json"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    states = [state_of(checkpoint, options.data_dir) for checkpoint in options.checkpoints]
    results[options.name] = sorted(states, key=lambda one: float(one["epoch"]))
    cache.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, output / "along-training.png")
    (output / "along-training-tables.md").write_text(table(results))
    Console().print(f"written: {cache}")


if __name__ == "__main__":
    main()
