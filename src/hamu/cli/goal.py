"""The start of a run by goal (`--auto`): an assessment, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from hamu.assess import Assessment, assess
from hamu.data import UnlearningData
from hamu.distributed import from_main
from hamu.methods import HamuQ
from hamu.training import UnlearnConfig
from hamu.training.auto import TUNED, apply_assessment

_CURVATURE_SAMPLES = 64
_BATCHES = 10  # of each side


def tune(
    model: Any,
    problem: UnlearningData[Any],
    args: UnlearnConfig,
    collator: Callable[[Any], Mapping[str, Any]],
    console: Console,
) -> Assessment:
    """Set what a run by goal finds by itself, by an assessment; returns that.

    Each process assesses, and all take what the main one has found: their sums may differ in the last digits, and
    another learning rate would part their weights.
    """
    found = assess(
        model.to(args.device),
        problem.retain,
        problem.forget,
        collate=collator,
        method=HamuQ(0.5, "relative"),
        max_grad_norm=args.clip_norm,
        batch_size=args.per_device_train_batch_size,
        most_batches=_BATCHES,
        conflicts=False,
        blocks=args.blocks,  # type: ignore[arg-type]
        curvature_samples=_CURVATURE_SAMPLES,
        seed=args.seed,
    )
    apply_assessment(args, found)
    of_main = from_main(lambda: [getattr(args, name) for name in TUNED])
    for name, value in zip(TUNED, of_main, strict=True):
        setattr(args, name, value)
    console.print(
        f"{found.verdict.headline} (κ {found.hamu_q.kappa:+.3g}, cosθ {found.hamu_q.cos:+.3f}); starting with learning "
        f"rate {args.learning_rate:.3g} and a demand of {args.constraint:.0%} of what is possible"
    )
    return found
