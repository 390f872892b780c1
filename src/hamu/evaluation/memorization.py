"""Memorization of texts: extraction, verbatim continuation, knowledge; and gibberish answers."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hamu.data import TextData
from hamu.evaluation.answers import generate_answers, rouge_l
from hamu.evaluation.predictions import TokenPredictions

_PROMPT, _CONTINUATION, _ANSWER = 200, 128, 32  # tokens, as in MUSE
_NEXT = re.compile(r"\n\n|\nQuestion|Question:")  # where MUSE ends an answer
_FEWEST = 20  # texts that tell language from gibberish
_MANY = 200  # texts that tell short answers too: with 50, of 10 characters 15 % were mistaken
_SHORT, _LONGER = 10, 40  # characters from which on an answer is judged, with many texts or few


def exact_memorization(predictions: TokenPredictions) -> Tensor:
    """(1/T) Σ_t 1[argmax p(· | x, y_<t) = y_t] of each record (Tirumala et al. 2022), float64.

    OpenUnlearning (Dorna et al. 2025) leaves out the last of the T tokens, the end of the sequence.
    """
    return torch.stack([right.double().mean() for right in predictions.each(predictions.correct)])


def extraction_strength(predictions: TokenPredictions) -> Tensor:
    """1 - k/T of each record, float64: greedy decoding after its first k tokens gives the others.

    k is the smallest such number (Carlini et al. 2021). OpenUnlearning (Dorna et al. 2025) leaves
    out the last of the T tokens, and gives 1/T where none fits; here that is 0.
    """
    each = predictions.each(predictions.correct)
    return torch.stack([right.flip(0).double().cumprod(0).sum() / len(right) for right in each])


def verbmem(model: Any, tokenizer: Any, data: TextData, batch_size: int = 64) -> Tensor:
    """ROUGE-L F1 of the greedy continuation of each record, [N] float64: MUSE's VerbMem.

    The model is given the first l tokens of a record, l the larger of its prompt and of half the
    record, at most 200; the next 128 are compared (Shi et al. 2024). For arguments see
    `generate_answers`.
    """
    starts, rests = [], []
    for tokens, start in zip(data.tokens, data.scored_from, strict=True):
        starts.append(max(start, min(_PROMPT, len(tokens) // 2)))
        rests.append(tokens[starts[-1] : starts[-1] + _CONTINUATION].tolist())
    expected = tokenizer.batch_decode(rests, skip_special_tokens=True)
    cut = replace(data, scored_from=tuple(starts))
    answers = generate_answers(model, tokenizer, cut, batch_size, _CONTINUATION)
    return rouge_l(answers, expected, "fmeasure")


def knowmem(answers: Sequence[str], references: Sequence[str], tokenizer: Any) -> Tensor:
    """ROUGE-L F1 of the first 32 tokens of each answer, [N] float64: MUSE's KnowMem.

    An answer ends at an empty line, or where the model goes on with a question of its own.
    """
    given = tokenizer(list(answers), add_special_tokens=False)["input_ids"]
    cut = tokenizer.batch_decode([one[:_ANSWER] for one in given])
    return rouge_l([_NEXT.split(one)[0] for one in cut], references, "fmeasure")


def gibberish(answers: Sequence[str], texts: Sequence[str]) -> float | None:
    """Share of answers, at least one, that are no language by their form; see docs/metrics.md.

    The trigram test is Σ log p(c_i | c_i-2, c_i-1) ≤ Σ log p(c_i) over an answer's characters, with
    trigrams interpolated with bigrams and unigrams by ½ each (by none without the context).
    `texts` are real ones of the same kind, such as right answers; None with fewer than 20.
    """
    if len(texts) < _FEWEST:
        return None
    least = _SHORT if len(texts) >= _MANY else _LONGER
    grams = [Counter(g for text in texts for g in _grams(text, n)) for n in (1, 2, 3)]
    starts = [Counter(g[:-1] for g in one.elements()) for one in grams]
    size = len(grams[0]) + 1  # and one for all other characters

    def order_gain(text: str) -> float:
        """Log likelihood of the trigrams over that of the characters."""
        gain = 0.0
        for runs in zip(*(_grams(text, n) for n in (1, 2, 3)), strict=True):
            alone = p = (grams[0][runs[0]] + 1) / (starts[0][""] + size)
            for n in (1, 2):
                seen = starts[n][runs[n][:-1]]
                p = p / 2 + grams[n][runs[n]] / seen / 2 if seen else p
            gain += math.log(p / alone)
        return gain

    def is_gibberish(text: str) -> bool:
        words = text.lower().split()
        pairs = list(pairwise(words))
        is_empty = not any(sign.isalnum() for sign in text)
        repeats = 2 * len(set(pairs)) < len(pairs)
        return is_empty or repeats or (len(text.strip()) >= least and order_gain(text) <= 0)

    return fmean(map(is_gibberish, answers))


def _grams(text: str, size: int) -> list[str]:
    """Runs of so many characters that end at each character of a text, and at its end."""
    padded = f"\n\n{text.strip()}\n"
    return [padded[end - size : end] for end in range(3, len(padded) + 1)]
