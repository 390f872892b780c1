"""Is what `hamu assess` says true? Hardness against similarity, and predicted against realised costs, on real images.

    python examples/hardness.py digits
    python examples/hardness.py cifar --data_dir CIFAR10 [--until 0.93] [--work runs/hardness]
    python examples/hardness.py originals --data_dir CIFAR10 --models runs/original-1/model runs/original-2/model ...

1. κ of the mean gradients against the similarity mixing ratio ρ, averaged over three models (one per seed, each with
   its own draw of the data and of the forget set).
2. The frontier's prediction of one step's retain change against what the step does, over 20 random pairs of a model
   and a constraint, at several learning rates.

"digits" trains the demo's model on the bundled digits. "cifar" trains on a random fifth of CIFAR-10 as the recipe does:
50 epochs, AdamW, learning rate 1e-3 throughout, batches of a tenth of the data; with --until it ends at the first epoch
that fits this share of the training images, as the recipe's model does on all data (a fifth is soon known by heart).
"originals" takes models trained elsewhere and a fifth of the data to measure on. Adds to hardness.json; writes
hardness-tables.md and hardness.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, set_seed

from hamu import HamuQ, PairedGradients
from hamu.assess import measure_hardness
from hamu.assess.curvature import hessian_product, lanczos
from hamu.assess.gradients import AssessedModel
from hamu.cli.demo import TRAIN, Scenario
from hamu.core.forward import evaluating, without_tf32
from hamu.data import (
    ImageData,
    UnlearningData,
    collate,
    forget_class,
    pixel_statistics,
    read_images,
)
from hamu.evaluation import predict
from hamu.models import load_classifier, new_classifier
from hamu.unlearning.trainer import TrainConfig, train_original

RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
RATES = (1e-4, 1e-3, 1e-2, 1e-1)
PAIRS = 20
SHARE = 0.2  # of CIFAR-10
SEEDS = 3


def thinned(problem: UnlearningData[Any], seed: int) -> UnlearningData[Any]:
    """A random fifth of the retain and of the forget set."""
    sets = {}
    for name in ("retain", "forget"):
        data = getattr(problem, name)
        generator = torch.Generator().manual_seed(seed)
        sets[name] = data.select(
            torch.randperm(len(data), generator=generator)[: round(SHARE * len(data))]
        )
    return replace(problem, **sets)


class Until(TrainerCallback):
    """Ends a training once enough of (2,000 of) the training images are right, in evaluation mode."""

    def __init__(self, model: nn.Module, data: ImageData, share: float) -> None:
        self.model, self.share = model, share
        self.data = data.select(range(min(2000, len(data))))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look."""
        right = predict(self.model, self.data, 500).correct.double().mean().item()
        control.should_training_stop = right >= self.share


def trained(
    everything: ImageData, seed: int, folder: Path, until: float | None
) -> tuple[Any, ImageData]:
    """A model trained by the recipe on a random fifth of the data, kept in a folder, and that fifth."""
    generator = torch.Generator().manual_seed(seed)
    train = everything.select(
        torch.randperm(len(everything), generator=generator)[: round(SHARE * len(everything))]
    )
    statistics = pixel_statistics(train)
    train = train.normalized(*statistics)
    if not (folder / "config.json").exists():
        set_seed(seed)
        new = new_classifier("resnet20", train, *map(list, statistics))
        settings = TrainConfig(
            output_dir="runs/unused", seed=seed, optim="adamw_torch", learning_rate=1e-3, num_train_epochs=50,
            per_device_train_batch_size=len(train) // 10, bf16=True, disable_tqdm=True, logging_steps=100,
        )  # fmt: skip
        watching: list[TrainerCallback] = [] if until is None else [Until(new, train, until)]
        train_original(new, train, settings, watching).save_pretrained(folder)
    model: Any = load_classifier(str(folder))
    return model.to(memory_format=torch.channels_last), train


def cifar(options: argparse.Namespace) -> Iterator[tuple[int, nn.Module, Any]]:
    """For each seed: a model trained on its fifth of the data by the recipe, and its problem at a given ρ."""
    everything = read_images(options.data_dir)
    for seed in range(options.seeds):
        model, train = trained(
            everything, seed, Path(options.work) / f"cifar-{seed}", options.until
        )
        print(
            "training accuracy",
            predict(model, train, 500).correct.double().mean().item(),
            flush=True,
        )

        def problem(rho: float, train: Any = train, seed: int = seed) -> UnlearningData[Any]:
            return forget_class(train, None, 0, rho, seed)

        yield seed, model, problem


def originals(options: argparse.Namespace) -> Iterator[tuple[int, nn.Module, Any]]:
    """For each original model: its seed, the model, and its problem at a given ρ."""
    train = read_images(options.data_dir)
    for seed, path in enumerate(options.models):
        model: Any = load_classifier(path)
        normalized = train.normalized(model.config.image_mean, model.config.image_std)

        def problem(
            rho: float, seed: int = seed, train: ImageData = normalized
        ) -> UnlearningData[Any]:
            return thinned(forget_class(train, None, 0, rho, seed), seed)

        yield seed, model.to(memory_format=torch.channels_last), problem


def digits(seeds: int) -> Iterator[tuple[int, nn.Module, Any]]:
    """The demo's model, trained for a random number of epochs."""
    for seed in range(seeds):
        set_seed(seed)
        scenario = Scenario("image", seed)
        model, train = scenario.new_model()
        epochs = 1 + seed % 4
        settings = TRAIN["image"] | {"num_train_epochs": epochs}
        train_original(
            model,
            train,
            TrainConfig(output_dir="runs/unused", seed=seed, disable_tqdm=True, **settings),
        )

        def problem(rho: float, train: Any = train, seed: int = seed) -> UnlearningData[Any]:
            return forget_class(train, None, 3, rho, seed)

        yield seed, model, problem


def correlation(cases: list[tuple[int, nn.Module, Any]]) -> dict[str, Any]:
    """κ at every ρ, for each seed, and Pearson's correlation of their means with ρ."""
    figures: dict[str, list[list[float]]] = {"kappa": [], "cos": []}
    for _, model, problem in cases:
        sets = [problem(rho) for rho in RHOS]
        found = [measure_hardness(model, s.retain, s.forget, collate=collate) for s in sets]
        for name, rows in figures.items():
            rows.append([getattr(h, name) for h in found])
            print(name, [f"{value:+.4f}" for value in rows[-1]], flush=True)
    summary: dict[str, Any] = dict(figures)
    for name, rows in figures.items():
        each = [float(np.corrcoef(RHOS, row)[0, 1]) for row in rows]
        summary[f"pearson_{name}"] = float(np.corrcoef(RHOS, np.mean(rows, axis=0))[0, 1])
        summary[f"pearson_{name}_of_each"] = each
    return summary


def one_step(
    model: nn.Module, problem: UnlearningData[Any], share: float, seed: int
) -> dict[str, Any]:
    """The predicted retain change of a step (per unit of learning rate) and the realised one at each rate."""
    assessed = AssessedModel(model, problem.retain, problem.forget, collate, seed=seed)
    pair = PairedGradients(model, HamuQ(share, constraint_mode="relative", stopping="off"))
    with evaluating(model), without_tf32():
        for side in ("retain", "forget"):
            count = len(getattr(problem, side))
            with getattr(pair, side)():
                for batch in assessed.batches(side):
                    (assessed.total(assessed.score(batch)) / count).backward()
        step = pair.combine()
        updates = [p.grad.clone() for p in pair.parameters if p.grad is not None]
        original = [p.detach().clone() for p in pair.parameters]
        before = retain_loss(assessed)
        realised = {}
        for rate in RATES:
            with torch.no_grad():
                for p, w, g in zip(pair.parameters, original, updates, strict=True):
                    p.copy_(w - rate * g)
            realised[f"{rate:g}"] = retain_loss(assessed) - before
        with torch.no_grad():
            for p, w in zip(pair.parameters, original, strict=True):
                p.copy_(w)
        some = list(assessed.batches("retain", assessed.positions("retain", 500), 100))
        loss = lambda batch: assessed.total(assessed.score(batch)) / 500  # noqa: E731
        product = hessian_product(loss, some, assessed.parameters)
        curvature = lanczos(product, assessed.parameters, steps=12, tolerance=1e-2)
    model.zero_grad()
    clip = step.clip[0].item()
    return {
        "constraint": share,
        "kappa": step.kappa.item(),
        "predicted_per_rate": step.promised_retain_change.item() / clip,
        "realised": realised,
        "largest_eigenvalue": curvature.largest,
        "clip": clip,
    }


@torch.no_grad()
def retain_loss(assessed: AssessedModel) -> float:
    """The mean loss over all retain records, summed in float64."""
    total, count = 0.0, 0
    for batch in assessed.batches("retain"):
        scored = assessed.score(batch)
        total += nn.functional.cross_entropy(
            scored.logits.double(), scored.labels, reduction="sum"
        ).item()
        count += len(scored.labels)
    return total / count


def predictions(cases: list[tuple[int, nn.Module, Any]], seed: int = 0) -> dict[str, Any]:
    """20 random pairs of a problem and a constraint; R² of the prediction at each learning rate."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(PAIRS):
        _, model, problem = cases[number % len(cases)]
        rho, share = float(draw.choice(RHOS)), float(draw.uniform(0.05, 1.0))
        rows.append({"rho": rho} | one_step(model, problem(rho), share, number))
        print({k: v for k, v in rows[-1].items() if k != "clip"}, flush=True)
    by_rate = {}
    for rate in RATES:
        predicted = np.array([rate * row["predicted_per_rate"] for row in rows])
        realised = np.array([row["realised"][f"{rate:g}"] for row in rows])
        residual = ((realised - predicted) ** 2).sum() / ((realised - realised.mean()) ** 2).sum()
        ratio = [0.5 * rate * row["clip"] * row["largest_eigenvalue"] for row in rows]
        by_rate[f"{rate:g}"] = {
            "r_squared": float(1 - residual),
            "median_error_ratio": float(np.median(ratio)),
        }
    return {"pairs": rows, "by_rate": by_rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=("digits", "cifar", "originals"))
    parser.add_argument("--data_dir", help="folder with CIFAR-10's train.parquet")
    parser.add_argument(
        "--models", nargs="+", default=[], help="original models on CIFAR-10, one per seed"
    )
    parser.add_argument(
        "--until", type=float, help="end a training once this share of the images is right"
    )
    parser.add_argument("--work", default="runs/hardness", help="where trained models are kept")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"how many models cifar trains [{SEEDS}]"
    )
    parser.add_argument("--only_correlation", action="store_true", help="leave the predictions out")
    parser.add_argument("--output", default="docs/results", help="where the results go")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    cache = output / "hardness.json"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    if options.case == "digits":
        name, cases = "digits", list(digits(PAIRS))
    elif options.case == "cifar":
        name = "CIFAR-10, a fifth, " + (
            "by heart" if options.until is None else f"to {options.until:.0%}"
        )
        cases = list(cifar(options))
    else:
        name, cases = "CIFAR-10, originals", list(originals(options))
    predicted = None if options.only_correlation else predictions(cases)
    results[name] = {"correlation": correlation(cases[:SEEDS]), "prediction": predicted}
    cache.write_text(json.dumps(results, indent=1) + "\n")
    write(results, output)


def write(results: dict[str, Any], output: Path) -> None:
    """The tables as Markdown, to be read with hardness.md, and the picture."""
    lines = [
        "| data | | " + " | ".join(f"ρ = {rho:g}" for rho in RHOS) + " | Pearson | of each seed |"
    ]
    lines.append("|---" * (len(RHOS) + 4) + "|")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, found in results.items():
        for figure_name, symbol in (("kappa", "κ"), ("cos", "cosθ")):
            values = np.array(found["correlation"][figure_name])
            each = ", ".join(
                f"{r:.3f}" for r in found["correlation"][f"pearson_{figure_name}_of_each"]
            )
            cells = " | ".join(f"{k:+.3f}" for k in values.mean(0))
            pearson = found["correlation"][f"pearson_{figure_name}"]
            lines.append(f"| {name} | {symbol} | {cells} | {pearson:.4f} | {each} |")
        kappas = np.array(found["correlation"]["kappa"])
        left.errorbar(RHOS, kappas.mean(0), kappas.std(0), marker="o", capsize=3, label=name)
        if found["prediction"] is None:
            continue
        rows = found["prediction"]["pairs"]
        predicted = [row["predicted_per_rate"] for row in rows]
        right.plot(
            predicted, [1e4 * row["realised"]["0.0001"] for row in rows], "o", label=name, alpha=0.7
        )
    lines += ["", "| data | learning rate | R² | median ½ηλ_max |", "|---|---|---|---|"]
    for name, found in results.items():
        for rate, row in (found["prediction"] or {"by_rate": {}})["by_rate"].items():
            lines.append(
                f"| {name} | {rate} | {row['r_squared']:.4f} | {row['median_error_ratio']:.2%} |"
            )
    (output / "hardness-tables.md").write_text("\n".join(lines) + "\n")
    left.set_ylim(-1.0, 1.5)  # room for the names
    left.set(xlabel=r"similarity mixing ratio $\rho$", ylabel=r"hardness $\kappa$, clipped")
    ends = right.get_xlim()
    right.plot(ends, ends, ":", color="0.5")
    right.set(
        xlabel=r"predicted retain change over $\eta$",
        ylabel=r"realised over $\eta$, at $\eta = 10^{-4}$",
    )
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output / "hardness.png", dpi=130)


if __name__ == "__main__":
    main()
