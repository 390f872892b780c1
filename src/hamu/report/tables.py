"""Tables of a report: before and after, several runs, the record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hamu.evaluation.membership import auc_of
from hamu.report.elements import Section, Table, number
from hamu.report.forgotten import counted_forgotten, retain_model_auc
from hamu.report.run import Run
from hamu.unlearning.goal_report import forgotten_words

_SETS = ("forget", "retain", "test")
_FIGURES = {"loss": ".4g", "accuracy": ".1%", "probability": ".3f"}


def before_and_after(run: Run) -> Table | None:
    """Loss, accuracy and probability of each set, with the record's intervals where there is one."""
    if run.evaluation is None:
        return None
    before, after = run.evaluation["before"], run.evaluation["after"]
    figures = [key for key in _FIGURES if key in after["forget"]]
    recorded = (run.record or {}).get("figures", {})
    rows = []
    for name in _SETS:
        if name not in after:
            continue
        count = after[name].get("samples", after[name].get("records"))
        cells = [
            _with_interval(
                one.get(name, {}).get(key), _FIGURES[key], recorded.get(role, {}), name, key
            )
            for key in figures
            for role, one in (("before", before), ("after", after))
        ]
        rows.append([name, "-" if count is None else f"{count:,}", *cells])
    head = ["set", "records", *(f"{key} {role}" for key in figures for role in ("before", "after"))]
    note = "In brackets: 95% bootstrap intervals over records." if recorded else ""
    return Table(head, rows, note)


def _with_interval(
    value: float | None, form: str, recorded: Mapping[str, Any], name: str, key: str
) -> str:
    ends = recorded.get("sets", {}).get(name, {}).get(f"{key}_interval")
    text = number(value, form)
    return text if not ends else f"{text} [{number(ends[0], form)}, {number(ends[1], form)}]"


def several(runs: Sequence[Run]) -> Table:
    """A table with a row for each run."""
    rows = []
    for run in runs:
        after = (run.evaluation or {}).get("after", {})
        promise = (run.evaluation or {}).get("promise") or {}
        retain, forget = run.gains or (None, None)
        rows.append([
            run.name, run.method, number(forget, "+.4g"), number(retain, "+.4g"), counted_forgotten(run) or "-",
            *(number(after.get(name, {}).get("accuracy"), ".1%") for name in _SETS),
            number(auc_of(after), ".3f"), number(retain_model_auc(run), ".3f"), number(promise.get("kept"), ".0%"),
            "-" if run.is_trajectory_alone else f"{(run.evaluation or {}).get('steps_taken', run.last_step):,}",
        ])  # fmt: skip
    head = [
        "run",
        "method",
        "ΔL_f",
        "-ΔL_r",
        "forgotten",
        *(f"{name} accuracy" for name in _SETS),
        "AUC",
        "AUC, retain model",
        "promise kept",
        "steps",
    ]
    used = [n for n in range(len(head)) if n < 4 or any(row[n] != "-" for row in rows)]
    caption = "ΔL_f: rise of the forget loss; -ΔL_r: fall of the retain loss."
    if head.index("AUC") in used:
        caption += " AUC of membership inference: 0.5 is ideal."
    for run in runs:
        if run.earlier_state:
            caption += f" The model saved by {run.name} is {run.earlier_state}."
    return Table(
        [head[n] for n in used], [[row[n] for n in used] for row in rows], caption, texts=2
    )


def record_sections(record: Mapping[str, Any] | None) -> list[Section]:
    """Show record.json in tables; settings and digests are unfolded on demand."""
    if record is None:
        return [
            Section(
                "The record",
                missing=["record.json, which a run leaves when it has come to its end"],
            )
        ]
    models = {role: model for role, model in record["models"].items() if model}
    versions = record["environment"]["versions"]
    facts = [
        ["run ended on", f"{record['date']}"],
        ["method", f"{record['method']}, seed {record['seed']}"],
        [
            "forget set",
            f"{record['forget_set']['description']} (setting {record['forget_set']['chosen_by']})",
        ],
        [
            "steps",
            f"{record['steps']['taken']:,} taken, {record['steps']['not_taken']:,} not taken",
        ],
        ["ended because", record["steps"]["ended_because"]],
        [
            "computed on",
            f"{record['environment']['device']}, {record['environment']['processes']} process(es)",
        ],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        *_goal(record["goal"]),
        *_hardness(record["hardness"]),
    ]
    sets = [
        [name.removesuffix("_set"), record[name]["source"], f"{record[name]['records']:,}"]
        for name in ("forget_set", "retain_set", "test_set")
        if record[name]
    ]
    digests = [[name.replace("_", " "), record[name]["sha256"]] for name in ("forget_set", "retain_set", "test_set")
               if record[name]]  # fmt: skip
    digests += [
        [f"{role.replace('_', ' ')} model, {part}", model[part]]
        for role, model in models.items()
        for part in ("weights", "adapter")
        if model[part]
    ]
    digests += [[name, digest] for name, digest in record.get("files", {}).items()]
    settings = [
        [name, json.dumps(value, ensure_ascii=False)] for name, value in record["settings"].items()
    ]
    proves = [[sentence] for sentence in record["statement"]]
    return [
        Section(
            "The record",
            "What record.json says, for those who ask later; hamu verify checks it against files, data and models.",
            tables=[Table(["", ""], facts, texts=2), Table(["set", "source", "records"], sets, texts=2),
                    Table(["What this proves and what not"], proves)],
        ),
        Section("Digests and settings", tables=[
            Table(["SHA-256 of", "digest"], digests, texts=2), Table(["setting", "value"], settings, texts=2)
        ], folded=True),
    ]  # fmt: skip


def _goal(found: Mapping[str, Any] | None) -> list[list[str]]:
    return [] if found is None else [["goal", forgotten_words(found)]]


def _hardness(found: Mapping[str, Any] | None) -> list[list[str]]:
    if found is None:
        return []
    names = {
        "kappa": "κ",
        "cos": "cosθ",
        "direct_threshold": "direct up to",
        "stop_threshold": "costs from",
    }
    text = ", ".join(f"{name} {number(found[key])}" for key, name in names.items())
    return [["hardness", f"{text} ({found['measured_at']})"]]
