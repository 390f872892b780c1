"""The record of a run: what was asked, done and measured. Counts and digests, never what a record says."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import hamu
from hamu.core.distributed import world_size
from hamu.core.plugins import providers
from hamu.data import ImageData, TextData, UnlearningData
from hamu.files import (
    CONFIG,
    EVALUATION,
    HARDNESS,
    INPUTS,
    LAYERS,
    MERGED,
    MODEL,
    READABLE_RECORD,
    RECORD,
    STEPS,
    file_digest,
)
from hamu.models.loading import is_adapter
from hamu.unlearning.goal_report import forgotten_words, meaning
from hamu.unlearning.record.digests import weights_digest
from hamu.unlearning.record.figures import changes, figures, goal_figures
from hamu.unlearning.record.inputs import Inputs, model_entry
from hamu.unlearning.record.schema import schema, violations
from hamu.unlearning.run_folder import RunFolder

if TYPE_CHECKING:
    from hamu.assess import Hardness
    from hamu.unlearning.trainer import UnlearnTrainer

VERSION = 2
_BESIDE = (CONFIG, INPUTS, HARDNESS, STEPS, LAYERS, EVALUATION)
_SETS = ("retain", "forget", "test")
_HARDNESS = ("kappa", "cos", "direct_threshold", "stop_threshold")


@dataclass(frozen=True)
class Asked:
    """What a run was asked to do.

    Attributes:
        problem: the three sets.
        chosen_by: the option that said what to forget.
        settings: see `hamu.unlearning.record.inputs.recorded`.
        inputs: the sets and the models that it reads.
        hardness: as it was assessed before the run, see `figures_of`; None where it was not.
    """

    problem: UnlearningData[Any]
    chosen_by: str
    settings: Mapping[str, Any]
    inputs: Inputs
    hardness: Mapping[str, Any] | None = None


def build(
    asked: Asked, trainer: UnlearnTrainer, evaluation: Mapping[str, Any], run: Path
) -> dict[str, Any]:
    """The record of a run whose model, log and figures are in its folder.

    Args:
        asked: what was asked.
        trainer: after the run.
        evaluation: what is in evaluation.json.
        run: the folder.

    Returns:
        What record.json holds but for the digests of the files beside it.
    """
    inputs, seed = asked.inputs, trainer.args.seed
    before = inputs["original model"]
    predictions = (trainer.start_predictions, trainer.predictions)
    was, now = (
        figures(evaluation[role], one, seed)
        for role, one in zip(("before", "after"), predictions, strict=True)
    )
    with_adapter = is_adapter(run / MODEL)
    has_images = isinstance(asked.problem.forget, ImageData)
    packages = ("torch", "transformers", *["peft"] * with_adapter, *["pillow"] * has_images)
    after = {"name": MODEL, "weights": before["weights"], "adapter": weights_digest(run / MODEL)}
    record = {
        "format": "hamu-unlearning-record",
        "version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "forget_set": {
            **(_described(asked, "forget") or {}),
            "chosen_by": asked.chosen_by,
            "description": _description(asked),
        },
        "retain_set": _described(asked, "retain"),
        "test_set": _described(asked, "test"),
        "models": {
            "before": before,
            "after": after if with_adapter else model_entry(MODEL, run / MODEL),
            "merged": model_entry(MERGED, run / MERGED) if (run / MERGED).is_dir() else None,
            "retain_model": inputs["retain model"],
        },
        "method": asked.settings["method"],
        "seed": seed,
        "settings": asked.settings,
        "environment": {
            "device": trainer.args.device.type,
            "processes": world_size(),
            "versions": versions(*packages),
        },
        "hardness": asked.hardness or first_hardness(run),
        "steps": {
            "ended_at": trainer.state.global_step,
            **steps_of(evaluation),
            **logged_steps(run),
        },
        "promise": evaluation["promise"],
        "goal": goal_figures(evaluation["goal"]),
        "figures": {
            "before": was,
            "after": now,
            "change": changes(was, now, predictions, seed),
        },
    }
    record["statement"] = statement(record)
    found: dict[str, Any] = plain(record)
    return found


def write(folder: RunFolder, record: Mapping[str, Any]) -> tuple[Path, str]:
    """Write record.md and record.json; returns where the first is, and the digest of the second."""
    text = markdown(record)
    files = {
        name: file_digest(folder.path / name) for name in _BESIDE if (folder.path / name).is_file()
    }
    readable = folder.write_text(READABLE_RECORD, text)
    files[readable.name] = file_digest(readable)
    return readable, file_digest(folder.write_json(RECORD, {**record, "files": files}))


def markdown(record: Mapping[str, Any]) -> str:
    """The record for people to read, record.md."""
    sets = [name for name in _SETS if name in record["figures"]["after"]["sets"]]
    return _templates().get_template("record.md.j2").render(record, sets=sets)


def statement(record: Mapping[str, Any]) -> list[str]:
    """Sentences on what a record proves and what it does not, from all else of the record."""
    return _templates().get_template("statement.j2").render(record).splitlines()


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("hamu.unlearning.record", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "interval": _interval, "setting": _setting}
    environment.globals |= {"forgotten_words": forgotten_words, "meaning": meaning}
    return environment


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(ends: list[float | None] | None) -> str:
    return "" if ends is None or None in ends else f" [{ends[0]:.4g}, {ends[1]:.4g}]"


def _setting(value: Any) -> str:
    """A value as JSON, in one line of a table."""
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")


def read_record(run: Path) -> dict[str, Any] | None:
    """The record of a run, None where there is none that fits its schema."""
    try:
        found: dict[str, Any] = json.loads((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if next(violations(found, schema()), None) is None else None


def plain(value: Any) -> Any:
    """A value as JSON can hold it everywhere: lists in place of tuples, null in place of what is not finite."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def steps_of(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluation.json says about the steps."""
    return {
        "taken": evaluation["steps_taken"],
        "not_taken": evaluation["steps_skipped"],
        "in_model": evaluation["steps_in_model"],
        "ended_because": evaluation["ended"],
    }


def logged_steps(run: Path) -> dict[str, int]:
    """How many steps steps.jsonl has, and how many of them were taken."""
    lines = _log(run)
    return {"logged": len(lines), "logged_taken": sum(line["taken"] == 1 for line in lines)}


def first_hardness(run: Path) -> dict[str, Any] | None:
    """κ, cosθ and the thresholds of the first step in steps.jsonl; None without any, or with one gradient alone."""
    first = next((line for line in _log(run) if "kappa" in line), None)
    if first is None:
        return None
    return {"measured_at": f"step {first['step']}"} | {name: first.get(name) for name in _HARDNESS}


def _described(asked: Asked, side: str) -> dict[str, Any] | None:
    """A set by its digest, and how many of its texts were longer than what the model was given of them."""
    found, data = asked.inputs[f"{side} set"], asked.problem.sets().get(side)
    return found and {**found, "cut": data.truncated if isinstance(data, TextData) else None}


def _description(asked: Asked) -> str:
    """How the forget set was chosen, without the name of a class: it may be a person's."""
    if asked.problem.target_class is None:
        return asked.problem.forget_name
    return f"a class, rho {asked.settings['rho']:g}"


def versions(*packages: str) -> dict[str, str]:
    """The versions of HAMU, of Python, of some packages and of those that add something to HAMU, by name."""
    own = {"hamu": hamu.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages} | providers()


def figures_of(found: Hardness) -> dict[str, Any]:
    """The figures of an assessment that a record holds."""
    return {"measured_at": "assessment"} | {name: getattr(found, name) for name in _HARDNESS}


def _log(run: Path) -> list[dict[str, Any]]:
    path = run / STEPS
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if path.is_file()
        else []
    )
