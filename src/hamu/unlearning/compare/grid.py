"""The cells of a comparison: every method with every constraint, learning rate and seed, none of them twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from hamu.core.methods import build_method
from hamu.unlearning.trainer.config import unused_settings


@dataclass(frozen=True)
class Cell:
    """The settings in which one run differs from the others.

    Attributes:
        method: its name.
        constraint: see `UnlearnConfig`; None for a method that has none.
        learning_rate: of the run.
        seed: of the run.
    """

    method: str
    constraint: float | None
    learning_rate: float
    seed: int

    @property
    def setting(self) -> str:
        """What the runs of all seeds share, as a name."""
        constraint = "" if self.constraint is None else f"-c{_short(self.constraint)}"
        return f"{self.method}{constraint}-lr{_short(self.learning_rate)}"

    @property
    def name(self) -> str:
        """The name of the run, and of its folder."""
        return f"{self.setting}-s{self.seed}"

    def settings(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the run: its own, and those of the comparison that have an effect with its method."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        unused = unused_settings(build_method(self.method))
        return {name: value for name, value in shared.items() if name not in unused} | own


def cells(
    methods: Iterable[str],
    constraints: Iterable[float],
    learning_rates: Iterable[float],
    seeds: Iterable[int],
) -> list[Cell]:
    """List all combinations, seed by seed; a method without a constraint is there once for all constraints.

    Raises:
        HamuError: if a method is unknown.
    """
    constrained = {
        name: "constraint" not in unused_settings(build_method(name)) for name in methods
    }
    found = (
        Cell(name, constraint if constrained[name] else None, learning_rate, seed)
        for seed, name, constraint, learning_rate in product(
            seeds, constrained, constraints, learning_rates
        )
    )
    return list(dict.fromkeys(found))


def _short(value: float) -> str:
    """The shortest text that means exactly this number."""
    return repr(float(value)).removesuffix(".0")
