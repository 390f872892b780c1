"""`hamu.verify`, and what the config.yaml of a run names, read again. Nothing is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from hamu.data import UnlearningData
from hamu.data.sources import is_of_hub
from hamu.errors import HamuError
from hamu.files import CONFIG, MODEL, RECORD, file_digest
from hamu.models.language import saved_adapter
from hamu.models.storage import NeedsCode, folder_of, is_adapter
from hamu.unlearning.goals import Goal, Standing
from hamu.unlearning.jobs.options import RunOptions
from hamu.unlearning.jobs.settings import recorded_settings, settings_of_run
from hamu.unlearning.jobs.tasks import Task, choose_task
from hamu.unlearning.record.inputs import differing, read_inputs, weights_digest, without_order
from hamu.unlearning.record.record import changes, figures, read_record
from hamu.unlearning.record.verify import Finding, Unavailable
from hamu.unlearning.record.verify import verify as verify_record


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

    Args:
        run: the output folder of `unlearn`; nothing is written.
        no_models: do not evaluate the models again, which takes most of the time.
        hub: the names of the hub that may be read, each "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with a model; that can do anything.
    """
    folder = Path(run).expanduser()
    sources = NamedSources(folder, hub, trust_remote_code=trust_remote_code)
    findings = tuple(verify_record(folder, sources, evaluate=not no_models))
    return Verified(folder, findings, file_digest(folder / RECORD))


class NamedSources:
    """The settings, data and models that the config.yaml of a run names, of the hub if permitted.

    Every access raises `Unavailable` for what is not here. Models have the roles "before", "after"
    and "retain_model".
    """

    def __init__(
        self, run: Path, hub: Collection[str] = (), *, trust_remote_code: bool = False
    ) -> None:
        self._run, self._hub, self._trusts = run, hub, trust_remote_code
        self.predicted = cache(lambda role: self.loaded(role)[1])

    @cached_property
    def task(self) -> Task:
        """The task of the run, with the options that config.yaml names."""
        path = self._run / CONFIG
        if not path.is_file():
            raise Unavailable("config.yaml is missing")
        try:
            settings = settings_of_run(path)
        except HamuError as error:
            raise Unavailable(f"config.yaml cannot be used here: {error}") from error
        settings.of(RunOptions).trust_remote_code = self._trusts
        task = choose_task(settings, Console(quiet=True))
        task.classes_of = str(self._run / MODEL)  # as the original's, which may be out of reach
        return task

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run was given, as its record holds them."""
        recorded = recorded_settings(self.task.settings)
        return {name: value for name, value in recorded.items() if name in self.task.given}

    @cached_property
    def problem(self) -> UnlearningData[Any]:
        """The unlearning problem that config.yaml names, read once."""
        for source in self.task.data_sources():
            self._need(source)
        return self.task.problem()

    @cached_property
    def reference(self) -> dict[str, Any] | None:
        """The retain model's predictions; None where it is not here."""
        try:
            return self.predicted("retain_model") if self.task.run.retain_model else None
        except Unavailable:
            return None

    def weights(self, role: str) -> Path:
        """The folder with the weights of a whole model, or of an adapter's base model."""
        return self._folder(self._base(role) or self._model(role))

    def adapter(self, role: str) -> Path:
        """The folder with the adapter of a model."""
        return self._folder(self._model(role))

    def check_unchanged(self) -> None:
        """Check that the data and both models are still those of the run."""
        before = self._model("before")
        for source in {before, self._base("before") or before}:
            self._folder(source)  # a model of the hub is to be in its cache
        now = without_order(self.task.inputs_of(self.problem, ("original",)))
        name = differing(read_inputs(self._run), now)
        record = read_record(self._run)
        if name is None and record is not None:
            after = record["models"]["after"]
            if weights_digest(self._run / MODEL) != (after["adapter"] or after["weights"]):
                name = "model after"
        if name is not None:
            raise Unavailable(f"the {name} is not that of the run any more")

    def loaded(self, role: str, most: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A model, and its predictions for so many records of each set, else as many as the run."""
        task, source, base = self.task, self._model(role), self._base(role)
        if task.run.tokenizer is not None:
            self._need(task.run.tokenizer)
        try:
            return task.predictions(source, self.problem, most, base)
        except NeedsCode as error:
            raise Unavailable(f"it cannot be loaded: {error}") from error

    def figures(self, role: str) -> dict[str, Any]:
        """The figures of the model before or after, in the run's precision and on its sample."""
        predictions = self.predicted(role)
        report = self.task.report(predictions, self.problem, self.reference)
        return figures(report, predictions, self.task.args.seed)

    def change(self) -> dict[str, Any]:
        """The changes from the model before to the model after, measured in the same way."""
        both = (self.predicted("before"), self.predicted("after"))
        return changes(self.figures("before"), self.figures("after"), both, self.task.args.seed)

    def standing(self, role: str, goal: Mapping[str, Any]) -> Standing:
        """Standing of the forget records against the goal of the record, before or after."""
        settings = Goal(goal["kind"], goal["share"], goal["loss"])
        original = self.predicted("before") if settings.kind == "unseen" else None
        reference = self.reference if settings.kind == "retrained" else None
        if settings.kind == "retrained" and reference is None:
            raise Unavailable("the retain model is not here")
        return settings.against(original, reference).standing(self.predicted(role)["forget"])

    def precision(self) -> str:
        """The precision of the run's evaluations: a key of `verify.TOLERANCE`."""
        is_full = not self.task.evaluates_in_half() and self.task.run.model_dtype == "float32"
        return "float32" if is_full else "half precision"

    def _model(self, role: str) -> str:
        """The name or folder of the model of this role, once it may be looked at."""
        if role == "after":
            return str(self._run / MODEL)
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
                raise Unavailable(
                    f"{source} is of the hub; to read it, name it again: --hub {source}"
                )
        elif self.task.is_local(source) and not Path(source).exists():
            raise Unavailable(f"{source} is not here")
        return source

    def _folder(self, source: str) -> Path:
        if is_of_hub(source):
            self.task.load_model(source)  # into the hub's cache
        return folder_of(source)
