"""Whether what a record says still holds: recomputed from the run's folder, and from its sources where they are there.

Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hamu
from hamu.data import UnlearningData
from hamu.errors import HamuError, first_line
from hamu.file_digests import file_digest
from hamu.json_files import parse_json
from hamu.unlearning.goals import Standing
from hamu.unlearning.record.digests import weights_digest
from hamu.unlearning.record.figures import figures, goal_figures, without_intervals
from hamu.unlearning.record.inputs import read_inputs, set_entries, without_order
from hamu.unlearning.record.markdown import markdown
from hamu.unlearning.record.record import first_hardness, logged_steps, plain, steps_of
from hamu.unlearning.record.schema import schema, violations
from hamu.unlearning.run_files import (
    EVALUATION,
    HARDNESS,
    INPUTS,
    MERGED,
    READABLE_RECORD,
    RECORD,
    STEPS,
)

# How far figures may be from those recorded, absolutely and for those above 1 relatively.
TOLERANCE = {"float32": 0.005, "half precision": 0.05}
_MODELS = {
    "after": "the model after unlearning",
    "before": "the model before unlearning",
    "retain_model": "the retain model",
}
_SETS = {"forget_set": "forget", "retain_set": "retain", "test_set": "test"}
_FIGURES = {
    "sets": "losses and accuracies",
    "membership_inference": "membership inference",
    "against_retain_model": "distance to the retain model",
}


class Unavailable(HamuError):
    """Something that would be needed for a check is not there."""


@dataclass(frozen=True)
class Finding:
    """One statement of a record.

    Attributes:
        statement: what is said.
        holds: None if it cannot be checked.
        why: why it does not hold, or cannot be checked.
    """

    statement: str
    holds: bool | None
    why: str = ""


class Sources(Protocol):
    """What the settings of a run name. Each member raises `Unavailable` for what is not there (any more)."""

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
        sources: what its config.yaml names.
        evaluate: whether to evaluate the models again.

    Raises:
        HamuError: if there is no record.
    """
    if not (run / RECORD).is_file():
        raise HamuError(f"{run} has no record.json; name the --output_dir of a `hamu unlearn`")
    try:
        record = _json(run / RECORD)
        wrong = next(violations(record, schema()), "")
    except HamuError as error:
        wrong = str(error)
    yield Finding("record.json fits its schema", not wrong, wrong)
    if wrong:  # there is no telling what the rest would mean
        return
    yield _checked("record.md says what record.json says", _markdown, run, record)
    for name, digest in record["files"].items():
        yield _checked(f"{name} is as the run left it", _file, run / name, digest)
    yield _checked("record.json and config.yaml name the same settings", _settings, record, sources)
    yield _checked(
        "record.json and inputs.json name the same data and models", _inputs, run, record
    )
    yield _checked("record.json and evaluation.json say the same", _evaluation, run, record)
    yield _checked("steps.jsonl has the steps recorded", _steps, run, record["steps"])
    if record["hardness"] is not None:
        assessed = record["hardness"]["measured_at"] == "assessment"
        where, check = (HARDNESS, _assessed) if assessed else (STEPS, _hardness)
        yield _checked(f"{where} has the hardness recorded", check, run, record["hardness"])
    yield from _models(run, record["models"], sources)
    for key, side in _SETS.items():
        if record[key] is not None:
            yield _checked(f"the {side} set is the one recorded", _set, record[key], side, sources)
    given = sources if evaluate else None
    for role in ("after", "before"):
        for part, name in _FIGURES.items():
            recorded = record["figures"][role][part]
            if recorded is not None:
                yield _checked(
                    f"{_MODELS[role]} has the {name} recorded",
                    _measured,
                    recorded,
                    role,
                    part,
                    given,
                )
        if record["goal"] is not None:
            yield _checked(
                f"{_MODELS[role]} has forgotten as many records as recorded",
                _forgotten,
                record["goal"],
                role,
                given,
            )
    yield _checked(
        "the figures changed from before to after as recorded",
        _changed,
        record["figures"]["change"],
        given,
    )


def _checked(statement: str, check: Callable[..., str], *of: Any) -> Finding:
    """A check says what is wrong, "" if nothing is; what it needs may be unavailable."""
    try:
        wrong = check(*of)
    except Unavailable as error:
        return Finding(statement, None, str(error))
    except HamuError as error:
        return Finding(statement, False, str(error))
    return Finding(statement, not wrong, wrong)


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


def _settings(record: Mapping[str, Any], sources: Sources) -> str:
    recorded = record["settings"]
    found = {**sources.settings, "method": record["method"], "seed": record["seed"]}
    return next(_differences({name: recorded.get(name) for name in found}, found), "")


def _inputs(run: Path, record: Mapping[str, Any]) -> str:
    if not (run / INPUTS).is_file():
        raise Unavailable("inputs.json is missing")
    recorded = {f"{side} set": record[key] for key, side in _SETS.items()}
    recorded |= {
        "original model": record["models"]["before"],
        "retain model": record["models"]["retain_model"],
    }
    found = without_order(read_inputs(run))
    try:  # a record says more of a set
        named = {
            name: entry and {key: recorded[name][key] for key in entry}
            for name, entry in found.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        return f"inputs.json cannot be understood: {error}"
    return next(_differences(named, found), "")


def _evaluation(run: Path, record: Mapping[str, Any]) -> str:
    if not (run / EVALUATION).is_file():
        raise Unavailable("evaluation.json is missing")
    evaluation = _json(run / EVALUATION)
    roles = ("before", "after")
    try:
        found = {role: figures(evaluation[role]) for role in roles}
        found |= {"steps": steps_of(evaluation), "promise": evaluation["promise"]}
        found |= {"goal": goal_figures(evaluation["goal"])}
    except (KeyError, TypeError) as error:
        return f"evaluation.json cannot be understood: {error}"
    recorded = {role: without_intervals(record["figures"][role]) for role in roles}
    recorded |= {
        "steps": {name: record["steps"][name] for name in found["steps"]},
        "promise": record["promise"],
    }
    recorded |= {"goal": record["goal"]}
    return "; ".join(_differences(recorded, plain(found)))


def _steps(run: Path, recorded: Mapping[str, Any]) -> str:
    found = _logged(logged_steps, run)
    every_step_is_logged = recorded["logged"] == recorded["ended_at"]
    if every_step_is_logged and recorded["logged_taken"] != recorded["taken"]:
        return f"the record says {recorded['taken']} steps were taken, {recorded['logged_taken']} are logged as taken"
    return next(_differences({name: recorded[name] for name in found}, found), "")


def _hardness(run: Path, recorded: Mapping[str, Any]) -> str:
    return next(_differences(recorded, _logged(first_hardness, run)), "")


def _assessed(run: Path, recorded: Mapping[str, Any]) -> str:
    if not (run / HARDNESS).is_file():
        raise Unavailable("hardness.json is missing")
    return next(_differences(recorded, plain(_json(run / HARDNESS))), "")


def _logged(read: Callable[[Path], Any], run: Path) -> Any:
    try:
        return read(run)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HamuError(f"steps.jsonl cannot be read: {error}") from error


def _models(run: Path, models: Mapping[str, Any], sources: Sources) -> Iterator[Finding]:
    for role, name in _MODELS.items():
        recorded = models[role]
        if recorded is None:
            continue
        if recorded["adapter"] is None:
            yield _checked(
                f"{name} has the weights recorded",
                _weights,
                recorded["weights"],
                sources.weights,
                role,
            )
            continue
        yield _checked(
            f"{name} has the adapter recorded", _weights, recorded["adapter"], sources.adapter, role
        )
        yield _checked(
            f"{name} has the base model recorded",
            _weights,
            recorded["weights"],
            sources.weights,
            role,
        )
    if models["merged"] is not None:
        merged = run / MERGED
        yield _checked(
            "merged/ has the weights recorded",
            _weights,
            models["merged"]["weights"],
            lambda: merged,
        )


def _weights(recorded: str | None, folder_of: Callable[..., Path], *of: Any) -> str:
    if recorded is None:
        raise Unavailable("it was not in safetensors, so that nothing is recorded of it")
    return _differing(weights_digest(folder_of(*of)), recorded)


def _set(recorded: Mapping[str, Any], side: str, sources: Sources) -> str:
    entry = set_entries(side, sources.problem.sets().get(side))[f"{side} set"]
    if entry is None:
        return "there is none any more"
    if entry["records"] != recorded["records"]:
        return f"it has {entry['records']} records, the record says {recorded['records']}"
    return _differing(entry["sha256"], recorded["sha256"])


def _measured(recorded: Any, role: str, part: str, sources: Sources | None) -> str:
    if sources is None:
        raise Unavailable("--no_models leaves it out")
    found = plain(sources.figures(role)[part])
    if found is None and part == "against_retain_model":
        raise Unavailable("the retain model is not here")
    return "; ".join(_differences(recorded, found, TOLERANCE[sources.precision()]))


def _forgotten(goal: Mapping[str, Any], role: str, sources: Sources | None) -> str:
    """The count may differ by the records whose losses are next to what they need; the quantiles by the tolerance."""
    if sources is None:
        raise Unavailable("--no_models leaves it out")
    recorded, found, tolerance = (
        goal[role],
        sources.standing(role, goal),
        TOLERANCE[sources.precision()],
    )
    least = found.targets.least
    near = (
        0
        if goal["kind"] == "erased"
        else int(((found.losses - least).abs() <= tolerance * least).sum())
    )
    if recorded["records"] != len(found.losses) or abs(recorded["forgotten"] - found.count) > near:
        return (
            f"the record says {recorded['forgotten']} of {recorded['records']}, there are {found.count} of "
            f"{len(found.losses)}"
        )
    quantiles = plain(found.figures())["loss_quantiles"]
    return "; ".join(_differences(recorded["loss_quantiles"], quantiles, tolerance))


def _changed(recorded: Mapping[str, Any], sources: Sources | None) -> str:
    if sources is None:
        raise Unavailable("--no_models leaves it out")
    return "; ".join(
        _differences(recorded, plain(sources.change()), TOLERANCE[sources.precision()])
    )


def _differing(found: str | None, recorded: str) -> str:
    """What to say of two digests."""
    if found is None:
        return "there are no weights"
    return (
        ""
        if found == recorded
        else f"its SHA-256 is {found[:12]}..., the record says {recorded[:12]}..."
    )


def _differences(recorded: Any, found: Any, tolerance: float = 0.0, at: str = "") -> Iterator[str]:
    """What differs, by its place; fractions may, by a tolerance."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted(recorded.keys() | found.keys()):
            yield from _differences(
                recorded.get(name), found.get(name), tolerance, f"{at} {name}".strip()
            )
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for one, other in zip(recorded, found, strict=True):
            yield from _differences(one, other, tolerance, at)
    elif not _near(recorded, found, tolerance):
        yield f"{at.replace('_', ' ')}: the record says {recorded}, there is {found}"


def _near(recorded: Any, found: Any, tolerance: float) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        return math.isclose(recorded, found, rel_tol=tolerance, abs_tol=tolerance)
    return bool(recorded == found)


def _json(path: Path) -> Any:
    try:
        return parse_json(path)
    except ValueError as error:
        raise HamuError(f"{path.name} is not JSON: {first_line(error)}") from error
