"""Pairs of one retain and one forget record, made in the data set, unseen by samplers and loaders.

One epoch is one pass over the retain data. The forget data are drawn round and round, each round in
a new order, and go on where the last epoch ended. The place of a record depends on the seed alone:
not on the batch size, the number of processes, or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hamu.core.gram import SIDES
from hamu.errors import HamuError

Shuffle = Literal["epoch", "once"]
WEIGHT = "weight"  # of a batch of pairs, 1 if it is not there
ALTERNATIVE = "alternative"  # in a batch of forget records: the same with their other answers
POSITIONS = "positions"  # of a batch's forget records in their data set, where limits need them


class PairedDataset(Dataset[dict[str, Any]]):
    """Item i is {"retain": retain[σ(i)], "forget": forget[π(i)]}, or one of the two sides.

    Args:
        retain: the data that stay; their number is the length of an epoch, whatever the sides.
        forget: the data that must go.
        sides: the sides that a method needs, of "retain" and "forget".
        seed: seed of every order.
        shuffle: "epoch" for a new order each epoch, "once" for the orders of the rounds that begin
            in the first epoch (the paper).
        with_positions: True if batches name their forget records by position, each once.
        with_alternatives: True if batches have the other answers to their forget records too, from
            the data set `forget.alternatives`.

    Attributes:
        focus: (start, positions), at most two: from this place of the run on, counted in pairs, the
            forget data are the records at these positions.

    Raises:
        HamuError: if a side is empty.
    """

    def __init__(
        self,
        retain: Dataset[Any],
        forget: Dataset[Any],
        *,
        sides: Sequence[str] = SIDES,
        seed: int = 42,
        shuffle: Shuffle = "epoch",
        with_positions: bool = False,
        with_alternatives: bool = False,
    ) -> None:
        self._data: dict[str, Any] = {"retain": retain, "forget": forget}
        for side, data in self._data.items():
            if len(data) == 0:
                raise HamuError(f"the {side} set is empty; give at least one record to {side}")
        self._sides, self._with_positions = tuple(sides), with_positions
        self._alternatives: Any = self._data["forget"].alternatives if with_alternatives else None
        self._seed, self._shuffle, self._epoch = seed, shuffle, 0
        self.focus: list[tuple[int, list[int]]] = []

    def focus_on(self, positions: Sequence[int], start: int) -> None:
        """Draw the forget data from these positions (all, if empty) from the place `start` on.

        The place lies beyond any batch that a loader holds already, so that a resumed run draws
        the same.
        """
        self.focus = [*self.focus[-1:], (start, list(positions))]

    def __len__(self) -> int:
        return len(self._data["retain"])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; data loaders call this."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        items = {side: self._data[side][self._position(side, index)] for side in self._sides}
        if "forget" in items and self._alternatives is not None:
            items[ALTERNATIVE] = self._alternatives[self._position("forget", index)]
        return items

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """A batch: for each side a list of items, or the result of its own `__getitems__`.

        Indices below 0, ~i for i, are read for their shape alone: the batch has the "weight" 0.
        """
        batch: dict[str, Any] = {WEIGHT: 0.0} if min(indices) < 0 else {}
        for side in self._sides:
            data = self._data[side]
            positions = [self._position(side, ~i if i < 0 else i) for i in indices]
            if side == "forget" and self._with_positions:
                positions = list(dict.fromkeys(positions))
                batch[POSITIONS] = torch.tensor(positions)
            batch[side] = _fetched(data, positions)
            if side == "forget" and self._alternatives is not None:
                batch[ALTERNATIVE] = _fetched(self._alternatives, positions)
        return batch

    def _position(self, side: str, index: int) -> int:
        place, focus = self._epoch * len(self) + index, list[int]()
        if side == "forget":
            focus = next((of for start, of in reversed(self.focus) if place >= start), focus)
        length = len(focus) or len(self._data[side])
        turn, place = divmod(place, length)
        if self._shuffle == "once" and not focus:
            turn %= -(-len(self) // length)  # the rounds that begin in the first epoch
        seed = (self._seed * 1_000_003 + turn) * 2 + SIDES.index(side)
        found = int(_order(seed, length)[place])
        return focus[found] if focus else found


def _fetched(data: Any, positions: list[int]) -> Any:
    fetch = getattr(data, "__getitems__", None)
    return fetch(positions) if fetch else [data[i] for i in positions]


@lru_cache(maxsize=8)  # of two sides; a batch may reach from one round into the next
def _order(seed: int, length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class PairCollator:
    """Collates each side of a batch by its own collator; one fetched whole stays as it is."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Tensor]]) -> None:
        self._collate = collate

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the batch of each side."""
        if not isinstance(batch, Mapping):  # a loader that fetches item by item
            batch = {side: [item[side] for item in batch] for side in batch[0]}
        found: dict[str, Any] = {
            side: items if isinstance(items, Mapping | float | Tensor) else self._collate(items)
            for side, items in batch.items()
        }
        if ALTERNATIVE in found:
            found["forget"] = {**found["forget"], ALTERNATIVE: found.pop(ALTERNATIVE)}
        return found
