"""The record of a run: what was asked, done and measured. Counts and digests, never what a record says."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hamu
from hamu.data import ImageData, TextData, TextRecords, UnlearningData
from hamu.distributed import processes
from hamu.models.loading import folder_of
from hamu.record.digests import file_digest, row_digests, set_digest, weights_digest
from hamu.record.figures import changes, figures
from hamu.record.markdown import markdown
from hamu.record.settings import short_name
from hamu.record.statement import statement
from hamu.run_folder import RunFolder

if TYPE_CHECKING:
    from hamu.assess.hardness import Hardness
    from hamu.training import UnlearnTrainer

VERSION = 1
_BESIDE = ("config.yaml", "steps.jsonl", "layers.jsonl", "evaluation.json")
_HARDNESS = ("kappa", "cos", "direct_threshold", "stop_threshold")


@dataclass(frozen=True)
class Asked:
    """What a run was asked to do.

    Attributes:
        problem: the three sets.
        chosen_by: the option that said what to forget.
        settings: see `hamu.record.settings.recorded`.
        before: the model to start from, see `model_entry`.
        retain_model: the model to compare with, None without.
        hardness: as it was assessed before the run, see `figures_of`; None where it was not.
    """

    problem: UnlearningData[Any]
    chosen_by: str
    settings: Mapping[str, Any]
    before: Mapping[str, Any]
    retain_model: Mapping[str, Any] | None = None
    hardness: Mapping[str, Any] | None = None


def model_entry(name: str, weights: Path, adapter: Path | None = None) -> dict[str, Any]:
    """A model by its digests.

    Args:
        name: what the user called it.
        weights: the folder of the whole model, or of an adapter's base model.
        adapter: the folder of the adapter.
    """
    return {
        "name": short_name(name),
        "weights": weights_digest(weights),
        "adapter": None if adapter is None else weights_digest(adapter),
    }


def saved_model_entry(source: str, base: str | None) -> dict[str, Any]:
    """A saved model by its digests; see `model_entry`.

    Args:
        source: a folder, or hub:OWNER/NAME in the hub's cache.
        base: the base model if it is an adapter, likewise; None for a whole model.
    """
    return model_entry(source, folder_of(base or source), None if base is None else folder_of(source))


def set_entry(data: ImageData | TextData | TextRecords) -> dict[str, Any]:
    """A set by its digest."""
    source = data.texts.source if isinstance(data, TextData) else data.source
    return {"source": short_name(source), "records": len(data), "sha256": set_digest(row_digests(data))}


def build(asked: Asked, trainer: UnlearnTrainer, evaluation: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The record of a run whose model, log and figures are in its folder.

    Args:
        asked: what was asked.
        trainer: after the run.
        evaluation: what is in evaluation.json.
        run: the folder.

    Returns:
        What record.json holds but for the digests of the files beside it.
    """
    problem, seed = asked.problem, trainer.args.seed
    predictions = (trainer.start_predictions, trainer.predictions)
    was, now = (
        figures(evaluation[role], one, seed) for role, one in zip(("before", "after"), predictions, strict=True)
    )
    is_adapter = (run / "model" / "adapter_config.json").is_file()
    after = {"name": "model", "weights": asked.before["weights"], "adapter": weights_digest(run / "model")}
    record = {
        "format": "hamu-unlearning-record",
        "version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "forget_set": {
            **set_entry(problem.forget),
            "chosen_by": asked.chosen_by,
            "description": _description(asked),
        },
        "retain_set": set_entry(problem.retain),
        "test_set": None if problem.test is None else set_entry(problem.test),
        "models": {
            "before": asked.before,
            "after": after if is_adapter else model_entry("model", run / "model"),
            "merged": model_entry("merged", run / "merged") if (run / "merged").is_dir() else None,
            "retain_model": asked.retain_model,
        },
        "method": asked.settings["method"],
        "seed": seed,
        "settings": asked.settings,
        "environment": {
            "device": trainer.args.device.type,
            "processes": processes(),
            "versions": _versions(is_adapter, isinstance(problem.forget, ImageData)),
        },
        "hardness": asked.hardness or first_hardness(run),
        "steps": {"ended_at": trainer.state.global_step, **steps_of(evaluation), **logged_steps(run)},
        "promise": evaluation["promise"],
        "goal": None if trainer.steering is None else trainer.steering.outcome,
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
    files = {name: file_digest(folder.path / name) for name in _BESIDE if (folder.path / name).is_file()}
    readable = folder.write_text("record.md", text)
    files[readable.name] = file_digest(readable)
    return readable, file_digest(folder.write_json("record.json", {**record, "files": files}))


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


def _description(asked: Asked) -> str:
    """How the forget set was chosen, without the name of a class: it may be a person's."""
    if asked.problem.target_class is None:
        return asked.problem.forget_name
    return f"a class, rho {asked.settings['rho']:g}"


def figures_of(found: Hardness) -> dict[str, Any]:
    """The figures of an assessment that a record holds."""
    return {"measured_at": "assessment"} | {name: getattr(found, name) for name in _HARDNESS}


def _log(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def _versions(with_adapter: bool, with_images: bool) -> dict[str, str]:
    packages = ["torch", "transformers", *["peft"] * with_adapter, *["pillow"] * with_images]
    return {
        "hamu": hamu.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
