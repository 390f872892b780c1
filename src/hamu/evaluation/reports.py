"""Reports of a model's figures, ready for JSON, with bootstrap intervals and foreign metrics."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import prod
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hamu.core.plugins import made, plugins
from hamu.errors import HamuError
from hamu.evaluation.membership import (
    AttackScores,
    loss_attack,
    membership_inference,
    text_membership,
)
from hamu.evaluation.memorization import exact_memorization, extraction_strength
from hamu.evaluation.predictions import Predictions, TokenPredictions, probabilities

BySet = Mapping[str, Predictions] | Mapping[str, TokenPredictions]
_LEVELS = (0.025, 0.975)
_REPLICATES = 1000
_TOFU_SETS = {"forget": "forget", "retain": "retain", "real_authors": "ra", "world_facts": "wf"}
_logger = logging.getLogger(__name__)


def classifier_report(
    predictions: Mapping[str, Predictions],
    classes: Sequence[str],
    target_class: int | None = None,
    reference: Mapping[str, Predictions] | None = None,
    seed: int = 42,
) -> dict[str, Any]:
    """Figures of a classifier, means over samples, by the formulas of docs/metrics.md.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is one.
        classes: the class names.
        target_class: the class to forget, if there is one; adds the set "test_without_class", the
            test data of all other classes.
        reference: predictions of a retain model for the same sets.
        seed: seed of the membership inference.

    Raises:
        HamuError: if the retain model has another number of classes.
    """
    report: dict[str, Any] = {}
    of_sets: dict[str, Any] = {}
    of_classes: dict[str, Any] = {}
    for name, ours in predictions.items():
        own = {"loss": ours.losses, "accuracy": ours.correct.double()}
        against = {} if reference is None else _against(ours, reference[name])
        sets = {name: torch.ones_like(ours.correct)}
        if name == "test" and target_class is not None:
            rest = ours.labels.ne(target_class)
            sets |= {"test_without_class": rest} if rest.any() else {}
        for key, chosen in sets.items():
            by_class = {name: chosen & (ours.labels == n) for n, name in enumerate(classes)}
            by_class = {name: places for name, places in by_class.items() if places.any()}
            report[key] = _means(own, chosen) | {"samples": int(chosen.sum())}
            for figure, values in own.items():
                means = {name: values[places].mean().item() for name, places in by_class.items()}
                report[key][f"per_class_{figure}"] = means
            of_sets[key] = _means(against, chosen)
            of_classes[key] = {name: _means(against, at) for name, at in by_class.items()}
    report["membership_inference"] = inference = _inference(predictions, seed)
    scores = "test" in predictions and loss_attack(predictions["forget"], predictions["test"], seed)
    report["metrics"] = {"tpr_at_1_fpr": scores.tpr if scores else None}
    if reference is None:
        return report
    found, difference = _inference(reference, seed), None
    if inference is not None and found is not None:
        difference = {key: inference[key] - found[key] for key in ("accuracy", "auc")}
    test = "test" if target_class is None else "test_without_class"
    report["metrics"] |= _against_retraining(of_sets, test, difference)
    retain_model = {"membership_inference": found, "membership_inference_difference": difference}
    against_both = {"against_retain_model": of_sets, "against_retain_model_per_class": of_classes}
    return report | against_both | {"retain_model": retain_model}


def _means(values: Mapping[str, Tensor], chosen: Tensor) -> dict[str, float]:
    return {name: each[chosen].mean().item() for name, each in values.items()}


def _against(ours: Predictions, reference: Predictions) -> dict[str, Tensor]:
    """Figures of each sample against the retain model, [N] float64."""
    counts = ours.logits.shape[-1], reference.logits.shape[-1]
    if counts[0] != counts[1]:
        raise HamuError(
            f"the model has {counts[0]} classes, the retain model {counts[1]}; both need the same"
        )
    log_p = (ours.log_probabilities, reference.log_probabilities)
    agree = ours.logits.argmax(-1) == reference.logits.argmax(-1)
    agree &= ~(ours.logits + reference.logits).isnan().any(-1)  # its place is that of the NaN
    return {
        "loss_difference": ours.losses - reference.losses,
        "accuracy_difference": ours.correct.double() - reference.correct.double(),
        "kl": nn.functional.kl_div(*log_p, reduction="none", log_target=True).sum(-1),
        "agreement": agree.double(),
    }


def _inference(predictions: Mapping[str, Predictions], seed: int) -> dict[str, Any] | None:
    if "test" not in predictions:
        return None
    return membership_inference(predictions["forget"], predictions["test"], seed)


def _against_retraining(
    of_sets: Mapping[str, Mapping[str, float]], test: str, inference: Mapping[str, float] | None
) -> dict[str, float | None]:
    """Tug-of-war (Zhao et al. 2024) and average gap (Fan et al. 2024b); None without test data."""
    if test not in of_sets:
        return {"tug_of_war": None, "average_gap": None}
    gaps = [abs(of_sets[name]["accuracy_difference"]) for name in ("forget", "retain", test)]
    gap = None if inference is None else fmean([*gaps, abs(inference["accuracy"])])
    return {"tug_of_war": prod(1 - gap for gap in gaps), "average_gap": gap}


def text_report(
    predictions: Mapping[str, TokenPredictions],
    *,
    texts: Mapping[str, Sequence[str]],
    reference: Mapping[str, TokenPredictions] | None = None,
) -> dict[str, Any]:
    """Figures of a language model, by the formulas of docs/metrics.md.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is one.
        texts: of the sets forget and test, the scored text of each record, for the attack zlib.
        reference: predictions of a retain model for the same tokens, for the reference attack.
    """
    report: dict[str, Any] = {}
    for name, one in predictions.items():
        report[name] = {
            "loss": one.losses.mean().item(),
            "accuracy": one.correct.double().mean().item(),
            "probability": probabilities(one).mean().item(),
            "records": one.records,
            "tokens": len(one.losses),
        }
    report["membership_inference"] = None
    if "test" in predictions:
        report["membership_inference"] = text_membership(
            predictions["forget"], predictions["test"], texts["forget"], texts["test"]
        )
    report["metrics"] = {
        "extraction_strength": extraction_strength(predictions["forget"]).mean().item(),
        "exact_memorization": exact_memorization(predictions["forget"]).mean().item(),
    }
    if reference is not None and "test" in predictions:
        sets = [(reference[name], predictions[name]) for name in ("forget", "test")]
        # Carlini et al. 2021
        scores = (theirs.record_losses - ours.record_losses for theirs, ours in sets)
        report["metrics"]["mia_reference"] = AttackScores(*scores).auc
    return report


def intervals(
    predictions: Predictions | TokenPredictions,
    before: Predictions | TokenPredictions | None = None,
    *,
    seed: int = 42,
) -> dict[str, tuple[float, float]]:
    """95% percentile bootstrap intervals of a set's figures (Efron 1979) over its records.

    With `before`, of another model on the same records, they are of the change since. A figure that
    is not finite, over fewer than two records, or the same in every draw has no interval.
    """
    columns = _per_record(predictions)
    if before is not None:
        with np.errstate(invalid="ignore"):  # infinite in both
            for name, (value, _) in _per_record(before).items():
                columns[name][0] -= value
    finite = {name: pair for name, pair in columns.items() if np.isfinite(pair).all()}
    records = columns["loss"].shape[1]
    if records < 2 or not finite:
        return {}
    pairs = np.stack(list(finite.values()))
    rng = np.random.default_rng(seed)
    draws = (rng.integers(records, size=records) for _ in range(_REPLICATES))
    totals = np.stack([pairs @ np.bincount(draw, minlength=records) for draw in draws])
    ends = np.quantile(totals[..., 0] / totals[..., 1], _LEVELS, axis=0)
    found = zip(finite, ends.T.tolist(), strict=True)
    return {name: (low, high) for name, (low, high) in found if low < high}


def _per_record(predictions: Predictions | TokenPredictions) -> dict[str, NDArray[Any]]:
    """Numerator and denominator of each figure, [2, records]."""
    pairs: dict[str, tuple[Any, Any]]
    if isinstance(predictions, Predictions):
        pairs = {"loss": (predictions.losses, 1), "accuracy": (predictions.correct, 1)}
    else:
        tokens = predictions.lengths
        right = torch.stack([one.sum() for one in predictions.each(predictions.correct)])
        pairs = {
            "loss": (predictions.record_losses * tokens, tokens),
            "accuracy": (right, tokens),
            "probability": (probabilities(predictions), 1),
        }
    return {
        name: np.stack(np.broadcast_arrays(of, count)).astype(float)
        for name, (of, count) in pairs.items()
    }


class Metric(ABC):
    """Figure of a model from another package's entry point in `hamu.metrics`."""

    name: ClassVar[str]  # in every report

    @abstractmethod
    def measure(self, predictions: BySet, reference: BySet | None) -> float | None:
        """Measure the figure; None if these data do not allow it.

        Args:
            predictions: by set: "retain", "forget", and "test" where there is one; `Predictions` of
                a classifier, `TokenPredictions` of a language model.
            reference: those of a retain model for the same sets, if there is one.
        """


def build_metrics() -> dict[str, Metric]:
    """Make all metrics of installed packages, by name; a HamuError if one cannot be made."""
    classes = plugins("metric", needs_all=True)
    return {name: made("metric", cls) for name, cls in classes.items()}


def further_figures(
    predictions: BySet, reference: BySet | None, taken: Collection[str] = ()
) -> dict[str, float | None]:
    """Figures of these metrics by name; with a warning None for one that fails, and none for one
    whose name is `taken` by a figure of the report.
    """
    try:
        metrics = build_metrics()
    except HamuError as error:  # a run refuses it at its start; reading a finished one may not
        _logger.warning("warning: %s; nothing further is measured", error)
        return {}
    found: dict[str, float | None] = {}
    for name, metric in metrics.items():
        if name in taken:
            _logger.warning("warning: the metric %s has the name of another; rename it", name)
            continue
        found[name] = None
        try:
            value = metric.measure(predictions, reference)
            found[name] = None if value is None else float(value)
        except Exception as error:  # its text may quote the data
            kind = type(error).__name__
            _logger.warning("warning: the metric %s is not measured: it ended in %s", name, kind)
    return found


def open_unlearning(report: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a report with the keys and units of OpenUnlearning (Dorna et al. 2025).

    Its attacks take k = 40%, its PrivLeak is in percent, its gibberish figure is the clean share;
    TOFU's own sets take the place of the run's. A figure that was not measured has no key.
    `report` is evaluation.json of a language model.
    """
    metrics, inference = report["metrics"], report["membership_inference"] or {}
    leak, noise = report.get("privleak"), metrics.get("gibberish")
    found = {
        "privleak": None if leak is None else 100 * leak,
        "forget_Q_A_gibberish": None if noise is None else 1 - noise,
    }
    for name in ("extraction_strength", "exact_memorization", "mia_gradnorm", "mia_reference"):
        found[name] = metrics.get(name)
    for name in ("loss", "zlib", "min_k_40", "min_k_plus_plus_40"):
        found[f"mia_{name.removesuffix('_40')}"] = inference.get(name)
    for side in ("forget", "retain"):
        found[f"{side}_Q_A_Prob"] = report[side]["probability"]
        found[f"{side}_Q_A_ROUGE"] = metrics.get(f"{side}_rouge")
        for name in ("knowmem", "verbmem"):
            found[f"{side}_{name}_ROUGE"] = metrics.get(f"{side}_{name}")
    tofu = report.get("tofu", {})
    for name, short in _TOFU_SETS.items():
        outside = "" if name == short else "_normalised"
        ratio = "truth_ratio" if name == "forget" else "Truth_Ratio"
        keys = {"probability": f"Q_A_Prob{outside}", "rouge": "Q_A_ROUGE", "truth_ratio": ratio}
        own = {f"{short}_{key}": tofu.get(name, {}).get(of) for of, key in keys.items()}
        found |= {key: value for key, value in own.items() if value is not None}
    found |= {key: tofu.get(key) for key in ("forget_quality", "model_utility")}
    return {key: value for key, value in found.items() if value is not None}
