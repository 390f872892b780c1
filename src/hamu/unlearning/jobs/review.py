"""`hamu.verify` and `hamu report`: a run that is over, its data and its models looked at again."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu import files
from hamu.data.forget_sets import subset
from hamu.errors import HamuError
from hamu.evaluation.predictions import embed
from hamu.files import finding_room, is_local, is_of_hub, write_whole
from hamu.models.language import saved_adapter
from hamu.models.storage import NeedsCode, folder_of, is_adapter
from hamu.report import run as seen
from hamu.report.page import MARK, report_page
from hamu.report.run import Run, read_run, run_folders
from hamu.unlearning.goals import Goal, Standing
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.jobs.settings import recorded_settings, settings_of_run
from hamu.unlearning.jobs.tasks import Figures, Problem, Task, TextTask, choose_task
from hamu.unlearning.record import changes, cut_records, figures, inputs, read_record
from hamu.unlearning.record.verify import Finding, Unavailable
from hamu.unlearning.record.verify import verify as verify_record
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.logs import silent

_EMBEDDED = 500  # images of each set


def report(
    runs: str | Path | Sequence[str | Path],
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

    It needs no network. What the models say about the data is measured again, as far as both are
    still where the config.yaml of the run says.

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
    several = [runs] if isinstance(runs, str | Path) else runs
    named, found = [Path(name).expanduser() for name in several], list[Run]()
    folders = dict.fromkeys(folder for place in named for folder in run_folders(place))
    target = _target(output, named)
    for folder in folders:
        run, why = read_run(folder), ""
        observed: seen.Observations | None = None
        if no_models:
            why = "--no_models leaves it out"
        elif run.evaluation is None:
            why = "the run has not come to its end, so there is no model after it"
        else:
            try:
                sources = NamedSources(folder, hub, trust_remote_code=trust_remote_code)
                sources.check_unchanged()
                if isinstance(sources.task, TextTask):
                    observed = _texts(sources, samples, answers if contents else 0, console)
                else:
                    observed = _images(sources, samples, console)
            except HamuError as error:
                console.print(f"{folder}: left out what the models say: {error}", soft_wrap=True)
                why = "a model or the data cannot be read; the command prints why"
                why = str(error) if contents else why
        found.append(replace(run, observed=observed, unobserved=why))
    page = report_page(found, contents=contents)
    # the name of a folder may have bytes that are no text
    with finding_room(f"the report cannot be written to {target}", "or choose another --output"):
        write_whole(target, page.encode(errors="backslashreplace").decode(), private=contents)
    return target


def _target(output: str | None, named: Sequence[Path]) -> Path:
    """Place of the page; nothing but an earlier page may be there."""
    if output is None and len(named) > 1:
        raise HamuError(f"name the place of the page of {len(named)} folders with --output FILE")
    target = named[0] / files.REPORT if output is None else Path(output)
    if not target.parent.is_dir():
        raise HamuError(f"the folder {target.parent} of --output is not there")
    if not os.access(target.parent, os.W_OK):
        raise HamuError(f"{target.parent} may only be read; choose another place with --output")
    is_page = target.is_file() and MARK.encode() in target.read_bytes()[:1000]
    if target.exists() and not is_page:
        raise HamuError(f"{target} is there and is not a report; choose another --output")
    return target.resolve() if target.is_symlink() else target  # a link stays


def _images(sources: NamedSources, most: int, console: Console) -> seen.ImageObservations:
    task, problem, seed = sources.task, sources.problem, sources.task.args.seed
    predictions, embeddings, refused, size = {}, {}, "", task.args.eval_batch_size
    for role in seen.ROLES:
        console.print(f"the model {role} looks at the images")
        model, predictions[role] = sources.loaded(role, most)
        try:
            embeddings[role] = {
                name: embed(model, subset(data, _EMBEDDED, seed), size)
                for name, data in task.fitted_problem(model, problem).sets().items()
            }
        except HamuError as error:
            refused = str(error)
    measured = subset(problem.forget, len(predictions["before"]["forget"].labels), seed)
    pictures = {  # no more than is shown: a report may be of many runs
        title: measured.select(places)
        for title, places in seen.most_and_least_changed(predictions).items()
    }
    return seen.ImageObservations(
        predictions,
        sizes={name: len(data) for name, data in problem.sets().items()},
        classes=problem.forget.classes,
        pictures=pictures,
        embeddings={} if refused else embeddings,
        no_embedding=refused,
        seed=seed,
    )


def _texts(sources: NamedSources, most: int, count: int, console: Console) -> seen.TextObservations:
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
    read = {name: one.records for name, one in predictions["before"].items()}
    texts = {name: task.some_records(sets[name], count) for name, count in read.items()}
    return seen.TextObservations(predictions, texts, found, "" if found else why)


@dataclass(frozen=True)
class Verified:
    """Result of `verify`."""

    folder: Path
    findings: tuple[Finding, ...]  # one for each statement of the record
    record_digest: str  # the SHA-256 of record.json

    def count(self, holds: bool | None) -> int:
        """Number of statements that hold, do not hold, or (None) cannot be checked."""
        return sum(finding.holds is holds for finding in self.findings)


def verify(
    run: str | Path,
    *,
    no_models: bool = False,
    hub: Collection[str] = (),
    trust_remote_code: bool = False,
) -> Verified:
    """Check the record of a run against its files, its model, and the data and models it names.

    A line for each statement of the record says that it holds, does not hold (exit code 1), or
    cannot be checked, as what it is about is not there any more.

    Args:
        run: the output folder of `unlearn`; nothing is written.
        no_models: do not evaluate the models again, which takes most of the time.
        hub: the names of the hub that may be read, each "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with a model; that can do anything.
    """
    folder = Path(run).expanduser()
    sources = NamedSources(folder, hub, trust_remote_code=trust_remote_code)
    findings = tuple(verify_record(folder, sources, evaluate=not no_models))
    return Verified(folder, findings, files.file_digest(folder / files.RECORD))


class NamedSources:
    """The settings, data and models that the config.yaml of a run names, of the hub if permitted.

    Every access raises `Unavailable` for what is not here. Models have the roles "before", "after"
    and "retain_model".
    """

    def __init__(self, run: Path, hub: Collection[str] = (), *, trust_remote_code: bool = False):
        self._run, self._trusts = run, trust_remote_code
        self._hub = (hub,) if isinstance(hub, str) else hub
        self.predicted = cache(self._predicted)

    @cached_property
    def task(self) -> Task:
        """The task of the run, with the options that config.yaml names."""
        path = self._run / files.CONFIG
        if not path.is_file():
            raise Unavailable("config.yaml is missing")
        try:
            settings = settings_of_run(path)
            if (data := settings.of(DataOptions)).task == "auto":  # the data may be out of reach
                data.task = "text" if inputs.of_texts(self._run) else "image"
        except HamuError as error:
            raise Unavailable(f"config.yaml cannot be used here: {error}") from error
        settings.of(RunOptions).trust_remote_code = self._trusts
        return choose_task(settings, Console(quiet=True))

    @property
    def settings(self) -> Figures:
        """Settings that the run was given, as its record holds them."""
        recorded = recorded_settings(self.task.settings)
        return {name: value for name, value in recorded.items() if name in self.task.given}

    @property
    def args(self) -> UnlearnConfig:
        """All settings of the run's training."""
        return self.task.settings.of(UnlearnConfig)

    @cached_property
    def problem(self) -> Problem:
        """The unlearning problem that config.yaml names, read once."""
        for source in self.task.data_sources():
            self._need(source)
        if not isinstance(self.task, TextTask):
            try:
                self.task.classes_of = self._model("before")
            except Unavailable:  # whose classes the model after has too
                self.task.classes_of = str(self._run / files.MODEL)
        try:
            return self.task.problem()
        except HamuError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # an image that a CSV lists
                raise Unavailable(str(error)) from error
            raise

    @cached_property
    def reference(self) -> Figures | None:
        """The retain model's predictions; None where it is not here."""
        try:
            return self.predicted("retain_model") if self.task.run.retain_model else None
        except Unavailable:
            return None

    def digest(self, role: str, part: str) -> str | None:
        """Digest of the "adapter" of a model, or of its "weights", those of an adapter's base."""
        base = self._base(role) if part == "weights" else None
        return inputs.weights_digest(self._folder(base or self._model(role)))

    def check_unchanged(self) -> None:
        """Check that the data and both models are still those of the run."""
        before = self._model("before")
        for source in {before, self._base("before") or before}:
            self._folder(source)  # a model of the hub is to be in its cache
        now = inputs.as_recorded(self.task.inputs_of(self.problem, ("original",)))
        name = inputs.differing(inputs.read_inputs(self._run), now)
        record, wrong = read_record(self._run)
        if name is None and not wrong:
            after = record["models"]["after"]
            weights = inputs.weights_digest(self._run / files.MODEL)
            if weights != (after["adapter"] or after["weights"]):
                name = "model after"
        if name is not None:
            raise Unavailable(f"the {name} is not that of the run any more")

    def loaded(self, role: str, most: int | None = None) -> tuple[Any, Figures]:
        """A model, and its predictions for so many records of each set, else as many as the run."""
        task, source, base = self.task, self._model(role), self._base(role)
        if task.run.tokenizer is not None:
            self._need(task.run.tokenizer)
        try:
            return task.predictions(source, self.problem, most, base)
        except NeedsCode as error:
            raise Unavailable(f"it cannot be loaded: {error}") from error

    def _predicted(self, role: str) -> Figures:
        model, found = self.loaded(role)
        if role == "after" and isinstance(self.task, TextTask):
            fitted = self.task.fitted_problem(model, self.problem).sets()
            self._cut = {name: cut_records(data) for name, data in fitted.items()}
        return found

    def cut_texts(self) -> dict[str, int | None]:
        """Number of the texts of each set of which the model after is given a part."""
        self.predicted("after")
        return self._cut

    def figures(self, role: str) -> Figures:
        """The figures of the model before or after, in the run's precision and on its sample."""
        predictions, reference = self.predicted(role), self.reference
        if isinstance(self.task, TextTask):  # the models may have different ones
            self.task.load_tokenizer(self._model(role), self._base(role))
        report = self.task.report(predictions, self.problem, reference)
        return figures(report, predictions, self.task.args.seed)

    def change(self) -> Figures:
        """The changes from the model before to the model after, measured in the same way."""
        both = (self.predicted("before"), self.predicted("after"))
        return changes(self.figures("before"), self.figures("after"), both, self.task.args.seed)

    def standing(self, role: str, goal: Mapping[str, Any]) -> Standing:
        """Standing of the forget records against the goal of the record, before or after."""
        settings = Goal(goal["kind"], goal["share"], goal["loss"])
        original = self.predicted("before") if settings.kind == "unseen" else None
        reference = self.predicted("retain_model") if settings.kind == "retrained" else None
        return settings.against(original, reference).standing(self.predicted(role)["forget"])

    def precision(self) -> str:
        """The lower precision of the run's evaluations and these: a key of `verify.TOLERANCE`."""
        is_full = not self.task.evaluates_in_half() and self.task.dtype() == "float32"
        record, device = read_record(self._run)[0], self.args.device.type
        has_adapter = record["settings"].get("lora")  # bfloat16 by default on a GPU
        if has_adapter and record["environment"]["device"] != device:
            is_full &= self.task.run.model_dtype == "float32"
        return "float32" if is_full else "half precision"

    def _model(self, role: str) -> str:
        """The name or folder of the model of this role, once it may be looked at."""
        if role == "after":
            return self._need(str(self._run / files.MODEL))
        run = self.task.run
        return self._need(str(run.model if role == "before" else run.retain_model))

    def _base(self, role: str) -> str | None:
        """Place of the base model of an adapter, None for a whole model."""
        source = self._model(role)
        if not is_of_hub(source) and not is_adapter(source):
            return None
        task, original, base = self.task, str(self.task.run.model), None
        is_hidden = is_of_hub(original) and original not in self._hub
        try:
            if role == "after" and task.run.lora and (is_hidden or saved_adapter(original) is None):
                base = original  # the whole model that was given a new adapter
            base = task.base_of(source, base)
        except HamuError as error:
            raise Unavailable(f"its base model is not known: {error}") from error
        return base if base is None else self._need(base)

    def _need(self, source: str) -> str:
        """A source that is here, or that may be read from the hub."""
        if is_of_hub(source):
            if source not in self._hub:
                raise Unavailable(f"{source} is of the hub; name it again: --hub {source}")
        elif is_local(source) and not Path(source).exists():
            raise Unavailable(f"{source} is not here")
        return source

    def _folder(self, source: str) -> Path:
        if is_of_hub(source):
            self.task.load_model(source)  # into the hub's cache
        return folder_of(source)
