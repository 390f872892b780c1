"""Bootstrap confidence intervals of figures over the records of a set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hamu.evaluation.predictions import Predictions, TokenPredictions, probabilities

LEVEL = 0.95
REPLICATES = 1000

Ends = dict[str, tuple[float, float]]  # the low and the high end of each figure
_ByFigure = dict[str, NDArray[Any]]


def record_intervals(predictions: Predictions | TokenPredictions, *, seed: int = 42) -> Ends:
    """Percentile bootstrap intervals of a set's figures (Efron 1979); draws records with
    replacement.

    The tokens of a text depend on each other, so each draw takes a text as a whole.

    Args:
        predictions: for one set.
        seed: seed of the draws.

    Returns:
        (low, high) of `loss` and `accuracy`, for texts of `probability` too, as the reports define
        them. A figure that is not finite, or over fewer than two records, has no interval.
    """
    return _intervals(*_per_record(predictions), seed)


def change_intervals(
    before: Predictions | TokenPredictions,
    after: Predictions | TokenPredictions,
    *,
    seed: int = 42,
) -> Ends:
    """Paired intervals of the change of each figure between two models on the same records.

    A record's difficulty cancels in the difference, so these are narrower than the intervals of
    both.

    Args:
        before, after: of two models, for the same set.
        seed: seed of the draws; see `record_intervals`.
    """
    (old, counts), (new, _) = _per_record(before), _per_record(after)
    with np.errstate(invalid="ignore"):  # infinite in both
        changes = {name: new[name] - old[name] for name in new}
    return _intervals(changes, counts, seed)


def _intervals(sums: _ByFigure, counts: _ByFigure, seed: int) -> Ends:
    records = len(next(iter(counts.values())))
    finite = [name for name, values in sums.items() if np.isfinite(values).all()]
    if records < 2 or not finite:
        return {}
    columns = np.stack([*(sums[name] for name in finite), *(counts[name] for name in finite)])
    draws = np.random.default_rng(seed)
    totals = np.stack(
        [
            columns @ np.bincount(draws.integers(records, size=records), minlength=records)
            for _ in range(REPLICATES)
        ]
    )
    figures = totals[:, : len(finite)] / totals[:, len(finite) :]
    low, high = np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).tolist()
    return {name: (low[i], high[i]) for i, name in enumerate(finite)}


def _per_record(predictions: Predictions | TokenPredictions) -> tuple[_ByFigure, _ByFigure]:
    """Numerator and denominator of each figure, [records] each."""
    if isinstance(predictions, Predictions):
        losses, correct = predictions.losses.numpy(), predictions.correct.double().numpy()
        ones = np.ones(len(predictions.labels))
        return {"loss": losses, "accuracy": correct}, {"loss": ones, "accuracy": ones}
    tokens = predictions.lengths.double()
    right = torch.zeros_like(tokens)
    right.index_add_(0, predictions.record, predictions.correct.double())
    sums = {
        "loss": (predictions.record_losses * tokens).numpy(),
        "accuracy": right.numpy(),
        "probability": probabilities(predictions).numpy(),
    }
    lengths = tokens.numpy()
    return sums, {"loss": lengths, "accuracy": lengths, "probability": np.ones_like(lengths)}
