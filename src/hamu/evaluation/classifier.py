"""Everything that is measured about a classifier after (or before) unlearning. All figures are means over samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

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
        target_class: the class that is being forgotten, if one is; adds the set "test_without_class", the test data of
            all other classes. Where only a part of it goes, it is still known, and "test" is what is to stay.
        reference: predictions of a retain model (retrained without the forget set) for the same sets.
        seed: seed of the membership inference.

    Returns:
        For each set `loss` (mean cross-entropy), `accuracy` (share of samples), `samples`, `per_class_loss` and
        `per_class_accuracy`; `membership_inference` (None without test data). With a reference `against_retain_model`,
        the differences in each set, see there; `against_retain_model_per_class`, by set and class; and
        `retain_model`, with the reference's own `membership_inference` and the `membership_inference_difference` of
        `accuracy` and `auc`, ours less its (None where one of them is).

    Raises:
        HamuError: if the retain model has another number of classes.
    """
    for name, ours in predictions.items() if reference is not None else ():
        if ours.logits.shape[-1] != reference[name].logits.shape[-1]:
            raise HamuError(
                f"the model has {ours.logits.shape[-1]} classes, the retain model {reference[name].logits.shape[-1]}; "
                f"both need the same"
            )
    sets, others = (_with_test_without(one, target_class) for one in (predictions, reference or {}))
    report: dict[str, Any] = {
        name: _figures(p, classes) for name, p in sets.items() if len(p.labels)
    }
    report["membership_inference"] = _inference(predictions, seed)
    if reference is not None:
        pairs = {name: (ours, others[name]) for name, ours in sets.items() if len(ours.labels)}
        report["against_retain_model"] = {name: _against(*pair) for name, pair in pairs.items()}
        report["against_retain_model_per_class"] = {
            name: _per_class(*pair, classes) for name, pair in pairs.items()
        }
        theirs = _inference(reference, seed)
        report["retain_model"] = {
            "membership_inference": theirs,
            "membership_inference_difference": _difference(report["membership_inference"], theirs),
        }
    return report


def _with_test_without(
    predictions: Mapping[str, Predictions], label: int | None
) -> dict[str, Predictions]:
    """All sets, and the test data of all other classes."""
    found = dict(predictions)
    if label is not None and "test" in found:
        found["test_without_class"] = _of(found["test"], found["test"].labels != label)
    return found


def _inference(predictions: Mapping[str, Predictions], seed: int) -> dict[str, Any] | None:
    if "test" not in predictions:
        return None
    found = membership_inference(predictions["forget"], predictions["test"], seed)
    return None if found is None else asdict(found)


def _difference(
    ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> dict[str, float] | None:
    if ours is None or theirs is None:
        return None
    return {key: ours[key] - theirs[key] for key in ("accuracy", "auc")}


def _figures(predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
    by_class = {name: _of(predictions, members) for name, members in _members(predictions, classes)}
    return {
        "loss": predictions.losses.mean().item(),
        "accuracy": predictions.correct.double().mean().item(),
        "samples": len(predictions.labels),
        "per_class_loss": {name: one.losses.mean().item() for name, one in by_class.items()},
        "per_class_accuracy": {
            name: one.correct.double().mean().item() for name, one in by_class.items()
        },
    }


def _members(predictions: Predictions, classes: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Of each class that there is, which samples are of it, [N] bool."""
    for number, name in enumerate(classes):
        members = predictions.labels == number
        if members.any():
            yield name, members


def _per_class(
    ours: Predictions, reference: Predictions, classes: Sequence[str]
) -> dict[str, dict[str, float]]:
    return {
        name: _against(_of(ours, among), _of(reference, among))
        for name, among in _members(ours, classes)
    }


def _against(ours: Predictions, reference: Predictions) -> dict[str, float]:
    """Differences to the retain model; KL is the mean of KL(p_retain_model ‖ p_ours)."""
    kl = nn.functional.kl_div(
        ours.log_probabilities, reference.log_probabilities, reduction="batchmean", log_target=True
    )
    agree = ours.logits.argmax(-1) == reference.logits.argmax(-1)
    return {
        "loss_difference": (ours.losses.mean() - reference.losses.mean()).item(),
        "accuracy_difference": (
            ours.correct.double().mean() - reference.correct.double().mean()
        ).item(),
        "kl": kl.item(),
        "agreement": agree.double().mean().item(),
    }


def _of(predictions: Predictions, chosen: Tensor) -> Predictions:
    """Those of some samples, chosen by [N] bool."""
    return Predictions(predictions.logits[chosen], predictions.labels[chosen])
