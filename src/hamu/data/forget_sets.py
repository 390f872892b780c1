"""What to forget: a class (with the paper's similarity mixing), a list of rows, or a second data set."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from hamu.data.images import ImageData
from hamu.data.split import Records, UnlearningData
from hamu.errors import HamuError


def forget_class(
    train: ImageData, test: ImageData | None, target: str | int, rho: float = 0.0, seed: int = 42
) -> UnlearningData:
    """Forget a class, mixed with other records by the similarity mixing ratio ρ (paper, App. E.1).

    Of the n records of the class, n - ⌊ρn⌋ are drawn at random; ⌊ρn⌋ more are drawn from everything not yet chosen.
    ρ = 0 forgets the whole class (easy); ρ = 1 forgets a random sample of all classes (hard).

    Args:
        train: the training data.
        test: data that was not trained on, or None.
        target: the class, by name or number.
        rho: the mixing ratio ρ in [0, 1].
        seed: seed of the draw.

    Raises:
        HamuError: if the class does not exist or has no records, or ρ is out of range.
    """
    number = _class_number(train, target)
    if not 0 <= rho <= 1:
        raise HamuError(f"the similarity mixing ratio rho is a share in [0, 1]; got {rho}")
    generator = torch.Generator().manual_seed(seed)
    members = (train.labels == number).nonzero().flatten()
    if not len(members):
        raise HamuError(
            f"class {train.classes[number]!r} has no records in {train.source}; choose another class"
        )
    mixed = math.floor(Fraction(str(rho)) * len(members))  # exact: 0.29 * 100 is 29, not 28
    own = members[torch.randperm(len(members), generator=generator)[: len(members) - mixed]]
    free = torch.ones(len(train), dtype=torch.bool)
    free[own] = False
    rest = free.nonzero().flatten()
    others = rest[torch.randperm(len(rest), generator=generator)[:mixed]]
    name = f"class {train.classes[number]}" + (f", rho {rho:g}" if rho else "")
    return _split(train, test, torch.cat([own, others]), name, number)


def forget_rows(train: Records, test: Records | None, rows: list[int]) -> UnlearningData:
    """Forget the records in these rows of the training data.

    Raises:
        HamuError: if the list is empty, names a row twice, or names one that does not exist.
    """
    if not rows:
        raise HamuError("the forget set is empty: no row was named; give at least one")
    seen: set[int] = set()
    for row in rows:
        if not 0 <= row < len(train):
            raise HamuError(
                f"row {row} is not in {train.source}, which has rows 0 to {len(train) - 1}"
            )
        if row in seen:
            raise HamuError(f"row {row} is named twice in the forget set; name each row once")
        seen.add(row)
    return _split(train, test, torch.tensor(rows), f"{len(rows)} named rows", None)


def forget_data(
    train: Records, test: Records | None, forget: Records, allow_missing: bool = False
) -> UnlearningData:
    """Forget the records of a second data set; where the training data hold the same records, they leave it.

    Args:
        train: the training data.
        test: data that was not trained on, or None.
        forget: what to forget.
        allow_missing: forget also what the training data do not hold, as where they hold the retain set alone.

    Raises:
        HamuError: if the two do not fit together, records are missing, or nothing is left to retain.
    """
    forget = train.matched(forget)
    digests, there = forget.digests(), train.digests()
    gone, known = set(digests), set(there)
    kept = torch.tensor(
        [i for i, digest in enumerate(there) if digest not in gone], dtype=torch.long
    )
    if not len(kept):
        raise HamuError(_EVERYTHING)
    found = sum(digest in known for digest in digests)
    if found < len(forget) and not allow_missing:
        raise HamuError(
            _missing(len(forget) - found, len(forget), Path(forget.source).name, train.source)
        )
    name = f"{len(forget)} records of {Path(forget.source).name}, {found or 'none'} of them found in the training data"
    rows = len(train) - len(kept)
    if rows != found:
        name += f", where they are {rows} records"
    return UnlearningData(train.select(kept), forget, test, name, not_found=len(forget) - found)


def lists_rows(value: str) -> bool:
    """Whether a text is itself a list of row numbers, not the name of a file with one."""
    return all(part.strip().lstrip("-").isdigit() for part in value.split(",") if part.strip())


def parse_rows(value: str) -> list[int]:
    """Row numbers from "3,17,25" or from a file with one number per line (or a JSON-like list).

    Raises:
        HamuError: if the file does not exist or something in it is not a number.
    """
    text = value
    if not lists_rows(value):
        path = Path(value)
        if not path.is_file():
            raise HamuError(
                f"{value!r} is neither a list of row numbers nor a file; write 3,17,25 or name a file"
            )
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise HamuError(
                f"{value} is not a text file; expected one row number per line"
            ) from None
    rows = []
    for part in text.replace("[", " ").replace("]", " ").replace(",", " ").split():
        try:
            rows.append(int(part))
        except ValueError:
            raise HamuError(
                f"{part[:40]!r} in the forget rows {value!r} is not a whole number"
            ) from None
    return rows


def _missing(missing: int, records: int, forget: str, train: str) -> str:
    if missing == records:
        return (
            f"none of the {records} records of {forget} is in {train}; name the file of records to forget in the form "
            f"that they have there, or give --allow_missing if {train} holds only what is to be retained"
        )
    return (
        f"{missing} of {records} records of {forget} are not in {train} as they are; where it holds them in another "
        f"form they would be retained: correct them, or give --allow_missing to forget them all the same"
    )


_EVERYTHING = (
    "the forget set is the whole training set: nothing is left to retain; delete the model instead"
)


def _split(
    train: Records, test: Records | None, forget: Tensor, name: str, target: int | None
) -> UnlearningData:
    stays = torch.ones(len(train), dtype=torch.bool)
    stays[forget] = False
    retain = stays.nonzero().flatten()
    if not len(retain):
        raise HamuError(_EVERYTHING)
    return UnlearningData(train.select(retain), train.select(forget), test, name, target)


def _class_number(data: ImageData, target: str | int) -> int:
    if str(target) in data.classes:
        return data.classes.index(str(target))
    if str(target).isdigit() and int(target) < len(data.classes):
        return int(target)
    raise HamuError(
        f"class {target!r} does not exist in {data.source}; choose one of {', '.join(data.classes)}"
    )
