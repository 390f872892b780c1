"""Figures 3, 4, 6 and 8 from several original models, a row for each.

    python -m experiments figure-3 figure-4 figure-6 figure-8 --data_dir CIFAR10 --bf16 --fraction 0.05
        --model runs/kept/checkpoint-200 --output_dir runs/from-200
    python examples/originals.py --data_dir CIFAR10 --row "20 epochs" runs/kept/checkpoint-200 runs/from-200

CIFAR10 holds train.parquet and test.parquet of CIFAR-10. --row has a name, an original model and what `python -m experiments`
made of it; it may be given several times. Figure 3 or 4 may be missing. Adds to originals.json; writes
originals-tables.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from hamu.data import read_images
from hamu.evaluation import predict
from hamu.models import load_classifier

FORGOTTEN = 0  # the recipe's class
METHODS = ("hamu-q", "hamu-u")


def on_test_images(model_dir: str, data_dir: str) -> dict[str, float]:
    """Accuracy on all test images and on those of the class that will be forgotten."""
    model = load_classifier(model_dir)
    data = read_images(data_dir, split="test").normalized(
        model.config.image_mean, model.config.image_std
    )
    right = predict(model, data, 500).correct.double()
    return {
        "all": right.mean().item(),
        "forgotten": right[torch.as_tensor(data.labels) == FORGOTTEN].mean().item(),
    }


def row_of(folder: str) -> dict[str, Any]:
    """Row of one original."""
    varying, fitted = figure(folder, 6), figure(folder, 8)
    fit, start = fitted["figures"], fitted["start"]
    pairs = [(f"{method} layer-wise", f"{method} global") for method in METHODS]
    return {
        "retain_loss": start["retain_loss"],
        "forget_loss": start["forget_loss"],
        "fraction": fitted["scale"]["fraction"],
        "kappa": [fit["steps"][layer]["kappa"] for layer, _ in pairs],
        "direct": [fit["steps"][layer]["direct_share"] for layer, _ in pairs],
        "r_squared": [[fit["line"][kind]["r_squared"] for kind in pair] for pair in pairs],
        "uncentred": [
            [fit["line"][kind]["r_squared_uncentred"] for kind in pair] for pair in pairs
        ],
        "layer_gains_more": sum(
            a > b
            for layer, whole in pairs
            for a, b in zip(fit["gain"][layer], fit["gain"][whole], strict=True)
        ),
        "figure_6_holds": sum(claim["holds"] for claim in varying["claims"]),
        **by_similarity(folder),
    }


def by_similarity(folder: str) -> dict[str, Any]:
    """Cells of Figures 3 and 4; empty for one that was not made."""
    found: dict[str, Any] = {}
    if (Path(folder) / "figure-3.json").is_file():
        correlation = figure(folder, 3)["figures"]["pearson"]["kappa"]
        found["pearson"] = [correlation[method] for method in METHODS]
    if (Path(folder) / "figure-4.json").is_file():
        compared = figure(folder, 4)["claims"]
        volumes = [claim["holds"] for claim in compared if "larger hypervolume" in claim["text"]]
        found["larger_hypervolumes"] = sum(volumes)
        found["undominated"] = next(
            claim["holds"] for claim in compared if "no baseline dominates" in claim["text"]
        )
    return found


def figure(folder: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / f"figure-{number}.json").read_text())
    return found


def table(results: dict[str, Any]) -> str:
    """All rows, the least κ first; as two tables, so that a page is wide enough."""
    first = (
        "original", "data", "test images", "of the class", "L_r", "L_f", "κ against ρ", "hypervolumes", "undominated",
    )  # fmt: skip
    second = (
        "original", "mean κ", "direct", "R² of Q", "global", "R² of U", "global", "layer-wise gains more", "Fig. 6",
    )  # fmt: skip
    rows = sorted(results.items(), key=lambda item: item[1]["kappa"][0])
    return (
        _lines(first, [_of_start(*item) for item in rows])
        + "\n"
        + _lines(second, [_of_fit(*item) for item in rows])
    )


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f"| {' | '.join(line)} |\n" for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    )


def _of_start(name: str, row: dict[str, Any]) -> list[str]:
    similarity = ["-"] * 3
    if "pearson" in row:
        similarity[0] = ", ".join(f"{one:.4f}" for one in row["pearson"])
    if "undominated" in row:
        similarity[1:] = f"{row['larger_hypervolumes']} of 4", "yes" if row["undominated"] else "no"
    right, losses = row["test"], (row["retain_loss"], row["forget_loss"])
    return [
        name, f"{row['fraction']:g}", f"{right['all']:.1%}", f"{right['forgotten']:.1%}",
        *(f"{loss:.3f}" for loss in losses), *similarity,
    ]  # fmt: skip


def _of_fit(name: str, row: dict[str, Any]) -> list[str]:
    kappa = ", ".join(f"{one:+.2f}" for one in row["kappa"])
    direct = ", ".join(f"{one:.0%}" for one in row["direct"])
    fits = [f"{one:.4f}" for pair in row["r_squared"] for one in pair]
    return [
        name,
        kappa,
        direct,
        *fits,
        f"{row['layer_gains_more']} of 10",
        f"{row['figure_6_holds']} of 4",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True, help="folder of CIFAR-10")
    parser.add_argument(
        "--row", nargs=3, action="append", required=True, metavar=("NAME", "MODEL", "FIGURES")
    )
    parser.add_argument(
        "--output", default="docs/results", help="where originals.json and the table go"
    )
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache, page = output / "originals.json", output / "originals-tables.md"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    for name, model_dir, folder in options.row:
        results[name] = row_of(folder) | {"test": on_test_images(model_dir, options.data_dir)}
    cache.write_text(json.dumps(results, indent=1) + "\n")
    page.write_text(table(results))
    Console().print(page.read_text(), markup=False)


if __name__ == "__main__":
    main()
