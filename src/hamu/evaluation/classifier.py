"""Everything that is measured about a classifier after (or before) unlearning. All figures are means over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from hamu.errors import HamuError
from hamu.evaluation.membership import membership_inference
from hamu.evaluation.predictions import Predictions


def classifier_report(
    predictions: Mapping[str, Predictions],
    classes: Sequence[str],
    target_class: int | None = None,
    reference: Mapping[str, Predictions] | None = None,
    seed: int = 42,
) -> dict[str, Any]:
    """The figures of a classifier, ready for JSON.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is one.
        classes: the class names.
        target_class: the class that is being forgotten as a whole, if one is; adds the set "test_without_class", the
            test data of all other classes.
        reference: predictions of a retain model (retrained without the forget set) for the same sets.
        seed: seed of the membership inference.

    Returns:
        For each set `loss` (mean cross-entropy), `accuracy` (share of samples), `samples` and `per_class_accuracy`;
        `membership_inference` (None without test data); and with a reference `against_retain_model`.

    Raises:
        HamuError: if the retain model has another number of classes.
    """
    for name, theirs in (reference or {}).items():
        if theirs.logits.shape[-1] != predictions[name].logits.shape[-1]:
            raise HamuError(
                f"the model has {predictions[name].logits.shape[-1]} classes, the retain model "
                f"{theirs.logits.shape[-1]}; both need the same"
            )
    sets = dict(predictions)
    if target_class is not None and "test" in sets:
        sets["test_without_class"] = _without(sets["test"], target_class)
    report: dict[str, Any] = {name: _figures(p, classes) for name, p in sets.items() if len(p.labels)}
    report["membership_inference"] = None
    if "test" in predictions:
        inference = membership_inference(predictions["forget"], predictions["test"], seed)
        report["membership_inference"] = None if inference is None else asdict(inference)
    if reference is not None:
        report["against_retain_model"] = {name: _against(predictions[name], reference[name]) for name in predictions}
    return report


def _figures(predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
    per_class = {
        name: predictions.correct[members].double().mean().item()
        for number, name in enumerate(classes)
        if (members := predictions.labels == number).any()
    }
    return {
        "loss": predictions.losses.mean().item(),
        "accuracy": predictions.correct.double().mean().item(),
        "samples": len(predictions.labels),
        "per_class_accuracy": per_class,
    }


def _against(ours: Predictions, reference: Predictions) -> dict[str, float]:
    """Differences to the retain model; KL is the mean of KL(p_retain_model ‖ p_ours)."""
    kl = nn.functional.kl_div(
        ours.log_probabilities, reference.log_probabilities, reduction="batchmean", log_target=True
    )
    agree = ours.logits.argmax(-1) == reference.logits.argmax(-1)
    return {
        "loss_difference": (ours.losses.mean() - reference.losses.mean()).item(),
        "accuracy_difference": (ours.correct.double().mean() - reference.correct.double().mean()).item(),
        "kl": kl.item(),
        "agreement": agree.double().mean().item(),
    }


def _without(predictions: Predictions, label: int) -> Predictions:
    others = (predictions.labels != label).nonzero().flatten()
    return Predictions(torch.index_select(predictions.logits, 0, others), predictions.labels[others])
