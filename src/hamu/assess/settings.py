"""What an assessment can be asked for."""

from __future__ import annotations

import math

from hamu.core.gram import check_max_norm
from hamu.errors import HamuError


def check_settings(
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    batch_size: int,
    most_batches: int | None,
    curvature_samples: int | None,
    bootstrap_memory: float,
) -> None:
    """Check the numbers that `assess` is given; see there.

    Raises:
        HamuError: if one is out of range.
    """
    if not 0 < learning_rate < math.inf:
        raise HamuError(
            f"learning_rate {learning_rate} must be a positive number: that of the run to come"
        )
    check_max_norm(max_grad_norm)
    if batch_size < 1:
        raise HamuError(f"batch_size {batch_size} must be at least 1 record")
    if most_batches is not None and most_batches < 1:
        raise HamuError(f"most_batches (--assess_batches) {most_batches} must be at least 1")
    if curvature_samples is not None and curvature_samples < 0:
        raise HamuError(
            f"curvature_samples {curvature_samples} must not be negative; 0 for no curvature"
        )
    if not 0 <= bootstrap_memory < math.inf:
        raise HamuError(f"bootstrap_memory {bootstrap_memory} must be a number of GB, 0 or more")
