"""Checks of a record: recomputed from the run's folder, and from its sources where they are there.

Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hamu
from hamu import files
from hamu.errors import HamuError, first_line
from hamu.unlearning.record.figures import figures, goal_figures
from hamu.unlearning.record.inputs import read_inputs, set_entries, weights_digest, without_order
from hamu.unlearning.record.record import first_hardness, logged_steps, markdown, plain, steps_of
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
# A statement, and the function that returns what is wrong with it, "" if nothing is.
_Checks = Iterator[tuple[str, Callable[[], str]]]


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
    for statement, check in (*_of_folder(run, record, sources), *_of_models(run, record, sources)):
        yield _finding(statement, check)
    for statement, measure in _of_figures(record, sources):
        yield _finding(statement, measure if evaluate else _left_out)


def _finding(statement: str, check: Callable[[], str]) -> Finding:
    try:
        wrong = check()
    except Unavailable as error:
        return Finding(statement, None, str(error))
    except HamuError as error:
        wrong = str(error)
    return Finding(statement, not wrong, wrong)


def _left_out() -> str:
    raise Unavailable("--no_models leaves it out")


@contextmanager
def _understood(name: str) -> Iterator[None]:
    """Refuse a file of the run that has been changed into something else."""
    try:
        yield
    except FileNotFoundError:
        raise Unavailable(f"{name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HamuError(f"{name} cannot be understood: {error}") from error


def _of_folder(run: Path, record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    """Checks that need no data and no model."""

    def settings() -> str:
        given = {**sources.settings, "method": record["method"], "seed": record["seed"]}
        return _first(record["settings"], given)

    def inputs() -> str:
        recorded = {f"{side} set": record[f"{side}_set"] for side in ("forget", "retain", "test")}
        recorded["original model"] = record["models"]["before"]
        recorded["retain model"] = record["models"]["retain_model"]
        with _understood(files.INPUTS):
            (run / files.INPUTS).stat()
            return _first(recorded, without_order(read_inputs(run)))

    def evaluation() -> str:
        with _understood(files.EVALUATION):
            found = files.parse_json(run / files.EVALUATION)
            said = {
                "figures": {role: figures(found[role]) for role in ("after", "before")},
                "steps": steps_of(found),
                "promise": found["promise"],
                "goal": goal_figures(found["goal"]),
            }
        return "; ".join(_differences(record, plain(said)))

    def steps() -> str:
        with _understood(files.STEPS):
            found = logged_steps(run)
        if found["logged"] == record["steps"]["ended_at"]:  # every step is logged
            found["taken"] = found["logged_taken"]
        return _first(record["steps"], found)

    def hardness() -> str:
        with _understood(files.STEPS):
            return _first(record["hardness"], first_hardness(run))

    yield "record.md says what record.json says", partial(_markdown, run, record)
    for name, digest in record["files"].items():
        yield f"{name} is as the run left it", partial(_file, run / name, digest)
    yield "record.json and config.yaml name the same settings", settings
    yield "record.json and inputs.json name the same data and models", inputs
    yield "record.json and evaluation.json say the same", evaluation
    yield "steps.jsonl has the steps recorded", steps
    if record["hardness"] is not None:
        yield "steps.jsonl has the hardness recorded", hardness


def _of_models(run: Path, record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    """Checks of weights, and of the data."""
    for role, name in _MODELS.items():
        model = record["models"][role]
        if model is None:
            continue
        part = "weights"
        if model["adapter"] is not None:
            adapter = partial(sources.adapter, role)
            yield f"{name} has the adapter recorded", partial(_weights, model["adapter"], adapter)
            part = "base model"
        weights = partial(sources.weights, role)
        yield f"{name} has the {part} recorded", partial(_weights, model["weights"], weights)
    merged = record["models"]["merged"]
    if merged is not None:
        check = partial(_weights, merged["weights"], lambda: run / files.MERGED)
        yield "merged/ has the weights recorded", check
    for side in ("forget", "retain", "test"):
        recorded = record[f"{side}_set"]
        if recorded is not None:
            yield f"the {side} set is the one recorded", partial(_set, recorded, side, sources)


def _of_figures(record: Mapping[str, Any], sources: NamedSources) -> _Checks:
    """Checks that evaluate the models again."""

    def figure(role: str, part: str) -> str:
        found = sources.figures(role)[part]
        if found is None and part == "against_retain_model":
            raise Unavailable("the retain model is not here")
        return same(record["figures"][role][part], found)

    def change() -> str:
        return same(record["figures"]["change"], sources.change())

    def same(recorded: Any, found: Any) -> str:
        tolerance = TOLERANCE[sources.precision()]
        return "; ".join(_differences(recorded, plain(found), tolerance, whole=True))

    for role in ("after", "before"):
        for part, name in _FIGURES.items():
            if record["figures"][role][part] is not None:
                yield f"{_MODELS[role]} has the {name} recorded", partial(figure, role, part)
        if record["goal"] is not None:
            yield (
                f"{_MODELS[role]} has forgotten as many records as recorded",
                partial(_forgotten, record["goal"], role, sources),
            )
    yield "the figures changed from before to after as recorded", change


def _markdown(run: Path, record: Mapping[str, Any]) -> str:
    written_by = record["environment"]["versions"]["hamu"]
    if written_by != hamu.__version__:
        raise Unavailable(f"it was written by hamu {written_by}, this is {hamu.__version__}")
    path = run / files.READABLE_RECORD
    if not path.is_file():
        return "it is missing"
    return "" if path.read_bytes() == markdown(record).encode() else "the two differ"


def _file(path: Path, digest: str) -> str:
    return _differing(files.file_digest(path), digest) if path.is_file() else "it is missing"


def _weights(recorded: str | None, folder: Callable[[], Path]) -> str:
    if recorded is None:
        raise Unavailable("it was not in safetensors, so that nothing is recorded of it")
    found = weights_digest(folder())
    return "there are no weights" if found is None else _differing(found, recorded)


def _set(recorded: Mapping[str, Any], side: str, sources: NamedSources) -> str:
    entry = set_entries(side, sources.problem.sets().get(side))[f"{side} set"]
    if entry is None:
        return "there is none any more"
    if entry["records"] != recorded["records"]:
        return f"it has {entry['records']} records, the record says {recorded['records']}"
    return _differing(entry["sha256"], recorded["sha256"])


def _forgotten(goal: Mapping[str, Any], role: str, sources: NamedSources) -> str:
    """Compare counts and quantiles.

    The count may differ by the records whose losses are next to what they need, the quantiles by
    the tolerance.
    """
    tolerance, recorded = TOLERANCE[sources.precision()], goal[role]
    found, near = sources.standing(role, goal), 0
    if goal["kind"] != "erased":
        least = found.targets.least
        near = int(((found.losses - least).abs() <= tolerance * least).sum())
    records = len(found.losses)
    if recorded["records"] != records or abs(recorded["forgotten"] - found.count) > near:
        return (
            f"the record says {recorded['forgotten']} of {recorded['records']}, "
            f"there are {found.count} of {records}"
        )
    quantiles = plain(found.figures())["loss_quantiles"]
    return "; ".join(_differences(recorded["loss_quantiles"], quantiles, tolerance, whole=True))


def _differing(found: str, recorded: str) -> str:
    """The difference of two digests, in words."""
    same = found == recorded
    return "" if same else f"its SHA-256 is {found[:12]}..., the record says {recorded[:12]}..."


def _first(recorded: Any, found: Any) -> str:
    return next(_differences(recorded, found), "")


def _differences(
    recorded: Any, found: Any, tolerance: float = 0.0, at: str = "", *, whole: bool = False
) -> Iterator[str]:
    """Differences by their place; fractions may differ by a tolerance.

    A record may hold more than what it is compared with, unless that is the whole.
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(recorded.keys() | found.keys() if whole else found):
            place = f"{at} {name}".strip().replace("_", " ")
            yield from _differences(
                recorded.get(name), found.get(name), tolerance, place, whole=whole
            )
        return
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for one, other in zip(recorded, found, strict=True):
            yield from _differences(one, other, tolerance, at, whole=whole)
        return
    are_close = recorded == found
    if isinstance(recorded, float) and isinstance(found, float):
        are_close = math.isclose(recorded, found, rel_tol=tolerance, abs_tol=tolerance)
    if not are_close:
        yield f"{at}: the record says {recorded}, there is {found}"
