"""The figures of a comparison: a row for each run, means over seeds, hypervolumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hamu.errors import HamuError
from hamu.evaluation import gains as pareto
from hamu.evaluation.gains import Gains, gains_of
from hamu.evaluation.membership import auc_of
from hamu.files import EVALUATION, RECORD, read_json
from hamu.unlearning.record.inputs import differing, read_inputs
from hamu.unlearning.record.record import plain, versions
from hamu.unlearning.stop_reason import kind_in

Row = dict[str, Any]
_SHARED = ("setting", "method", "constraint", "learning_rate", "forget_records")
_AVERAGED = (
    *("forget_gain", "retain_gain", "forgotten"),
    *("forget_accuracy", "retain_accuracy", "test_accuracy"),
    *("forget_probability", "retain_probability", "test_probability", "utility"),
    *("membership_auc", "retain_model_auc", "promise_kept", "steps", "seconds"),
)


def finished_row(columns: Row, run: Path, seconds: float | None) -> Row:
    """The figures of a finished run, after its own columns; those that are not finite are None."""
    evaluation, record = (read_json(run / name, remove=run) for name in (EVALUATION, RECORD))
    gains, steps = gains_of(evaluation), record["steps"]
    found: Row = {
        "forget_gain": gains.forget,
        "retain_gain": gains.retain,
        "joint_gain": gains.joint,
        **model_figures(evaluation, "after"),
        "promise_kept": (record["promise"] or {}).get("kept"),
        "steps": steps["taken"],
        "ended_at": steps["ended_at"],
        "ended": kind_in(evaluation),
        "ended_because": steps["ended_because"],
        "environment": written_environment(record["environment"]),
    }
    row = {"run": run.name, **columns, **plain(found), "seconds": seconds, "failed": ""}
    if row["forget_gain"] is None or row["retain_gain"] is None:
        row |= {"failed": "the losses of its model are not finite", "joint_gain": None}
    return row


def failed_row(
    name: str, columns: Row, reason: str, seconds: float | None, *, interrupted: bool = False
) -> Row:
    """The row of a run that failed for a reason, or that a signal has ended."""
    ended = "interrupted" if interrupted else "failed"
    return {"run": name, **columns, "ended": ended, "seconds": seconds, "failed": reason}


def trajectory(run: Path) -> tuple[list[Gains], Gains]:
    """The gains at each evaluation of a run, and those of the model it has saved."""
    evaluation = read_json(run / EVALUATION, remove=run)
    return pareto.trajectory_of(evaluation["trajectory"]), gains_of(evaluation)


def start_figures(runs: Iterable[Path]) -> Row | None:
    """Figures of the model that runs have started from; None without runs.

    Where the runs do not agree, as the draw of membership inference depends on the seed, their mean
    and deviation.
    """
    evaluations = [read_json(run / EVALUATION, remove=run) for run in runs]
    found = [plain(model_figures(evaluation, "before")) for evaluation in evaluations]
    if not found:
        return None
    return {
        key: value if all(one[key] == value for one in found) else _averaged(found, key)
        for key, value in found[0].items()
    }


def check_same_inputs(runs: Mapping[str, Path], of: Container[str] | None = None) -> None:
    """Check that runs, by name, have the same inputs: those named in `of`, or all."""
    first: tuple[str, Any] | None = None
    for name, run in runs.items():
        read = read_inputs(run).items()
        inputs = {key: entry for key, entry in read if of is None or key in of}
        first = first or (name, inputs)
        other = differing(first[1], inputs)
        if other is not None:
            had = f"{name} had another {other} than {first[0]}, so that they do not compare"
            raise HamuError(f"{had}; remove the folder that is out of date, and run it again")


def model_figures(evaluation: Mapping[str, Any], role: str) -> Row:
    """Figures of a model: records forgotten, accuracies, probabilities (texts), utility and AUCs.

    The AUC is of membership inference, for texts by Min-K%. Utility is for texts the mean
    probability of the answers to retain, the paper's model utility (App. H.2), for images the
    negated retain loss, its retain utility (Sec. 6).
    """
    report, goal = evaluation[role], (evaluation.get("goal") or {}).get(role, {})
    found: Row = {"forgotten": goal.get("forgotten"), "forget_records": goal.get("records")}
    for side in ("forget", "retain", "test"):
        for figure in ("accuracy", "probability"):
            found[f"{side}_{figure}"] = report.get(side, {}).get(figure)
    probability = found["retain_probability"]
    return found | {
        "utility": -report["retain"]["loss"] if probability is None else probability,
        "membership_auc": auc_of(report),
        "retain_model_auc": auc_of(report.get("retain_model", {})),
    }


@dataclass(frozen=True)
class Comparison:
    """Rows of `finished_row` and `failed_row` in order, and the figures that all started from."""

    found: tuple[Row, ...]
    start: Row | None

    @property
    def _finished(self) -> list[Row]:
        return [row for row in self.found if not row["failed"]]

    @cached_property
    def rows(self) -> list[Row]:
        """All rows by joint gain, with `pareto` for those that no other beats; then the failed."""
        return [*_ranked(self._finished), *(row for row in self.found if row["failed"])]

    @cached_property
    def means(self) -> list[Row]:
        """Means and (sample) standard deviations by setting; empty if there is one seed alone."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            if not row["failed"]:
                groups.setdefault(row["setting"], []).append(row)
        has_several_seeds = len({row["seed"] for row in self.found}) > 1
        return _ranked(map(_mean, groups.values())) if has_several_seeds else []

    @cached_property
    def reference(self) -> Gains:
        """The reference of the hypervolumes, see `hypervolume_reference`."""
        worst = min((row["retain_gain"] for row in self._finished), default=0.0)
        return pareto.hypervolume_reference(worst)

    @cached_property
    def hypervolumes(self) -> dict[str, float]:
        """The hypervolume of each method, of the gains with which its finished runs ended."""
        ends: dict[str, list[Gains]] = {row["method"]: [] for row in self.found}
        for row in self._finished:
            ends[row["method"]].append(_gains(row))
        return {name: pareto.hypervolume(gains, self.reference) for name, gains in ends.items()}

    def summary(self) -> dict[str, Any]:
        """Rows, means and hypervolumes, as JSON holds them."""
        reference = (self.reference.forget, self.reference.retain)
        volumes = {"reference": reference, "methods": self.hypervolumes}
        return {"start": self.start, "runs": self.rows, "means": self.means, "hypervolume": volumes}


def _ranked(rows: Iterable[Row]) -> list[Row]:
    rows = sorted(rows, key=lambda row: -_value(row["joint_gain"]))
    best = pareto.pareto_optimal([_gains(row) for row in rows])
    return [{**row, "pareto": is_best} for row, is_best in zip(rows, best, strict=True)]


def _mean(rows: list[Row]) -> Row:
    """One row of several that differ in the seed."""
    row = {key: rows[0].get(key) for key in _SHARED} | {"runs": len(rows)}
    row |= {key: _averaged(rows, key) for key in _AVERAGED}
    # each end once, with its count where there are several: "all steps 2, criterion 1"
    ends = Counter(one["ended"] for one in rows).most_common()
    row["ended"] = ", ".join(end if len(ends) == 1 else f"{end} {count}" for end, count in ends)
    return row | {"joint_gain": {"mean": _gains(row).joint, "deviation": None}}


def _averaged(rows: Iterable[Row], key: str) -> dict[str, float | None] | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    if not known:
        return None
    return {"mean": mean(known), "deviation": stdev(known) if len(known) > 1 else None}


def _gains(row: Row) -> Gains:
    return Gains(retain=_value(row["retain_gain"]), forget=_value(row["forget_gain"]))


def _value(figure: Any) -> float:
    """A figure, or the mean of one."""
    return float(figure["mean"] if isinstance(figure, dict) else figure)


def written_environment(environment: Mapping[str, Any]) -> str:
    """The environment that a record names, as text."""
    numbers = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    return f"{environment['device']}, {numbers}"


def this_environment(device: str) -> str:
    """The environment of this process on a device, as text."""
    return written_environment({"device": device, "versions": versions()})


def differing_environments(runs: Mapping[str, str | None]) -> str:
    """The differences between known environments of runs, and whose each is; "" without any."""
    names: dict[str, list[str]] = {}
    for name, environment in runs.items():
        if environment is not None:
            names.setdefault(environment, []).append(name)
    if len(names) < 2:
        return ""
    common = set.intersection(*(set(environment.split(", ")) for environment in names))
    groups = []
    for environment, of in names.items():
        own = [part for part in environment.split(", ") if part not in common] or ["nothing else"]
        groups.append(f"{', '.join(own)} ({', '.join(of)})")
    return "; ".join(groups)
