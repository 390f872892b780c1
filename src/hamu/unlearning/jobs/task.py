"""Task: reads a problem, loads models, brings data into a model's form, and reports figures."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from hamu.data import UnlearningData, forget_data, forget_rows, lists_rows, parse_rows
from hamu.data.forget_sets import subset
from hamu.data.sources import is_local, located
from hamu.errors import HamuError
from hamu.models.language import adapter_base
from hamu.unlearning.jobs.options import DataOptions, EvaluateOptions, OriginalOptions, RunOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.record import Inputs, saved_model_entry, set_entries
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.resumable import to_channels_last

_WAYS = ("forget_class", "forget_rows", "forget_data", "forget_filter")
TOFU_SETS = ("forget_perturbed", "retain_perturbed", "real_authors", "world_facts")


class Task(ABC):
    """One kind of data and model, with the options of a job.

    `ways` are the options that name the forget set, `bundled` the data that come with this package,
    `built_in` the names of models that `hamu train` makes (a regular expression), `batch_sizes`
    settings of `TrainConfig` where they are not given. Labels are numbered as by the saved model
    `classes_of`.
    """

    noun: str
    ways: tuple[str, ...]
    bundled: str
    built_in: str
    batch_sizes: ClassVar[Mapping[str, int]] = {}
    has_test_split: Callable[[str], bool]

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console, self.given = settings, console, settings.given
        self.data, self.run = settings.of(DataOptions), settings.of(RunOptions)
        self.args = settings.of(TrainConfig)
        further = [one for one in settings.options if isinstance(one, OriginalOptions)]
        self.original_model = further[0].original_model if further else None
        self.classes_of = self.run.model
        for name, size in self.batch_sizes.items():
            if name not in self.given:
                setattr(self.args, name, size)

    @abstractmethod
    def read(self, source: str, split: str) -> Any:
        """Read one data set."""

    def numbered(self, train: Any) -> Any:
        """The training data with labels as the model numbers them."""
        return train

    @abstractmethod
    def divide_by_own_option(self, train: Any, test: Any) -> UnlearningData[Any]:
        """Divide by an option that only this task has."""

    def is_built_in(self, model: str) -> bool:
        """True if `hamu train` makes a new model by this name, whatever folder is called so."""
        return re.fullmatch(self.built_in, model) is not None

    @abstractmethod
    def new_model(self, name: str, train: Any) -> Any:
        """A model to be trained on these records."""

    @abstractmethod
    def load_model(self, source: str, base: str | None = None) -> Any:
        """A saved model as it is; the base model of an adapter where `base` says, if it does."""

    def start_model(self, source: str) -> Any:
        """A saved model, ready to be changed."""
        return self.load_model(source)

    def base_of(self, source: str, base: str | None = None) -> str | None:
        """The base model, if a saved model is an adapter; see `load_model`."""
        return None

    @abstractmethod
    def check_models(self) -> None:
        """Check that the named models are there, before any of them is loaded."""

    def settle_adapter(self) -> None:
        """Check the settings of a new adapter, and put those of a saved one in their place."""
        return

    @abstractmethod
    def fitted(self, model: Any, *sets: Any) -> list[Any]:
        """Training sets and then test data (None stays None) in the form that the model takes."""

    @abstractmethod
    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        """The function that makes a batch of records."""

    @abstractmethod
    def predict(self, model: Any, data: Any) -> Any:
        """The model's predictions for a data set, in the precision of evaluations."""

    @abstractmethod
    def report(
        self, predictions: Mapping[str, Any], problem: UnlearningData[Any], reference: Any
    ) -> dict[str, Any]:
        """The figures of a model, from its predictions for each set and a retain model's."""

    def beside_model(self) -> list[Any]:
        """Parts to save with a model, so that it can be opened again."""
        return []

    def save_merged(self, folder: RunFolder, model: Any) -> None:
        """Save the adapter merged into its model, if asked for; the model is used up."""
        return

    def named_models(self) -> dict[str, str]:
        """The models of this job that are named, by role."""
        named = {
            "model": self.run.model,
            "retain": self.run.retain_model,
            "original": self.original_model,
        }
        return {role: name for role, name in named.items() if name is not None}

    def folder(self, *, resume: bool = False) -> RunFolder:
        """The output folder."""
        return RunFolder(
            str(self.args.output_dir),
            overwrite=self.run.overwrite,
            resume=resume,
            sources=self.sources(),
        )

    def start(self, *, resume: bool = False) -> tuple[RunFolder, UnlearningData[Any]]:
        """The output folder and the problem, of a command that has a model."""
        if self.run.model is None:
            raise HamuError(
                "name the model with --model: a folder written by `hamu train`, or hub:OWNER/NAME"
            )
        return self.folder(resume=resume), self.problem()

    def problem(self) -> UnlearningData[Any]:
        """Read the training and test data and divide them as the options say."""
        data = self.data
        self.chosen_by()
        train, test = self.train_and_test()
        if data.forget_rows is not None:
            problem = forget_rows(train, test, parse_rows(data.forget_rows))
        elif data.forget_data is not None:
            forget = self.read(self.located(data.forget_data), "train")
            problem = forget_data(train, test, forget, data.allow_missing)
        else:
            problem = self.divide_by_own_option(train, test)
        self._warn(problem)
        return problem

    def _warn(self, problem: UnlearningData[Any]) -> None:
        """Name records that are in the sets, but should not be."""
        noun, missing, known = self.noun, problem.not_found, problem.known_tests()
        copies = 0 if self.data.forget_data is not None else problem.copies()
        for count, text in (
            (
                missing,
                f"of {len(problem.forget)} {noun} to forget are not found in {self.data.data} as "
                f"they are; if they are there in another form, they are retained",
            ),
            (
                copies,
                f"of the {noun} to retain are the same as some to forget, which a model goes on "
                f"learning; --forget_data with a file of them takes out all that are the same",
            ),
            (
                known,
                f"test {noun} are among those to retain or to forget; figures of the test set, and "
                f"of membership inference, are not of data never trained on",
            ),
        ):
            if count:
                self.console.print(f"warning: {count} {text}")

    def announce(self, problem: UnlearningData[Any], more: str) -> None:
        """Name the sets of a problem."""
        self.console.print(
            f"forget {len(problem.forget)} {self.noun} ({problem.forget_name}), retain "
            f"{len(problem.retain)}{more}"
        )

    def chosen_by(self) -> str:
        """The one option that names the forget set."""
        chosen = [name for name in _WAYS if getattr(self.data, name) is not None]
        flags = ", ".join(f"--{name}" for name in self.ways)
        for name in chosen:
            if name not in self.ways:
                raise HamuError(
                    f"{name} is not for {self.noun}; say what to forget with one of {flags}"
                )
        if len(chosen) != 1:
            given = " and ".join(f"--{name}" for name in chosen) or "nothing"
            raise HamuError(f"say what to forget with one of {flags}; got {given}")
        for name, way in (("rho", "forget_class"), ("allow_missing", "forget_data")):
            if getattr(self.data, name) and chosen != [way]:
                raise HamuError(f"{name} is for --{way}; leave it out with --{chosen[0]}")
        return chosen[0]

    def train_and_test(self) -> tuple[Any, Any]:
        """The training data, and the test data or None."""
        data = self.data
        if data.data is None:
            raise HamuError(
                f"name the training data with --data: {self.bundled}, a file, a folder, or "
                f"hub:OWNER/NAME"
            )
        named = [name for name in (data.data, data.test_data, data.forget_data) if name is not None]
        if data.data_dir is not None and not any(map(self.is_local, named)):
            raise HamuError(
                f"--data_dir {data.data_dir} has no effect, as {' and '.join(named)} would not be "
                f"read from there; name the files in it with --data, --forget_data and --test_data"
            )
        source = self.located(data.data)
        train = self.numbered(self.read(source, "train"))
        if data.test_data is not None:
            return train, train.matched(self.read(self.located(data.test_data), "test"))
        has_test = self.has_test_split(source)
        return train, train.matched(self.read(source, "test")) if has_test else None

    def data_sources(self) -> list[str]:
        """The places that the problem is read from."""
        data = self.data
        named = (data.data, data.test_data, data.forget_data)
        found = [self.located(name) for name in named if name is not None]
        is_file = data.forget_rows and not lists_rows(data.forget_rows)
        return [*found, str(data.forget_rows)] if is_file else found

    def sources(self) -> tuple[str, ...]:
        """The local files and folders that are read, which no run may write into."""
        models = [*self.named_models().values(), self.run.base_model, self.run.tokenizer]
        if self.classes_of is None:  # a new model
            models.remove(self.run.model)
        models += [adapter_base(model) for model in models if model is not None]
        further = [one for one in self.settings.options if isinstance(one, EvaluateOptions)]
        tofu = [getattr(one, name) for one in further for name in TOFU_SETS]
        found = [*self.data_sources(), *(self.located(name) for name in tofu if name), *models]
        return tuple(name for name in found if name is not None and self.is_local(name))

    def inputs(self, sets: Mapping[str, Any], models: Mapping[str, str | None]) -> Inputs:
        """Digests of the sets and saved models that a run reads, by role; None for none."""
        entries: dict[str, Any] = {}
        for name, data in sets.items():
            entries |= set_entries(name, data)
        for name, source in models.items():
            entry = None if source is None else saved_model_entry(source, self.base_of(source))
            entries[f"{name} model"] = entry
        return entries

    def inputs_of(
        self, problem: UnlearningData[Any], models: Mapping[str, str | None] | None = None
    ) -> Inputs:
        """Digests of a problem and of models, by default of the original and the retain model."""
        sets = {"forget": problem.forget, "retain": problem.retain, "test": problem.test}
        own = {"original": self.run.model, "retain": self.run.retain_model}
        return self.inputs(sets, own if models is None else models)

    def fitted_problem(self, model: Any, problem: UnlearningData[Any]) -> UnlearningData[Any]:
        """All sets of a problem in the form that the model takes."""
        retain, forget, test = self.fitted(model, problem.retain, problem.forget, problem.test)
        return replace(problem, retain=retain, forget=forget, test=test)

    def on_device(self, model: Any) -> Any:
        """The model on the device; channels last as in training, which changes the last digits."""
        model = model.to(self.args.device)
        if self.args.channels_last:
            to_channels_last(model)
        return model

    def predictions(
        self,
        source: str,
        problem: UnlearningData[Any],
        most: int | None = None,
        base: str | None = None,
        *,
        only: Collection[str] = ("retain", "forget", "test"),
    ) -> tuple[Any, dict[str, Any]]:
        """A saved model, and its predictions for each set: for `most` records, else `limit`."""
        model = self.on_device(self.load_model(source, base))
        found = {}
        for name, data in self.fitted_problem(model, problem).sets().items():
            if name in only:
                some = subset(data, self.limit(name) if most is None else most, self.args.seed)
                found[name] = self.predict(model, some)
        return model, found

    def limit(self, name: str) -> int | None:
        """The most records of a set that evaluations look at; None for all.

        Those are all of a forget set whose records each have a loss to reach.
        """
        args = self.args
        if not isinstance(args, UnlearnConfig):
            return None
        is_whole = name == "forget" and args.forget_objective == "bounded"
        return None if is_whole else args.max_eval_samples

    def evaluates_in_half(self) -> bool:
        """True if evaluations run under autocast, as training does."""
        full = isinstance(self.args, UnlearnConfig) and self.args.full_precision_eval
        return (self.args.bf16 or self.args.fp16) and not full

    def evaluation_precision(self) -> AbstractContextManager[None]:
        """Precision of evaluations; the forward of a trained model has autocast already."""
        half = torch.float16 if self.args.fp16 else torch.bfloat16
        return torch.autocast(self.args.device.type, half, enabled=self.evaluates_in_half())

    def located(self, source: str) -> str:
        """Place of a data set: relative to --data_dir, unless it is bundled or of the hub."""
        return located(source, self.data.data_dir, self.bundled)

    def is_local(self, source: str) -> bool:
        """True if a data set or model is a path: not bundled, and not of the hub."""
        return is_local(source, self.bundled)

    def stated(self) -> dict[str, range] | None:
        """The sets as ranges where their sizes are stated and the data are not here, else None."""
        counts = {"retain": self.data.expected_retain, "forget": self.data.expected_forget}
        sources = self.data_sources()
        is_here = sources and all(s == self.bundled or Path(s).exists() for s in sources)
        known = {name: range(count) for name, count in counts.items() if count is not None}
        return None if is_here or len(known) < len(counts) else known
