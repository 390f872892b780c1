"""The runs of a comparison: every method with every constraint, learning rate and seed.

Each is an ordinary `hamu unlearn` in its own folder: begun, gone on with, or finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hamu.core.methods import build_method
from hamu.errors import HamuError
from hamu.files import COMPARISON, CONFIG, INPUTS, RECORD, parse_json
from hamu.unlearning.compare.children import Call, Children
from hamu.unlearning.compare.rows import Comparison, Row, failed_row, finished_row, start_figures
from hamu.unlearning.record.inputs import Inputs, differing, read_inputs
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.config import unused_settings


@dataclass(frozen=True)
class Cell:
    """The settings in which one run differs from the others; some methods have no constraint."""

    method: str
    constraint: float | None
    learning_rate: float
    seed: int

    @property
    def setting(self) -> str:
        """The name that the runs of all seeds share."""
        constraint = "" if self.constraint is None else f"-c{_short(self.constraint)}"
        return f"{self.method}{constraint}-lr{_short(self.learning_rate)}"

    @property
    def name(self) -> str:
        """The name of the run, and of its folder."""
        return f"{self.setting}-s{self.seed}"

    def columns(self) -> Row:
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


def _short(value: float) -> str:
    """The shortest text that means exactly this number."""
    return repr(float(value)).removesuffix(".0")


@dataclass(frozen=True)
class Plan:
    """A run that is to be: its folder's name, own columns, file of settings, and all options."""

    name: str
    columns: Row
    settings: Path
    options: Mapping[str, Any]


class Runs:
    """The runs, and what has come out of them so far.

    `options_of` reads the config.yaml of an earlier run, `inputs` what runs read now; `overwrite`
    replaces runs that had other settings or inputs. Each run is given `options` beside its
    settings. A HamuError names a run that is in the place of another.
    """

    # what to do about a run that is not the one planned in its place
    remedy = "choose another --output_dir, or give --overwrite to replace such runs"

    def __init__(
        self,
        folder: RunFolder,
        plans: Iterable[Plan],
        options_of: Callable[[Path], Mapping[str, Any]],
        inputs: Callable[[], Inputs] = dict,
        *,
        overwrite: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._options_of, self._inputs = folder, options_of, cache(inputs)
        self._overwrite, self._options = overwrite, options or {}
        self._plans = {plan.name: plan for plan in plans}
        self._seconds = _seconds(folder)
        calls = {name: self._call(plan) for name, plan in self._plans.items()}
        self._calls = {name: call for name, call in calls.items() if call is not None}
        self._rows = {name: self._finished(name) for name in calls if calls[name] is None}

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def waiting(self) -> list[str]:
        """The names of the runs that neither have figures nor have failed."""
        return [name for name in self._plans if name not in self._rows]

    @property
    def rows(self) -> list[Row]:
        """The row of each run that has ended, in the order of the plans."""
        return [self._rows[name] for name in self._plans if name in self._rows]

    def folders(self) -> dict[str, Path]:
        """The folders of the runs that are finished, by name."""
        finished = [row["run"] for row in self.rows if not row["failed"]]
        return {name: self._folder.path / name for name in finished}

    def comparison(self) -> Comparison:
        """The comparison of the runs that have ended so far."""
        seeds = {self._plans[name].columns.get("seed"): run for name, run in self.folders().items()}
        return Comparison(tuple(self.rows), start_figures(seeds.values()))

    def summary(self) -> dict[str, Any]:
        """Content of comparison.json but for times."""
        return self.comparison().summary()

    def run(self, children: Children) -> Iterator[Row]:
        """Run what is not finished; yields the row of each run that has ended.

        A run that was asked to end has no row. comparison.json holds at any time what is known.
        """
        self._save()
        for ended in children.make(self._calls.values()):
            name, resumed = ended.name, "resume" in self._calls[ended.name].options
            earlier = self._seconds.get(name, 0.0) if resumed else 0.0
            self._seconds[name] = round(earlier + ended.seconds, 1)
            if not ended.reason and (self._folder.path / name / RECORD).is_file():
                self._rows[name] = self._finished(name)
            elif not children.asked_by:
                columns, took = self._plans[name].columns, self._seconds[name]
                reason, was = ended.reason or "it left no record", ended.interrupted
                self._rows[name] = failed_row(name, columns, reason, took, interrupted=was)
            self._save()
            if name in self._rows:
                yield self._rows[name]

    def _call(self, plan: Plan) -> Call | None:
        """The call that begins a run, or goes on with it; None if it is finished."""
        place = self._folder.path / plan.name
        output = {**self._options, "output_dir": str(place)}
        if (place / CONFIG).is_file():
            difference = self._difference(place, plan)
            if difference is None:
                is_there, more = (place / RECORD).is_file(), {"resume": True, **output}
                return None if is_there else Call(plan.name, "unlearn", more)
            if not self._overwrite:
                raise HamuError(f"{place} holds a run with {difference}; {self.remedy}")
        RunFolder(place, overwrite=True)  # refuses what is not of a run
        settings = {"config": str(plan.settings), "overwrite": True}
        return Call(plan.name, "unlearn", settings | output)

    def _difference(self, place: Path, plan: Plan) -> str | None:
        """The difference of an earlier run from the one planned in its place; None without."""
        was = self._options_of(place / CONFIG)
        for name, now in plan.options.items():
            if name != "output_dir" and was[name] != now:
                return f"{name} {was[name]}, not {now}"
        if not (place / INPUTS).is_file():
            return f"no {INPUTS}"
        other = differing(read_inputs(place), self._inputs())
        return other and f"another {other} than there is now"

    def _finished(self, name: str) -> Row:
        columns, seconds = self._plans[name].columns, self._seconds.get(name)
        return finished_row(columns, self._folder.path / name, seconds)

    def _save(self) -> None:
        self._folder.write_json(COMPARISON, self.summary() | {"seconds": self._seconds})


def _seconds(folder: RunFolder) -> dict[str, float]:
    """Seconds that runs have taken, by name; nothing else is read of an earlier comparison.json."""
    try:
        found: dict[str, float] = parse_json(folder.path / COMPARISON)["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found
