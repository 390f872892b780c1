"""Everything that is measured about a language model after (or before) unlearning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hamu.evaluation.generation import rouge_l_recall
from hamu.evaluation.likelihood import probabilities
from hamu.evaluation.predictions import TokenPredictions
from hamu.evaluation.text_membership import text_membership


def text_report(
    predictions: Mapping[str, TokenPredictions],
    answers: Mapping[str, Sequence[str]] | None = None,
    *,
    texts: Mapping[str, Sequence[str]],
    k: float = 0.2,
) -> dict[str, Any]:
    """The figures of a language model, ready for JSON.

    Args:
        predictions: by set: "retain", "forget", and "test" where there is data that was never trained on.
        answers: what the model generated for the records of some of these sets.
        texts: the right answers of "forget" and "test", and of each set in `answers`.
        k: the share of least likely tokens that Min-K% looks at.

    Returns:
        For each set `loss` (mean -log p over scored tokens), `accuracy` (share of scored tokens that are the most
        likely one), `probability` (mean over records, see `probabilities`), `records`, `tokens`, and with answers
        `rouge` (mean ROUGE-L recall over records); and `membership_inference`, the AUC of each attack (None without
        test data).
    """
    report: dict[str, Any] = {name: _figures(p) for name, p in predictions.items() if p.records}
    for name, generated in (answers or {}).items():
        if name in report:
            report[name]["rouge"] = rouge_l_recall(generated, texts[name]).mean().item()
    report["membership_inference"] = None
    if "test" in predictions:
        report["membership_inference"] = text_membership(
            predictions["forget"], predictions["test"], texts["forget"], texts["test"], k
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
