"""Shared by several experiments: the methods that they compare, the mixing ratios, the correlation of two figures."""

from __future__ import annotations

from typing import Any

import numpy as np

OURS = ("hamu-q", "hamu-u")
BASELINES = ("ft", "ga", "gdiff", "kl", "scrub")
METHODS = OURS + BASELINES
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)  # similarity mixing ratios


def pearson_of(xs: Any, ys: Any) -> float | None:
    """Pearson's correlation; None if a value is missing, if there are fewer than three, or if all are alike."""
    pairs = list(zip(xs, ys, strict=True))
    if len(pairs) < 3 or None in ys or len({*ys}) < 2:
        return None
    return float(np.corrcoef(np.array(pairs, dtype=float).T)[0, 1])
