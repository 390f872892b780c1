"""What a language model answers when it is asked, and how much of the right answer is in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hamu.core.forward import evaluating
from hamu.errors import HamuError
from hamu.models.language import longest_text

if TYPE_CHECKING:
    from hamu.data import TextData

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
    """The answer to each prompt, greedily: the most likely token at every step, until the end-of-sequence token.

    Prompts of like length are taken together and padded at their left. Neither what stands in a batch with a prompt nor
    the right answers change what is answered. Of the model's own generation settings its end tokens alone count:
    sampling, penalties, suppressed or forced tokens and limits of time do not.

    Args:
        model: a causal language model with `generate`.
        tokenizer: the model's tokenizer, with a padding token.
        data: records that were encoded with loss_on="answer".
        batch_size: prompts per batch.
        max_new_tokens: the longest answer (200 tokens), shorter where the model cannot read so much behind the prompt.
        sampling_seed: draw each token, at temperature 1 from the whole vocabulary, by this seed; None for greedily.

    Returns:
        The answers in the data's order, without special tokens and without space around them.

    Raises:
        HamuError: if a record has no prompt.
    """
    prompts = [data.prompt(i) for i in range(len(data))]
    for row, prompt in zip(data.texts.rows.tolist(), prompts, strict=True):
        if not len(prompt):
            raise HamuError(
                f"row {row} of {data.texts.source} has no prompt to answer; give questions, not plain text"
            )
    device = next(model.parameters()).device
    ends = _ends(model, tokenizer)
    pad = ends[0] if ends else 0  # a tokenizer's own may have no embedding in the model
    most = longest_text(model)
    room = [
        max_new_tokens if most is None else max(1, min(max_new_tokens, most - len(p)))
        for p in prompts
    ]
    answers = [""] * len(prompts)
    drawn = (
        {}
        if sampling_seed is None
        else {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    )
    with evaluating(model), _plain_settings(model):
        if sampling_seed is not None:
            torch.manual_seed(sampling_seed)
        for places in _batches([len(p) for p in prompts], room, batch_size):
            ids = _pad_left([prompts[i] for i in places], pad)
            mask = _pad_left([torch.ones_like(prompts[i]) for i in places], 0)
            generated = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=room[places[0]],
                **({"do_sample": False} | drawn),
                use_cache=True,
                pad_token_id=pad,
                eos_token_id=ends or None,
            )
            written = [_until(ends, row) for row in generated[:, ids.shape[1] :].tolist()]
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            for place, text in zip(places, texts, strict=True):
                answers[place] = text.strip()
    return answers


@contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """The model without generation settings of its own, which would apply wherever a call leaves something open."""
    from transformers import GenerationConfig

    inner = (
        model.get_base_model() if hasattr(model, "get_base_model") else model
    )  # an adapter asks its base
    kept, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = kept


def _batches(lengths: Sequence[int], room: Sequence[int], size: int) -> Iterator[list[int]]:
    """Prompts of like length together, all of a batch with room for the same number of tokens."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(
        order, key=room.__getitem__
    ):  # where it differs it falls with the length
        places = list(group)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those that a chat model names besides."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = [named] if isinstance(named, int) else list(named or [])
    return sorted({token for token in (tokenizer.eos_token_id, *named) if token is not None})


def _until(ends: list[int], tokens: list[int]) -> list[int]:
    """What comes before the first end."""
    return tokens[
        : next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    ]


def rouge_l_recall(answers: Sequence[str], references: Sequence[str]) -> Tensor:
    """ROUGE-L recall of each answer, [N] float64: the longest common subsequence's share of the reference's words.

    Words are stemmed and without case (Lin 2004), as in TOFU (Maini et al. 2024). That way of telling words knows none
    but Latin letters without accents; references that are for the most part of other letters are cut into words by
    Unicode, and scripts without spaces into characters. Where a reference has no word at all (a sign, nothing) it is 1
    if the answer is the same and 0 if not.

    Args:
        answers: what the model said.
        references: what it was to say.
    """
    from rouge_score.rouge_scorer import RougeScorer

    latin, other = (
        RougeScorer(["rougeL"], use_stemmer=True),
        RougeScorer(["rougeL"], tokenizer=_UnicodeWords()),
    )

    def recall(answer: str, reference: str) -> float:
        if not any(sign.isalnum() for sign in reference):
            return float(answer == reference)
        found = (latin if _is_latin(reference) else other).score(reference, answer)
        return float(found["rougeL"].recall)

    pairs = zip(answers, references, strict=True)
    return torch.tensor(
        [recall(answer.strip(), reference.strip()) for answer, reference in pairs],
        dtype=torch.float64,
    )


def _is_latin(text: str) -> bool:
    """Whether at least half of the letters and digits are those that rouge-score knows."""
    signs = [sign for sign in text if sign.isalnum()]
    return 2 * sum(sign.isascii() for sign in signs) >= len(signs)


class _UnicodeWords:
    """Tells words of any script, for rouge-score; characters where a script is written wide, without spaces."""

    def tokenize(self, text: str) -> list[str]:
        words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).casefold())
        wide = {
            word: any(unicodedata.east_asian_width(sign) in "WF" for sign in word) for word in words
        }
        return [part for word in words for part in (word if wide[word] else [word])]


def _pad_left(sequences: list[Tensor], value: int) -> Tensor:
    return pad_sequence(sequences, batch_first=True, padding_value=value, padding_side="left")
