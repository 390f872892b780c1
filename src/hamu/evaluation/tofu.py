"""The evaluation of TOFU (Maini et al. 2024): is it forgotten, and is everything else still known?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hamu.data import TextCollator, TextRecords, encode
from hamu.data.forget_sets import draw_positions
from hamu.errors import HamuError
from hamu.evaluation.generation import MAX_NEW_TOKENS, generate_answers, rouge_l_recall
from hamu.evaluation.likelihood import (
    model_utility,
    normalized_probabilities,
    probabilities,
    truth_ratio_scores,
    truth_ratios,
)
from hamu.evaluation.predictions import TokenPredictions, predict_tokens

PARAPHRASED, PERTURBED = "paraphrased_answer", "perturbed_answer"
_TERMS = ("probability", "rouge", "truth_ratio")
_UTILITY_SETS = ("retain", "real_authors", "world_facts")
_OUTSIDE_SETS = (
    "real_authors",
    "world_facts",
)  # known from pre-training; a probability there is one among options


@dataclass(frozen=True)
class TofuSets:
    """Questions and answers to evaluate on; None is left out.

    Each record has the fields `perturbed_answer` (wrong answers) and, if there is one, `paraphrased_answer`.

    Attributes:
        forget: what is to be forgotten.
        retain: what is to be kept.
        real_authors: questions about authors who exist.
        world_facts: questions about the world.
    """

    forget: TextRecords | None = None
    retain: TextRecords | None = None
    real_authors: TextRecords | None = None
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
    """The figures of TOFU, ready for JSON.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer, with a padding token.
        sets: what to evaluate on.
        batch_size: records per forward pass.
        max_length: longer records are cut at their end.
        most: generate for this many records of each set at most, drawn at random; None for all.
        seed: seed of that draw.
        generate: whether to generate answers at all; it takes most of the time.
        max_new_tokens: the longest generated answer, see `generate_answers`.

    Returns:
        For each given set:

        - `records`: their number, and `generated`, for how many of them an answer was generated;
        - `probability`: the mean of `probabilities`; for real authors and world facts of `normalized_probabilities`;
        - `rouge`: the mean ROUGE-L recall of the generated answers (None without them);
        - `truth_ratio`: the mean of `truth_ratio_scores`, the right answer being the paraphrased one, or the answer
          itself where a set has no paraphrases;
        - `truth_ratios` (forget set alone): R of each record, which `forget_quality` compares with a retain model's.

        `model_utility` is the harmonic mean of the nine values on retain set, real authors and world facts (None if one
        is missing). `model_utility_probability` is the probability on the retain set (None without it): the row "model
        utility (probability)" of the paper HAMU, read as the retain set's probability term of the utility, for the
        paper does not define it further.

    Raises:
        HamuError: if a record has no perturbed answer, or only some have a paraphrased one.
    """
    report: dict[str, Any] = {}
    for name in (field.name for field in fields(sets)):
        texts = getattr(sets, name)
        if texts is not None and len(texts):
            report[name] = _likelihoods(model, tokenizer, name, texts, batch_size, max_length)
            chosen = _positions_in_order(len(texts), most, seed) if generate else []
            report[name]["generated"] = len(chosen)
            report[name]["rouge"] = None
            if len(chosen):
                asked = texts.select(chosen)
                data = encode(asked, tokenizer, max_length)
                answers = generate_answers(model, tokenizer, data, batch_size, max_new_tokens)
                report[name]["rouge"] = (
                    rouge_l_recall(answers, [r.answer for r in asked.records]).mean().item()
                )
    nine = [report[name][key] for name in _UTILITY_SETS if name in report for key in _TERMS]
    complete = len(nine) == len(_UTILITY_SETS) * len(_TERMS) and None not in nine
    report["model_utility"] = model_utility(nine) if complete else None
    report["model_utility_probability"] = (
        report["retain"]["probability"] if "retain" in report else None
    )
    return report


def _likelihoods(
    model: Any, tokenizer: Any, name: str, texts: TextRecords, batch_size: int, max_length: int
) -> dict[str, Any]:
    """All figures that need no generation."""

    def predicted(records: TextRecords) -> TokenPredictions:
        data = encode(records, tokenizer, max_length)
        return predict_tokens(model, data, batch_size, TextCollator())

    answer, wrong, owner = predicted(texts), predicted(texts.answering(PERTURBED)), _owners(texts)
    paraphrases = _paraphrases(texts)
    ratios = truth_ratios(answer if paraphrases is None else predicted(paraphrases), wrong, owner)
    p = (
        normalized_probabilities(answer, wrong, owner)
        if name in _OUTSIDE_SETS
        else probabilities(answer)
    )
    figures: dict[str, Any] = {
        "records": len(texts),
        "probability": p.mean().item(),
        "truth_ratio": truth_ratio_scores(ratios, for_forget=name == "forget").mean().item(),
    }
    return figures | ({"truth_ratios": ratios.tolist()} if name == "forget" else {})


def _owners(texts: TextRecords) -> Tensor:
    """The record that each perturbed answer belongs to."""
    counts = [len(texts.select([i]).answering(PERTURBED)) for i in range(len(texts))]
    return torch.arange(len(texts)).repeat_interleave(torch.tensor(counts))


def _paraphrases(texts: TextRecords) -> TextRecords | None:
    """The right answers in other words; None if no record has one."""
    if not any(record.fields.get(PARAPHRASED) for record in texts.records):
        return None
    found = texts.answering(PARAPHRASED)
    if len(found) != len(texts):
        raise HamuError(
            f"{texts.source} has {len(found)} paraphrased answers for {len(texts)} records; give one each"
        )
    return found


def _positions_in_order(length: int, most: int | None, seed: int) -> list[int]:
    """At most this many positions, drawn at random and then sorted."""
    drawn = draw_positions(length, most, seed)
    return list(range(length)) if drawn is None else sorted(drawn)
