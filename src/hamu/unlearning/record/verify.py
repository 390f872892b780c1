"""Checks of a record: recomputed from the run's folder, and from its sources where they are there. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import hamu
from hamu.data import UnlearningData
from hamu.errors import HamuError, first_line
from hamu.files import (
    EVALUATION,
    HARDNESS,
    INPUTS,
    MERGED,
    READABLE_RECORD,
    RECORD,
    STEPS,
    file_digest,
    parse_json,
)
from hamu.unlearning.goals import Standing
from hamu.unlearning.record.digests import weights_digest
from hamu.unlearning.record.figures import figures, goal_figures, without_intervals
from hamu.unlearning.record.inputs import read_inputs, set_entries, without_order
from hamu.unlearning.record.record import first_hardness, logged_steps, markdown, plain, steps_of
from hamu.unlearning.record.schema import schema, violations

# Largest distance of figures from those recorded, absolutely, and for those above 1 relatively.
TOLERANCE = {"float32": 0.005, "half precision": 0.05}
_MODELS = {
    "after": "the model after unlearning",
    "before": "the model before unlearning",
    "retain_model": "the retain model",
}
_ROLES = ("after", "before")
_SETS = {"forget_set": "forget", "retain_set": "retain", "test_set": "test"}
_FIGURES = {
    "sets": "losses and accuracies",
    "membership_inference": "membership inference",
    "against_retain_model": "distance to the retain model",
}
_Check = tuple[str, Callable[[], str]]  # a statement, and what is wrong with it, "" if nothing is


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


class Sources(Protocol):
    """Everything that the settings of a run name. Each member raises `Unavailable` for what is not there (any more)."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of config.yaml, as a record holds them."""

    @property
    def problem(self) -> UnlearningData[Any]:
        """The sets, read again."""

    def weights(self, role: str) -> Path:
        """The folder with all weights of the model "before", "after" or "retain_model"; of its base if an adapter."""

    def adapter(self, role: str) -> Path:
        """The folder with its adapter."""

    def figures(self, role: str) -> Mapping[str, Any]:
        """See `figures`: of the model "before" or "after", evaluated again."""

    def change(self) -> Mapping[str, Any]:
        """See `changes`: of both models, evaluated again."""

    def standing(self, role: str, goal: Mapping[str, Any]) -> Standing:
        """Standing of the forget set against the goal of a record: by "before" or "after"."""

    def precision(self) -> str:
        """A key of `TOLERANCE`."""


def verify(run: Path, sources: Sources, *, evaluate: bool = True) -> Iterator[Finding]:
    """Check a record, one statement after the other.

    Args:
        run: the folder that `hamu unlearn` has written.
        sources: everything that its config.yaml names.
        evaluate: whether to evaluate the models again.

    Raises:
        HamuError: if there is no record.
    """
    if not (run / RECORD).is_file():
        raise HamuError(f"{run} has no record.json; name the --output_dir of a `hamu unlearn`")
    record: dict[str, Any] = {}
    try:
        record = _json(run / RECORD)
        wrong = next(violations(record, schema()), "")
    except HamuError as error:
        wrong = str(error)
    yield Finding("record.json fits its schema", not wrong, wrong)
    if wrong:  # there is no telling what the rest would mean
        return
    checks = (*_of_folder(run, record, sources), *_of_models(run, record, sources))
    for statement, check in (*checks, *_of_figures(record, sources, evaluate)):
        try:
            wrong = check()
        except Unavailable as error:
            yield Finding(statement, None, str(error))
        except HamuError as error:
            yield Finding(statement, False, str(error))
        else:
            yield Finding(statement, not wrong, wrong)


def _of_folder(run: Path, record: Mapping[str, Any], sources: Sources) -> Iterator[_Check]:
    """Checks that need no data and no model."""

    def settings() -> str:
        found = {**sources.settings, "method": record["method"], "seed": record["seed"]}
        return _first({name: record["settings"].get(name) for name in found}, found)

    def steps() -> str:
        recorded, found = record["steps"], _logged(logged_steps, run)
        every_step_is_logged = recorded["logged"] == recorded["ended_at"]
        if every_step_is_logged and recorded["logged_taken"] != recorded["taken"]:
            return f"the record says {recorded['taken']} steps were taken, {recorded['logged_taken']} are logged as taken"
        return _first({name: recorded[name] for name in found}, found)

    def hardness() -> str:
        if is_assessed:
            return _first(record["hardness"], plain(_needed(run / HARDNESS)))
        return _first(record["hardness"], _logged(first_hardness, run))

    yield "record.md says what record.json says", lambda: _markdown(run, record)
    for name, digest in record["files"].items():
        yield f"{name} is as the run left it", partial(_file, run / name, digest)
    yield "record.json and config.yaml name the same settings", settings
    yield "record.json and inputs.json name the same data and models", lambda: _inputs(run, record)
    yield "record.json and evaluation.json say the same", lambda: _evaluation(run, record)
    yield "steps.jsonl has the steps recorded", steps
    if record["hardness"] is not None:
        is_assessed = record["hardness"]["measured_at"] == "assessment"
        yield f"{HARDNESS if is_assessed else STEPS} has the hardness recorded", hardness


def _of_models(run: Path, record: Mapping[str, Any], sources: Sources) -> Iterator[_Check]:
    """Checks of weights, and of the data."""
    models = record["models"]
    for role, name in _MODELS.items():
        if models[role] is None:
            continue
        weights, adapter = models[role]["weights"], models[role]["adapter"]
        if adapter is not None:
            yield (
                f"{name} has the adapter recorded",
                partial(_weights, adapter, partial(sources.adapter, role)),
            )
        part = "weights" if adapter is None else "base model"
        yield (
            f"{name} has the {part} recorded",
            partial(_weights, weights, partial(sources.weights, role)),
        )
    if models["merged"] is not None:
        merged = models["merged"]["weights"]
        yield "merged/ has the weights recorded", lambda: _weights(merged, lambda: run / MERGED)
    for key, side in _SETS.items():
        if record[key] is not None:
            yield (
                f"the {side} set is the one recorded",
                partial(_set, record[key], side, sources),
            )


def _of_figures(record: Mapping[str, Any], sources: Sources, evaluate: bool) -> Iterator[_Check]:
    """Checks that evaluate the models again."""

    def check(measure: Callable[[float], str]) -> str:
        if not evaluate:
            raise Unavailable("--no_models leaves it out")
        return measure(TOLERANCE[sources.precision()])

    def figure(role: str, part: str, tolerance: float) -> str:
        found = plain(sources.figures(role)[part])
        if found is None and part == "against_retain_model":
            raise Unavailable("the retain model is not here")
        return "; ".join(_differences(record["figures"][role][part], found, tolerance))

    def change(tolerance: float) -> str:
        found = plain(sources.change())
        return "; ".join(_differences(record["figures"]["change"], found, tolerance))

    for role in _ROLES:
        for part, name in _FIGURES.items():
            if record["figures"][role][part] is not None:
                yield (
                    f"{_MODELS[role]} has the {name} recorded",
                    partial(check, partial(figure, role, part)),
                )
        if record["goal"] is not None:
            yield (
                f"{_MODELS[role]} has forgotten as many records as recorded",
                partial(check, partial(_forgotten, record["goal"], role, sources)),
            )
    yield "the figures changed from before to after as recorded", lambda: check(change)


def _markdown(run: Path, record: Mapping[str, Any]) -> str:
    written_by = record["environment"]["versions"]["hamu"]
    if written_by != hamu.__version__:
        raise Unavailable(f"it was written by hamu {written_by}, this is {hamu.__version__}")
    path = run / READABLE_RECORD
    if not path.is_file():
        return "it is missing"
    return "" if path.read_bytes() == markdown(record).encode() else "the two differ"


def _file(path: Path, digest: str) -> str:
    return _differing(file_digest(path), digest) if path.is_file() else "it is missing"


def _inputs(run: Path, record: Mapping[str, Any]) -> str:
    if not (run / INPUTS).is_file():
        raise Unavailable("inputs.json is missing")
    recorded: dict[str, Any] = {f"{side} set": record[key] for key, side in _SETS.items()}
    recorded["original model"] = record["models"]["before"]
    recorded["retain model"] = record["models"]["retain_model"]
    found = without_order(read_inputs(run))
    try:  # a record says more of a set
        named = {
            name: entry and {key: recorded[name][key] for key in entry}
            for name, entry in found.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        return f"inputs.json cannot be understood: {error}"
    return _first(named, found)


def _evaluation(run: Path, record: Mapping[str, Any]) -> str:
    evaluation = _needed(run / EVALUATION)
    try:
        found: dict[str, Any] = {role: figures(evaluation[role]) for role in _ROLES}
        found |= {"steps": steps_of(evaluation), "promise": evaluation["promise"]}
        found |= {"goal": goal_figures(evaluation["goal"])}
    except (KeyError, TypeError) as error:
        return f"evaluation.json cannot be understood: {error}"
    recorded = {role: without_intervals(record["figures"][role]) for role in _ROLES}
    recorded["steps"] = {name: record["steps"][name] for name in found["steps"]}
    recorded |= {name: record[name] for name in ("promise", "goal")}
    return "; ".join(_differences(recorded, plain(found)))


def _logged(read: Callable[[Path], Any], run: Path) -> Any:
    try:
        return read(run)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HamuError(f"steps.jsonl cannot be read: {error}") from error


def _weights(recorded: str | None, folder: Callable[[], Path]) -> str:
    if recorded is None:
        raise Unavailable("it was not in safetensors, so that nothing is recorded of it")
    return _differing(weights_digest(folder()), recorded)


def _set(recorded: Mapping[str, Any], side: str, sources: Sources) -> str:
    entry = set_entries(side, sources.problem.sets().get(side))[f"{side} set"]
    if entry is None:
        return "there is none any more"
    if entry["records"] != recorded["records"]:
        return f"it has {entry['records']} records, the record says {recorded['records']}"
    return _differing(entry["sha256"], recorded["sha256"])


def _forgotten(goal: Mapping[str, Any], role: str, sources: Sources, tolerance: float) -> str:
    """The count may differ by the records whose losses are next to what they need; the quantiles by the tolerance."""
    recorded, found = goal[role], sources.standing(role, goal)
    near, least = 0, found.targets.least
    if goal["kind"] != "erased":
        near = int(((found.losses - least).abs() <= tolerance * least).sum())
    if recorded["records"] != len(found.losses) or abs(recorded["forgotten"] - found.count) > near:
        return (
            f"the record says {recorded['forgotten']} of {recorded['records']}, there are {found.count} of "
            f"{len(found.losses)}"
        )
    quantiles = plain(found.figures())["loss_quantiles"]
    return "; ".join(_differences(recorded["loss_quantiles"], quantiles, tolerance))


def _differing(found: str | None, recorded: str) -> str:
    """The difference of two digests, in words."""
    if found is None:
        return "there are no weights"
    same = found == recorded
    return "" if same else f"its SHA-256 is {found[:12]}..., the record says {recorded[:12]}..."


def _first(recorded: Any, found: Any) -> str:
    return next(_differences(recorded, found), "")


def _differences(recorded: Any, found: Any, tolerance: float = 0.0, at: str = "") -> Iterator[str]:
    """Each difference, by its place; fractions may differ by a tolerance."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(recorded.keys() | found.keys()):
            place = f"{at} {name}".strip()
            yield from _differences(recorded.get(name), found.get(name), tolerance, place)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for one, other in zip(recorded, found, strict=True):
            yield from _differences(one, other, tolerance, at)
    elif isinstance(recorded, float) and isinstance(found, float):
        if not math.isclose(recorded, found, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{at.replace('_', ' ')}: the record says {recorded}, there is {found}"
    elif recorded != found:
        yield f"{at.replace('_', ' ')}: the record says {recorded}, there is {found}"


def _needed(path: Path) -> Any:
    if not path.is_file():
        raise Unavailable(f"{path.name} is missing")
    return _json(path)


def _json(path: Path) -> Any:
    try:
        return parse_json(path)
    except ValueError as error:
        raise HamuError(f"{path.name} is not JSON: {first_line(error)}") from error
