"""The folder of a run, finished or not, as a report reads it; nothing is written."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hamu import files as run_files
from hamu.core.methods import method_classes
from hamu.core.objectives import CrossEntropy
from hamu.errors import HamuError
from hamu.evaluation.gains import Gains, gains_at, gains_of, is_near, trajectory_of
from hamu.evaluation.membership import auc_of
from hamu.files import parse_json
from hamu.unlearning.record.inputs import Inputs, read_inputs
from hamu.unlearning.record.schema import schema, violations
from hamu.unlearning.stop_reason import StopKind, kind_in

_STEP_COLUMNS = (
    "step", "retain_loss", "forget_loss", "kappa", "direct_threshold", "stop_threshold", "demand", "free_limit",
    "max_demand", "direct_share", "first_order_retain_change", "first_order_forget_change",
    "realised_retain_change", "realised_forget_change",
)  # fmt: skip
_SIDES = ("forget", "retain")
_OF_A_STEP = ("criterion", "target", "no forgetting", "retain loss", "infeasible")  # stop kinds
UNKNOWN = "unknown"  # as a method


@dataclass(frozen=True)
class Layers:
    """Figures of every block, from layers.jsonl.

    Attributes:
        blocks: their names, L.
        steps: [T].
        cos, change: cosθ and ‖Δw‖, [T, L]; NaN where unknown.
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
        method: its method.
        place: its folder; for a run of a demo the demo's folder and the method.
        steps: by figure its values at the logged steps, [T] each; NaN where there is none.
        entries: its evaluations along the way.
        layers, evaluation, record, attack: the files of these names, None without.
        settings: config.yaml.
        inputs: digests of its data and models, from inputs.json; empty without.
        notes: files that could not be read, and why.
        failed: the error of a failed run of a comparison, else "".
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
    def after(self) -> Mapping[str, Any]:
        """Figures of the model saved, empty while there is none."""
        found: Mapping[str, Any] = (self.evaluation or {}).get("after", {})
        return found

    @property
    def is_finished(self) -> bool:
        """True with an evaluation."""
        return self.evaluation is not None

    @property
    def is_trajectory_alone(self) -> bool:
        """True for a run of a demo, which keeps its trajectory alone."""
        return not (self.steps or self.is_finished or self.notes)

    @property
    def points(self) -> list[Gains]:
        """The points of its trajectory, see `trajectory_of`."""
        return trajectory_of(self.entries)

    @property
    def gains(self) -> Gains | None:
        """Gains of the model saved, else of the last evaluation; None before both."""
        if self.evaluation is not None:
            return gains_of(self.evaluation)
        return self.points[-1] if len(self.points) > 1 else None

    @property
    def goal(self) -> Mapping[str, Any] | None:
        """Goal of a finished run with its counts, None without one."""
        return (self.evaluation or {}).get("goal")

    @property
    def forgotten(self) -> str:
        """Count of forgotten records of all, "" without a goal."""
        goal = self.goal
        return (
            ""
            if goal is None
            else f"{goal['after']['forgotten']:,} of {goal['after']['records']:,}"
        )

    @property
    def retain_model_auc(self) -> float | None:
        """The retain model's AUC of membership inference, None without one."""
        return auc_of(self.after.get("retain_model") or {})

    @property
    def last_step(self) -> int:
        """The last logged or evaluated step."""
        logged = self.steps.get("step", np.zeros(0))[-1:]
        return max([*map(int, logged), *(int(e["step"]) for e in self.entries[-1:])], default=0)

    @property
    def ended(self) -> str:
        """Stop reason in words, "" for an unfinished run."""
        return str((self.evaluation or {}).get("ended", ""))

    @property
    def ended_kind(self) -> StopKind | None:
        """Kind of the stop reason; None for an unfinished run."""
        return None if self.evaluation is None else kind_in(self.evaluation)

    @property
    def earlier_state(self) -> str:
        """State of the model saved, in words, unless it is that of the last evaluation; then "".

        Its step is that of the evaluation with the very same losses: no file names it.
        """
        if self.evaluation is None or not self.entries:
            return ""
        last = self.entries[-1]
        same = [
            entry["step"]
            for entry in self.entries
            if entry["step"]
            and all(_same(entry.get(f"eval_{s}_loss"), self.after[s]["loss"]) for s in _SIDES)
        ]
        if same:  # a best model may be evaluated again, with the number of the last step
            step = same[0] if self.settings.get("load_best_model_at_end") else same[-1]
            words = f"that of step {step:,}, not that of the last evaluation"
            return "" if step == last["step"] else words
        if is_near(gains_of(self.evaluation), gains_at(last)):
            return ""
        return "not that of the last evaluation; of which step it is has not been recorded"

    def objective(self, side: str) -> str | None:
        """Name of the objective whose values the steps log for a side.

        None for a method that is not installed, or settings that cannot be read.
        """
        method = method_classes().get(self.method)
        if method is None or not self.settings:
            return None
        if side == "forget":
            return self.settings.get("forget_objective") or method.forget_objective
        return method.retain_objective

    def logs_loss(self, side: str) -> bool:
        """True if the steps log the mean loss of a side, comparable with that of sets and runs."""
        return self.objective(side) == CrossEntropy.name

    def measured_on(self, name: str) -> str:
        """Records of a set ("forget", "retain", "test") behind the evaluations' figures."""
        from hamu.report.charts import counted

        found = self.after.get(name, {})
        count = found.get("samples", found.get("records"))
        total = ((self.record or {}).get(f"{name}_set") or {}).get("records")
        if count is None:
            most = self.settings.get("max_eval_samples")
            return f"at most {most:,} records" if isinstance(most, int) else "the set's records"
        if total is None:
            return counted(count, "records")
        if count >= total:
            return f"all {counted(total, 'records')}"
        return f"a sample of {count:,} of {total:,} records"

    @property
    def end_measured_on(self) -> str:
        """Records behind the figures of the stop reason, in brackets; "" if it has none."""
        if (self.evaluation or {}).get("steering") is not None:
            return (
                " (figures of the measurements that steered the run, not of the evaluation above)"
            )
        return " (figures of that step's batches)" if self.ended_kind in _OF_A_STEP else ""


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)


def run_folders(path: Path) -> list[Path]:
    """Folders of runs that a folder stands for: itself, or the runs of a comparison.

    Raises:
        HamuError: if there is none.
    """
    if not path.is_dir():
        raise HamuError(f"there is no folder {path}; name the --output_dir of a `hamu unlearn`")
    if (path / run_files.COMPARISON).is_file():
        listed = _rows(path)
        ended = {child.parent for child in path.glob(f"*/{run_files.RECORD}")}
        begun = {child.parent for child in path.glob(f"*/{run_files.CONFIG}")}
        # a finished run that is not listed belongs to an earlier comparison in this folder
        found = sorted((begun - ended) | {path / name for name in listed} if listed else begun)
        if not found:
            raise HamuError(
                f"the comparison in {path} has no run yet; wait until its first one has begun"
            )
        return found
    files = (run_files.STEPS, run_files.EVALUATION, run_files.SUMMARY)
    if not any((path / name).is_file() for name in files):
        raise HamuError(
            f"{path} holds no run: it has neither steps.jsonl nor evaluation.json; name the "
            "--output_dir of a "
            f"`hamu unlearn` or `hamu compare`"
        )
    return [path]


def read_runs(path: Path) -> list[Run]:
    """Read the run in a folder, or the runs of a demo."""
    summary = path / run_files.SUMMARY
    return _of_demo(summary) if summary.is_file() else [read_run(path)]


def read_run(path: Path) -> Run:
    """Read the files of a run as far as possible; `notes` names those that cannot be read."""
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
    place = path.resolve()
    failed = {n: row for n, row in _rows(place.parent).items() if row.get("failed")}.get(
        place.name, {}
    )
    named = {"method": "hamu-q", **settings} if settings else {**failed, **(record or {})}
    evaluation = _fitting(evaluation, _shape("evaluation"), run_files.EVALUATION, notes)
    return Run(
        name=place.name,
        method=str(named.get("method", UNKNOWN)),
        place=place,
        steps=_steps(path / run_files.STEPS, notes),
        entries=_entries(path, notes) if evaluation is None else evaluation["trajectory"],
        layers=_layers(path / run_files.LAYERS, notes),
        evaluation=evaluation,
        record=_fitting(record, schema(), run_files.RECORD, notes),
        attack=_attack(path, notes),
        settings=settings,
        inputs=_inputs(path, notes),
        notes=notes,
        failed=str(failed.get("failed", "")),
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Prefix names that several folders share with as many parent folders as tell them apart."""
    return [replace(run, name=_distinct_name(run, runs)) for run in runs]


def _distinct_name(run: Run, runs: Sequence[Run]) -> str:
    others = [one.place for one in runs if one.name == run.name and one.place != run.place]
    if not others:
        return run.name
    parts = run.place.parts
    ends = (parts[-n:] for n in range(1, len(parts) + 1))
    return Path(*next(e for e in ends if all(o.parts[-len(e) :] != e for o in others))).as_posix()


def _of_demo(path: Path) -> list[Run]:
    summary = _json(path, [])
    if summary is None or _fitting(summary, _shape("summary"), path.name, []) is None:
        raise HamuError(
            f"{path} is not that of a demo; name the --output_dir of a `hamu unlearn` or `hamu "
            "demo`"
        )
    return [
        Run(method, method, path.resolve().parent / method, entries=[
            {"step": n, "at": f"epoch {n}", "eval_retain_gain": retain, "eval_forget_gain": forget}
            for n, (retain, forget) in enumerate(figures["trajectory"])
        ])
        for method, figures in summary["methods"].items()
    ]  # fmt: skip


@cache
def _shape(name: str) -> dict[str, Any]:
    """Schema of the parts of a file that a report shows."""
    text = resources.files("hamu.report").joinpath("shapes.json").read_text("utf-8")
    return {"$ref": f"#/$defs/{name}", "$defs": json.loads(text)["$defs"]}


def _fitting(
    found: dict[str, Any] | None, shape: Mapping[str, Any], name: str, notes: list[str]
) -> dict[str, Any] | None:
    """Content of a file, None with a note if it does not fit its schema."""
    wrong = None if found is None else next(violations(found, shape, name.split(".")[0]), None)
    if wrong is None:
        return found
    part, _, _ = str(wrong).partition(".per_class_")  # the rest names a class
    notes.append(f"{name} is not one that can be shown: {part}")
    return None


def _steps(path: Path, notes: list[str]) -> dict[str, np.ndarray]:
    """The log by columns, read line by line: a long one fits in little memory."""
    if not path.is_file():
        notes.append("steps.jsonl is missing")
        return {}
    columns = {name: array("d") for name in _STEP_COLUMNS}
    for found in _lines(path, notes):
        for name, column in columns.items():
            column.append(_number(found.get(name)))
    kept = {name: np.array(column) for name, column in columns.items()}
    return {name: one for name, one in kept.items() if name == "step" or np.isfinite(one).any()}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Whole lines of a log; a note counts the others."""
    unread = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                yield found
            else:
                unread += 1
    if unread:
        are = "1 line is" if unread == 1 else f"{unread:,} lines are"
        notes.append(f"of {path.name}, {are} damaged and skipped")


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _layers(path: Path, notes: list[str]) -> Layers | None:
    if not path.is_file():
        notes.append("layers.jsonl is missing")
        return None
    first, *rest = [*_lines(path, notes)] or [{}]
    blocks = first.get("blocks")
    if first and not (isinstance(blocks, list) and all(isinstance(name, str) for name in blocks)):
        notes.append("layers.jsonl does not begin with the names of its blocks")
        return None
    if blocks is None or not rest:
        notes.append("layers.jsonl has no step yet")
        return None

    def matrix(name: str) -> np.ndarray:
        rows = [one.get(name) for one in rest]
        whole = [isinstance(row, list) and len(row) == len(blocks) for row in rows]
        none = [math.nan] * len(blocks)
        kept = [row if fits else none for row, fits in zip(rows, whole, strict=True)]
        return np.array([[_number(value) for value in row or none] for row in kept])

    return Layers(blocks, np.array([one["step"] for one in rest]), matrix("cos"), matrix("change"))


def _entries(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Evaluations of an unfinished run, from its newest readable checkpoint."""
    saved = path.glob(f"{run_files.CHECKPOINT}*/{run_files.TRAINER_STATE}")
    steps = {state: state.parent.name.rpartition("-")[2] for state in saved}
    numbered = [state for state, step in steps.items() if step.isdecimal()]
    for state in sorted(numbered, key=lambda state: -int(steps[state])):
        found = _json(state, notes)
        if found is not None:
            history = found.get("log_history")
            logged = history if isinstance(history, list) else []
            return [one for one in logged if next(violations(one, _shape("entry")), None) is None]
    return []


def _rows(comparison: Path) -> dict[str, Mapping[str, Any]]:
    """Rows of comparison.json by the name of the run."""
    rows = (_json(comparison / run_files.COMPARISON, []) or {}).get("runs")
    listed = rows if isinstance(rows, list) else []
    return {str(row["run"]): row for row in listed if isinstance(row, dict) and "run" in row}


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
        fitting = _fitting(found, _shape("attack"), run_files.ATTACK, notes)
        if fitting is not None:
            return fitting
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
