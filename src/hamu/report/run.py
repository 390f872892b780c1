"""What lies in the folder of a run, finished or not, as a report reads it. Nothing is written."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hamu import files as run_files
from hamu.errors import HamuError
from hamu.evaluation.gains import Gains
from hamu.files import parse_json
from hamu.report.elements import counted, were
from hamu.report.evaluation_shape import ATTACK, ENTRY, EVALUATION, SUMMARY
from hamu.report.trajectories import gains_at, gains_of, is_near, trajectory_of
from hamu.unlearning.record.inputs import Inputs, read_inputs
from hamu.unlearning.record.schema import schema, violations
from hamu.unlearning.stop_reason import StopKind, kind_in

_STEP_COLUMNS = (
    "step", "taken", "retain_loss", "forget_loss", "kappa", "cos", "direct_threshold", "stop_threshold", "demand",
    "free_limit", "max_demand", "direct_share", "first_order_retain_change", "first_order_forget_change",
    "realised_retain_change", "realised_forget_change", "promise_kept", "learning_rate",
)  # fmt: skip
_SIDES = ("forget", "retain")
UNKNOWN = "unknown"  # as a method
_MOST_STEPS = 2**53  # as a float has them


@dataclass(frozen=True)
class Layers:
    """What every block did, from layers.jsonl.

    Attributes:
        blocks: their names, L.
        steps: [T].
        cos, change: cosθ and ‖Δw‖, [T, L]; NaN where they are not known.
    """

    blocks: Sequence[str]
    steps: np.ndarray
    cos: np.ndarray
    change: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run as its folder holds it.

    Attributes:
        name: of its folder.
        method: by which it unlearns.
        place: its folder; for a run of a demo that of the demo, and its name in it.
        steps: by figure its values at the logged steps, [T] each; NaN where there is none.
        entries: its evaluations along the way.
        layers: None without layers.jsonl.
        evaluation: evaluation.json, None without.
        record: record.json, None without.
        attack: attack.json, None without.
        settings: config.yaml.
        inputs: inputs.json: digests of what it has read; empty without.
        notes: what could not be read, and why.
        failed: why it failed, as the comparison that it is of says; "" if it did not.
    """

    name: str
    method: str
    place: Path = Path()
    steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    entries: Sequence[Mapping[str, Any]] = ()
    layers: Layers | None = None
    evaluation: Mapping[str, Any] | None = None
    record: Mapping[str, Any] | None = None
    attack: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failed: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.evaluation is not None

    @property
    def is_trajectory_alone(self) -> bool:
        """Whether only its trajectory is known, as of the runs of a demo."""
        return not (self.steps or self.is_finished or self.notes)

    @property
    def points(self) -> list[Gains]:
        """The points of its trajectory, see `trajectory_of`."""
        return trajectory_of(self.entries)

    @property
    def gains(self) -> Gains | None:
        """The gains of the model saved or, while there is none, at the last evaluation; None before both."""
        if self.evaluation is not None:
            return gains_of(self.evaluation)
        return self.points[-1] if len(self.points) > 1 else None

    @property
    def earlier_state(self) -> str:
        """Which model was saved, in words, if it is not that of the last evaluation; else "".

        Its step is that of the evaluation with the very same losses. Nothing else tells it.
        """
        if self.evaluation is None or not self.entries:
            return ""
        after, last = self.evaluation["after"], self.entries[-1]
        same = [
            entry["step"]
            for entry in self.entries
            if entry["step"]
            and all(_same(entry.get(f"eval_{side}_loss"), after[side]["loss"]) for side in _SIDES)
        ]
        if (
            same
        ):  # a best model that was loaded may have been evaluated again, as if of the last step
            step = same[0] if self.settings.get("load_best_model_at_end") else same[-1]
            return (
                ""
                if step == last["step"]
                else f"that of step {step:,}, not that of the last evaluation"
            )
        if is_near(gains_of(self.evaluation), gains_at(last)):
            return ""
        return "not that of the last evaluation; of which step it is has not been recorded"

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        logged = self.steps.get("step", np.zeros(0))
        found = [
            *(int(s) for s in logged[-1:]),
            *(int(entry["step"]) for entry in self.entries[-1:]),
        ]
        return max(found, default=0)

    @property
    def ended(self) -> str:
        """Why the run ended, "" while it has not."""
        return "" if self.evaluation is None else str(self.evaluation.get("ended", ""))

    @property
    def ended_kind(self) -> StopKind | None:
        """Why the run ended, as a kind; None while it has not."""
        return None if self.evaluation is None else kind_in(self.evaluation)


def _same(one: float | None, other: float | None) -> bool:
    """Whether two figures are alike; where neither is a number they are."""
    return one == other or (one != one and other != other)


def run_folders(path: Path) -> list[Path]:
    """The runs that a folder stands for: itself, or those of a comparison.

    Raises:
        HamuError: if there is none.
    """
    if not path.is_dir():
        raise HamuError(f"there is no folder {path}; name the --output_dir of a `hamu unlearn`")
    if (path / run_files.COMPARISON).is_file():
        listed = _rows(path)
        ended = {child.parent for child in path.glob(f"*/{run_files.RECORD}")}
        begun = {child.parent for child in path.glob(f"*/{run_files.CONFIG}")}
        # a run that has ended and is not listed is of an earlier comparison in this folder
        found = sorted((begun - ended) | {path / name for name in listed} if listed else begun)
        if not found:
            raise HamuError(
                f"the comparison in {path} has no run yet; wait until its first one has begun"
            )
        return found
    if not any(
        (path / name).is_file()
        for name in (run_files.STEPS, run_files.EVALUATION, run_files.SUMMARY)
    ):
        raise HamuError(
            f"{path} holds no run: it has neither steps.jsonl nor evaluation.json; name the --output_dir of a "
            f"`hamu unlearn` or `hamu compare`"
        )
    return [path]


def read_runs(path: Path) -> list[Run]:
    """The run in a folder, or those that a demo tells of."""
    summary = path / run_files.SUMMARY
    return _of_demo(summary) if summary.is_file() else [read_run(path)]


def read_run(path: Path) -> Run:
    """Read what a folder holds of a run, as far as it can be read; what cannot is told in `notes`."""
    notes: list[str] = []
    settings = _settings(path / run_files.CONFIG, notes)
    evaluation = _json(path / run_files.EVALUATION, notes)
    if not (path / run_files.EVALUATION).is_file():
        notes.append("evaluation.json is missing: the run has not come to its end")
    if evaluation is not None and not {"before", "after", "trajectory"} <= evaluation.keys():
        raise HamuError(
            f"{path} is not a run of `hamu unlearn`: its evaluation.json has no before and after"
        )
    record = _json(path / run_files.RECORD, notes)
    failed = _failures(path.resolve().parent).get(path.resolve().name, {})
    method = (
        settings.get("method", "hamu-q")
        if settings
        else {**failed, **(record or {})}.get("method", UNKNOWN)
    )
    wrong = (
        None if evaluation is None else next(violations(evaluation, EVALUATION, "evaluation"), None)
    )
    if wrong is not None:
        part, _, _ = str(wrong).partition(".per_class_")  # what follows names a class
        notes.append(f"evaluation.json is not one that can be shown: {part}")
        evaluation = None
    wrong = None if record is None else next(violations(record, schema()), None)
    if wrong is not None:
        notes.append(f"record.json is not one that can be shown: {wrong}")
        record = None
    return Run(
        name=path.resolve().name,
        method=str(method),
        place=path.resolve(),
        steps=_steps(path / run_files.STEPS, notes),
        entries=_entries(path, notes) if evaluation is None else evaluation["trajectory"],
        layers=_layers(path / run_files.LAYERS, notes),
        evaluation=evaluation,
        record=record,
        attack=_attack(path, notes),
        settings=settings,
        inputs=_inputs(path, notes),
        notes=notes,
        failed=str(failed.get("failed", "")),
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs; where folders have the same name, with as many of the folders above them in it as tell them apart."""
    places = {run.name: {other.place for other in runs if other.name == run.name} for run in runs}
    return [replace(run, name=_short_path(run.place, places[run.name])) if len(places[run.name]) > 1 else run
            for run in runs]  # fmt: skip


def _short_path(place: Path, places: Collection[Path]) -> str:
    """The end of a path that no other one has."""
    parts = place.parts
    lengths = range(1, len(parts) + 1)
    own = next(
        n
        for n in lengths
        if all(other == place or other.parts[-n:] != parts[-n:] for other in places)
    )
    return Path(*parts[-own:]).as_posix()


def _of_demo(path: Path) -> list[Run]:
    """One run for each method of `hamu demo`, which keeps no more of them than their trajectories."""
    summary = _json(path, [])
    if summary is None or next(violations(summary, SUMMARY), None) is not None:
        raise HamuError(
            f"{path} is not that of a demo; name the --output_dir of a `hamu unlearn` or `hamu demo`"
        )
    runs = []
    for method, figures in summary["methods"].items():
        entries = [
            {
                "step": epoch,
                "at": f"epoch {epoch}",
                "eval_retain_gain": retain,
                "eval_forget_gain": forget,
            }
            for epoch, (retain, forget) in enumerate(figures["trajectory"])
        ]
        runs.append(Run(method, method, path.resolve().parent / method, entries=entries))
    return runs


def _steps(path: Path, notes: list[str]) -> dict[str, np.ndarray]:
    """The log, line by line into columns, so that a long one fits in little memory."""
    columns = {name: array("d") for name in _STEP_COLUMNS}
    if not path.is_file():
        notes.append("steps.jsonl is missing")
        return {}
    for found in _lines(path, notes):
        for name, column in columns.items():
            column.append(_number(found.get(name)))
    kept = {
        name: np.frombuffer(column) if column else np.zeros(0) for name, column in columns.items()
    }
    return {
        name: column for name, column in kept.items() if name == "step" or np.isfinite(column).any()
    }


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of a log that are whole, one by one; in the end it is noted how many others there were."""
    unread = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            found = _line(text)
            if found is None:
                unread += 1
            else:
                yield found
    if unread:
        are = "are" if unread != 1 else "is"
        lines = counted(unread, "lines")
        notes.append(
            f"of {path.name}, {lines} {are} broken off or damaged and {were(unread)} skipped"
        )


def _line(text: str) -> dict[str, Any] | None:
    """A line of a log that is whole, with a step."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return found if isinstance(step, int) and 0 <= step <= _MOST_STEPS else None


def _number(value: Any) -> float:
    """A figure; NaN for what is none, or is beyond all numbers."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _layers(path: Path, notes: list[str]) -> Layers | None:
    if not path.is_file():
        notes.append("layers.jsonl is missing")
        return None
    lines = list(_lines(path, notes))
    if lines and not _are_names(lines[0].get("blocks")):
        notes.append("layers.jsonl does not begin with the names of its blocks")
        return None
    if len(lines) < 2:
        notes.append("layers.jsonl has no step yet")
        return None
    blocks, rest = lines[0]["blocks"], lines[1:]

    def matrix(name: str) -> np.ndarray:
        none = [math.nan] * len(blocks)
        rows = [
            row if isinstance(row := one.get(name), list) and len(row) == len(blocks) else none
            for one in rest
        ]
        return np.array([[_number(value) for value in row] for row in rows], dtype=float).reshape(
            -1, len(blocks)
        )

    return Layers(blocks, np.array([one["step"] for one in rest]), matrix("cos"), matrix("change"))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _entries(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """The evaluations of a run that is not finished, from its newest checkpoint."""
    saved = path.glob(f"{run_files.CHECKPOINT}*/{run_files.TRAINER_STATE}")
    states = {state: state.parent.name.rpartition("-")[2] for state in saved}
    newest = sorted(
        (state for state, step in states.items() if step.isdecimal()), key=lambda s: -int(states[s])
    )
    for state in newest:
        found = _json(state, notes)
        if found is not None:
            history = found.get("log_history")
            logged = history if isinstance(history, list) else []
            return [entry for entry in logged if next(violations(entry, ENTRY), None) is None]
    return []


def _rows(comparison: Path) -> dict[str, Mapping[str, Any]]:
    """What a comparison has written of the runs that have ended, by name."""
    found = _json(comparison / run_files.COMPARISON, []) or {}
    rows = found.get("runs")
    listed = rows if isinstance(rows, list) else []
    return {str(row["run"]): row for row in listed if isinstance(row, dict) and "run" in row}


def _failures(comparison: Path) -> dict[str, Mapping[str, Any]]:
    """The runs of a comparison that have failed, by name."""
    return {name: row for name, row in _rows(comparison).items() if row.get("failed")}


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        notes.append("config.yaml is missing")
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        notes.append(f"config.yaml cannot be read: {str(error).splitlines()[0]}")
    return {}


def _attack(run: Path, notes: list[str]) -> dict[str, Any] | None:
    """Result of `hamu attack`: in the run's folder, or in attack/ there."""
    for place in (run, run / run_files.ATTACK_FOLDER):
        found = _json(place / run_files.ATTACK, notes)
        wrong = None if found is None else next(violations(found, ATTACK, run_files.ATTACK), None)
        if wrong is not None:
            notes.append(f"attack.json is not one that can be shown: {wrong}")
        elif found is not None:
            return found
    return None


def _inputs(run: Path, notes: list[str]) -> Inputs:
    if not (run / run_files.INPUTS).is_file():
        return {}
    try:
        return read_inputs(run)
    except HamuError as error:
        notes.append(str(error))
        return {}


def _json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = parse_json(path)
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return None
    return found if isinstance(found, dict) else None
