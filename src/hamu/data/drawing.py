"""Some records of a data set, drawn at random: which ones depends on its length, how many, and the seed alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, Subset


def draw_positions(length: int, most: int | None, seed: int) -> list[int] | None:
    """At most this many of the positions 0 to length - 1, in random order; None for all of them.

    A smaller number draws the beginning of what a larger one draws.
    """
    if most is None or length <= most:
        return None
    drawn: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[
        :most
    ].tolist()
    return drawn


def subset(data: Dataset[Any], most: int | None, seed: int) -> Dataset[Any]:
    """At most this many records of a data set, those of `draw_positions`; the data set itself if these are all."""
    positions = draw_positions(len(data), most, seed)  # type: ignore[arg-type]
    return data if positions is None else Subset(data, positions)
