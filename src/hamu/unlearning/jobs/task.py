"""Task: reads a problem, loads models, brings data into the form that a model takes, and reports figures."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

from hamu.data import (
    ImageData,
    TextData,
    TextRecords,
    UnlearningData,
    forget_data,
    forget_rows,
    lists_rows,
    parse_rows,
)
from hamu.data.sources import is_local, located
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.models.language import adapter_base
from hamu.unlearning.jobs.options import DataOptions, EvaluateOptions, OriginalOptions, RunOptions
from hamu.unlearning.record import Inputs, saved_model_entry, set_entries
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig

_WAYS = ("forget_class", "forget_rows", "forget_data", "forget_filter")

# of one kind of data: as they are read, as a model takes them, and what a model says of them
Read = TypeVar("Read", ImageData, TextRecords)
Fitted = TypeVar("Fitted", ImageData, TextData)
Predicted = TypeVar("Predicted", Predictions, TokenPredictions)


class Task(ABC, Generic[Read, Fitted, Predicted]):
    """One kind of data and model.

    Class attributes:
        noun: what its records are called.
        ways: the options that say what to forget.
        bundled: names of data that come with this package.
        built_in: the names of models that `hamu train` makes, as a regular expression.
        has_test_split: whether the test data can be read from the same source as the training data.
    """

    noun: str
    ways: tuple[str, ...]
    bundled: str
    built_in: str
    has_test_split: Callable[[str], bool]
    batch_sizes: Mapping[str, int] = {}  # where they are not given: settings of TrainConfig

    def __init__(self, data: DataOptions, run: RunOptions, console: Console) -> None:
        self.data_options = data
        self.run_options = run
        self.console = console
        self.classes_of = run.model  # the saved model by which labels are numbered

    @abstractmethod
    def read(self, source: str, split: str) -> Read:
        """Read one data set."""

    def numbered(self, train: Read) -> Read:
        """The training data with labels as the model numbers them."""
        return train

    @abstractmethod
    def divide_by_own_option(self, train: Read, test: Read | None) -> UnlearningData[Read]:
        """Divide by an option that only this task has."""

    def is_built_in(self, model: str) -> bool:
        """True if `hamu train` makes a new model by this name, whatever folder is called so."""
        return re.fullmatch(self.built_in, model) is not None

    @abstractmethod
    def new_model(self, name: str, train: Read) -> Any:
        """A model to be trained on these records."""

    @abstractmethod
    def load_model(self, source: str, base: str | None = None) -> Any:
        """A saved model, as it is.

        Args:
            source: where it is.
            base: where its base model is if it is an adapter; by default where --base_model or the adapter says.
        """

    def start_model(self, source: str) -> Any:
        """A saved model, ready to be changed."""
        return self.load_model(source)

    def base_of(self, source: str, base: str | None = None) -> str | None:
        """The base model, if a saved model is an adapter; see `load_model`."""
        return None

    def check_models(self, options: OriginalOptions | None = None) -> None:
        """Check that the models which are named are there, before any of them is asked."""
        return

    def settle_adapter(self, given: Collection[str]) -> None:
        """Check the settings of a new adapter, and put those of a saved one in their place."""
        return

    @abstractmethod
    def fitted(self, model: Any, *sets: Read | None) -> list[Fitted | None]:
        """Training sets and then test data (None stays None) in the form that the model takes, once it is sure that it
        can.
        """

    @abstractmethod
    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        """What makes a batch of them."""

    @abstractmethod
    def predict(self, model: Any, data: Fitted, args: TrainConfig) -> Predicted:
        """The model's predictions for a data set."""

    @abstractmethod
    def report(
        self,
        predictions: Mapping[str, Predicted],
        problem: UnlearningData[Any],
        reference: Mapping[str, Predicted] | None,
        args: TrainConfig,
    ) -> dict[str, Any]:
        """The figures of a model, from its predictions for each set and a retain model's."""

    def beside_model(self) -> list[Any]:
        """Parts to save with a model, so that it can be opened again."""
        return []

    def save_model(
        self, folder: RunFolder, model: Any, card: Callable[[Path], Path] | None = None
    ) -> Path:
        """Save the model with what belongs to it, and its card."""
        return folder.save_model(model, *self.beside_model(), *([card] if card else []))

    def save_merged(self, folder: RunFolder, model: Any) -> None:
        """Save what is made of the saved model, if asked for."""
        return

    def problem(self) -> UnlearningData[Read]:
        """Read the training and test data and divide them as the options say.

        Raises:
            HamuError: if something is missing or does not fit; nothing has been written then.
        """
        options = self.data_options
        self.chosen_by()
        train, test = self.train_and_test()
        problem = self._divided(train, test)
        if problem.not_found:
            self.console.print(
                f"warning: {problem.not_found} of {len(problem.forget)} {self.noun} to forget are not found in "
                f"{options.data} as they are; if they are there in another form, they are retained"
            )
        copies = 0 if options.forget_data is not None else problem.copies()
        if copies:
            self.console.print(
                f"warning: {copies} of the {self.noun} to retain are the same as some to forget, which a model goes on "
                f"learning; --forget_data with a file of them takes out all that are the same"
            )
        known = problem.known_tests()
        if known:
            self.console.print(
                f"warning: {known} of {len(problem.test)} test {self.noun} are among those to retain or to forget; "
                f"what is said of the test set, and of membership inference, is not of data never trained on"
            )
        return problem

    def _divided(self, train: Read, test: Read | None) -> UnlearningData[Read]:
        options = self.data_options
        if options.forget_rows is not None:
            return forget_rows(train, test, parse_rows(options.forget_rows))
        if options.forget_data is not None:
            forget = self.read(self.located(options.forget_data), "train")
            return forget_data(train, test, forget, options.allow_missing)
        return self.divide_by_own_option(train, test)

    def chosen_by(self) -> str:
        """The option that says what to forget.

        Raises:
            HamuError: if there is none, or more than one, or one of another task.
        """
        options = self.data_options
        for name in _WAYS:
            if name not in self.ways and getattr(options, name) is not None:
                raise HamuError(
                    f"{name} is not for {self.noun}; say what to forget with one of {self._flags()}"
                )
        chosen = [name for name in self.ways if getattr(options, name) is not None]
        if len(chosen) != 1:
            given = " and ".join(f"--{name}" for name in chosen) or "nothing"
            raise HamuError(f"say what to forget with one of {self._flags()}; got {given}")
        if options.rho and chosen != ["forget_class"]:
            raise HamuError(
                f"rho {options.rho:g} mixes records into a class; leave it out with --{chosen[0]}"
            )
        if options.allow_missing and chosen != ["forget_data"]:
            raise HamuError(f"allow_missing is for --forget_data; leave it out with --{chosen[0]}")
        return chosen[0]

    def _flags(self) -> str:
        return ", ".join(f"--{name}" for name in self.ways)

    def train_and_test(self) -> tuple[Read, Read | None]:
        """The training data, and the test data if there are any."""
        options = self.data_options
        if options.data is None:
            raise HamuError(
                f"name the training data with --data: {self.bundled}, a file, a folder, or hub:OWNER/NAME"
            )
        named = [
            name
            for name in (options.data, options.test_data, options.forget_data)
            if name is not None
        ]
        if options.data_dir is not None and not any(map(self.is_local, named)):
            raise HamuError(
                f"--data_dir {options.data_dir} has no effect, as {' and '.join(named)} would not be read from there; "
                f"name the files in it with --data, --forget_data and --test_data"
            )
        source = self.located(options.data)
        train = self.numbered(self.read(source, "train"))
        if options.test_data is not None:
            return train, train.matched(self.read(self.located(options.test_data), "test"))
        return train, train.matched(self.read(source, "test")) if self.has_test_split(
            source
        ) else None

    def data_sources(self) -> list[str]:
        """What the problem is read from."""
        data = self.data_options
        found = [
            self.located(name)
            for name in (data.data, data.test_data, data.forget_data)
            if name is not None
        ]
        return (
            found
            if not data.forget_rows or lists_rows(data.forget_rows)
            else [*found, data.forget_rows]
        )

    def sources(
        self, options: OriginalOptions | None = None, *, is_training: bool = False
    ) -> tuple[str, ...]:
        """The local files and folders that are read, which no run may write into."""
        run, named = self.run_options, []
        is_new = is_training and self.is_built_in(str(run.model))
        models = [None if is_new else run.model, run.retain_model, run.base_model, run.tokenizer]
        if isinstance(options, EvaluateOptions):
            named = [
                options.forget_perturbed,
                options.retain_perturbed,
                options.real_authors,
                options.world_facts,
            ]
        if options is not None:
            models.append(options.original_model)
        models += [adapter_base(model) for model in models if model is not None]
        found = [
            *self.data_sources(),
            *(self.located(name) for name in named if name is not None),
            *models,
        ]
        return tuple(name for name in found if name is not None and self.is_local(name))

    def inputs(self, sets: Mapping[str, Any], models: Mapping[str, str | None]) -> Inputs:
        """What a run reads, by its digests.

        Args:
            sets: by what they are to the run, None where there is none.
            models: likewise, saved ones.
        """
        entries = {
            key: entry
            for name, data in sets.items()
            for key, entry in set_entries(name, data).items()
        }
        return entries | {
            f"{name} model": None
            if source is None
            else saved_model_entry(source, self.base_of(source))
            for name, source in models.items()
        }

    def fill_in(self, args: TrainConfig, given: Mapping[str, Any]) -> None:
        """Put this task's batch sizes where none were given."""
        for name, size in self.batch_sizes.items():
            if name not in given:
                setattr(args, name, size)

    def located(self, source: str) -> str:
        """Where a data set is: relative to --data_dir, unless it is bundled or of the hub."""
        return located(source, self.data_options.data_dir, self.bundled)

    def is_local(self, source: str) -> bool:
        """True if a data set or model is a path: not bundled, and not of the hub."""
        return is_local(source, self.bundled)


def evaluates_in_half(args: TrainConfig) -> bool:
    """True if evaluations run under autocast, as training does."""
    return (args.bf16 or args.fp16) and not getattr(args, "full_precision_eval", False)


def evaluation_precision(args: TrainConfig) -> AbstractContextManager[None]:
    """What a model is asked in; one that was trained has autocast in its forward already, and says the same."""
    half = torch.float16 if args.fp16 else torch.bfloat16
    return torch.autocast(args.device.type, dtype=half, enabled=evaluates_in_half(args))
