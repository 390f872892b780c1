"""The pages, each one HTML file: the report of one run or several, and the page of answers.

Python gathers verdict, charts and tables; the wording is in the templates.
"""

import base64
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image
from plotly.offline import get_plotlyjs

import hamu
from hamu import files
from hamu.errors import counted
from hamu.evaluation.attacks import AttackResult
from hamu.evaluation.gains import gains_of
from hamu.evaluation.membership import attacker_words, auc_of
from hamu.report import charts, tables
from hamu.report.pictures import looks_of
from hamu.report.run import (
    ROLES,
    SIDES,
    AnsweredRecord,
    ImageObservations,
    Observations,
    Run,
    most_and_least_changed,
    right_probability,
    told_apart,
)
from hamu.report.tables import Column, Table, number, text_table
from hamu.unlearning import goals
from hamu.unlearning.compare.runs import model_figures
from hamu.unlearning.record.inputs import as_recorded, differing
from hamu.unlearning.trainer.promise import kept_in_words

MARK = '<meta name="generator" content="hamu report">'  # identifies a file as a report
_TITLES = {"forget": "To be forgotten", "retain": "To be kept", "test": "Never trained on"}
_QUANTILES = ("min", "q25", "median", "q75", "max")
_LARGEST = 96  # pixels of a picture
_NO_CHANGE = 1e-3  # in nats, and as a share of records


class Verdict(NamedTuple):
    """Top of a report."""

    headline: str
    tone: Literal["good", "mixed", "bad", "open"]


def verdict(run: Run) -> Verdict:
    """Judge a run, finished or not.

    "It forgot" without more needs a goal that is reached and attacks that the model withstood.
    """
    if run.evaluation is None:
        if run.failed:
            return Verdict(f"It failed after step {run.last_step:,}", "bad")
        if run.steps.filter([f"{side}_loss" for side in SIDES]).tail(1).isna().any(axis=None):
            return Verdict(f"Not finished: a loss of step {run.last_step:,} is not finite", "bad")
        return Verdict(f"Not finished: step {run.last_step:,} so far", "open")
    goal = run.goal
    if not all(map(math.isfinite, gains_of(run.evaluation))):
        return Verdict("The model's losses are not finite", "bad")
    if run.evaluation["after"]["retain"]["loss"] > run.evaluation.get("guessing_loss", math.inf):
        return Verdict("The model is of no use: on what is to stay it is worse than chance", "bad")
    found = _forgotten(run)
    for further in (_kept, _lasting):
        found = found if found.tone == "bad" else further(run, found)
    headline, tone = found
    if tone == "bad":
        return found
    for telling in filter(None, (_too_high(goal), attacker_words(run.evaluation["after"]))):
        headline, tone = f"{headline}; {telling}", "mixed" if tone == "good" else tone
    if goal and goal["budget"] is not None and not goal["reached"]:
        return Verdict(f"{headline}; its goal is not reached", "mixed")
    return Verdict(headline, tone)


def _lasting(run: Run, found: Verdict) -> Verdict:
    """Add whether what has changed on the forget set lasts, if anything has."""
    goal, lasts, what = run.goal, run.attack and run.attack["lasts"], "it"
    if goal and goal["after"]["forgotten"] <= goal["before"]["forgotten"]:
        what = "the rise"
        if _change(run, "forget", "loss") <= 0:
            return found
    if lasts is False:
        back = "fine-tuning on the retain data brings some of it back"
        return Verdict(f"It does not last: {back}", "bad")
    if lasts is not None:
        return Verdict(f"{found.headline}; {what} lasts", found.tone)
    tested = "was not tested"
    if goal and goal.get("lasting"):
        tested = "was only rehearsed" if goal["reached"] else "was not shown in rehearsal"
    tested = "is open" if run.attack else tested
    by, said = goals.BASES[goal["kind"]] if goal else "losses", found.headline
    words = f"By its {by} {said[0].lower()}{said[1:]}; whether {what} lasts {tested}"
    return Verdict(words, "mixed")


def _too_high(goal: Mapping[str, Any] | None) -> str:
    """Count the records that stand out, if more than unseen ones do by chance."""
    high, records = (goal["after"][name] for name in ("too_high", "records")) if goal else (0, 0)
    return f"{high:,} stand out by high losses" if high > goals.LEVEL * records else ""


def _forgotten(run: Run) -> Verdict:
    """Judge by the records forgotten, without a goal by the rise of their loss."""
    if run.goal is None:
        if _change(run, "forget", "loss") <= 0:
            chance = "the loss on the forget set rose by no more than chance would"
            return Verdict(f"It did not forget: {chance}", "bad")
        return Verdict("The forget loss rose", "open")
    before, after = (run.goal[role]["forgotten"] for role in ROLES)
    whole, measured = run.goal.get("sampled_from"), run.goal["after"]["records"]
    count = f"{after:,} of {measured:,} records"
    count += f" in a sample of {whole:,}" if whole else ""
    if run.goal.get("doubts") and after > before:
        return Verdict("Whether it forgot can hardly be told", "open")
    if goals.has_share(run.goal):
        if after == before:
            return Verdict(f"Before the run, too, {count} counted as forgotten", "open")
        if after < before:
            return Verdict(f"Fewer count as forgotten: {count}, {before:,} before", "open")
        of = f" in a sample of {measured:,} of {whole:,} records" if whole else ""
        if after < (1 - goals.LEVEL) * measured:  # its goal asks for few
            of = f" {count}, as many as its goal asks"
        elif before and not whole:
            of = f" {count}"
        of += f", {before:,} before" if before else ""
        return Verdict(f"It forgot{of}", "good")
    if after > before:
        return Verdict(f"It forgot in part, {count}, {before:,} before", "mixed")
    rose = _change(run, "forget", "loss") > 0
    said = "The forget loss rose, but no more are forgotten" if rose else "It did not forget"
    return Verdict(f"{said}: {count}, {before:,} before", "mixed" if rose else "bad")


def _kept(run: Run, found: Verdict) -> Verdict:
    """Add the change on the retain set."""
    loss, accuracy = _change(run, "retain", "loss"), _change(run, "retain", "accuracy")
    kept, forgot = run.gains or (0.0, 0.0)
    if loss > 0 and -kept >= forgot and found.tone != "good":
        return Verdict("It lost more on what is to stay than it forgot", "bad")
    if loss > 0 or accuracy < 0:
        return Verdict(f"{found.headline}, at a price on what is to stay", "mixed")
    stays = "the model does better on what is to stay" if loss < 0 else "what is to stay has stayed"
    return Verdict(f"{found.headline}, and {stays}", found.tone)


def _change(run: Run, side: str, figure: str) -> int:
    """Sign of a change beyond chance, else 0: its recorded paired interval does not hold 0."""
    before, after = ((run.evaluation or {})[role][side][figure] for role in ROLES)
    change = after - before
    recorded = (run.record or {}).get("figures", {}).get("change", {}).get(side, {})
    low, high = recorded.get(f"{figure}_interval") or (change, change)
    return 0 if abs(change) <= _NO_CHANGE or low <= 0 <= high else int(math.copysign(1, change))


def report_page(runs: Sequence[Run], *, contents: bool = False) -> str:
    """HTML of the report of runs; with `contents` images, answers, prompts and names of classes."""
    runs = told_apart(runs)
    looks = looks_of([run.method for run in runs])
    parts = [
        {"run": run, "look": look, "verdict": verdict(run)}
        | {"pictures": _pictures(run.observed) if contents else {}}
        for run, look in zip(runs, looks, strict=True)
    ]
    draw = resources.files("hamu.report").joinpath("draw.js").read_text("utf-8")
    script = f"{get_plotlyjs()}\n{draw}"
    return _template("report.html.j2").render(
        mark=MARK,
        version=hamu.__version__,
        parts=parts,
        names=[run.name for run in runs],
        overview=_overview(runs, looks) if len(runs) > 1 else None,
        contents=contents,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def answers_page(sets: Mapping[str, Sequence[AnsweredRecord]]) -> str:
    """HTML of prompts with answers before and after, by set ("forget", "retain", "test")."""
    return _template("answers.html.j2").render(sets=sets)


def _template(name: str) -> Template:
    loader = PackageLoader("hamu.report", "")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    found.trim_blocks = found.lstrip_blocks = True
    found.filters |= {"number": number, "counted": counted, "json": json.dumps}
    found.globals |= {"TITLES": _TITLES, "draw": charts, "figures": tables, "goals": goals}
    found.globals |= {"auc_of": auc_of, "goal_tables": goal_tables}
    found.globals |= {"kept_in_words": kept_in_words, "attack_result": AttackResult.from_json}
    found.tests["images"] = lambda one: isinstance(one, ImageObservations)
    return found.get_template(name)


def goal_tables(goal: Mapping[str, Any], observed: Observations | None) -> list[Table]:
    """Counts and quantiles of the losses of single records, and the ten furthest away."""
    rows = [
        [f"forget, {role}", f"{goal[role]['forgotten']:,} of {goal[role]['records']:,}"]
        + [number(goal[role]["loss_quantiles"][name]) for name in _QUANTILES]
        for role in ROLES
    ]
    if observed and "test" in observed.predictions["before"]:
        unseen = goals.record_losses(observed.predictions["before"]["test"])
        levels = goals.quantiles_of(unseen, (0.0, 0.25, 0.5, 0.75, 1.0))
        rows.append(["test, before: never trained on", "-", *map(number, levels)])
    heads = ["records", "forgotten", "lowest loss", "25%", "median", "75%", "highest loss"]
    name = goals.goal_name(goal)
    caption = f"Forgotten by the goal {name}, and quantiles of the records' losses."
    worst = enumerate(goal["after"]["worst"], 1)
    ten = [[f"{n}", number(one["loss"]), number(one["target"])] for n, one in worst]
    furthest = ["furthest from being forgotten", "loss", "enough"]
    found = [text_table(furthest, ten, "At most ten records are listed.")] * bool(ten)
    return [text_table(heads, rows, caption), *found]


def _overview(runs: Sequence[Run], looks: Sequence[tuple[str, str]]) -> dict[str, Any]:
    others, known = [], [run for run in runs if run.inputs]
    for run in known[1:]:
        name = differing(as_recorded(known[0].inputs), as_recorded(run.inputs))
        others += [f"{run.name} had another {name} than {known[0].name}"] * (name is not None)
    found = charts.trajectories(runs, looks)
    return {"table": several(runs), "charts": found, "differing": others}


def several(runs: Sequence[Run]) -> Table:
    """Table with a row for each run and the columns that have figures."""
    rows, caption = [], "ΔL_f: rise of the forget loss; -ΔL_r: fall of the retain loss."
    for run in runs:
        evaluation, gains = run.evaluation or {}, run.gains
        steps = evaluation.get("steps_taken", run.last_step)
        kept = (evaluation.get("promise") or {}).get("kept")
        row = {"run": run.name, "method": run.method, "steps": steps, "promise_kept": kept}
        row |= {f"{side}_gain": gains and getattr(gains, side) for side in SIDES}
        rows.append(row | (model_figures(evaluation, "after") if evaluation else {}))
        of, repeated, step = run.name.rpartition(files.STATE)
        if repeated and any(of == one.name for one in runs):
            caption += f" {run.name} is {of} again, up to step {step}, its state at the level."
        if run.earlier_state:
            caption += f" The model saved by {run.name} is {run.earlier_state}."
    caption += " AUC of membership inference: 0.5 is ideal."
    columns = [one for one in tables.RESULTS if one.key != "utility"]
    columns = [Column("run", "run"), Column("method", "method"), *columns]
    return replace(tables.comparison_table(rows, columns), caption=caption)


def _pictures(found: Observations | None) -> dict[str, list[tuple[str, ...]]]:
    """Forget images that changed most and least: source, class, row, change and prediction."""
    if not isinstance(found, ImageObservations):
        return {}
    before, after = (right_probability(found.predictions[role]["forget"]) for role in ROLES)
    logits = found.predictions["after"]["forget"].logits
    names = charts.output_names(found.classes, logits.shape[1], contents=True)
    guesses = logits.argmax(-1).tolist()
    shown: dict[str, list[tuple[str, ...]]] = {}
    for title, places in most_and_least_changed(found.predictions).items():
        data = found.pictures[title]
        for k, n in enumerate(places):
            right, row = names[int(data.labels[k])], str(int(data.rows[k]))
            change, guess = f"{before[n]:.0%} → {after[n]:.0%}", names[guesses[n]]
            picture = (_uri(data.pixels[k].numpy()), right, row, change, guess)
            shown.setdefault(title, []).append(picture)
    return shown


def _uri(pixels: np.ndarray) -> str:
    """Image [C, H, W] as a PNG within the page."""
    values = pixels.transpose(1, 2, 0)
    image = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values[:, :, :3])
    image.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
