"""The folder of a run, finished or not, as a report reads it; nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hamu import files
from hamu.core.methods import method_classes
from hamu.core.objectives import CrossEntropy
from hamu.errors import HamuError
from hamu.evaluation.gains import Gains, gains_of, trajectory_of
from hamu.evaluation.membership import auc_of
from hamu.report.observations import Observations
from hamu.unlearning.record.inputs import read_inputs
from hamu.unlearning.record.schema import schema, violations
from hamu.unlearning.stop_reason import StopKind, kind_in

SIDES = ("forget", "retain")
_STEP_COLUMNS = (
    *("step", "retain_loss", "forget_loss", "kappa", "direct_threshold", "stop_threshold"),
    *("demand", "free_limit", "max_demand", "direct_share"),
    *(f"{kind}_{side}_change" for kind in ("first_order", "realised") for side in SIDES),
)


@dataclass(frozen=True)
class Layers:
    """Figures of L blocks at T steps, from layers.jsonl: cosθ and ‖Δw‖ [T, L], NaN if unknown."""

    blocks: Sequence[str]
    steps: np.ndarray
    cos: np.ndarray
    change: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run as its folder holds it, and what its models were asked for the report.

    `steps` are values [T] at the logged steps by figure, NaN where there is none; `entries` the
    evaluations along the way; `notes` name files that could not be read; `failed` is the error of
    a failed run of a comparison; `observed` is None for the reason `unobserved`.
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
    observed: Observations | None = None
    unobserved: str = ""

    @property
    def after(self) -> Mapping[str, Any]:
        """Figures of the model saved, empty while there is none."""
        found: Mapping[str, Any] = (self.evaluation or {}).get("after", {})
        return found

    @property
    def is_trajectory_alone(self) -> bool:
        """True for a run of a demo, which keeps its trajectory alone."""
        return not (self.steps or self.evaluation or self.notes)

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
    def retain_model_auc(self) -> float | None:
        """The retain model's AUC of membership inference, None without one."""
        return auc_of(self.after.get("retain_model") or {})

    @property
    def last_step(self) -> int:
        """The last logged or evaluated step."""
        logged = self.steps.get("step", np.zeros(0))[-1:]
        return max([*map(int, logged), *(int(e["step"]) for e in self.entries[-1:])], default=0)

    @property
    def ended_kind(self) -> StopKind | None:
        """Kind of the stop reason; None for an unfinished run."""
        return None if self.evaluation is None else kind_in(self.evaluation)

    @property
    def earlier_state(self) -> str:
        """State of the model saved, in words, if the run went back; else ""."""
        found = self.evaluation or {}
        taken = found.get("steps_taken", 0)
        kept = found.get("steps_in_model", taken)
        return "" if kept == taken else f"that after {kept:,} of {taken:,} steps, not the last one"

    def records(self, name: str) -> tuple[int | None, int | None]:
        """Records of a set behind the evaluations' figures, and all of it; None if unknown."""
        found = self.after.get(name, {})
        whole = (self.record or {}).get(f"{name}_set") or {}
        return found.get("samples", found.get("records")), whole.get("records")

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


def run_folders(path: Path) -> list[Path]:
    """Folders of runs that a folder stands for: itself, or the runs of a comparison."""
    if not path.is_dir():
        raise HamuError(f"there is no folder {path}; name the --output_dir of a `hamu unlearn`")
    if (path / files.COMPARISON).is_file():
        listed = _rows(path)
        ended = {child.parent for child in path.glob(f"*/{files.RECORD}")}
        begun = {child.parent for child in path.glob(f"*/{files.CONFIG}")}
        # a finished run that is not listed belongs to an earlier comparison in this folder
        found = sorted((begun - ended) | {path / name for name in listed} if listed else begun)
        if not found:
            raise HamuError(
                f"the comparison in {path} has no run yet; wait until its first one has begun"
            )
        return found
    if not any((path / name).is_file() for name in (files.STEPS, files.RECORD, files.SUMMARY)):
        raise HamuError(
            f"{path} holds no run: it has neither steps.jsonl nor record.json; name the "
            "--output_dir of a `hamu unlearn` or `hamu compare`"
        )
    return [path]


def read_runs(path: Path) -> list[Run]:
    """Read the run in a folder, or the runs of a demo."""
    if not (path / files.SUMMARY).is_file():
        return [read_run(path)]
    summary = _json(path / files.SUMMARY, [], "summary")
    if summary is None:
        raise HamuError(
            f"{path / files.SUMMARY} is not that of a demo; name the --output_dir of a "
            "`hamu unlearn` or `hamu demo`"
        )
    runs = []
    for method, figures in summary["methods"].items():
        entries = [
            {"step": n, "at": f"epoch {n}", "eval_retain_gain": retain, "eval_forget_gain": forget}
            for n, (retain, forget) in enumerate(figures["trajectory"])
        ]
        runs.append(Run(method, method, path.resolve() / method, entries=entries))
    return runs


def read_run(path: Path) -> Run:
    """Read the files of a run as far as possible; `notes` names those that cannot be read."""
    notes: list[str] = []
    place = path.resolve()
    if not (path / files.EVALUATION).is_file():
        notes.append("evaluation.json is missing: the run has not come to its end")
    evaluation = _json(path / files.EVALUATION, notes, "evaluation")
    record = _json(path / files.RECORD, notes, "record")
    row = _rows(place.parent).get(place.name, {})
    failed = row if row.get("failed") else {}
    settings = _settings(path / files.CONFIG, notes)
    named = {"method": "hamu-q", **settings} if settings else {**failed, **(record or {})}
    attacks = [path / files.ATTACK, path / files.ATTACK_FOLDER / files.ATTACK]
    found = (_json(one, notes, "attack") for one in attacks)
    return Run(
        name=place.name,
        method=str(named.get("method", "unknown")),
        place=place,
        steps=_steps(path / files.STEPS, notes),
        entries=_entries(path, notes) if evaluation is None else evaluation["trajectory"],
        layers=_layers(path / files.LAYERS, notes),
        evaluation=evaluation,
        record=record,
        attack=next((one for one in found if one is not None), None),
        settings=settings,
        inputs=_inputs(path, notes),
        notes=notes,
        failed=str(failed.get("failed", "")),
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Name the runs of folders that share their name by the way from the folder above all."""
    places = {run.place for run in runs}
    if len({place.name for place in places}) == len(places):
        return list(runs)
    above = os.path.commonpath({place.parent for place in places})
    return [replace(run, name=run.place.relative_to(above).as_posix()) for run in runs]


@cache
def _shape(name: str) -> dict[str, Any]:
    """Schema of the parts of a file that a report shows."""
    if name == "record":
        return schema()
    text = resources.files("hamu.report").joinpath("shapes.json").read_text("utf-8")
    return {"$ref": f"#/$defs/{name}", "$defs": json.loads(text)["$defs"]}


def _json(path: Path, notes: list[str], shape: str | None = None) -> dict[str, Any] | None:
    """Content of a JSON file; None without one, and with a note if it is not of its shape."""
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = files.parse_json(path)
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return None
    wrong = next(violations(found, _shape(shape), path.stem), None) if shape else None
    if wrong is None:
        return found
    part, _, _ = str(wrong).partition(".per_class_")  # the rest names a class
    notes.append(f"{path.name} is not one that can be shown: {part}")
    return None


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Whole lines of a log; a note counts the others."""
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return []
    found, unread = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            found.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            unread += 1
    if unread:
        are = "1 line is" if unread == 1 else f"{unread:,} lines are"
        notes.append(f"of {path.name}, {are} damaged and skipped")
    return found


def _steps(path: Path, notes: list[str]) -> dict[str, np.ndarray]:
    """The log by columns, without those that have no finite value."""
    lines = _lines(path, notes)
    columns = {name: [one.get(name) for one in lines] for name in _STEP_COLUMNS}
    kept = {name: np.array(values, dtype=float) for name, values in columns.items()}
    return {name: one for name, one in kept.items() if np.isfinite(one).any()}


def _layers(path: Path, notes: list[str]) -> Layers | None:
    first, *rest = _lines(path, notes) or [{}]
    blocks = first.get("blocks")
    if not blocks or not rest:
        return None
    none = [None] * len(blocks)  # of a step that was not taken
    cos, change = (
        np.array([one.get(name) or none for one in rest], dtype=float) for name in ("cos", "change")
    )
    return Layers(blocks, np.array([one["step"] for one in rest]), cos, change)


def _entries(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Evaluations of an unfinished run, from its newest checkpoint."""
    states = path.glob(f"{files.CHECKPOINT}[0-9]*/{files.TRAINER_STATE}")
    newest = max(states, key=lambda one: int(one.parent.name.rpartition("-")[2]), default=None)
    logged = ((newest and _json(newest, notes)) or {}).get("log_history", [])
    return [one for one in logged if next(violations(one, _shape("entry")), None) is None]


def _rows(comparison: Path) -> dict[str, Mapping[str, Any]]:
    """Rows of comparison.json by the name of the run."""
    rows = (_json(comparison / files.COMPARISON, []) or {}).get("runs") or []
    return {str(row["run"]): row for row in rows}


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        notes.append("config.yaml is missing")
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"config.yaml cannot be read: {str(error).splitlines()[0]}")
    return {}


def _inputs(run: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        return read_inputs(run) if (run / files.INPUTS).is_file() else {}
    except HamuError as error:
        notes.append(str(error))
        return {}
