"""The runs of a comparison, each an ordinary `hamu unlearn` in its own folder, and their figures: a
row for each run, means over seeds, hypervolumes.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hamu import files
from hamu.errors import HamuError, reading
from hamu.evaluation import gains as pareto
from hamu.evaluation.attacks import RELEARN_RETAIN, UNLEARNED, AttackResult
from hamu.evaluation.gains import Gains, Level, gains_of, state_at
from hamu.evaluation.membership import auc_of
from hamu.files import COMPARISON, CONFIG, EVALUATION, RECORD, parse_json, read_json
from hamu.unlearning.compare.children import Call, Children
from hamu.unlearning.record.inputs import Inputs, differing, read_inputs
from hamu.unlearning.run_folder import RunFolder

Row = dict[str, Any]
METRIC = "metrics."  # prefix of further metrics in a row
_SHARED = ("setting", "method", "constraint", "forget_weight", "learning_rate", "forget_records")
_AVERAGED = (
    *("forget_gain", "retain_gain", "forgotten", "too_high"),
    *("forget_accuracy", "retain_accuracy", "test_accuracy"),
    *("forget_probability", "retain_probability", "test_probability", "utility"),
    *("membership_auc", "retain_model_auc", "promise_kept", "steps", "seconds"),
)
_AT_LEVEL = ("at_gain", "at_step", "at_test_accuracy", "relearned")  # averaged if all seeds have it


def finished_row(columns: Row, run: Path, seconds: float | None, level: Level | None = None) -> Row:
    """The figures of a finished run, after its own columns; those that are not finite are None."""
    evaluation, record = (read_json(run / name, remove=run) for name in (EVALUATION, RECORD))
    gains, steps = gains_of(evaluation), record["steps"]
    found: Row = {
        "forget_gain": gains.forget,
        "retain_gain": gains.retain,
        "joint_gain": gains.joint,
        **({} if level is None else figures_at(evaluation["trajectory"], level)),
        **relearned(run),
        **model_figures(evaluation, "after"),
        "promise_kept": (record["promise"] or {}).get("kept"),
        "steps": steps["taken"],
        "ended_at": steps["ended_at"],
        "ended": evaluation.get("ended_kind", "other"),
        "ended_because": steps["ended_because"],
        "environment": written_environment(record["environment"]),
    }
    row = {"run": run.name, **columns, **files.plain(found), "seconds": seconds, "failed": ""}
    if row["forget_gain"] is None or row["retain_gain"] is None:
        row |= {"failed": "the losses of its model are not finite", "joint_gain": None}
    return row


def figures_at(trajectory: Iterable[Mapping[str, Any]], level: Level) -> Row:
    """Figures of a run at a level, see `state_at`: the other side's gain, step, test accuracy."""
    other = "retain" if level.side == "forget" else "forget"
    names = {"at_gain": f"eval_{other}_gain", "at_step": "step"}
    names |= {"at_test_accuracy": "eval_test_accuracy", "at_evaluated": "evaluated"}
    state = state_at(trajectory, level) or {}
    return {key: state.get(name) for key, name in names.items()}


def relearned(run: Path) -> Row:
    """Share that fine-tuning on retain data has brought back, of a run that was attacked so."""
    path = run / files.ATTACK_FOLDER / files.ATTACK
    if not path.is_file():
        return {}
    result = AttackResult.from_json(read_json(path))
    if RELEARN_RETAIN not in result.outcomes:
        return {}
    outcome = result.outcomes[RELEARN_RETAIN][UNLEARNED]
    return {"relearned": outcome.mean(result.figure, outcome.at[-1])}


def trajectory(run: Path) -> tuple[list[Gains], Gains]:
    """The gains at each evaluation of a run, and those of the model it has saved."""
    evaluation = read_json(run / EVALUATION, remove=run)
    return pareto.trajectory_of(evaluation["trajectory"]), gains_of(evaluation)


def start_figures(runs: Iterable[Path]) -> Row | None:
    """Figures of the model that runs have started from; None without runs.

    Where the runs do not agree, for membership inference draws by the seed, mean and deviation.
    """
    evaluations = [read_json(run / EVALUATION, remove=run) for run in runs]
    found = [files.plain(model_figures(evaluation, "before")) for evaluation in evaluations]
    start: Row = {}
    for key in dict.fromkeys(key for one in found for key in one):
        first = found[0].get(key)
        is_one = all(one.get(key) == first for one in found)
        start[key] = first if is_one else _averaged(found, key)
    return start or None


def check_same_inputs(runs: Mapping[str, Path], of: Container[str] | None = None) -> None:
    """Check that runs, by name, have read the same: all inputs, or those named in `of`."""
    first, inputs = next(iter(runs), ""), {name: read_inputs(run) for name, run in runs.items()}
    for name, read in inputs.items():
        kept = {key: entry for key, entry in read.items() if of is None or key in of}
        other = differing(inputs[first], kept)
        if other is not None:
            had = f"{name} had another {other} than {first}, so that they do not compare"
            raise HamuError(f"{had}; remove the folder that is out of date, and run it again")


def model_figures(evaluation: Mapping[str, Any], role: str) -> Row:
    """Figures of a model; after the prefix `METRIC` those of the report's further metrics.

    Utility is for texts the mean probability of the answers to retain, the paper's model utility
    (App. H.2), for images the negated retain loss, its retain utility (Sec. 6).
    """
    report, goal = evaluation[role], (evaluation.get("goal") or {}).get(role, {})
    names = {"forgotten": "forgotten", "too_high": "too_high", "forget_records": "records"}
    found: Row = {name: goal.get(key) for name, key in names.items()}
    for side in ("forget", "retain", "test"):
        for figure in ("loss", "accuracy", "probability"):
            found[f"{side}_{figure}"] = report.get(side, {}).get(figure)
    probability = found["retain_probability"]
    found |= {f"{METRIC}{name}": value for name, value in report.get("metrics", {}).items()}
    return found | {
        "utility": -report["retain"]["loss"] if probability is None else probability,
        "membership_auc": auc_of(report),
        "retain_model_auc": auc_of(report.get("retain_model", {})),
    }


@dataclass(frozen=True)
class Comparison:
    """Rows of finished and failed runs in order, and the figures that all started from.

    With a level rows are ranked by the gain there, with `best` only these settings are `shown`.
    """

    found: tuple[Row, ...]
    start: Row | None
    level: Level | None = None
    best: frozenset[str] = frozenset()

    @cached_property
    def rows(self) -> list[Row]:
        """All rows by joint gain, with `pareto` for those that no other beats; then the failed."""
        return self._in_order(self.found)

    @cached_property
    def shown(self) -> list[Row]:
        """The rows for people, `pareto` among them: of the best settings, if some are; else all."""
        return self._in_order(r for r in self.found if not self.best or r["setting"] in self.best)

    def _in_order(self, rows: Iterable[Row]) -> list[Row]:
        rows = [*rows]
        failed = [row for row in rows if row["failed"]]
        return [*self._ranked(row for row in rows if not row["failed"]), *failed]

    def _ranked(self, rows: Iterable[Row]) -> list[Row]:
        by = "joint_gain" if self.level is None else "at_gain"
        rows = sorted(rows, key=lambda row: -_value(row[by], -math.inf))
        best = pareto.pareto_optimal([_gains(row) for row in rows])
        return [{**row, "pareto": is_best} for row, is_best in zip(rows, best, strict=True)]

    @property
    def level_gain(self) -> tuple[str, float] | None:
        """The side of the level, and its gain there."""
        if self.level is None or self.start is None:
            return None
        rise = self.level.loss - _value(self.start[f"{self.level.side}_loss"])
        return self.level.side, rise if self.level.side == "forget" else -rise

    def best_settings(self) -> dict[str, str]:
        """The best setting of each method that gets to the level: by the mean over all seeds, or,
        of methods with no setting that gets there with each, by a single run.
        """
        ranked = [*self._means(self.rows), *self.rows]
        there = [row for row in ranked if row.get("at_gain") is not None]
        return {row["method"]: row["setting"] for row in reversed(there)}

    @cached_property
    def means(self) -> list[Row]:
        """Means and (sample) standard deviations by setting; empty if there is one seed alone."""
        return self._means(self.shown)

    def _means(self, rows: Iterable[Row]) -> list[Row]:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["setting"], []).append(row)
        seeds = len({row["seed"] for row in self.found})
        there = [of for of in groups.values() if not all(row["failed"] for row in of)]
        means = self._ranked(map(_mean, there)) if seeds > 1 else []
        return sorted(means, key=lambda row: row["runs"] < seeds)  # a mean needs all seeds

    @property
    def reference(self) -> Gains:
        """The reference of the hypervolumes, see `hypervolume_reference`."""
        known = [row["retain_gain"] for row in self.found if not row["failed"]]
        return pareto.hypervolume_reference(min(known, default=0.0))

    @cached_property
    def hypervolumes(self) -> dict[str, float]:
        """The hypervolume of each method with finished runs, of the gains with which they ended."""
        ends: dict[str, list[Gains]] = {}
        for row in self.found:
            if not row["failed"]:
                ends.setdefault(row["method"], []).append(_gains(row))
        return {name: pareto.hypervolume(gains, self.reference) for name, gains in ends.items()}

    def summary(self) -> dict[str, Any]:
        """Rows, means and hypervolumes, as JSON holds them."""
        reference = (self.reference.forget, self.reference.retain)
        found = {"at": self.level._asdict(), "best": sorted(self.best)} if self.level else {}
        return found | {
            "start": self.start,
            "runs": self.rows,
            "means": self.means,
            "hypervolume": {"reference": reference, "methods": self.hypervolumes},
        }


def _mean(rows: list[Row]) -> Row:
    """One row of several that differ in the seed."""
    seeds, at_level = {one["seed"] for one in rows}, Row()
    for key in _AT_LEVEL:  # of runs that failed later too
        there = [one for one in rows if one.get(key) is not None]
        at_level[key] = _averaged(there, key) if {one["seed"] for one in there} == seeds else None
    rows = [one for one in rows if not one["failed"]]
    row = {key: rows[0].get(key) for key in _SHARED} | {"runs": len(rows)}
    further = dict.fromkeys(key for one in rows for key in one if key.startswith(METRIC))
    row |= {key: _averaged(rows, key) for key in (*_AVERAGED, *further)} | at_level
    return row | {
        "ended": ", ".join(dict.fromkeys(one["ended"] for one in rows)),
        "joint_gain": {"mean": _gains(row).joint, "deviation": None},
    }


def _averaged(rows: Iterable[Row], key: str) -> dict[str, float | None] | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    if not known:
        return None
    return {"mean": mean(known), "deviation": stdev(known) if len(known) > 1 else None}


def _gains(row: Row) -> Gains:
    return Gains(retain=_value(row["retain_gain"]), forget=_value(row["forget_gain"]))


def _value(figure: Any, none: float = math.nan) -> float:
    """A figure, or the mean of one."""
    if figure is None:
        return none
    return float(figure["mean"] if isinstance(figure, dict) else figure)


def written_environment(environment: Mapping[str, Any]) -> str:
    """The environment that a record names, as text."""
    numbers = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    return f"{environment['device']}, {numbers}"


def differing_environments(runs: Mapping[str, str | None]) -> str:
    """The differences between known environments of runs, and whose each is; "" without any."""
    names: dict[str, list[str]] = {}
    for name, environment in runs.items():
        if environment is not None:
            names.setdefault(environment, []).append(name)
    if len(names) < 2:
        return ""
    common = set.intersection(*({*one.split(", ")} for one in names))
    groups = []
    for environment, of in names.items():
        own = [part for part in environment.split(", ") if part not in common]
        groups.append(f"{', '.join(own) or 'nothing else'} ({', '.join(of)})")
    return "; ".join(groups)


@dataclass(frozen=True)
class Plan:
    """A run that is to be: its folder's name, own columns, settings, and all options."""

    name: str
    columns: Row
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    state_of: str | None = None  # the run that it repeats up to its state at the level


class Runs:
    """The runs, and what has come out of them so far.

    `options_of` completes options, `inputs` reads what runs read now; `overwrite` replaces runs
    that had others, which are an error else. Each run is given `options` beside its settings.
    """

    # what to do about a run that is not the one planned in its place
    remedy = "choose another --output_dir, or give --overwrite to replace such runs"

    def __init__(
        self,
        folder: RunFolder,
        plans: Iterable[Plan],
        options_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        inputs: Callable[[], Inputs] = dict,
        *,
        overwrite: bool = False,
        options: Mapping[str, Any] | None = None,
        level: Level | None = None,
    ) -> None:
        self._folder, self._options_of, self._inputs = folder, options_of, cache(inputs)
        self._overwrite, self.options = overwrite, options or {}
        self._level, self.best = level, frozenset[str]()
        self._plans: dict[str, Plan] = {}
        self._calls: dict[str, Call] = {}
        self._rows: dict[str, Row] = {}
        self._seconds: dict[str, float] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):  # none else is read of an earlier
            self._seconds = parse_json(folder.path / COMPARISON)["seconds"]
        self.add(plans)

    def add(self, plans: Iterable[Plan]) -> None:
        """Plan more runs."""
        for plan in plans:
            self._plans[plan.name] = plan
            if call := self._call(plan):
                self._calls[plan.name] = call
            else:
                self.read(plan.name)

    def read(self, name: str) -> None:
        """Read the figures of a finished run."""
        columns, seconds = self._plans[name].columns, self._seconds.get(name)
        place = self._folder.path / name
        again = f"; remove {place} and give the same command again"
        with reading(f"a file of the run in {place} is damaged", again):
            self._rows[name] = finished_row(columns, place, seconds, self._level)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def waiting(self) -> list[str]:
        """The names of the runs that neither have figures nor have failed."""
        return [name for name in self._plans if name not in self._rows]

    @property
    def rows(self) -> list[Row]:
        """Rows of ended runs, as planned, with what is relearned from the state at the level."""
        ended = [name for name in self._plans if name in self._rows]
        found = {name: {**self._rows[name]} for name in ended}
        for row in found.values():  # of an attack on the model at the end, which may be there too
            row.pop("relearned", None)
        for name, plan in self._plans.items():
            if plan.state_of is not None and name in found and not found[name]["failed"]:
                del found[name]
                found[plan.state_of]["relearned"] = self._rows[name].get("relearned")
        return [*found.values()]

    def folders(self) -> dict[str, Path]:
        """The folders of all runs that are finished, by name."""
        ended = self._rows.items()
        return {name: self._folder.path / name for name, row in ended if not row["failed"]}

    def comparison(self) -> Comparison:
        """The comparison of the runs that have ended so far."""
        seeds = {self._plans[name].columns.get("seed"): run for name, run in self.folders().items()}
        start = start_figures(seeds.values())
        return Comparison(tuple(self.rows), start, self._level, self.best)

    def summary(self) -> dict[str, Any]:
        """Content of comparison.json but for times."""
        return self.comparison().summary()

    def run(self, children: Children) -> Iterator[Row]:
        """Run what is not finished; yields the row of each that has ended and was not asked to."""
        self.save()
        for ended in children.make([self._calls[name] for name in self.waiting]):
            name, resumed = ended.name, "resume" in self._calls[ended.name].options
            earlier = self._seconds.get(name, 0.0) if resumed else 0.0
            self._seconds[name] = round(earlier + ended.seconds, 1)
            if not ended.reason and (self._folder.path / name / RECORD).is_file():
                self.read(name)
            elif not children.asked_by:
                self._rows[name] = {
                    "run": name,
                    **self._plans[name].columns,
                    "ended": "interrupted" if ended.interrupted else "failed",
                    "seconds": self._seconds[name],
                    "failed": ended.reason or "it left no record",
                }
            self.save()
            if name in self._rows:
                yield self._rows[name]

    def _call(self, plan: Plan) -> Call | None:
        """The call that begins a run, or goes on with it; None if it is finished."""
        place = self._folder.path / plan.name
        output = {**self.options, "output_dir": str(place)}
        if (place / CONFIG).is_file():
            difference = self._difference(place, plan)
            if difference is None:
                if all((place / name).is_file() for name in (EVALUATION, RECORD)):
                    return None
                return Call(plan.name, "unlearn", {"resume": True, **output})
            if not self._overwrite:
                raise HamuError(f"{place} holds a run with {difference}; {self.remedy}")
        RunFolder(place, overwrite=True)  # refuses what is not of a run
        return Call(plan.name, "unlearn", {**plan.settings, "overwrite": True, **output})

    def _difference(self, place: Path, plan: Plan) -> str | None:
        """The difference of an earlier run from the one planned in its place; None without."""
        was = self._options_of({"config": str(place / CONFIG)})
        for name, now in plan.options.items():
            if name != "output_dir" and was[name] != now:
                old, new = (getattr(one, "value", one) for one in (was[name], now))
                return f"{name} {old}, not {new}"
        other = differing(read_inputs(place), self._inputs())
        return other and f"another {other} than there is now"

    def save(self) -> None:
        """Write comparison.json."""
        self._folder.write_json(COMPARISON, self.summary() | {"seconds": self._seconds})
