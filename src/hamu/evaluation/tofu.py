"""TOFU's evaluation (Maini et al. 2024): truth ratios, forget quality, model utility.

NLL is the mean -log p per answer token of a record, and exp(-NLL) its probability.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hamu.data import TextCollator, TextRecords, encode
from hamu.data.forget_sets import draw_positions
from hamu.errors import HamuError
from hamu.evaluation.generation import MAX_NEW_TOKENS, generate_answers, rouge_l_recall
from hamu.evaluation.predictions import TokenPredictions, predict_tokens, probabilities

PARAPHRASED, PERTURBED = "paraphrased_answer", "perturbed_answer"
_TERMS = ("probability", "rouge", "truth_ratio")
_OUTSIDE_SETS = ("real_authors", "world_facts")  # pre-training knowledge, judged among options


def normalized_probabilities(
    answer: TokenPredictions, wrong: TokenPredictions, owner: Tensor
) -> Tensor:
    """P / (p + Σ_j p_j) of each record, p = exp(-NLL), j its wrong answers; float64.

    `owner` is the record of each wrong answer. TOFU reports this for real authors and world facts.
    """
    odds = torch.exp(answer.record_losses[owner] - wrong.record_losses)  # p_j/p, never 0/0
    return 1.0 / (1.0 + odds.new_zeros(answer.records).index_add_(0, owner, odds))


def truth_ratios(
    paraphrase: TokenPredictions, perturbed: TokenPredictions, owner: Tensor
) -> Tensor:
    """R = exp(-mean_j NLL(perturbed_j)) / exp(-NLL(paraphrase)) of each record, float64.

    Small where the model prefers the truth, 1 where it is indifferent. The paper writes an
    arithmetic mean of the perturbed answers' probabilities; its published results take the
    geometric mean, as here.
    """
    losses = perturbed.record_losses
    sums = losses.new_zeros(paraphrase.records).index_add_(0, owner, losses)
    return torch.exp(paraphrase.record_losses - sums / owner.bincount(minlength=len(sums)))


def truth_ratio_scores(ratios: Tensor, for_forget: bool) -> Tensor:
    """min(R, 1/R) for the forget set, best where R is 1; otherwise max(0, 1 - R), best where 0."""
    return torch.minimum(ratios, 1.0 / ratios) if for_forget else (1.0 - ratios).clamp(min=0.0)


def model_utility(values: Sequence[float]) -> float:
    """Harmonic mean, 0 if a value is 0; of nine values, see `tofu_report`."""
    return float(statistics.harmonic_mean(values))


def forget_quality(ours: Sequence[float] | Tensor, reference: Sequence[float] | Tensor) -> float:
    """p-value of a two-sample Kolmogorov-Smirnov test between truth ratios R on the forget set.

    Args:
        ours, reference: R of each record under the unlearned model, and under a retain model, one
            retrained without the forget set. TOFU calls p > 0.05 good.
    """
    from scipy.stats import ks_2samp

    return float(ks_2samp(ours, reference).pvalue)


@dataclass(frozen=True)
class TofuSets:
    """Questions and answers to evaluate on; None leaves a set out.

    Each record has the field `perturbed_answer` (wrong answers), and maybe `paraphrased_answer`.
    """

    forget: TextRecords | None = None
    retain: TextRecords | None = None
    real_authors: TextRecords | None = None  # questions about authors who exist
    world_facts: TextRecords | None = None


def tofu_report(
    model: Any,
    tokenizer: Any,
    sets: TofuSets,
    batch_size: int = 64,
    max_length: int = 512,
    most: int | None = None,
    seed: int = 42,
    generate: bool = True,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, Any]:
    """Figures of TOFU, ready for JSON.

    Args:
        model, tokenizer: a causal language model, and its tokenizer.
        sets: the sets to evaluate on.
        batch_size: records per forward pass.
        max_length: cuts longer records at their end.
        most: generate for this many records of each set at most, drawn at random; None for all.
        seed: seed of that draw.
        generate: False generates no answers, which take most of the time.
        max_new_tokens: the longest generated answer, see `generate_answers`.

    Returns:
        For each given set `records` and `generated`, numbers; `probability`, the mean of
        `probabilities` (for real authors and world facts of `normalized_probabilities`); `rouge`,
        the mean ROUGE-L recall of the generated answers (None without them); `truth_ratio`, the
        mean of `truth_ratio_scores` with the paraphrased answers, or the answers themselves where a
        set has no paraphrases; for the forget set also `truth_ratios`, for `forget_quality`.
        `model_utility`, the harmonic mean of probability, rouge and truth ratio on retain set, real
        authors and world facts (None if one is missing); `model_utility_probability`, the
        probability on the retain set (a row of the paper HAMU, which does not define it further).

    Raises:
        HamuError: if a record has no perturbed answer, or only some have a paraphrased one.
    """
    report: dict[str, Any] = {}
    for name, texts in vars(sets).items():
        if texts is None:
            continue
        report[name] = figures = _likelihoods(model, tokenizer, name, texts, batch_size, max_length)
        drawn = draw_positions(len(texts), most, seed) if generate else []
        asked = texts if drawn is None else texts.select(sorted(drawn))
        figures |= {"generated": len(asked), "rouge": None}
        if len(asked):
            data = encode(asked, tokenizer, max_length)
            answers = generate_answers(model, tokenizer, data, batch_size, max_new_tokens)
            right = [record.answer for record in asked.records]
            figures["rouge"] = rouge_l_recall(answers, right).mean().item()
    nine = [report.get(n, {}).get(key) for n in ("retain", *_OUTSIDE_SETS) for key in _TERMS]
    return report | {
        "model_utility": None if None in nine else model_utility(nine),
        "model_utility_probability": nine[0],
    }


def _likelihoods(
    model: Any, tokenizer: Any, name: str, texts: TextRecords, batch_size: int, max_length: int
) -> dict[str, Any]:
    """All figures that need no generation."""

    def predicted(records: TextRecords) -> TokenPredictions:
        data = encode(records, tokenizer, max_length)
        return predict_tokens(model, data, batch_size, TextCollator())

    perturbed = texts.answering(PERTURBED)
    owner = torch.unique_consecutive(perturbed.rows, return_inverse=True)[1]
    answer, wrong = predicted(texts), predicted(perturbed)
    right = answer
    if any(record.fields.get(PARAPHRASED) for record in texts.records):
        paraphrases = texts.answering(PARAPHRASED)
        if len(paraphrases) != len(texts):
            raise HamuError(
                f"{texts.source} has {len(paraphrases)} paraphrased answers for {len(texts)} "
                f"records; give one each"
            )
        right = predicted(paraphrases)
    ratios = truth_ratios(right, wrong, owner)
    is_outside = name in _OUTSIDE_SETS
    p = normalized_probabilities(answer, wrong, owner) if is_outside else probabilities(answer)
    figures: dict[str, Any] = {
        "records": len(texts),
        "probability": p.mean().item(),
        "truth_ratio": truth_ratio_scores(ratios, for_forget=name == "forget").mean().item(),
    }
    return figures | ({"truth_ratios": ratios.tolist()} if name == "forget" else {})
