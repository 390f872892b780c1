"""Figures that other packages measure beside ours. They name theirs with an entry point in group `hamu.metrics`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from hamu.core.plugins import made, with_plugins
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions

_logger = logging.getLogger(__name__)

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
    """All metrics of installed packages, by name.

    Raises:
        HamuError: if one cannot be loaded: they all stand in every report.
    """
    ours: tuple[type[Metric], ...] = ()
    return with_plugins(ours, "hamu.metrics", "metric", needs_all=True)


def build_metrics() -> dict[str, Metric]:
    """All metrics of installed packages, by name; made before a run, so that one that is broken costs none.

    Raises:
        HamuError: if one cannot be loaded or made.
    """
    return {name: made("metric", cls) for name, cls in metric_classes().items()}


def further_figures(
    predictions: BySet, reference: BySet | None
) -> dict[str, dict[str, float | None]]:
    """What these metrics measure, as `metrics` of a report; nothing if there are none.

    A metric that fails is not measured, and a warning says so: what came before it is not lost.
    """
    try:
        metrics = build_metrics()
    except (
        HamuError
    ) as error:  # a run is refused before it begins; here it may be one that is only looked at
        _logger.warning("warning: %s; nothing further is measured", error)
        return {}
    found = {
        name: _measured(name, metric, predictions, reference) for name, metric in metrics.items()
    }
    return {"metrics": found} if found else {}


def _measured(
    name: str, metric: Metric, predictions: BySet, reference: BySet | None
) -> float | None:
    try:
        value = metric.measure(predictions, reference)
        return None if value is None else float(value)
    except Exception as error:  # its text may quote the data
        _logger.warning(
            "warning: the metric %s is not measured: it ended in %s", name, type(error).__name__
        )
        return None
