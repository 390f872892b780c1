"""Answers that a language model generates, and their ROUGE-L recall."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hamu.core.forward import evaluating
from hamu.data import TextData
from hamu.errors import HamuError
from hamu.models.language import longest_text

MAX_NEW_TOKENS = 200  # TOFU's limit is 200 tokens with the prompt


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    data: TextData,
    batch_size: int = 64,
    max_new_tokens: int = MAX_NEW_TOKENS,
    *,
    sampling_seed: int | None = None,
) -> list[str]:
    """Answer each prompt with the most likely token at every step, until an end token.

    Neither the other prompts of a batch nor the right answers change an answer. Of the model's own
    generation settings only its end tokens count.

    Args:
        model: a causal language model with `generate`.
        tokenizer: the model's tokenizer.
        data: records encoded with loss_on="answer".
        batch_size: prompts per batch.
        max_new_tokens: the longest answer, shorter where the model's context ends before.
        sampling_seed: draws each token, at temperature 1 from the whole vocabulary.

    Returns:
        The answers in the data's order, without special tokens and without space around them.

    Raises:
        HamuError: if a record has no prompt.
    """
    prompts = [data.prompt(i) for i in range(len(data))]
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        row = data.rows[lengths.index(0)].item()
        raise HamuError(
            f"row {row} of {data.texts.source} has no prompt to answer; give questions, not plain "
            f"text"
        )
    device, ends = next(model.parameters()).device, _ends(model, tokenizer)
    pad = ends[0] if ends else 0  # a tokenizer's own may have no embedding in the model
    longest = longest_text(model) or math.inf
    room = [int(min(max_new_tokens, max(1, longest - n))) for n in lengths]
    answers = [""] * len(prompts)
    with evaluating(model), _settings(model, is_greedy=sampling_seed is None):
        if sampling_seed is not None:
            torch.manual_seed(sampling_seed)
        for places in _batches(lengths, room, batch_size):
            ids = _pad_left([prompts[i] for i in places], pad)
            mask = _pad_left([torch.ones_like(prompts[i]) for i in places], 0)
            generated = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=room[places[0]],
                use_cache=True,
                pad_token_id=pad,
                eos_token_id=ends or None,
            )
            rows = generated[:, ids.shape[1] :].tolist()
            written = [list(takewhile(lambda token: token not in ends, row)) for row in rows]
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text.strip()
    return answers


@contextmanager
def _settings(model: Any, *, is_greedy: bool) -> Iterator[None]:
    """Replace the model's own generation settings, which fill in whatever a call leaves open."""
    from transformers import GenerationConfig

    drawn = {} if is_greedy else {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
    is_adapter = hasattr(model, "get_base_model")  # its settings are those of its base
    inner = model.get_base_model() if is_adapter else model
    kept = inner.generation_config
    inner.generation_config = GenerationConfig(do_sample=not is_greedy, **drawn)
    try:
        yield
    finally:
        inner.generation_config = kept


def _batches(lengths: Sequence[int], room: Sequence[int], size: int) -> Iterator[list[int]]:
    """Batches of prompts of similar length, all with room for the same number of tokens."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(order, key=room.__getitem__):  # falls with the length
        places = list(group)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of a chat model's settings."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = [named] if isinstance(named, int) else list(named or [])
    return sorted({token for token in (tokenizer.eos_token_id, *named) if token is not None})


def _pad_left(sequences: list[Tensor], value: int) -> Tensor:
    return pad_sequence(sequences, batch_first=True, padding_value=value, padding_side="left")


def rouge_l_recall(answers: Sequence[str], references: Sequence[str]) -> Tensor:
    """ROUGE-L recall of each answer, [N] float64.

    The longest common subsequence's share of the reference's words, stemmed, without case (Lin
    2004), as in TOFU (Maini et al. 2024). That tokenizer reads only Latin letters without accents;
    references of mostly other letters are split by Unicode words, and scripts without spaces into
    characters. For a reference without a word it is 1 if the answer is equal, else 0.
    """
    from rouge_score.rouge_scorer import RougeScorer

    latin = RougeScorer(["rougeL"], use_stemmer=True)
    other = RougeScorer(["rougeL"], tokenizer=_UnicodeWords())

    def recall(answer: str, reference: str) -> float:
        signs = [sign for sign in reference if sign.isalnum()]
        if not signs:
            return float(answer == reference)
        is_latin = 2 * sum(sign.isascii() for sign in signs) >= len(signs)
        return float((latin if is_latin else other).score(reference, answer)["rougeL"].recall)

    pairs = zip(answers, references, strict=True)
    found = [recall(answer.strip(), reference.strip()) for answer, reference in pairs]
    return torch.tensor(found, dtype=torch.float64)


class _UnicodeWords:
    """Tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        parts: list[str] = []
        for word in re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).casefold()):
            is_wide = any(unicodedata.east_asian_width(sign) in "WF" for sign in word)
            parts += word if is_wide else [word]
        return parts
