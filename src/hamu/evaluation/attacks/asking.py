"""Attacks that ask otherwise: after the first words of the right answer, and again and again."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import Any

import torch
from torch import Tensor

from hamu.data import TextData
from hamu.evaluation.generation import generate_answers, rouge_l_recall

Scores = dict[str, Tensor]


def prefilled(model: Any, tokenizer: Any, data: TextData, words: int, batch_size: int) -> Scores:
    """Greedy answers after the first words of the right answers, compared with what follows these words.

    At least one token of an answer is left to be said.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        data: records with prompts, if no words are given.
        words: of the right answer that are given.
        batch_size: prompts per batch.

    Returns:
        `rouge_l_recall` and `exact_match` (1 where the rest is the same text) of each record, [N].
    """
    starts = [_after(tokenizer, data, i, words) for i in range(len(data))]
    asked = replace(data, scored_from=tuple(starts))
    rests = _texts(tokenizer, asked)
    answers = generate_answers(model, tokenizer, asked, batch_size, _longest(asked))
    return _scores(answers, rests)


def sampled(
    model: Any, tokenizer: Any, data: TextData, samples: int, batch_size: int
) -> list[Scores]:
    """Scores of several answers to each prompt, drawn at temperature 1 from the whole vocabulary.

    Args:
        model, tokenizer, data, batch_size: see `prefilled`.
        samples: answers to each prompt.
    """
    rests = _texts(tokenizer, data)
    found = []
    for _ in range(samples):
        seed = int(torch.randint(2**31, ()))  # `generate_answers` leaves the random state as it was
        answers = generate_answers(
            model, tokenizer, data, batch_size, _longest(data), sampling_seed=seed
        )
        found.append(_scores(answers, rests))
    return found


def leak_at_k(scores: list[Tensor], k: int) -> float:
    """leak@k (Reisizadeh et al. 2025): the mean over records of the best score of k drawn answers.

    E[max of k out of the n that were drawn] without replacement, which has no bias: leak@1 is the mean of all
    answers, leak@n the mean of the best. Here the score is ROUGE-L recall, or exact match.

    Args:
        scores: of each draw, n times [N].
        k: at most n.
    """
    ascending = torch.stack(scores).double().sort(0).values
    n = len(ascending)
    shares = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return float((torch.tensor(shares, dtype=torch.float64) @ ascending).mean())


def has_prompts(data: TextData) -> bool:
    """True if each record has a prompt."""
    return all(start > 0 for start in data.scored_from)


def _after(tokenizer: Any, data: TextData, index: int, words: int) -> int:
    """The place behind the first words of an answer; its last token stays behind it."""
    tokens, start = data.tokens[index].tolist(), data.scored_from[index]
    last = len(tokens) - (2 if tokens[-1] == tokenizer.eos_token_id else 1)
    end = start
    while words and end < last and len(tokenizer.decode(tokens[start : end + 1]).split()) <= words:
        end += 1
    return min(end, max(start, last))


def _texts(tokenizer: Any, data: TextData) -> list[str]:
    """The text after each prompt."""
    pairs = zip(data.tokens, data.scored_from, strict=True)
    return [
        tokenizer.decode(tokens[start:].tolist(), skip_special_tokens=True)
        for tokens, start in pairs
    ]


def _longest(data: TextData) -> int:
    """The most tokens that follow a prompt: longer answers are not asked for, to save time."""
    return max(
        len(tokens) - start for tokens, start in zip(data.tokens, data.scored_from, strict=True)
    )


def _scores(answers: list[str], rests: list[str]) -> Scores:
    same = [answer.split() == rest.split() for answer, rest in zip(answers, rests, strict=True)]
    return {
        "rouge_l_recall": rouge_l_recall(answers, rests),
        "exact_match": torch.tensor(same, dtype=torch.float64),
    }
