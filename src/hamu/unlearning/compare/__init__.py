"""Comparisons of many runs; here the settings in which they differ: a grid, or a random search."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch.quasirandom import SobolEngine

from hamu.core.methods import build_method
from hamu.unlearning.trainer.config import unused_settings

# Ranges of the search, on log scales: factors of the learning rate, and the strengths that methods
# have of their own. Both sides are clipped to norm 1, so an absolute demand is at most 1 as well.
RATES = (0.1, 10.0)
STRENGTHS = {"constraint": (0.02, 1.0), "forget_weight": (0.02, 0.9)}


@dataclass(frozen=True)
class Cell:
    """The settings in which one run differs from the others; None where its method has none."""

    method: str
    constraint: float | None
    learning_rate: float
    seed: int
    forget_weight: float | None = None

    @property
    def setting(self) -> str:
        """The name that the runs of all seeds share."""
        constraint = "" if self.constraint is None else f"-c{_short(self.constraint)}"
        weight = "" if self.forget_weight is None else f"-w{_short(self.forget_weight)}"
        return f"{self.method}{constraint}{weight}-lr{_short(self.learning_rate)}"

    @property
    def name(self) -> str:
        """The name of the run, and of its folder."""
        return f"{self.setting}-s{self.seed}"

    def columns(self) -> dict[str, Any]:
        """The columns of its row that tell it from others."""
        return {"setting": self.setting, **vars(self)}

    def settings(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the run: its own, and those shared ones that have an effect."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        unused = unused_settings(build_method(self.method))
        return {name: value for name, value in shared.items() if name not in unused} | own


def cells(
    methods: Iterable[str],
    constraints: Iterable[float],
    learning_rates: Iterable[float],
    seeds: Iterable[int],
) -> list[Cell]:
    """All combinations, seed by seed; a method without a constraint is there once for all."""
    takes = {name: "constraint" not in unused_settings(build_method(name)) for name in methods}
    grid = product(seeds, takes, constraints, learning_rates)
    found = (Cell(name, c if takes[name] else None, rate, seed) for seed, name, c, rate in grid)
    return list(dict.fromkeys(found))


def random_cells(methods: Iterable[str], trials: int, rate: float, seed: int) -> list[Cell]:
    """Settings for each method, at the same points of a scrambled Sobol sequence."""
    sobol: Any = SobolEngine
    points = sobol(2, scramble=True, seed=seed).draw(trials).tolist()
    found, limits = [], (rate * RATES[0], rate * RATES[1])
    for method in methods:
        taken = STRENGTHS.keys() - unused_settings(build_method(method))
        for at_rate, at_strength in points:
            own: dict[str, Any] = {n: _between(*STRENGTHS[n], at_strength) for n in taken}
            found.append(replace(Cell(method, None, _between(*limits, at_rate), seed), **own))
    return found


def _between(low: float, high: float, share: float) -> float:
    """The number at a share of the way on a log scale, to three digits."""
    return float(f"{low * math.exp(share * math.log(high / low)):.3g}")


def _short(value: float) -> str:
    """The shortest text that means exactly this number."""
    return repr(float(value)).removesuffix(".0")
