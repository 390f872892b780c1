"""The report of one run or several: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

import hamu
from hamu.report.attack_section import attack_section
from hamu.report.course import steps_section, trajectories
from hamu.report.elements import Section
from hamu.report.forgotten import forgotten_section, retain_model_auc
from hamu.report.images import class_accuracy, images_section
from hamu.report.layers import layers_section
from hamu.report.looks import Look, looks_of
from hamu.report.membership import membership_section
from hamu.report.observations import ImageObservations, Observations
from hamu.report.overview import overview
from hamu.report.run import Run, told_apart
from hamu.report.tables import before_and_after, record_sections
from hamu.report.texts import texts_section
from hamu.report.verdict import RunVerdict, verdict

MARK = '<meta name="generator" content="hamu report">'  # by which a file is known as a report


@dataclass(frozen=True)
class Reported:
    """A run and what else is known of it.

    Attributes:
        run: what its folder holds.
        observed: what its models say; None if they, or the data, cannot be reached.
        unobserved: why, in words that go on the page.
    """

    run: Run
    observed: Observations | None = None
    unobserved: str = ""


@dataclass(frozen=True)
class _Part:
    """A run with what the page says of it."""

    run: Run
    verdict: RunVerdict
    sections: Sequence[Section] = field(default_factory=list)


def report_page(found: Sequence[Reported], *, contents: bool = False) -> str:
    """Make the page of one run or several, as HTML.

    Args:
        found: the runs, at least one.
        contents: whether images, answers, prompts and names of classes are in it.
    """
    runs = told_apart([one.run for one in found])
    found = [replace(one, run=run) for one, run in zip(found, runs, strict=True)]
    looks = looks_of([run.method for run in runs])
    parts = [
        _Part(one.run, verdict(one.run), sections_of(one, look, contents))
        for one, look in zip(found, looks, strict=True)
        if not one.run.is_trajectory_alone
    ]
    environment = Environment(
        loader=PackageLoader("hamu.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    files = {
        name: resources.files("hamu.report").joinpath(f"report.{name}").read_text("utf-8")
        for name in ("css", "js")
    }
    return environment.get_template("report.html.j2").render(
        mark=MARK,
        version=hamu.__version__,
        parts=parts,
        overview=overview(runs, looks) if len(runs) > 1 else None,
        names=[run.name for run in runs],
        contents=contents,
        script=files["js"],
        script_hash=base64.b64encode(hashlib.sha256(files["js"].encode()).digest()).decode(),
        style=files["css"],
    )


def sections_of(one: Reported, look: Look, contents: bool) -> list[Section]:
    """The sections of one run, those that have something to show or to say."""
    run, observed, theirs = one.run, one.observed, retain_model_auc(one.run)
    table = before_and_after(run)
    path = trajectories([run], [look])
    classes = None if run.evaluation is None else class_accuracy(run.evaluation, contents)
    gained = Section(
        "What was gained",
        charts=[chart for chart in (path, classes) if chart is not None],
        tables=[] if table is None else [table],
        missing=[] if path else ["the trajectory: it takes two evaluations"],
    )
    if observed is None:
        measured = [Section("What the models say", missing=[
            f"confusion, embeddings, images or answers, and the scores of membership inference: {one.unobserved}"
        ])]  # fmt: skip
    elif isinstance(observed, ImageObservations):
        measured = [images_section(observed, contents), membership_section(observed, theirs)]
    else:
        measured = [texts_section(observed, contents), membership_section(observed, theirs)]
    rest = [Section("Notes", missing=list(run.notes))] if run.notes else []
    lasting = [attack_section(run.attack)] if run.is_finished else []
    sections = [
        forgotten_section(run, observed),
        gained,
        *lasting,
        steps_section(run),
        layers_section(run),
        *measured,
        *record_sections(run.record),
        *rest,
    ]
    return [section for section in sections if not section.is_empty]
