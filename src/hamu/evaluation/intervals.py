"""How sure a figure is: what it would have been with other records from the same source (bootstrap)."""

from __future__ import annotations

import numpy as np
import torch

from hamu.evaluation.likelihood import probabilities
from hamu.evaluation.predictions import Predictions, TokenPredictions

LEVEL = 0.95
REPLICATES = 1000


Ends = dict[str, tuple[float, float]]  # of each figure: the low and the high end


def record_intervals(predictions: Predictions | TokenPredictions, *, seed: int = 42) -> Ends:
    """Percentile bootstrap intervals of the figures of a set (Efron 1979); records are drawn with replacement.

    The tokens of a text are not independent of each other, so that it is drawn as a whole.

    Args:
        predictions: for one set.
        seed: seed of the draws.

    Returns:
        (low, high) of `loss` and `accuracy`, for texts of `probability` too, as the reports define them. A figure that
        is not finite, or that is of fewer than two records, has no interval.
    """
    return _intervals(*_per_record(predictions), seed)


def change_intervals(
    before: Predictions | TokenPredictions,
    after: Predictions | TokenPredictions,
    *,
    seed: int = 42,
) -> Ends:
    """See `record_intervals`: of the change of each figure. It is paired, as both are of the same records.

    What is hard in a record is so before and after, and falls out of the difference; the intervals of before and after
    by themselves are wider, and say little about the change.

    Args:
        before, after: of two models, for the same set.
        seed: likewise.
    """
    (old, counts), (new, _) = _per_record(before), _per_record(after)
    with np.errstate(invalid="ignore"):  # of what is infinite in both
        changes = {name: new[name] - old[name] for name in new}
    return _intervals(changes, counts, seed)


def _intervals(sums: dict[str, np.ndarray], counts: dict[str, np.ndarray], seed: int) -> Ends:
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


def _per_record(
    predictions: Predictions | TokenPredictions,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What each record adds to a figure's sum and to what that is divided by, [records] each."""
    if isinstance(predictions, Predictions):
        sums = {
            "loss": predictions.losses.numpy(),
            "accuracy": predictions.correct.double().numpy(),
        }
        return sums, dict.fromkeys(sums, np.ones(len(predictions.labels)))
    tokens, correct = predictions.lengths.double(), predictions.correct.double()
    right = torch.zeros_like(tokens).index_add_(0, predictions.record, correct)
    sums = {
        "loss": (predictions.record_losses * tokens).numpy(),
        "accuracy": right.numpy(),
        "probability": probabilities(predictions).numpy(),
    }
    return sums, {
        name: (np.ones_like(one) if name == "probability" else tokens.numpy())
        for name, one in sums.items()
    }
