"""A figure or table of the paper: runs, figures taken from them, a picture, and claims about them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from experiments.paper.finished_run import FinishedRun

Figures = dict[str, Any]  # as JSON holds them
IMAGE_STEPS = (
    9  # steps per epoch of the paper: 45,000 images to retain in batches of 5,000 (App. E.3)
)
TEXT_STEPS = 72  # 3,600 records to retain in batches of 50 (App. F.3)
SIMILAR_STEPS = 80  # 4,000 with the paraphrases, in the same batches (App. F.1)
LEARNING_RATE = 1e-4  # where neither the recipe nor the user says otherwise


@dataclass(frozen=True)
class Scale:
    """Size of an experiment.

    Attributes:
        recipe: the name of the recipe, or of the user's own settings, that its runs start from.
        base: those settings, for `hamu unlearn`.
        is_text: whether it unlearns from a language model.
        fraction: of the data, in (0, 1]. Batches shrink with it, so that an epoch has the paper's number of steps.
        epochs: of every run; None for the paper's.
        learning_rate: of every run; None for that of the recipe, or of the experiment where it has its own.
        seed: of every run.
        has_similar: whether there are data to retain that repeat the forget set in other words.
    """

    recipe: str
    base: Mapping[str, Any]
    is_text: bool
    fraction: float
    epochs: float | None
    learning_rate: float | None
    seed: int
    has_similar: bool = False

    @property
    def rate(self) -> float:
        """The learning rate of runs that do not have one of their own."""
        return float(self.learning_rate or self.base.get("learning_rate", LEARNING_RATE))

    def wanted(self, method: str, paper_epochs: float, **changes: Any) -> Wanted:
        """A run by a method, as long as the paper's or as --epochs says."""
        steps = TEXT_STEPS if self.is_text else IMAGE_STEPS
        changes = {"learning_rate": self.rate} | changes
        return Wanted(
            method, self.epochs or paper_epochs, changes, steps, paper_epochs=paper_epochs
        )


@dataclass(frozen=True)
class Wanted:
    """A run that an experiment needs.

    Attributes:
        method: its name.
        epochs: how many; figures are taken from these even if a longer run is at hand.
        changes: settings of `hamu unlearn` beyond those of the recipe.
        steps_per_epoch: the paper's over the data without paraphrases, which say how large its batches are.
        similar: whether the retain data repeat the forget set in other words.
        whole: whether it must end there, because its last report is looked at; no longer run does then.
        paper_epochs: the paper's.
    """

    method: str
    epochs: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    steps_per_epoch: int = IMAGE_STEPS
    similar: bool = False
    whole: bool = False
    paper_epochs: float = 0.0

    @property
    def steps(self) -> int:
        """Number of steps if batches have the size wanted and nothing ends the run before."""
        return math.ceil(self.epochs * self.paper_steps_per_epoch)

    @property
    def paper_steps_per_epoch(self) -> int:
        """The paper's steps per epoch: paraphrases make an epoch longer, and not its batches larger."""
        return SIMILAR_STEPS if self.similar else self.steps_per_epoch


@dataclass(frozen=True)
class Claim:
    """One thing that the paper says, and what we found.

    Attributes:
        text: what is claimed.
        paper: the paper's number, None where it gives none.
        ours: what we found, as a number or in words; None if there is nothing to tell it by.
        holds: whether it is so; None if it cannot be told.
        otherwise: what explains it if it does not hold.
    """

    text: str
    ours: float | str | None
    holds: bool | None
    paper: float | str | None = None
    otherwise: str = ""

    def as_json(self) -> dict[str, Any]:
        """The claim as JSON holds it."""
        return asdict(self)


def of_all(holds: bool, complete: bool) -> bool | None:
    """True if a claim about all of something holds: one that is known breaks it, but only all of them bear it out."""
    return holds and (complete or None)


class Experiment(ABC):
    """One figure or table.

    Class attributes:
        name: by which it is called, and its files.
        reference: where it is in the paper.
        title: what it shows.
        task: "image", "text", or "" where nothing is trained.
        about: what is to be known of how it is made here, beyond what all have in common.
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    title: ClassVar[str]
    task: ClassVar[str]
    about: ClassVar[str] = ""

    def runs(self, scale: Scale) -> dict[str, Wanted]:
        """The runs that it needs, by keys of its own; none, unless it says so."""
        return {}

    @abstractmethod
    def claims(self, figures: Figures) -> list[Claim]:
        """Compare the paper's claims with the figures."""

    def table(self, figures: Figures) -> list[list[str]]:
        """The figures as a table, its head first, the paper's beside ours; empty where a picture says it all."""
        return []

    @abstractmethod
    def draw(self, figures: Figures, path: Path) -> None:
        """Save the picture."""


class Computed(Experiment):
    """An experiment that follows from the formulas alone."""

    task = ""

    @abstractmethod
    def compute(self) -> Figures:
        """All that is drawn or claimed."""


class Trained(Experiment):
    """An experiment whose figures come from runs."""

    @abstractmethod
    def figures(self, finished: Mapping[str, FinishedRun], scale: Scale) -> Figures:
        """All that is drawn or claimed.

        Args:
            finished: the runs, by the keys of `runs`; those that failed are missing.
            scale: of the runs.
        """


class Measured(Experiment):
    """An experiment that measures steps in this process, and needs no runs.

    Class attributes:
        takes: the settings that it looks at; all others are the defaults.
    """

    takes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def measure(self, settings: Mapping[str, Any], scale: Scale) -> Figures:
        """All that is drawn or claimed.

        Args:
            settings: of a run by HAMU-Q at this scale.
            scale: epochs are turns of the measurement.
        """
