"""The runs of a comparison, each an ordinary `hamu unlearn` in its own folder: begun, gone on with, or finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hamu.errors import HamuError
from hamu.files import COMPARISON, CONFIG, INPUTS, RECORD
from hamu.unlearning.compare.children import Call, Children, Ended
from hamu.unlearning.compare.rows import (
    Comparison,
    Row,
    RunKey,
    failed_row,
    finished_row,
    start_figures,
)
from hamu.unlearning.record.inputs import Inputs, differing, read_inputs
from hamu.unlearning.run_folder import RunFolder


@dataclass(frozen=True)
class Plan:
    """What a run is to be.

    Attributes:
        settings: a file of them, as --config takes it.
        options: what it comes to for every option.
    """

    settings: Path
    options: Mapping[str, Any]


class Runs:
    """The runs, and what has come out of them so far.

    Class attributes:
        remedy: what to do about a run that is not the one planned in its place.

    Args:
        folder: of the comparison.
        plans: by cell.
        options_of: what the config.yaml of an earlier run comes to.
        inputs: what runs read now, as far as it is known; asked for if one has begun.
        overwrite: replace runs that had other settings, or other inputs.
        flags: given to every run, beside its settings.

    Raises:
        HamuError: if something else is in the place of a run.
    """

    remedy = "choose another --output_dir, or give --overwrite to replace such runs"

    def __init__(
        self,
        folder: RunFolder,
        plans: Mapping[RunKey, Plan],
        options_of: Callable[[Path], Mapping[str, Any]],
        inputs: Callable[[], Inputs] = dict,
        *,
        overwrite: bool = False,
        flags: tuple[str, ...] = (),
    ) -> None:
        self._folder, self._plans, self._options_of, self._overwrite = (
            folder,
            plans,
            options_of,
            overwrite,
        )
        self._flags = flags
        self._inputs = cache(inputs)
        self._seconds = _seconds(folder)
        calls = {cell: self._call(cell) for cell in plans}
        self._calls = {cell: call for cell, call in calls.items() if call is not None}
        self._rows = {
            cell: self._finished_row(cell) for cell, call in calls.items() if call is None
        }

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def waiting(self) -> list[RunKey]:
        """The cells that neither have figures nor have failed."""
        return [cell for cell in self._plans if cell not in self._rows]

    def run(self, children: Children) -> Iterator[Row]:
        """Run what is not finished; yields the row of each run that has ended.

        A run that was asked to end has no row. comparison.json holds at any time what is known.
        """
        cells = {call.name: cell for cell, call in self._calls.items()}
        self._save()
        for ended in children.make(self._calls.values()):
            cell = cells[ended.name]
            earlier = (
                self._seconds.get(ended.name, 0.0) if "--resume" in self._calls[cell].argv else 0.0
            )
            self._seconds[ended.name] = round(earlier + ended.seconds, 1)
            is_finished = not ended.reason and self._place(cell).has(RECORD)
            if is_finished or not children.asked_by:
                self._rows[cell] = (
                    self._finished_row(cell) if is_finished else self._failed_row(cell, ended)
                )
            self._save()
            if cell in self._rows:
                yield self._rows[cell]

    @property
    def rows(self) -> list[Row]:
        """What has come out of each run that has ended, in the order of the plans."""
        return [self._rows[cell] for cell in self._plans if cell in self._rows]

    def folders(self) -> dict[str, Path]:
        """The folders of the runs that are finished, by name."""
        return {
            row["run"]: self._folder.path / row["run"] for row in self.rows if not row["failed"]
        }

    def comparison(self) -> Comparison:
        """The comparison of the runs that have ended so far."""
        finished = self.folders()
        of_seed = {
            row.get("seed"): finished[row["run"]] for row in self.rows if row["run"] in finished
        }
        return Comparison(tuple(self.rows), start_figures(of_seed.values()))

    def summary(self) -> dict[str, Any]:
        """What comparison.json says of the runs, as JSON holds it."""
        return self.comparison().summary()

    def _call(self, cell: RunKey) -> Call | None:
        """How a run is begun, or gone on with; None if it is finished."""
        place, plan = self._place(cell), self._plans[cell]
        if place.has(CONFIG):
            differing = self._differing(place, plan)
            if differing is None:
                going_on = Call(
                    cell.name,
                    ("unlearn", "--resume", *self._flags, "--output_dir", str(place.path)),
                )
                return None if place.has(RECORD) else going_on
            if not self._overwrite:
                raise HamuError(f"{place.path} holds a run with {differing}; {self.remedy}")
        RunFolder(place.path, overwrite=True)  # refuses what is not of a run
        how = ("--config", str(plan.settings), "--overwrite", *self._flags)
        return Call(cell.name, ("unlearn", *how, "--output_dir", str(place.path)))

    def _differing(self, place: RunFolder, plan: Plan) -> str | None:
        """What tells an earlier run from the one that is planned in its place; None if nothing does."""
        was, now = self._options_of(place.path / CONFIG), plan.options
        for name in now:
            if name != "output_dir" and was[name] != now[name]:
                return f"{name} {was[name]}, not {now[name]}"
        if not place.has(INPUTS):
            return f"no {INPUTS}"
        other = differing(read_inputs(place.path), self._inputs())
        return other and f"another {other} than there is now"

    def _finished_row(self, cell: RunKey) -> Row:
        return finished_row(cell, self._folder.path / cell.name, self._seconds.get(cell.name))

    def _failed_row(self, cell: RunKey, ended: Ended) -> Row:
        reason = ended.reason or "it left no record"
        return failed_row(cell, reason, self._seconds.get(cell.name), interrupted=ended.interrupted)

    def _place(self, cell: RunKey) -> RunFolder:
        return RunFolder(self._folder.path / cell.name, resume=True)

    def _save(self) -> None:
        self._folder.write_json(COMPARISON, self.summary() | {"seconds": self._seconds})


def _seconds(folder: RunFolder) -> dict[str, float]:
    """How long runs have taken, by name. It is all that a summary is read for, so one that is damaged is made anew."""
    if not folder.has(COMPARISON):
        return {}
    try:
        found: dict[str, float] = json.loads(
            (folder.path / COMPARISON).read_text(encoding="utf-8")
        )["seconds"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found
