"""The record of a run: what was asked, done and measured. Counts and digests, never contents."""

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

import hamu
from hamu import files
from hamu.core.distributed import world_size
from hamu.core.plugins import providers
from hamu.data import TextData, UnlearningData
from hamu.errors import first_line, percent
from hamu.evaluation.membership import aucs_of, most_telling
from hamu.evaluation.reports import intervals
from hamu.files import HUB, is_of_hub
from hamu.models.storage import is_adapter
from hamu.unlearning.goals import BASES, MEANINGS, forgotten_words, share_in_words
from hamu.unlearning.record.inputs import Inputs, saved_model_entry, short_name
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnTrainer

Found = Mapping[str, Any]  # of JSON
FORMAT, VERSION = "hamu-unlearning-record", 2
SETS, FIGURES = ("retain", "forget", "test"), ("loss", "accuracy", "probability")
_OF_CARD = ("train", *SETS)
BESIDE = (
    *(files.CONFIG, files.INPUTS, files.STEPS, files.LAYERS, files.EVALUATION),
    files.READABLE_RECORD,
)
_PACKAGES = ("torch", "transformers", "peft", "pillow")
_HARDNESS = ("kappa", "cos", "direct_threshold", "stop_threshold")

_FOUR_BIT = "The figures are of the base model in 4 bits (NF4); in other precisions they differ."
_TYPES = {  # of JSON, by Python's
    dict: {"object"},
    list: {"array"},
    str: {"string"},
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    type(None): {"null"},
}


def write_record(
    folder: RunFolder,
    trainer: UnlearnTrainer,
    evaluation: Found,
    *,
    problem: UnlearningData[Any],
    chosen_by: str,
    settings: Found,
    inputs: Inputs,
) -> None:
    """Write record.md and record.json of a run whose model, log and figures are in its folder.

    `settings` are `inputs.recorded`, `inputs` the sets and the models that the run has read.
    """
    run, seed = folder.path, trainer.args.seed
    predictions = {"before": trainer.start_predictions, "after": trainer.predictions}
    measured = measured_in(evaluation, predictions, seed)
    of_roles = measured["figures"]
    change = changes(of_roles["before"], of_roles["after"], (*predictions.values(),), seed)
    environment = {"device": trainer.args.device.type, "processes": world_size()}
    environment["versions"] = versions()
    found = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        **_sets(problem, inputs, chosen_by, settings),
        "models": _models(run, inputs),
        "method": settings["method"],
        "seed": seed,
        "settings": settings,
        "environment": environment,
        "hardness": first_hardness(run),
        **measured,
        "steps": {"ended_at": trainer.state.global_step, **measured["steps"], **logged_steps(run)},
        "figures": {**of_roles, "change": change},
    }
    record = files.plain(found | {"statement": statement(found, trainer.sides)})
    folder.write_text(files.READABLE_RECORD, markdown(record))
    beside = [run / name for name in BESIDE if folder.has(name)]
    record["files"] = {path.name: files.file_digest(path) for path in beside}
    folder.write_json(files.RECORD, record)


def _sets(
    problem: UnlearningData[Any], inputs: Inputs, chosen_by: str, settings: Found
) -> dict[str, Any]:
    """The sets by their digests, with the count of texts of which the model was given a part."""
    found: dict[str, Any] = {}
    for side in SETS:
        data, entry = problem.sets().get(side), inputs[f"{side} set"]
        found[f"{side}_set"] = entry and {**entry, "cut": cut_records(data)}
    words = description(problem, settings["rho"])
    found["forget_set"] |= {"chosen_by": chosen_by, "description": words}
    return found


def description(problem: UnlearningData[Any], rho: float) -> str:
    """Words on a forget set that name no person."""
    found = problem.forget_name
    if problem.target_class is not None:  # its name may be a person's
        found = f"a class, rho {rho:g}"
    if problem.kept_copies:
        found += f"; equal records that stay in the retain set: {problem.kept_copies}"
    return found


def cut_records(data: Any) -> int | None:
    """Number of texts of which the model was given a part; None without texts."""
    return data.truncated if isinstance(data, TextData) else None


def cut_words(cut: int, records: int) -> str:
    """Statement that the ends of so many forget records were left out."""
    return (
        f"{cut} of the {records} records to be forgotten are longer than what the model read; "
        f"their ends were neither unlearned nor measured"
    )


def _models(run: Path, inputs: Inputs) -> dict[str, Any]:
    before, after = inputs["original model"], saved_model_entry(str(run / files.MODEL))
    if is_adapter(run / files.MODEL):
        after |= {"weights": before["weights"], "adapter": after["weights"]}
    merged = run / files.MERGED
    return {
        "before": before,
        "after": after,
        "merged": saved_model_entry(str(merged)) if merged.is_dir() else None,
        "retain_model": inputs["retain model"],
    }


def measured_in(
    evaluation: Found, predictions: Mapping[str, Found] | None = None, seed: int = 42
) -> dict[str, Any]:
    """The parts of evaluation.json that a record holds; see `figures`."""
    return {
        "steps": {
            "taken": evaluation["steps_taken"],
            "not_taken": evaluation["steps_skipped"],
            "in_model": evaluation["steps_in_model"],
            "ended_because": evaluation["ended"],
        },
        "promise": evaluation["promise"],
        "goal": goal_figures(evaluation["goal"]),
        "figures": {
            role: figures(evaluation[role], predictions and predictions[role], seed)
            for role in ("before", "after")
        },
    }


def figures(report: Found, predictions: Found | None = None, seed: int = 42) -> dict[str, Any]:
    """Figures of a report on a model, with bootstrap intervals if its predictions are given."""
    sets = {}
    for name in (name for name in SETS if name in report):
        found = report[name]
        sets[name] = {"records": found["samples"] if "samples" in found else found["records"]}
        sets[name] |= {key: found[key] for key in FIGURES if key in found}
        if predictions is not None:
            sets[name] |= _named(intervals(predictions[name], seed=seed), found)
    theirs = report.get("retain_model", {})
    # of images; it has a set more than the record
    against = report.get("against_retain_model") or {
        name: {f"{key}_difference": ours[key] - theirs[name][key] for key in FIGURES if key in ours}
        for name, ours in sets.items()
        if name in theirs and report[name].get("tokens") == theirs[name].get("tokens")
    }
    return {
        "sets": sets,
        "membership_inference": report["membership_inference"],
        "retain_model_membership_inference": theirs.get("membership_inference"),
        "against_retain_model": {name: against[name] for name in sets if name in against} or None,
    }


def changes(
    before: Found, after: Found, predictions: tuple[Found, ...], seed: int
) -> dict[str, Any]:
    """By set the change of each of two models' `figures`, with intervals over the same records."""
    found = {}
    for name, now in after["sets"].items():
        was = before["sets"][name]
        old, new = (one[name] for one in predictions)
        change = {key: now[key] - was[key] for key in FIGURES if key in now}
        found[name] = change | _named(intervals(new, old, seed=seed), now)
    return found


def _named(ends: Found, of: Found) -> dict[str, Any]:
    return {f"{key}_interval": ends.get(key) for key in FIGURES if key in of}


def goal_figures(goal: Found | None) -> dict[str, Any] | None:
    """The goal of a run and the counts of its records, without positions in the forget set."""
    if goal is None:
        return None
    found = {**goal}
    for role in ("before", "after"):
        worst = [{key: one[key] for key in ("loss", "target")} for one in goal[role]["worst"]]
        found[role] = {**goal[role], "worst": worst}
    return found


def versions() -> dict[str, str]:
    """Versions of HAMU, Python, the main packages and those that add something to HAMU, by name."""
    own = {"hamu": hamu.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in _PACKAGES} | providers()


def write_model_card(
    folder: Path,
    *,
    base: str | None,
    method: str | None = None,
    forget_records: int = 0,
    cut: int | None = None,
    reports: Mapping[str, Found] | None = None,
    goal: Found | None = None,
    four_bit: bool = False,
) -> None:
    """Write README.md into the folder of a saved model.

    `base` is the model that it was made from, None for one from nothing; `cut` counts the forget
    records that the model read a part of; `reports` are the figures of each set by column, such as
    "before" and "after"; `goal` is that of evaluation.json; `four_bit` tells that the base was in
    4 bits, whose values a merged model has.
    """
    reports = reports or {}
    columns = [
        (figure, role)
        for figure in FIGURES
        for role, report in reports.items()
        if any(figure in report.get(name, {}) for name in _OF_CARD)
    ]
    inferred = {role: report.get("membership_inference") or {} for role, report in reports.items()}
    roles = [role for role in ("after", *inferred) if inferred.get(role)]
    latest = reports[roles[0]] if roles else {}
    attack, _, right = most_telling(latest) or ("", None, None)
    aucs = {role: one[attack] for role, one in inferred.items() if one.get(attack) is not None}
    aucs |= {} if right is None else {"of the retain model": right}
    card = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if is_adapter(folder) else "transformers",
            base_model=base.removeprefix(HUB) if base and is_of_hub(base) else None,
            tags=["hamu", *(["machine-unlearning", method] if method else [])],
        ),
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        made="from nothing" if base is None else f"from `{short_name(base)}`",
        method=method,
        records=forget_records,
        cut=cut,
        cut_words=cut_words,
        columns=columns,
        reports=reports,
        aucs=aucs,
        attack="losses" if attack in ("auc", "loss") else attack,
        attacks=len(aucs_of(latest)),
        sets=[name for name in _OF_CARD if any(name in report for report in reports.values())],
        forgotten=goal and forgotten_words(goal),
        four_bit=_FOUR_BIT if four_bit and is_adapter(folder) else None,
        version=hamu.__version__,
    )
    (folder / "README.md").write_text(str(card), encoding="utf-8")


def read_record(run: Path) -> tuple[Any, str]:
    """The record of a run, and the reason why it is none that fits its schema, "" if it does."""
    try:
        found = files.parse_json(run / files.RECORD)
    except (OSError, ValueError) as error:
        return None, first_line(error)
    return found, next(violations(found, schema()), "")


def markdown(record: Found) -> str:
    """The record for people to read, record.md."""
    sets = list(record["figures"]["after"]["sets"])
    return _templates().get_template("record.md.j2").render(record, sets=sets)


def statement(record: Found, sides: Sequence[str]) -> list[str]:
    """Sentences on what a record proves and what not, from the rest and the method's sides."""
    return _templates().get_template("statement.j2").render(record, sides=sides).splitlines()


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("hamu.unlearning.record", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"forgotten_words": forgotten_words, "meanings": MEANINGS}
    environment.globals |= {"bases": BASES, "share_in_words": share_in_words, "percent": percent}
    environment.globals |= {"cut_words": cut_words, "four_bit": _FOUR_BIT}
    return environment


def logged_steps(run: Path) -> dict[str, int]:
    """Number of steps in steps.jsonl, and of those that were taken."""
    lines = _log(run)
    return {"logged": len(lines), "logged_taken": sum(line["taken"] == 1 for line in lines)}


def last_logged(run: Path) -> int:
    """The last step in steps.jsonl, 0 without any."""
    return max((line["step"] for line in _log(run)), default=0)


def logged_promise(run: Path) -> dict[str, Any]:
    """Counts of the checked steps in steps.jsonl, and the share that kept its demand."""
    checked = [line for line in _log(run) if "trust" in line]
    stayed = [line for line in checked if line["taken"] == 1]
    kept = [one for line in stayed if (one := line.get("promise_kept")) is not None]
    found: dict[str, Any] = {"checked": len(checked), "undone": len(checked) - len(stayed)}
    return found | {"judged": len(kept), "kept": fmean(kept) if kept else None}


def first_hardness(run: Path) -> dict[str, Any] | None:
    """κ, cosθ and the thresholds of the first step in steps.jsonl; None with one gradient alone."""
    first = next((line for line in _log(run) if "kappa" in line), None)
    if first is None:
        return None
    return {"measured_at": f"step {first['step']}"} | {key: first.get(key) for key in _HARDNESS}


def _log(run: Path) -> list[dict[str, Any]]:
    path = run / files.STEPS
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def schema() -> Any:
    """The schema of record.json."""
    return files.parse_json(Path(__file__).with_name("schema.json"))


def violations(
    value: Any, part: Found, at: str = "record", shared: Found | None = None
) -> Iterator[str]:
    """Parts of a JSON value that do not fit a schema, each with its place, which `at` begins."""
    shared = part.get("$defs", {}) if shared is None else shared
    while "$ref" in part:  # what stands beside a reference takes the place of what it has
        own = {key: one for key, one in part.items() if key != "$ref"}
        part = {**shared[part["$ref"].removeprefix("#/$defs/")], **own}
    kinds = part.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not _TYPES[type(value)] & {*kinds}:
        yield f"{at} is not of type {' or '.join(kinds)}"
    elif "enum" in part and value not in part["enum"]:
        yield f"{at} is not one of {part['enum']}"
    elif isinstance(value, str) and not re.search(part.get("pattern", ""), value):
        yield f"{at} does not match {part['pattern']}"
    elif isinstance(value, int | float) and value < part.get("minimum", value):
        yield f"{at} is below {part['minimum']}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from violations(one, part.get("items", {}), f"{at}[{number}]", shared)
    elif isinstance(value, dict):
        yield from (f"{at} has no {key}" for key in part.get("required", ()) if key not in value)
        for key, one in value.items():
            others = part.get("additionalProperties", True)
            inner = part.get("properties", {}).get(key, others)
            if inner is False:
                yield f"{at} has the unknown key {key}"
            elif inner is not True:
                yield from violations(one, inner, f"{at}.{key}", shared)
