"""Reports of a model's figures, ready for JSON, with bootstrap intervals and foreign metrics."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    auc_or_none,
    loss_attack,
    membership_inference,
    reference_scores,
    text_membership,
)
from hamu.evaluation.memorization import exact_memorization, extraction_strength
from hamu.evaluation.predictions import Predictions, TokenPredictions, probabilities

BySet = Mapping[str, Predictions] | Mapping[str, TokenPredictions]
Ends = dict[str, tuple[float, float]]  # the low and the high end of each figure
_LEVELS = (0.025, 0.975)
_REPLICATES = 1000
_logger = logging.getLogger(__name__)
# Keys of OpenUnlearning (Dorna et al. 2025).
_OF_SETS = {"retain": "retain", "real_authors": "ra", "world_facts": "wf"}
_ATTACKS = {
    "mia_loss": "loss",
    "mia_zlib": "zlib",
    "mia_min_k": "min_k_40",
    "mia_min_k_plus_plus": "min_k_plus_plus_40",
}
_METRICS = {
    name: name
    for name in ("extraction_strength", "exact_memorization", "mia_gradnorm", "mia_reference")
} | {
    "forget_Q_A_ROUGE": "forget_rouge",
    "retain_Q_A_ROUGE": "retain_rouge",
    "forget_knowmem_ROUGE": "forget_knowmem",
    "retain_knowmem_ROUGE": "retain_knowmem",
    "forget_verbmem_ROUGE": "forget_verbmem",
}


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
    theirs = None if reference is None else _with_rest(reference, target_class)
    for name, ours in _with_rest(predictions, target_class).items():
        places = {key: (ours.labels == number) for number, key in enumerate(classes)}
        places = {key: chosen for key, chosen in places.items() if chosen.any()}
        by_class = {key: _figures(_of(ours, chosen)) for key, chosen in places.items()}
        report[name] = _figures(ours) | {"samples": len(ours.labels)}
        for figure in ("loss", "accuracy"):
            report[name][f"per_class_{figure}"] = {key: f[figure] for key, f in by_class.items()}
        if theirs is not None:
            of_sets[name] = _against(ours, theirs[name])
            of_classes[name] = {
                key: _against(_of(ours, chosen), _of(theirs[name], chosen))
                for key, chosen in places.items()
            }
    report["membership_inference"] = inference = _inference(predictions, seed)
    scores = "test" in predictions and loss_attack(predictions["forget"], predictions["test"], seed)
    report["metrics"] = {"tpr_at_1_fpr": scores.tpr if scores else None}
    if reference is None:
        return report
    found, difference = _inference(reference, seed), None
    if inference is not None and found is not None:
        difference = {key: inference[key] - found[key] for key in ("accuracy", "auc")}
    report["metrics"] |= _against_retraining(of_sets, difference)
    retain_model = {"membership_inference": found, "membership_inference_difference": difference}
    against = {"against_retain_model": of_sets, "against_retain_model_per_class": of_classes}
    return report | against | {"retain_model": retain_model}


def _against_retraining(
    of_sets: Mapping[str, Mapping[str, float]], inference: Mapping[str, float] | None
) -> dict[str, float | None]:
    """Tug-of-war (Zhao et al. 2024) and average gap (Fan et al. 2024b) to the retain model.

    With the accuracy gaps d of forget, retain and test set (without the class to forget): the
    product of their 1 - |d|, and the mean of the |d| and of the gap in membership inference.
    """
    test = "test_without_class" if "test_without_class" in of_sets else "test"
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
        texts: by set, the scored text of each record, for the attack zlib.
        reference: predictions of a retain model for the same sets, for the reference attack.
    """
    report: dict[str, Any] = {}
    for name, one in predictions.items():
        counts = {"records": one.records, "tokens": len(one.losses)}
        report[name] = _figures(one) | {"probability": probabilities(one).mean().item()} | counts
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
        both = (reference_scores(predictions[n], reference[n]) for n in ("forget", "test"))
        report["metrics"]["mia_reference"] = auc_or_none(*both)
    return report


def _with_rest(
    predictions: Mapping[str, Predictions], target_class: int | None
) -> dict[str, Predictions]:
    """All sets; with "test_without_class", if a class is to be forgotten and has others beside."""
    sets = dict(predictions)
    if target_class is not None and "test" in sets:
        rest = sets["test"].labels != target_class
        if rest.any():
            sets["test_without_class"] = _of(sets["test"], rest)
    return sets


def _of(predictions: Predictions, chosen: Tensor) -> Predictions:
    return Predictions(predictions.logits[chosen], predictions.labels[chosen])


def _figures(predictions: Predictions | TokenPredictions) -> dict[str, Any]:
    accuracy = predictions.correct.double().mean().item()
    return {"loss": predictions.losses.mean().item(), "accuracy": accuracy}


def _inference(predictions: Mapping[str, Predictions], seed: int) -> dict[str, Any] | None:
    if "test" not in predictions:
        return None
    found = membership_inference(predictions["forget"], predictions["test"], seed)
    return None if found is None else asdict(found)


def _against(ours: Predictions, reference: Predictions) -> dict[str, float]:
    counts = ours.logits.shape[-1], reference.logits.shape[-1]
    if counts[0] != counts[1]:
        raise HamuError(
            f"the model has {counts[0]} classes, the retain model {counts[1]}; both need the same"
        )
    kl = nn.functional.kl_div(
        ours.log_probabilities, reference.log_probabilities, reduction="batchmean", log_target=True
    )
    agree = ours.logits.argmax(-1) == reference.logits.argmax(-1)
    mine, theirs = _figures(ours), _figures(reference)
    differences = {f"{name}_difference": mine[name] - theirs[name] for name in mine}
    return {**differences, "kl": kl.item(), "agreement": agree.double().mean().item()}


def record_intervals(predictions: Predictions | TokenPredictions, *, seed: int = 42) -> Ends:
    """95% percentile bootstrap intervals of a set's figures (Efron 1979) over its records.

    The tokens of a text depend on each other, so each draw takes a text as a whole. A figure that
    is not finite, or over fewer than two records, has no interval.
    """
    return _intervals(_per_record(predictions), seed)


def change_intervals(
    before: Predictions | TokenPredictions,
    after: Predictions | TokenPredictions,
    *,
    seed: int = 42,
) -> Ends:
    """Paired intervals of the change of each figure between two models on the same records.

    A record's difficulty cancels in the difference, so these are narrower than those of both.
    """
    old, new = _per_record(before), _per_record(after)
    with np.errstate(invalid="ignore"):  # infinite in both
        changes = {name: np.stack([new[name][0] - of, count]) for name, (of, count) in old.items()}
    return _intervals(changes, seed)


def _per_record(predictions: Predictions | TokenPredictions) -> dict[str, NDArray[Any]]:
    """Numerator and denominator of each figure, [2, records]."""
    pairs: dict[str, tuple[Any, Any]]
    if isinstance(predictions, Predictions):
        pairs = {"loss": (predictions.losses, 1), "accuracy": (predictions.correct, 1)}
    else:
        tokens = predictions.lengths
        right = torch.zeros(len(tokens), dtype=torch.float64)
        right.index_add_(0, predictions.record, predictions.correct.double())
        pairs = {
            "loss": (predictions.record_losses * tokens, tokens),
            "accuracy": (right, tokens),
            "probability": (probabilities(predictions), 1),
        }
    return {
        name: np.stack(np.broadcast_arrays(of, count)).astype(float)
        for name, (of, count) in pairs.items()
    }


def _intervals(figures: Mapping[str, NDArray[Any]], seed: int) -> Ends:
    finite = {name: pair for name, pair in figures.items() if np.isfinite(pair).all()}
    records = next(iter(figures.values())).shape[1]
    if records < 2 or not finite:
        return {}
    columns = np.stack(list(finite.values()))
    rng = np.random.default_rng(seed)
    draws = (rng.integers(records, size=records) for _ in range(_REPLICATES))
    totals = np.stack([columns @ np.bincount(draw, minlength=records) for draw in draws])
    ends = np.quantile(totals[..., 0] / totals[..., 1], _LEVELS, axis=0)
    return {name: (low, high) for name, (low, high) in zip(finite, ends.T.tolist(), strict=True)}


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
    """Make all metrics of installed packages, by name.

    Raises:
        HamuError: if one cannot be loaded or made: every report has them all.
    """
    classes = plugins("hamu.metrics", "metric", needs_all=True)
    return {name: made("metric", cls) for name, cls in classes.items()}


def further_figures(predictions: BySet, reference: BySet | None) -> dict[str, float | None]:
    """Figures of these metrics by name; None and a warning for one that fails."""
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
    return found


def open_unlearning(report: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a report with the keys and units of OpenUnlearning's summary files.

    Its attacks take k = 40%, its PrivLeak is in percent, its gibberish figure is the clean share;
    TOFU's own sets take the place of the run's. A figure that was not measured has no key.

    Args:
        report: evaluation.json of a language model.
    """
    metrics, tofu = report["metrics"], report.get("tofu", {})
    found = {f"{side}_Q_A_Prob": report[side]["probability"] for side in ("forget", "retain")}
    found |= {key: metrics.get(name) for key, name in _METRICS.items()}
    inference = report["membership_inference"] or {}
    found |= {key: inference.get(name) for key, name in _ATTACKS.items()}
    leak, noise = report.get("privleak"), metrics.get("gibberish")
    found["privleak"] = None if leak is None else 100 * leak
    found["forget_Q_A_gibberish"] = None if noise is None else 1 - noise
    for name, short in {"forget": "forget", **_OF_SETS}.items():
        one = tofu.get(name, {})
        ratio = "forget_truth_ratio" if name == "forget" else f"{short}_Truth_Ratio"
        probability = "Prob" if name in ("forget", "retain") else "Prob_normalised"
        own = {
            f"{short}_Q_A_{probability}": one.get("probability"),
            f"{short}_Q_A_ROUGE": one.get("rouge"),
            ratio: one.get("truth_ratio"),
        }
        found |= {key: value for key, value in own.items() if value is not None}
    found |= {key: tofu.get(key) for key in ("forget_quality", "model_utility")}
    return {key: value for key, value in found.items() if value is not None}
