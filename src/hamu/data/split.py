"""The division of a data set into what must go and what must stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from hamu.data.images import ImageData
from hamu.data.text import TextData, TextRecords

Records = TypeVar("Records", ImageData, TextRecords, TextData)


@dataclass(frozen=True)
class UnlearningData(Generic[Records]):
    """The three sets of an unlearning problem.

    Attributes:
        retain: training records that stay.
        forget: training records that must go.
        test: records that were never trained on, None where there are none.
        forget_name: how the forget set was chosen, for records and tables.
        target_class: the class that is being forgotten, None if the forget set is not built on one.
        not_found: forget records that are not among the training records, which only `allow_missing` lets pass.
    """

    retain: Records
    forget: Records
    test: Records | None
    forget_name: str
    target_class: int | None = None
    not_found: int = 0

    def copies(self) -> int:
        """How many records that stay are the same, pixel by pixel or letter by letter, as one that must go."""
        retain, forget = self._trained
        gone = set(forget)
        return sum(digest in gone for digest in retain)

    def known_tests(self) -> int:
        """How many test records are the same as one to retain or to forget, and so were trained on."""
        if self.test is None:
            return 0
        retain, forget = self._trained
        known = {*retain, *forget}
        return sum(digest in known for digest in self.test.digests())

    @cached_property
    def _trained(self) -> tuple[list[bytes], list[bytes]]:
        """Digests of what is retained and what is forgotten."""
        return self.retain.digests(), self.forget.digests()

    def sets(self) -> dict[str, Records]:
        """The sets that there are, by name."""
        named = {"retain": self.retain, "forget": self.forget, "test": self.test}
        return {name: data for name, data in named.items() if data is not None}

    def normalized(self, mean: list[float], std: list[float]) -> UnlearningData[ImageData]:
        """All sets of images, normalised by the same statistics."""
        changed = {name: data.normalized(mean, std) for name, data in self.sets().items()}
        return replace(self, **changed)
