"""`hamu report`: the page of runs, with what both models of each say of its data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.data.forget_sets import draw_positions, subset
from hamu.errors import HamuError
from hamu.evaluation.predictions import embed
from hamu.files import REPORT, write_whole
from hamu.report import run as seen
from hamu.report.page import MARK, report_page
from hamu.report.run import Run, read_runs, run_folders
from hamu.unlearning.jobs.progress import silent
from hamu.unlearning.jobs.sources import NamedSources
from hamu.unlearning.jobs.tasks import TextTask

_EMBEDDED = 500  # images of each set


def report(
    runs: Sequence[str | Path],
    *,
    output: str | None = None,
    contents: bool = False,
    no_models: bool = False,
    samples: int = 5000,
    answers: int = 20,
    hub: Collection[str] = (),
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> Path:
    """Make one HTML page of a run, finished or not, or of several side by side.

    Args:
        runs: output folders of `unlearn`, or of `compare`, each of which stands for all its runs.
        output: place of the page; by default in the folder of the run.
        contents: also show images, prompts, answers, names of classes and numbers of rows.
        no_models: do not ask the models again, which takes most of the time.
        samples: records of each set that the models predict.
        answers: answers of each set to show, of texts and with `contents`.
        hub: the names of the hub that may be read, each "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with a model; that can do anything.
        console: shows progress; silent by default.

    Returns:
        The page.

    Raises:
        HamuError: if a folder is not of a run, or something else is in the place of the page.
    """
    if samples < 1 or answers < 0:
        raise HamuError(f"samples {samples} must be at least 1, and answers {answers} at least 0")
    console = console or silent()

    def observed(folder: Path, run: Run) -> Run:
        try:
            sources = NamedSources(folder, hub, trust_remote_code=trust_remote_code)
            sources.check_unchanged()
            limit = sources.task.limit("retain")
            most = samples if limit is None else min(samples, limit)
            if isinstance(sources.task, TextTask):
                found: Any = _texts(sources, most, answers if contents else 0, console)
            else:
                found = _images(sources, most, console)
            return replace(run, observed=found)
        except HamuError as error:
            console.print(f"{folder}: left out what the models say: {error}", soft_wrap=True)
            why = "a model or the data cannot be read; the command prints why"
            return replace(run, unobserved=str(error) if contents else why)

    def reported(folder: Path) -> list[Run]:
        found = read_runs(folder)
        if len(found) > 1:
            why = "a demo keeps no models"
        elif no_models:
            why = "--no_models leaves it out"
        elif found[0].evaluation is None:
            why = "the run has not come to its end, so there is no model after it"
        else:
            return [observed(folder, found[0])]
        return [replace(run, unobserved=why) for run in found]

    named = [Path(name) for name in runs]
    folders = [folder for place in named for folder in run_folders(place)]
    target = _target(output, named)
    page = report_page(
        [one for folder in dict.fromkeys(folders) for one in reported(folder)], contents=contents
    )
    # the name of a folder may have bytes that are no text
    write_whole(target, page.encode(errors="backslashreplace").decode(), private=contents)
    return target


def _target(output: str | None, named: Sequence[Path]) -> Path:
    """Place of the page; nothing but an earlier page may be there."""
    if output is None and len(named) > 1:
        raise HamuError(
            f"{len(named)} folders are named: say where their common page goes, with --output "
            f"FILE.html"
        )
    target = named[0] / REPORT if output is None else Path(output)
    if not target.parent.is_dir():
        raise HamuError(
            f"the folder {target.parent} of --output is not there; make it, or choose another"
        )
    is_page = target.is_file() and MARK.encode() in target.read_bytes()[:1000]
    if target.exists() and not is_page:
        raise HamuError(
            f"{target} is there and is not a report; choose another --output, or remove it"
        )
    return target.resolve() if target.is_symlink() else target  # a link stays


def _images(sources: NamedSources, most: int, console: Console) -> seen.ImageObservations:
    """Predictions and embeddings of both models, one after the other."""
    task, problem, seed = sources.task, sources.problem, sources.task.args.seed
    predictions, embeddings, refused = {}, {}, ""
    for role in seen.ROLES:
        console.print(f"the model {role} looks at the images")
        model, predictions[role] = sources.loaded(role, most)
        try:
            some = {
                name: subset(data, _EMBEDDED, seed)
                for name, data in task.fitted_problem(model, problem).sets().items()
            }
            size = task.args.eval_batch_size
            embeddings[role] = {
                n: embed(model, one, size, task.collator) for n, one in some.items()
            }
        except HamuError as error:
            refused = str(error)
    chosen = draw_positions(len(problem.forget), most, seed)
    pictures = {  # no more than is shown: a report may be of many runs
        title: problem.forget.select(places if chosen is None else [chosen[p] for p in places])
        for title, places in seen.most_and_least_changed(predictions).items()
    }
    return seen.ImageObservations(
        predictions,
        counts={name: len(one.labels) for name, one in predictions["after"].items()},
        sizes={name: len(data) for name, data in problem.sets().items()},
        classes=problem.forget.classes,
        pictures=pictures,
        embeddings={} if refused else embeddings,
        no_embedding=refused,
        seed=seed,
    )


def _texts(sources: NamedSources, most: int, count: int, console: Console) -> seen.TextObservations:
    """Predictions and answers of both models, one after the other."""
    task: Any = sources.task
    sets = sources.problem.sets()
    prompts = {name: task.some_records(sets[name], count) for name in ("forget", "retain") if count}
    prompts = {name: data for name, data in prompts.items() if all(r.prompt for r in data.records)}
    predictions: dict[str, Any] = {}
    answers: dict[str, dict[str, list[str]]] = {name: {} for name in prompts}
    for role in seen.ROLES:
        also = " and answers some" if prompts else ""
        console.print(f"the model {role} reads the records{also}")
        model, predictions[role] = sources.loaded(role, most)
        for name, data in prompts.items():
            answers[name][role] = task.answers_of(model, data)
    found = {name: seen.answered(data, answers[name]) for name, data in prompts.items()}
    why = "plain text has no prompt" if count else "--answers 0 leaves them out"
    texts = {name: task.some_records(data, most) for name, data in sets.items()}
    return seen.TextObservations(predictions, texts, found, "" if found else why)
