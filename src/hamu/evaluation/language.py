"""Everything that is measured about a language model after (or before) unlearning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hamu.evaluation.likelihood import probabilities
from hamu.evaluation.predictions import TokenPredictions
from hamu.evaluation.text_membership import text_membership


def text_report(
    predictions: Mapping[str, TokenPredictions], *, texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The figures of a language model, ready for JSON.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is data that was never trained on.
        texts: the right answers of "forget" and "test".

    Returns:
        For each set `loss` (mean -log p over scored tokens), `accuracy` (share of scored tokens that are the most
        likely one), `probability` (mean over records, see `probabilities`), `records` and `tokens`; and
        `membership_inference`, the AUC of each attack of `text_membership` (None without test data, and for an attack
        that has none).
    """
    report: dict[str, Any] = {name: _figures(p) for name, p in predictions.items() if p.records}
    report["membership_inference"] = None
    if "test" in predictions:
        report["membership_inference"] = text_membership(
            predictions["forget"], predictions["test"], texts["forget"], texts["test"]
        )
    return report


def _figures(predictions: TokenPredictions) -> dict[str, Any]:
    return {
        "loss": predictions.losses.mean().item(),
        "accuracy": predictions.correct.double().mean().item(),
        "probability": probabilities(predictions).mean().item(),
        "records": predictions.records,
        "tokens": len(predictions.losses),
    }
