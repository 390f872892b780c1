"""The pages: the report of one run or several, and the page of answers. Each is one HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

import hamu
from hamu.evaluation.attack_results import MODELS, RELEARNING, AttackResult, sentence
from hamu.evaluation.membership import auc_of
from hamu.report.charts import Chart, Section, Table, axis, number, plane, series
from hamu.report.course import layers_section, losses_of_runs, steps_section, trajectories
from hamu.report.images import class_accuracy, images_section
from hamu.report.pictures import (
    ATTACK_AXES,
    ATTACK_FIGURES,
    COLOR_OF_MODEL,
    Look,
    figure_of,
    heads_of,
    looks_of,
)
from hamu.report.records import (
    ROLES,
    AnsweredRecord,
    ImageObservations,
    Observations,
    forgotten_section,
    membership_section,
    texts_section,
)
from hamu.report.run import Run, told_apart
from hamu.report.verdict import verdict
from hamu.unlearning.goal_report import forgotten_words
from hamu.unlearning.record.inputs import differing, without_order

MARK = '<meta name="generator" content="hamu report">'  # identifies a file as a report
_SETS = ("forget", "retain", "test")
_FIGURES = {"loss": ".4g", "accuracy": ".1%", "probability": ".3f"}
_TITLES = {"forget": "To be forgotten", "retain": "To be kept", "test": "Never trained on"}


@dataclass(frozen=True)
class Reported:
    """A run, the predictions of its models, and the reason where there are none."""

    run: Run
    observed: Observations | None = None
    unobserved: str = ""


def report_page(found: Sequence[Reported], *, contents: bool = False) -> str:
    """HTML of the report of one run or several.

    Args:
        found: the runs, at least one.
        contents: whether it shows images, answers, prompts and names of classes.
    """
    runs = told_apart([one.run for one in found])
    looks = looks_of([run.method for run in runs])
    parts = [
        (run, verdict(run), sections_of(replace(one, run=run), look, contents))
        for one, run, look in zip(found, runs, looks, strict=True)
        if not run.is_trajectory_alone
    ]
    style, draw = (
        resources.files("hamu.report").joinpath(name).read_text("utf-8")
        for name in ("report.css", "draw.js")
    )
    script = f"{get_plotlyjs()}\n{draw}"
    return _environment().get_template("report.html.j2").render(
        mark=MARK, version=hamu.__version__, parts=parts, names=[run.name for run in runs], titles=_TITLES,
        overview=overview(runs, looks) if len(runs) > 1 else None, contents=contents, style=style, script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def answers_page(sets: Mapping[str, Sequence[AnsweredRecord]]) -> str:
    """HTML of prompts with answers before and after, by set ("forget", "retain", "test")."""
    sides = [(title, sets[name]) for name, title in _TITLES.items() if name in sets]
    return _environment().get_template("answers.html.j2").render(sides=sides)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("hamu.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def sections_of(one: Reported, look: Look, contents: bool) -> list[Section]:
    """Sections of a run that show something or name what is missing."""
    run, observed = one.run, one.observed
    path = trajectories([run], [look])
    classes = None if run.evaluation is None else class_accuracy(run.evaluation, contents)
    gained = Section(
        "What was gained",
        charts=[chart for chart in (path, classes) if chart is not None],
        tables=before_and_after(run),
        missing=[] if path else ["the trajectory: it takes two evaluations"],
    )
    if observed is None:
        missing = "confusion, embeddings, images or answers, and the scores of membership inference"
        measured = [Section("What the models say", missing=[f"{missing}: {one.unobserved}"])]
    else:
        measured = [
            images_section(observed, contents)
            if isinstance(observed, ImageObservations)
            else texts_section(observed, contents),
            membership_section(observed, run.retain_model_auc),
        ]
    sections = [
        forgotten_section(run, observed),
        gained,
        *([attack_section(run.attack)] if run.is_finished else []),
        steps_section(run),
        layers_section(run),
        *measured,
        *record_sections(run.record),
        Section("Notes", missing=run.notes),
    ]
    return [s for s in sections if s.charts or s.tables or s.pictures or s.answers or s.missing]


def before_and_after(run: Run) -> list[Table]:
    """Loss, accuracy and probability of each set, with the record's intervals."""
    if run.evaluation is None:
        return []
    figures = [key for key in _FIGURES if key in run.after["forget"]]
    recorded = (run.record or {}).get("figures", {})

    def cell(role: str, name: str, key: str) -> str:
        form = _FIGURES[key]
        text = number((run.evaluation or {})[role].get(name, {}).get(key), form)
        ends = recorded.get(role, {}).get("sets", {}).get(name, {}).get(f"{key}_interval")
        return text if not ends else f"{text} [{number(ends[0], form)}, {number(ends[1], form)}]"

    rows = []
    for name in (one for one in _SETS if one in run.after):
        count = run.after[name].get("samples", run.after[name].get("records"))
        cells = [cell(role, name, key) for key in figures for role in ROLES]
        rows.append([name, number(count, ",.0f"), *cells])
    head = ["set", "records", *(f"{key} {role}" for key in figures for role in ROLES)]
    note = "In brackets: 95% bootstrap intervals over records." if recorded else ""
    return [Table(head, rows, note)]


def overview(runs: Sequence[Run], looks: Sequence[Look]) -> Section:
    """Figures, trajectories and losses of at least two runs."""
    sides = ("forget", "retain")
    charts = [trajectories(runs, looks, wide=True)]
    charts += [losses_of_runs(runs, looks, side) for side in sides]
    missing, others = [], []
    for side in sides:
        own = [r.name for r in runs if f"{side}_loss" in r.steps and not r.logs_loss(side)]
        if own:
            missing.append(
                f"the {side} loss of the steps' batches of {', '.join(own)}: what is logged there "
                "is the objective of "
                f"the method, which is not the loss, or not known to be"
            )
    for run in runs:
        first = runs[0]
        if first.inputs and run.inputs:
            name = differing(without_order(first.inputs), without_order(run.inputs))
            if name is not None:
                others.append(f"{run.name} had another {name} than {first.name}")
    alone = [run.name for run in runs if run.is_trajectory_alone]
    if alone:
        missing.append(f"more of {', '.join(alone)}: a demo keeps trajectories alone")
    intro = f"These runs do not all compare: {'; '.join(others)}." if others else ""
    drawn = [chart for chart in charts if chart is not None]
    return Section("All runs", intro, drawn, [several(runs)], missing=missing)


def several(runs: Sequence[Run]) -> Table:
    """Table with a row for each run and the columns that have figures."""
    rows = []
    for run in runs:
        promise = (run.evaluation or {}).get("promise") or {}
        retain, forget = run.gains or (None, None)
        steps = (run.evaluation or {}).get("steps_taken", run.last_step)
        rows.append(
            {
                "run": run.name,
                "method": run.method,
                "ΔL_f": number(forget, "+.4g"),
                "-ΔL_r": number(retain, "+.4g"),
                "forgotten": run.forgotten or "-",
                **{
                    f"{name} accuracy": number(run.after.get(name, {}).get("accuracy"), ".1%")
                    for name in _SETS
                },
                "AUC": number(auc_of(run.after), ".3f"),
                "AUC, retain model": number(run.retain_model_auc, ".3f"),
                "promise kept": number(promise.get("kept"), ".0%"),
                "steps": "-" if run.is_trajectory_alone else f"{steps:,}",
            }
        )
    always = ("run", "method", "ΔL_f", "-ΔL_r")
    used = [name for name in rows[0] if name in always or any(row[name] != "-" for row in rows)]
    caption = "ΔL_f: rise of the forget loss; -ΔL_r: fall of the retain loss."
    if "AUC" in used:
        caption += " AUC of membership inference: 0.5 is ideal."
    for run in (one for one in runs if one.earlier_state):
        caption += f" The model saved by {run.name} is {run.earlier_state}."
    return Table(used, [[row[name] for name in used] for row in rows], caption, texts=2)


def attack_section(content: Mapping[str, Any] | None) -> Section:
    """Section "Does it last?" from the content of attack.json, None without one."""
    title = "Does it last?"
    if content is None:
        where = "`hamu attack` makes it, in the run's folder or in attack/ there"
        return Section(title, missing=[f"attack.json: {where}"])
    result = AttackResult.from_json(content)
    charts = [_attack_chart(attack, result) for attack in result.outcomes if attack in RELEARNING]
    tables = [_attack_table(attack, result) for attack in result.outcomes]
    intro = (
        f"{sentence(result)} The same attack on the other models is the yardstick; of each only "
        "copies are "
        f"changed. Up to {result.records['measured']:,} of {result.records['forget']:,} forgotten "
        "records are measured."
    )
    skipped = [f"{name}: {reason}" for name, reason in result.skipped.items()]
    return Section(title, intro, charts, tables, missing=skipped)


def _attack_chart(attack: str, result: AttackResult) -> Chart:
    name, form = figure_of(attack, result)
    lines, says = [], []
    for role in (one for one in MODELS if one in result.outcomes[attack]):
        outcome, color = result.outcomes[attack][role], COLOR_OF_MODEL[role]
        means = np.array([outcome.mean(name, at) for at in outcome.at])
        lines.append(series(role, outcome.at, means, color, mode="lines+markers"))
        says.append(f"{role}: {means[0]:{form}} to {means[-1]:{form}}")
    shares: dict[str, Any] = {"tickformat": ".0%", "range": [0, 1]} if name == "recognised" else {}
    figure = plane(lines, axis("steps of fine-tuning"), axis(ATTACK_AXES[name], **shares))
    caption = f"{ATTACK_AXES[name].capitalize()}, means over seeds. {'; '.join(says)}."
    return Chart(f"After {attack}", caption, figure)


def _attack_table(attack: str, result: AttackResult) -> Table:
    name, form = figure_of(attack, result)
    by_model = result.outcomes[attack]
    rows = [
        [role, *(format(by_model[role].mean(name, at), form) for at in by_model[role].at)]
        for role in MODELS
        if role in by_model
    ]
    heads = heads_of(attack, next(iter(by_model.values())))
    return Table([attack, *heads], rows, f"{attack}: {ATTACK_FIGURES[name]}.")


def record_sections(record: Mapping[str, Any] | None) -> list[Section]:
    """Tables of record.json; settings and digests unfold on demand."""
    if record is None:
        missing = "record.json, which a run leaves when it has come to its end"
        return [Section("The record", missing=[missing])]
    forgotten, steps, environment = (record[k] for k in ("forget_set", "steps", "environment"))
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    facts = [
        ["run ended on", f"{record['date']}"],
        ["method", f"{record['method']}, seed {record['seed']}"],
        ["forget set", f"{forgotten['description']} (setting {forgotten['chosen_by']})"],
        ["steps", f"{steps['taken']:,} taken, {steps['not_taken']:,} not taken"],
        ["ended because", steps["ended_because"]],
        ["computed on", f"{environment['device']}, {environment['processes']} process(es)"],
        ["versions", versions],
    ]
    if record["goal"] is not None:
        facts.append(["goal", forgotten_words(record["goal"])])
    if record["hardness"] is not None:
        names = {
            "kappa": "κ",
            "cos": "cosθ",
            "direct_threshold": "direct up to",
            "stop_threshold": "costs from",
        }
        text = ", ".join(f"{name} {number(record['hardness'][key])}" for key, name in names.items())
        facts.append(["hardness", f"{text} ({record['hardness']['measured_at']})"])
    read = {name: found for name in _SETS if (found := record[f"{name}_set"])}
    sets = [[name, found["source"], f"{found['records']:,}"] for name, found in read.items()]
    digests = [[f"{name} set", found["sha256"]] for name, found in read.items()]
    digests += [
        [f"{role.replace('_', ' ')} model, {part}", model[part]]
        for role, model in record["models"].items()
        for part in ("weights", "adapter")
        if model and model[part]
    ]
    digests += [[name, digest] for name, digest in record.get("files", {}).items()]
    settings = [
        [k, json.dumps(value, ensure_ascii=False)] for k, value in record["settings"].items()
    ]
    proves = Table(["What this proves and what not"], [[line] for line in record["statement"]])
    return [
        Section(
            "The record",
            "What record.json says, for those who ask later; hamu verify checks it against files, "
            "data and models.",
            tables=[Table(["", ""], facts, texts=2), Table(["set", "source", "records"], sets, texts=2), proves],
        ),
        Section("Digests and settings", folded=True, tables=[
            Table(["SHA-256 of", "digest"], digests, texts=2), Table(["setting", "value"], settings, texts=2),
        ]),
    ]  # fmt: skip
