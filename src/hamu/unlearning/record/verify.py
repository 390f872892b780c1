"""Checks of a record: recomputed from the run's folder, and from its sources where they are there.

Nothing is written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers.trainer_utils import IntervalStrategy

import hamu
from hamu import files
from hamu.errors import HamuError
from hamu.unlearning import record
from hamu.unlearning.goals import has_share
from hamu.unlearning.record import Found, inputs

if TYPE_CHECKING:
    from hamu.unlearning.jobs.review import NamedSources

# Largest distance of figures from those recorded, absolutely, and for those above 1 relatively.
TOLERANCE = {"float32": 0.005, "half precision": 0.05}
_MODELS = {
    "after": "the model after unlearning",
    "before": "the model before unlearning",
    "retain_model": "the retain model",
}
_FIGURES = {
    "sets": "losses and accuracies",
    "membership_inference": "membership inference",
    "retain_model_membership_inference": "retain model's membership inference",
    "against_retain_model": "distance to the retain model",
}
_OF_STANDING = ("records", "forgotten", "too_high", "loss_quantiles")
# Statements, each with what the record says and the function that finds it again.
_Checks = Iterator[tuple[str, Any, Callable[[], Any]]]


class Unavailable(HamuError):
    """Something that would be needed for a check is not there."""


@dataclass(frozen=True)
class Finding:
    """One statement of a record."""

    statement: str
    holds: bool | None  # None if it cannot be checked
    why: str = ""  # it does not hold, or cannot be checked


def verify(run: Path, sources: NamedSources, *, evaluate: bool = True) -> Iterator[Finding]:
    """Check the record of a run, one statement after the other; `evaluate` the models again."""
    if not (run / files.RECORD).is_file():
        raise HamuError(f"{run} has no record.json; name the --output_dir of a `hamu unlearn`")
    found, wrong = record.read_record(run)
    yield Finding("record.json fits its schema", not wrong, wrong)
    if wrong:  # there is no telling what the rest would mean
        return
    for checks in (_of_folder(run, found, sources), _of_sources(run, found, sources)):
        for check in checks:
            yield _finding(*check)
    for statement, recorded, find in _of_figures(found, sources):
        if evaluate:
            yield _finding(statement, recorded, find, sources)
        else:
            yield Finding(statement, None, "--no_models leaves it out")


def _finding(
    statement: str, recorded: Any, find: Callable[[], Any], sources: NamedSources | None = None
) -> Finding:
    """Compare exactly, or with sources to the tolerance of their precision."""
    try:
        tolerance = None if sources is None else TOLERANCE[sources.precision()]
        wrong = "; ".join(_differences(recorded, files.plain(find()), tolerance))
    except Unavailable as error:
        return Finding(statement, None, str(error))
    except HamuError as error:
        wrong, cause = str(error), error.__cause__
        is_out_of_reach = files.HUB in wrong and isinstance(cause, OSError)
        if is_out_of_reach or isinstance(cause, ImportError):  # of a library that is not here
            return Finding(statement, None, wrong)
    return Finding(statement, not wrong, wrong)


def _of_folder(run: Path, found: Found, sources: NamedSources) -> _Checks:
    """Checks that need no data and no model."""

    def check_version() -> None:
        written_by = found["environment"]["versions"]["hamu"]
        if written_by != hamu.__version__:
            raise Unavailable(f"it was written by hamu {written_by}, this is {hamu.__version__}")

    of_file = partial(_read, run)

    def readable() -> Any:
        check_version()
        return of_file(
            files.RECORD, lambda: hashlib.sha256(record.markdown(found).encode()).hexdigest()
        )

    def stated() -> Any:
        check_version()
        sides = [side for side, objective in sources.args.objectives().items() if objective]
        return of_file(files.RECORD, partial(record.statement, found, sides))

    written = _digest(run / files.READABLE_RECORD)
    yield "record.md says what record.json says", written, readable
    yield "what record.json states follows from it", found["statement"], stated
    if found["goal"] is not None:
        yield (
            "the goal is as set, and whether it is reached follows from its counts",
            found["goal"],
            partial(_goal, found, sources),
        )
    there = dict.fromkeys(name for name in record.BESIDE if (run / name).is_file())
    for name, digest in {**there, **found["files"]}.items():
        yield f"{name} is as the run left it", digest, partial(_digest, run / name)
    own = {"method": found["method"], "seed": found["seed"]}
    said = "record.json and config.yaml agree on the settings given"
    yield said, found["settings"], lambda: sources.settings | own
    models = found["models"]
    read = {f"{side} set": found[f"{side}_set"] for side in record.SETS}
    read |= {"original model": models["before"], "retain model": models["retain_model"]}
    yield (
        *("record.json and inputs.json name the same data and models", read),
        partial(of_file, files.INPUTS, lambda: inputs.as_recorded(inputs.read_inputs(run))),
    )
    evaluation = run / files.EVALUATION
    yield (
        *("record.json and evaluation.json say the same", found),
        partial(of_file, evaluation.name, lambda: record.measured_in(files.parse_json(evaluation))),
    )
    yield (
        "steps.jsonl has the steps recorded",
        found["steps"],
        partial(of_file, files.STEPS, partial(_steps, run, found, sources)),
    )
    if found["promise"] is not None and found["steps"]["logged"] == found["steps"]["ended_at"]:
        find = partial(of_file, files.STEPS, partial(record.logged_promise, run))
        yield "steps.jsonl has the promise recorded", found["promise"], find
    if found["hardness"] is not None or files.STEPS in there:
        find = partial(of_file, files.STEPS, partial(record.first_hardness, run))
        yield "steps.jsonl has the hardness recorded", found["hardness"], find


def _steps(run: Path, found: Found, sources: NamedSources) -> dict[str, int]:
    """Counts by the log, whose lines may have been lost before a run was resumed."""
    logged = record.logged_steps(run)
    ended_at = found["steps"]["taken"] + found["steps"]["not_taken"]
    if _logs_each(found, sources):
        ended_at = record.last_logged(run)
    all_logged = logged["logged"] == ended_at
    taken = {"taken": logged["logged_taken"]} if all_logged else {}
    return logged | taken | {"ended_at": ended_at}


def _logs_each(found: Found, sources: NamedSources) -> bool:
    """True if each step was to be logged, by the settings, or as far as the record tells."""
    try:
        args = sources.args
    except Unavailable:
        return bool(found["steps"]["logged"] == found["steps"]["ended_at"])
    return args.logging_strategy == IntervalStrategy.STEPS and args.logging_steps == 1


def _goal(found: Found, sources: NamedSources) -> dict[str, Any]:
    """The goal by the settings, and whether it is reached by the record's own counts."""
    is_there = found["goal"]["reached"] and has_share(found["goal"])
    args = sources.args
    loss, budget = args.target_forget_loss, args.max_retain_increase if args.auto else None
    kind = args.goal or ("loss" if loss is not None else found["goal"]["kind"])
    now = {"kind": kind, "share": args.target_share, "loss": loss, "budget": budget}
    return now | {"lasting": args.lasting, "reached": is_there}


def _read(run: Path, name: str, read: Callable[[], Any]) -> Any:
    """Read a file of the run, which may have been changed into something else."""
    if not (run / name).is_file():
        raise Unavailable(f"{name} is missing")
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TemplateError) as error:
        raise HamuError(f"{name} cannot be understood: {error}") from error


def _digest(path: Path) -> str | None:
    return files.file_digest(path) if path.is_file() else None


def _of_sources(run: Path, found: Found, sources: NamedSources) -> _Checks:
    """Checks of the models' weights and of the sets."""

    def entry(side: str) -> Found | None:
        entries = inputs.set_entries(side, sources.problem.sets().get(side))
        now = inputs.digests_in(entries[f"{side} set"])
        if now is None or side != "forget":
            return now
        words = record.description(sources.problem, sources.task.data.rho)
        return {**now, "chosen_by": sources.task.chosen_by(), "description": words}

    def merged() -> str | None:
        if not (run / files.MERGED).is_dir():
            raise Unavailable("merged/ is not here")
        return inputs.weights_digest(run / files.MERGED)

    for role, name in _MODELS.items():
        model, words = found["models"][role] or {}, "weights"
        if model.get("adapter") is not None:
            words, find = "base model", partial(sources.digest, role, "adapter")
            yield f"{name} has the adapter recorded", model["adapter"], find
        if model:
            find = partial(sources.digest, role, "weights")
            yield f"{name} has the {words} recorded", model["weights"], find
    if found["models"]["merged"] is not None:
        yield "merged/ has the weights recorded", found["models"]["merged"]["weights"], merged
    for side in record.SETS:
        recorded = found[f"{side}_set"]
        if recorded is not None:
            yield f"the {side} set is the one recorded", recorded, partial(entry, side)


def _of_figures(found: Found, sources: NamedSources) -> _Checks:
    """Checks that evaluate the models again."""
    figures, goal = found["figures"], found["goal"]

    def figure(role: str, part: str) -> Any:
        again = sources.figures(role)[part]
        if again is None and "retain_model" in part:
            raise Unavailable("the retain model is not here")
        return again

    def standing(role: str) -> dict[str, Any]:
        """Counts and quantiles, and those of the worst that are there; the counts recorded if
        records next to a limit explain them.
        """
        now, reach = sources.standing(role, goal), TOLERANCE[sources.precision()]
        again = {key: now.figures()[key] for key in _OF_STANDING}
        limits = {"forgotten": now.targets.least, "too_high": now.targets.most}
        for key, limit in limits.items() if goal["kind"] != "erased" else ():
            is_near = limit.isfinite() & ((now.losses - limit).abs() <= reach * limit)
            if abs(goal[role][key] - again[key]) <= int(is_near.sum()):
                again[key] = goal[role][key]

        def is_there(one: Found) -> bool:
            both = (now.losses, one["loss"]), (now.targets.least, one["target"])
            near = [
                (values - recorded).abs() <= reach * max(1.0, abs(recorded))
                for values, recorded in both
                if recorded is not None
            ]
            return bool(torch.stack(near).all(0).any()) if near else True

        return again | {"worst": [one for one in goal[role]["worst"] if is_there(one)]}

    cut = {side: one["cut"] for side in record.SETS if (one := found[f"{side}_set"])}
    if {*cut.values()} != {None}:
        yield "as many texts are cut as recorded", cut, sources.cut_texts
    for role in ("after", "before"):
        for part, name in _FIGURES.items():
            recorded = figures[role][part]
            if recorded is not None:
                statement = f"{_MODELS[role]} has the {name} recorded"
                yield statement, recorded, partial(figure, role, part)
        if goal is not None:
            statement = f"{_MODELS[role]} has forgotten as many records as recorded"
            recorded = {key: goal[role][key] for key in (*_OF_STANDING, "worst")}
            yield statement, recorded, partial(standing, role)
    statement = "the figures changed from before to after as recorded"
    yield statement, figures["change"], sources.change


def _differences(recorded: Any, found: Any, tolerance: float | None, at: str = "") -> Iterator[str]:
    """Differences by their place.

    Without a tolerance numbers are equal, and a record may hold more than what it is compared with.
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(found if tolerance is None else recorded.keys() | found.keys()):
            place = f"{at} {name}".strip().replace("_", " ")
            yield from _differences(recorded.get(name), found.get(name), tolerance, place)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for one, other in zip(recorded, found, strict=True):
            yield from _differences(one, other, tolerance, at)
    else:
        are_close = recorded == found
        if isinstance(recorded, float) and isinstance(found, float) and tolerance is not None:
            are_close = math.isclose(recorded, found, rel_tol=tolerance, abs_tol=tolerance)
        if not are_close:
            yield f"{at}: the record says {recorded}, there is {found}".removeprefix(": ")
