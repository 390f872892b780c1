"""Figures that other packages measure beside ours. They name theirs with an entry point in group `hamu.metrics`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.plugins import with_plugins

BySet = Mapping[str, Predictions] | Mapping[str, TokenPredictions]


class Metric(ABC):
    """One figure of a model. Subclass it, name it in an entry point, and it stands in every report.

    Attributes:
        name: what reports call it.
    """

    name: ClassVar[str]

    @abstractmethod
    def measure(self, predictions: BySet, reference: BySet | None) -> float | None:
        """Measure it.

        Args:
            predictions: by set: "retain", "forget", and "test" where there is one; `Predictions` of a classifier,
                `TokenPredictions` of a language model.
            reference: those of a retain model for the same sets, where one is given.

        Returns:
            The figure, None if it cannot be measured here.
        """


def metric_classes() -> dict[str, type[Metric]]:
    """All metrics of installed packages, by name."""
    ours: tuple[type[Metric], ...] = ()
    return with_plugins(ours, "hamu.metrics", "metric")


def further_figures(predictions: BySet, reference: BySet | None) -> dict[str, dict[str, float | None]]:
    """What these metrics measure, as `metrics` of a report; nothing if there are none."""
    found = {name: cls().measure(predictions, reference) for name, cls in metric_classes().items()}
    return {"metrics": found} if found else {}
