"""Checks of a record: recomputed from the run's folder, and from its sources where they are there.

Nothing is written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hamu
from hamu import files
from hamu.errors import HamuError, first_line
from hamu.unlearning.record.inputs import (
    digests_in,
    read_inputs,
    set_entries,
    weights_digest,
    without_order,
)
from hamu.unlearning.record.record import (
    SETS,
    first_hardness,
    logged_steps,
    markdown,
    measured_in,
    plain,
)
from hamu.unlearning.record.schema import schema, violations

if TYPE_CHECKING:
    from hamu.unlearning.jobs.named_sources import NamedSources

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
    "against_retain_model": "distance to the retain model",
}
# Statements, each with what the record says and the function that finds it again.
_Checks = Iterator[tuple[str, Any, Callable[[], Any]]]


class Unavailable(HamuError):
    """Something that would be needed for a check is not there."""


@dataclass(frozen=True)
class Finding:
    """One statement of a record.

    Attributes:
        statement: in words.
        holds: None if it cannot be checked.
        why: why it does not hold, or cannot be checked.
    """

    statement: str
    holds: bool | None
    why: str = ""


def verify(run: Path, sources: NamedSources, *, evaluate: bool = True) -> Iterator[Finding]:
    """Check a record, one statement after the other.

    Args:
        run: the folder that `hamu unlearn` has written.
        sources: everything that its config.yaml names; raises `Unavailable` for what has gone.
        evaluate: whether to evaluate the models again.

    Raises:
        HamuError: if there is no record.
    """
    if not (run / files.RECORD).is_file():
        raise HamuError(f"{run} has no record.json; name the --output_dir of a `hamu unlearn`")
    try:
        record = files.parse_json(run / files.RECORD)
        wrong = next(violations(record, schema()), "")
    except ValueError as error:
        wrong = first_line(error)
    yield Finding("record.json fits its schema", not wrong, wrong)
    if wrong:  # there is no telling what the rest would mean
        return
    for check in (
        *_of_folder(run, record, sources),
        *_of_models(run, record["models"], sources),
        *_of_sets(record, sources),
    ):
        yield _finding(*check)
    for statement, recorded, find in _of_figures(record, sources):
        if evaluate:
            yield _finding(statement, recorded, find, sources)
        else:
            yield Finding(statement, None, "--no_models leaves it out")


def _finding(
    statement: str, recorded: Any, find: Callable[[], Any], sources: NamedSources | None = None
) -> Finding:
    """Compare exactly, or with sources to the tolerance of their precision."""
    if recorded is None:
        why = "it was not in safetensors, so that nothing is recorded of it"
        return Finding(statement, None, why)
    try:
        found = plain(find())
        tolerance = None if sources is None else TOLERANCE[sources.precision()]
        wrong = "; ".join(_differences(recorded, found, tolerance))
    except Unavailable as error:
        return Finding(statement, None, str(error))
    except HamuError as error:
        wrong = str(error)
    return Finding(statement, not wrong, wrong)


def _of_folder(run: Path, record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    """Checks that need no data and no model."""
    sets = {f"{side} set": record[f"{side}_set"] for side in SETS}
    models = {"original model": record["models"]["before"]}
    models["retain model"] = record["models"]["retain_model"]
    own = {"method": record["method"], "seed": record["seed"]}
    evaluation = run / files.EVALUATION
    said = hashlib.sha256(markdown(record).encode()).hexdigest()
    yield "record.md says what record.json says", said, partial(_readable, run, record)
    for name, recorded in record["files"].items():
        yield f"{name} is as the run left it", recorded, partial(_digest, run / name)
    yield (
        *("record.json and config.yaml name the same settings", record["settings"]),
        lambda: sources.settings | own,
    )
    yield (
        *("record.json and inputs.json name the same data and models", sets | models),
        partial(_read, run, files.INPUTS, lambda: without_order(read_inputs(run))),
    )
    yield (
        *("record.json and evaluation.json say the same", record),
        partial(_read, run, files.EVALUATION, lambda: measured_in(files.parse_json(evaluation))),
    )
    steps = partial(_steps, run, record["steps"]["ended_at"])
    find = partial(_read, run, files.STEPS, steps)
    yield "steps.jsonl has the steps recorded", record["steps"], find
    if record["hardness"] is not None:
        yield (
            *("steps.jsonl has the hardness recorded", record["hardness"]),
            partial(_read, run, files.STEPS, lambda: first_hardness(run)),
        )


def _read(run: Path, name: str, read: Callable[[], Any]) -> Any:
    """Read a file of the run, which may have been changed into something else."""
    if not (run / name).is_file():
        raise Unavailable(f"{name} is missing")
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HamuError(f"{name} cannot be understood: {error}") from error


def _digest(path: Path) -> str | None:
    return files.file_digest(path) if path.is_file() else None


def _readable(run: Path, record: Mapping[str, Any]) -> str | None:
    written_by = record["environment"]["versions"]["hamu"]
    if written_by != hamu.__version__:
        raise Unavailable(f"it was written by hamu {written_by}, this is {hamu.__version__}")
    return _digest(run / files.READABLE_RECORD)


def _steps(run: Path, last: int) -> dict[str, int]:
    """Lines of the log, and the steps taken if each was logged."""
    found = logged_steps(run)
    return found | ({"taken": found["logged_taken"]} if found["logged"] == last else {})


def _of_models(run: Path, models: Mapping[str, Any], sources: NamedSources) -> _Checks:
    def digest(folder: Callable[[str], Path], role: str) -> str | None:
        return weights_digest(folder(role))

    for role, name in _MODELS.items():
        model, part = models[role] or {}, "weights"
        if model.get("adapter") is not None:
            find, part = partial(digest, sources.adapter, role), "base model"
            yield f"{name} has the adapter recorded", model["adapter"], find
        if model:
            find = partial(digest, sources.weights, role)
            yield f"{name} has the {part} recorded", model["weights"], find
    if models["merged"] is not None:
        find = partial(weights_digest, run / files.MERGED)
        yield "merged/ has the weights recorded", models["merged"]["weights"], find


def _of_sets(record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    def entry(side: str) -> Mapping[str, Any] | None:
        return digests_in(set_entries(side, sources.problem.sets().get(side))[f"{side} set"])

    for side in SETS:
        if record[f"{side}_set"] is not None:
            statement = f"the {side} set is the one recorded"
            yield statement, record[f"{side}_set"], partial(entry, side)


def _of_figures(record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    """Checks that evaluate the models again."""

    def figure(role: str, part: str) -> Any:
        found = sources.figures(role)[part]
        if found is None and part == "against_retain_model":
            raise Unavailable("the retain model is not here")
        return found

    for role in ("after", "before"):
        for part, name in _FIGURES.items():
            recorded, find = record["figures"][role][part], partial(figure, role, part)
            if recorded is not None:
                yield f"{_MODELS[role]} has the {name} recorded", recorded, find
        if record["goal"] is not None:
            statement = f"{_MODELS[role]} has forgotten as many records as recorded"
            find = partial(_standing, role, record["goal"], sources)
            yield statement, _of_standing(record["goal"][role]), find
    change = record["figures"]["change"]
    yield "the figures changed from before to after as recorded", change, sources.change


def _standing(role: str, goal: Mapping[str, Any], sources: NamedSources) -> dict[str, Any]:
    """Counts and quantiles; the count as recorded if records next to their target explain it."""
    found, near, said = sources.standing(role, goal), 0, goal[role]["forgotten"]
    if goal["kind"] != "erased":
        least = found.targets.least
        reach = TOLERANCE[sources.precision()] * least
        near = int(((found.losses - least).abs() <= reach).sum())
    explained = {"forgotten": said} if abs(said - found.count) <= near else {}
    return _of_standing(found.figures()) | explained


def _of_standing(standing: Mapping[str, Any]) -> dict[str, Any]:
    return {key: standing[key] for key in ("records", "forgotten", "loss_quantiles")}


def _differences(recorded: Any, found: Any, tolerance: float | None, at: str = "") -> Iterator[str]:
    """Differences by their place.

    Without a tolerance numbers are equal, and a record may hold more than what it is compared with.
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(found if tolerance is None else recorded.keys() | found.keys()):
            place = f"{at} {name}".strip().replace("_", " ")
            yield from _differences(recorded.get(name), found.get(name), tolerance, place)
        return
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for one, other in zip(recorded, found, strict=True):
            yield from _differences(one, other, tolerance, at)
        return
    are_close = recorded == found
    if isinstance(recorded, float) and isinstance(found, float) and tolerance is not None:
        are_close = math.isclose(recorded, found, rel_tol=tolerance, abs_tol=tolerance)
    if not are_close:
        yield f"{at}: the record says {recorded}, there is {found}".removeprefix(": ")
