"""The division of data into forget and retain set, by class, rows, filter or a second file; and
pairs of a record of each, unseen by samplers and loaders.
"""

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from hamu.core.gram import SIDES
from hamu.data import text
from hamu.data.images import ImageData, normal
from hamu.data.text import TextData, TextRecords, column_names
from hamu.errors import HamuError, counted, reading

Records = TypeVar("Records", ImageData, TextRecords, TextData)
_Read = TypeVar("_Read", ImageData, TextRecords)  # before they are tokenized
Shuffle = Literal["epoch", "once"]
WEIGHT = "weight"  # by side, of a batch of pairs, 1 if it is not there
ALTERNATIVE = "alternative"  # in a batch of forget records: the same with their other answers
POSITIONS = "positions"  # of a batch's forget records in their data set, where limits need them


@dataclass(frozen=True)
class UnlearningData(Generic[Records]):
    """The three sets of an unlearning problem.

    Attributes:
        test: records that were never trained on, None where there are none.
        forget_name: the choice of the forget set in words, for records and tables.
        target_class: the class to forget, None if the forget set is not built on one.
        not_found: the number of forget records that are not among the training records.
        kept_copies: the number of retain records that are known to equal a forget record.
    """

    retain: Records
    forget: Records
    test: Records | None
    forget_name: str
    target_class: int | None = None
    not_found: int = 0
    kept_copies: int = 0

    def copies(self) -> int:
        """Count the retain records that are equal to a forget record."""
        return _shared(self._digests["retain"], self._digests["forget"])

    def near_copies(self) -> tuple[int, int]:
        """Count retain texts like forget texts but for case or punctuation; then test texts."""
        found = {name: data.digests(loosely=True) for name, data in self.sets().items()}
        known = found["retain"] + found["forget"]
        kept = _shared(found["retain"], found["forget"]) - self.copies()
        return kept, _shared(found.get("test", ()), known)

    def without_known_tests(self) -> "UnlearningData[Records]":
        """Leave out the test records that equal a retain or forget record; some must be left."""
        if self.test is None:
            return self
        known = {*self._digests["retain"], *self._digests["forget"]}
        unseen = [i for i, digest in enumerate(self._digests["test"]) if digest not in known]
        if len(unseen) == len(self.test):
            return self
        if not unseen:
            raise HamuError(
                f"all {len(self.test)} test records are among those to retain or to forget; "
                f"give other --test_data"
            )
        return replace(self, test=self.test.select(unseen))

    @cached_property
    def _digests(self) -> dict[str, list[bytes]]:
        return {name: data.digests() for name, data in self.sets().items()}

    def sets(self) -> dict[str, Any]:
        """Return the sets that there are, by name."""
        named = {"retain": self.retain, "forget": self.forget, "test": self.test}
        return {name: data for name, data in named.items() if data is not None}


def forget_class(
    train: ImageData, test: ImageData | None, target: str | int, rho: float = 0.0, seed: int = 42
) -> UnlearningData[ImageData]:
    """Forget a class, mixed with other records by the similarity mixing ratio ρ (paper, App. E.1).

    Of the n records of the class, n - ⌊ρn⌋ are drawn at random; ⌊ρn⌋ more are drawn from everything
    not yet chosen. ρ = 0 forgets the whole class (easy); ρ = 1 a random sample of all classes.
    `target` is its name or, where not all names are numbers, its place.
    """
    if not 0 <= rho <= 1:
        raise HamuError(f"the similarity mixing ratio rho is a share in [0, 1]; got {rho}")
    numbers = {normal(name): number for number, name in enumerate(train.classes)}
    has_names = not all(map(str.isdecimal, train.classes))
    if has_names:
        numbers = {str(number): number for number in range(len(train.classes))} | numbers
    number = numbers.get(normal(str(target)), -1)
    members = (train.labels == number).nonzero().flatten()
    if not len(members):
        listed = ", ".join(train.classes[i] for i in sorted({*train.labels.tolist()}))
        listed += "" if has_names else ": its classes have numbers, not names"
        raise HamuError(f"class {target!r} does not exist in {train.source}; choose of {listed}")
    generator = torch.Generator().manual_seed(seed)
    mixed = math.floor(Fraction(str(rho)) * len(members))  # exact: 0.29 * 100 is 29, not 28
    own = members[torch.randperm(len(members), generator=generator)[: len(members) - mixed]]
    rest = _others(len(train), own)
    others = rest[torch.randperm(len(rest), generator=generator)[:mixed]]
    words = f"class {train.classes[number]}" + (f", rho {rho:g}" if rho else "")
    return _split(train, test, torch.cat([own, others]), words, number)


def forget_rows(train: _Read, test: _Read | None, rows: list[int]) -> UnlearningData[_Read]:
    """Forget the records in these rows of the training data; each exists and is named once."""
    if not rows:
        raise HamuError("the forget set is empty: no row was named; give at least one")
    wrong = [row for row in rows if not 0 <= row < len(train)]
    if wrong:
        there = f"which has rows 0 to {len(train) - 1}"
        raise HamuError(f"row {wrong[0]} is not in {train.source}, {there}")
    if len({*rows}) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise HamuError(f"row {twice} is named twice in the forget set; name each row once")
    return _split(train, test, torch.tensor(rows), counted(len(rows), "named rows"), None)


def forget_data(
    train: _Read, test: _Read | None, forget: _Read, allow_missing: bool = False
) -> UnlearningData[_Read]:
    """Forget the records of a second data set; equal records leave the training data.

    Records that the training data do not hold are an error, unless `allow_missing` is given. A
    record repeated in `forget` counts no more often than the training data hold it.
    """
    forget, there, seen = train.matched(forget), train.digests(), Counter[bytes]()
    held, kept = Counter(there), dict[int, bytes]()  # digests by position
    for position, digest in enumerate(forget.digests()):
        seen[digest] += 1
        if seen[digest] <= max(1, held[digest]):
            kept[position] = digest
    repeats = len(forget) - len(kept)
    forget = forget.select(list(kept))
    rows = torch.tensor([i for i, digest in enumerate(there) if digest in seen]).long()
    found, file = _shared(kept.values(), there), Path(forget.source).name
    missing = len(forget) - found
    if missing and not allow_missing:
        raise HamuError(
            f"{missing} of {len(forget)} records of {file} are not in {train.source} as they are; "
            f"correct their form, or give --allow_missing if it holds only what is to be retained"
        )
    words = f"{counted(len(forget), 'records')} of {file}, {found or 'none'} of them found in the "
    words += "training data"
    if len(rows) != found:
        words += f", where they are {counted(len(rows), 'records')}"
    if repeats:
        words += f"; repeated in the file and left out: {repeats}"
    return replace(_split(train, test, rows, words, None), forget=forget, not_found=missing)


def matching(texts: TextRecords, expression: str) -> list[int]:
    """Find the positions of the records that COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX chooses.

    A regular expression may match anywhere in the column. True, False and None may also be written
    as in JSON, and 7.0 as 7.
    """
    parsed = re.fullmatch(r"\s*([^=!~]*[^=!~\s])\s*(!=|=|~)\s*(.*)", expression, re.DOTALL)
    if parsed is None:
        ways = "COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX"
        raise HamuError(f"the filter {expression!r} cannot be read; write {ways}")
    column, operator, value = parsed.groups()
    value = unicodedata.normalize("NFC", value)
    with reading(f"{value!r} in the filter is not a regular expression"):
        pattern = re.compile(value if operator == "~" else re.escape(value))
    matches = pattern.search if operator == "~" else pattern.fullmatch
    chosen = []
    for position, record in enumerate(texts.records):
        if column not in record.fields:
            row = f"record {position} of {texts.source}"
            raise HamuError(f"{row} has no column {column}; it has {column_names(record.fields)}")
        cell = record.fields[column]
        if any(map(matches, _written(cell, operator != "~"))) != (operator == "!="):
            chosen.append(position)
    return chosen


def _written(cell: Any, whole: bool) -> list[str]:
    """Ways to write a cell; None, NaN and the ".0" of a whole number have no parts."""
    is_number = isinstance(cell, float) and cell.is_integer()  # of a column with missing cells
    found = [str(int(cell))] if is_number else []
    if whole or not (is_number or cell is None or cell != cell):
        found.append(unicodedata.normalize("NFC", str(cell)))
    if isinstance(cell, bool) or (whole and cell is None):
        found.append(json.dumps(cell))
    return found


def lists_rows(value: str) -> bool:
    """Tell a list of row numbers from the name of a file with one."""
    return all(part.strip().lstrip("-").isdigit() for part in value.split(",") if part.strip())


def parse_rows(value: str) -> list[int]:
    """Read row numbers from "3,17,25" or from a file with one number per line (or a JSON list)."""
    way = "write 3,17,25 or name a text file with one number a line"
    with reading(f"the forget rows {value!r} are not whole numbers", f"; {way}"):
        text = value if lists_rows(value) else Path(value).read_text(encoding="utf-8-sig")
        numbers = text.strip()
        if numbers.startswith("[") != numbers.endswith("]"):
            raise ValueError("the list is cut off")
        numbers = numbers.removeprefix("[").removesuffix("]")
        if re.search(r"[^\s\d,-]", numbers):  # int would show the first, which may be a name
            raise ValueError("they hold other characters")
        rows = [int(part) for part in numbers.replace(",", " ").split()]
    if not rows:
        raise HamuError(f"the forget set is empty: {value!r} names no row; {way}")
    return rows


def batch_of(data: Any, positions: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
    """These records as a batch; the default collators leave one that the set fetches whole."""
    fetch = getattr(data, "__getitems__", None)
    items = fetch(positions) if fetch else [data[i] for i in positions]
    if isinstance(items, Mapping) and collate not in (list, text.collate):
        items = [data[i] for i in positions]
    return items if isinstance(items, Mapping) else collate(items)


def draw_positions(length: int, most: int | None, seed: int) -> list[int] | None:
    """Draw at most this many of the positions 0 to length - 1, in random order; None for all.

    The draw depends on the arguments alone, and a smaller number draws the beginning of a larger.
    """
    if most is None or length <= most:
        return None
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return order[:most].tolist()


def subset(data: Any, most: int | None, seed: int) -> Any:
    """Return the records of `draw_positions`: the data, a part of its kind, or a `Subset`."""
    positions = draw_positions(len(data), most, seed)
    if positions is None:
        return data
    is_ours = isinstance(data, ImageData | TextRecords | TextData)
    return data.select(positions) if is_ours else Subset(data, positions)


def rows_of(data: Any) -> Tensor:
    """Rows of the records in their source, [N]; of a user's data set their places in it."""
    if isinstance(data, ImageData | TextRecords | TextData):
        return data.rows
    return torch.as_tensor(data.indices if isinstance(data, Subset) else [*range(len(data))])


def _shared(digests: Iterable[bytes], known: Iterable[bytes]) -> int:
    among = set(known)
    return sum(digest in among for digest in digests)


def _others(length: int, positions: Tensor) -> Tensor:
    """Return the positions that are not among these, in order."""
    free = torch.ones(length, dtype=torch.bool)
    free[positions] = False
    return free.nonzero().flatten()


def _split(
    train: _Read, test: _Read | None, forget: Tensor, name: str, target: int | None
) -> UnlearningData[_Read]:
    retain = _others(len(train), forget)
    if not len(retain):
        raise HamuError("all is to be forgotten and nothing is left to retain; delete the model")
    return UnlearningData(train.select(retain), train.select(forget), test, name, target)


class PairedDataset(Dataset[dict[str, Any]]):
    """Item i is {"retain": retain[σ(i)], "forget": forget[π(i)]}, or what `sides` names of it.

    One epoch is one pass over the retain data. The forget data are drawn round and round, each
    round in a new order, and go on where the last epoch ended. The place of a record depends on the
    seed alone: not on the batch size, the number of processes, or a resume.

    Args:
        collate: makes a side's batch of a list of its items.
        sides: of "retain", "forget" and "alternative", other answers to the forget records.
        shuffle: "epoch" for a new order each epoch, "once" for the orders of the rounds that begin
            in the first epoch (the paper).
        with_positions: True if batches name their forget records by position, each once in the
            batch of all processes.
        share: number of the process among those that share a batch, which read it in turns.

    Attributes:
        focus: (start, positions), at most two: from this place of the run on, counted in pairs, the
            forget data are the records at these positions.
    """

    def __init__(
        self,
        retain: Dataset[Any],
        forget: Dataset[Any],
        *,
        collate: Callable[[list[Any]], Any] = list,
        sides: Sequence[str] = SIDES,
        seed: int = 42,
        shuffle: Shuffle = "epoch",
        with_positions: bool = False,
        share: int = 0,
    ) -> None:
        self._data: dict[str, Any] = {"retain": retain, "forget": forget}
        for side, data in self._data.items():
            if len(data) == 0:
                raise HamuError(f"the {side} set is empty; give at least one record to {side}")
        self._sides, self._with_positions, self._share = tuple(sides), with_positions, share
        if ALTERNATIVE in sides:
            self._data[ALTERNATIVE] = self._data["forget"].alternatives
            known, others = (len(self._data[name]) for name in ("forget", ALTERNATIVE))
            if others != known:  # would be paired with other records
                raise HamuError(
                    f"the forget set has {known} records and {others} alternatives; give one for "
                    f"each, in the same order"
                )
        self._seed, self._shuffle, self._epoch, self._collate = seed, shuffle, 0, collate
        self.focus: list[tuple[int, list[int]]] = []

    def focus_on(self, positions: Sequence[int], start: int) -> None:
        """Draw the forget data from these positions (all, if empty) from the place `start` on,
        beyond any batch that a loader holds already.
        """
        self.focus = [*self.focus[-1:], (start, list(positions))]

    def __len__(self) -> int:
        return len(self._data["retain"])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; data loaders call this."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {side: self._data[side][self._position(side, index)] for side in self._sides}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """The batch of each side.

        Indices below 0, ~i for i, are read for their shape alone: the batch has the "weight" 0; so
        has a side whose records the earlier processes have.
        """
        batch, is_shape = dict[str, Any](), min(indices) < 0
        weights = dict.fromkeys(self._sides, 0) if is_shape else {}
        for side in self._sides:
            positions = [self._position(side, ~i if i < 0 else i) for i in indices]
            if side != "retain" and self._with_positions:
                once = [] if is_shape else self._once(side, indices)
                if not once:
                    weights[side] = 0
                positions = once or positions[:1]
                batch[POSITIONS] = torch.tensor(positions)
            batch[side] = batch_of(self._data[side], positions, self._collate)
        if ALTERNATIVE in batch:
            batch["forget"] = {**batch["forget"], ALTERNATIVE: batch.pop(ALTERNATIVE)}
        return batch | ({WEIGHT: weights} if weights else {})

    def _once(self, side: str, indices: Sequence[int]) -> list[int]:
        """Positions that come first at these indices in the batch of all processes."""
        first, own = dict[int, int](), set(indices)
        for index in range(indices[0] - self._share, indices[-1] + 1):
            first.setdefault(self._position(side, index), index)
        return [position for position, index in first.items() if index in own]

    def _position(self, side: str, index: int) -> int:
        place, focus = self._epoch * len(self) + index, list[int]()
        if side != "retain":
            focus = next((of for start, of in reversed(self.focus) if place >= start), focus)
        length = len(focus) or len(self._data[side])
        turn, place = divmod(place, length)
        if self._shuffle == "once" and not focus:
            turn %= -(-len(self) // length)  # the rounds that begin in the first epoch
        seed = (self._seed * 1_000_003 + turn) * 2 + (side != "retain")
        found = int(_order(seed, length)[place])
        return focus[found] if focus else found


@lru_cache(maxsize=8)  # of two sides; a batch may reach from one round into the next
def _order(seed: int, length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
