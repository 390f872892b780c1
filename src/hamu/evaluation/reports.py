"""Reports of a model's figures, ready for JSON: classifiers, language models, figures of other
packages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from torch import Tensor, nn

from hamu.core.plugins import made, plugins
from hamu.errors import HamuError
from hamu.evaluation.membership import membership_inference, text_membership
from hamu.evaluation.predictions import Predictions, TokenPredictions, probabilities

BySet = Mapping[str, Predictions] | Mapping[str, TokenPredictions]
_logger = logging.getLogger(__name__)


def classifier_report(
    predictions: Mapping[str, Predictions],
    classes: Sequence[str],
    target_class: int | None = None,
    reference: Mapping[str, Predictions] | None = None,
    seed: int = 42,
) -> dict[str, Any]:
    """Figures of a classifier. All are means over samples.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is one.
        classes: the class names.
        target_class: the class to forget, if there is one; adds the set "test_without_class", the
            test data of all other classes. If only a part of the class goes, "test" measures what
            should stay.
        reference: predictions of a retain model (retrained without the forget set) for the same
            sets.
        seed: seed of the membership inference.

    Returns:
        For each set `loss` (mean cross-entropy), `accuracy` (share of samples), `samples`,
        `per_class_loss` and `per_class_accuracy`; `membership_inference` (None without test data).
        With a reference also, by set (and class), `against_retain_model`
        (`against_retain_model_per_class`): the differences of loss and accuracy, ours less its own,
        `kl`, the mean of KL(p_retain_model ‖ p_ours), and `agreement`, the share of samples with
        the same most likely class; and `retain_model`, with its own `membership_inference` and the
        `membership_inference_difference` of `accuracy` and `auc`, ours less its own (None where one
        is None).

    Raises:
        HamuError: if the retain model has another number of classes.
    """
    for name, ours in predictions.items() if reference else ():
        counts = ours.logits.shape[-1], (reference or {})[name].logits.shape[-1]
        if counts[0] != counts[1]:
            raise HamuError(
                f"the model has {counts[0]} classes, the retain model {counts[1]}; "
                f"both need the same"
            )
    sets, others = dict(predictions), dict(reference or {})
    if target_class is not None and "test" in sets:
        for found in filter(None, (sets, others)):
            found["test_without_class"] = _of(found["test"], found["test"].labels != target_class)
    sets = {name: one for name, one in sets.items() if len(one.labels)}
    report: dict[str, Any] = {
        name: {
            **_figures(one),
            "samples": len(one.labels),
            **{
                f"per_class_{figure}": {
                    key: _figures(_of(one, among))[figure]
                    for key, among in _members(one, classes).items()
                }
                for figure in ("loss", "accuracy")
            },
        }
        for name, one in sets.items()
    }
    report["membership_inference"] = inference = _inference(predictions, seed)
    if reference is None:
        return report
    report["against_retain_model"] = {n: _against(one, others[n]) for n, one in sets.items()}
    report["against_retain_model_per_class"] = {
        name: {
            key: _against(_of(one, among), _of(others[name], among))
            for key, among in _members(one, classes).items()
        }
        for name, one in sets.items()
    }
    theirs = _inference(reference, seed)
    difference = None
    if inference is not None and theirs is not None:
        difference = {key: inference[key] - theirs[key] for key in ("accuracy", "auc")}
    report["retain_model"] = {
        "membership_inference": theirs,
        "membership_inference_difference": difference,
    }
    return report


def text_report(
    predictions: Mapping[str, TokenPredictions], *, texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Figures of a language model.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is data that was never
            trained on.
        texts: the right answers of "forget" and "test".

    Returns:
        For each set `loss` (mean -log p over scored tokens), `accuracy` (share of scored tokens
        that are the most likely one), `probability` (mean over records, see `probabilities`),
        `records` and `tokens`; and `membership_inference`, the AUC of each attack of
        `text_membership` (None without test data, and for an attack that has none).
    """
    report: dict[str, Any] = {
        name: {
            **_figures(one),
            "probability": probabilities(one).mean().item(),
            "records": one.records,
            "tokens": len(one.losses),
        }
        for name, one in predictions.items()
        if one.records
    }
    report["membership_inference"] = None
    if "test" in predictions:
        report["membership_inference"] = text_membership(
            predictions["forget"], predictions["test"], texts["forget"], texts["test"]
        )
    return report


def _inference(predictions: Mapping[str, Predictions], seed: int) -> dict[str, Any] | None:
    if "test" not in predictions:
        return None
    found = membership_inference(predictions["forget"], predictions["test"], seed)
    return None if found is None else asdict(found)


def _figures(predictions: Predictions | TokenPredictions) -> dict[str, float]:
    accuracy = predictions.correct.double().mean().item()
    return {"loss": predictions.losses.mean().item(), "accuracy": accuracy}


def _members(predictions: Predictions, classes: Sequence[str]) -> dict[str, Tensor]:
    """Samples of each class that occurs, [N] bool."""
    members = {name: predictions.labels == number for number, name in enumerate(classes)}
    return {name: among for name, among in members.items() if among.any()}


def _of(predictions: Predictions, chosen: Tensor) -> Predictions:
    return Predictions(predictions.logits[chosen], predictions.labels[chosen])


def _against(ours: Predictions, reference: Predictions) -> dict[str, float]:
    """Differences to the retain model, see `classifier_report`."""
    kl = nn.functional.kl_div(
        ours.log_probabilities, reference.log_probabilities, reduction="batchmean", log_target=True
    )
    agree = ours.logits.argmax(-1) == reference.logits.argmax(-1)
    right, theirs = ours.correct.double(), reference.correct.double()
    return {
        "loss_difference": (ours.losses.mean() - reference.losses.mean()).item(),
        "accuracy_difference": (right.mean() - theirs.mean()).item(),
        "kl": kl.item(),
        "agreement": agree.double().mean().item(),
    }


class Metric(ABC):
    """Figure of a model from another package, which names the class in an entry point of
    `hamu.metrics`.

    Attributes:
        name: its name in every report.
    """

    name: ClassVar[str]

    @abstractmethod
    def measure(self, predictions: BySet, reference: BySet | None) -> float | None:
        """Measure the figure.

        Args:
            predictions: by set: "retain", "forget", and "test" where there is one; `Predictions` of
                a classifier, `TokenPredictions` of a language model.
            reference: those of a retain model for the same sets, if there is one.

        Returns:
            The figure, None if these data do not allow it.
        """


def metric_classes() -> dict[str, type[Metric]]:
    """Load all metrics of installed packages, by name.

    Raises:
        HamuError: if one cannot be loaded: every report has them all.
    """
    return plugins("hamu.metrics", "metric", needs_all=True)


def build_metrics() -> dict[str, Metric]:
    """Make all metrics of installed packages, by name; called before a run, to find a broken one
    early.

    Raises:
        HamuError: if one cannot be loaded or made.
    """
    return {name: made("metric", cls) for name, cls in metric_classes().items()}


def further_figures(
    predictions: BySet, reference: BySet | None
) -> dict[str, dict[str, float | None]]:
    """Figures of these metrics, as `metrics` of a report; empty if there are none.

    A metric that fails gives None and a warning, so that a run keeps its other figures.
    """
    try:
        metrics = build_metrics()
    except HamuError as error:  # a run refuses it at its start; reading a finished one may not
        _logger.warning("warning: %s; nothing further is measured", error)
        return {}
    found: dict[str, float | None] = {}
    for name, metric in metrics.items():
        found[name] = None
        try:
            value = metric.measure(predictions, reference)
            found[name] = None if value is None else float(value)
        except Exception as error:  # its text may quote the data
            kind = type(error).__name__
            _logger.warning("warning: the metric %s is not measured: it ended in %s", name, kind)
    return {"metrics": found} if found else {}
