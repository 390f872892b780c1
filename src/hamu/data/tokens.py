"""Texts as tokens: the prompt, the answer, and the labels that the loss is taken of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hamu.core.objectives import IGNORED
from hamu.data.sources import reading
from hamu.data.text import TextRecord, TextRecords
from hamu.errors import HamuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["answer", "all"]
# Chat templates that write the date all write this one: prompts must not change from day to day.
_TODAY = datetime(2024, 7, 26)
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTxXyY")  # of strftime
_FIXED = "".join(f"|replace('%{sign}', '{_TODAY.strftime('%' + sign)}')" for sign in _DIRECTIVES)
_DATE = f"{{% macro strftime_now(format) %}}{{{{ format{_FIXED} }}}}{{% endmacro %}}\n"


@dataclass(frozen=True, eq=False)
class TextData(Dataset[dict[str, Tensor]]):
    """Records as tokens.

    Attributes:
        texts: the records.
        tokens: for each record its token ids, prompt first, int32.
        scored_from: for each record the place of the first token that counts for the loss.
        truncated: the number of records that were cut to the maximal length.
    """

    texts: TextRecords
    tokens: tuple[Tensor, ...]
    scored_from: tuple[int, ...]
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids [T] and labels [T], -100 where nothing is scored."""
        ids = self.tokens[index].long()
        labels = ids.clone()
        labels[: max(1, self.scored_from[index])] = IGNORED  # nothing predicts the first token
        return {"input_ids": ids, "labels": labels}

    @property
    def rows(self) -> Tensor:
        """The row of each record in its source, [N]."""
        return self.texts.rows

    def prompt(self, index: int) -> Tensor:
        """The tokens of the prompt alone, [T], to begin a generation with."""
        return self.tokens[index][: self.scored_from[index]].long()

    def select(self, positions: Tensor | Sequence[int]) -> TextData:
        """Return the records at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long).tolist()
        tokens = tuple(self.tokens[i] for i in index)
        starts = tuple(self.scored_from[i] for i in index)
        return replace(self, texts=self.texts.select(index), tokens=tokens, scored_from=starts)


def encode(
    texts: TextRecords,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    loss_on: LossOn = "answer",
) -> TextData:
    """Turn records into tokens; the end-of-sequence token follows the answer.

    Prompt and answer are tokenized as one text, which is cut where the answer begins.

    Args:
        texts: the records.
        tokenizer: the model's tokenizer.
        max_length: longer records are cut at their end.
        loss_on: "answer", or "all" to score the prompt too.

    Raises:
        HamuError: if a record has no answer token left, or the tokenizer has no chat template that
            fits a conversation.
    """
    if loss_on not in ("answer", "all"):
        raise HamuError(f"loss_on {loss_on!r} is unknown; choose answer or all")
    if max_length < 2:
        raise HamuError(f"max_length {max_length} must be at least 2 tokens")
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    pairs = _prompts_and_answers(texts, tokenizer)
    tokens, starts, truncated = [], [], 0
    rows = zip(texts.rows.tolist(), texts.records, pairs, strict=True)
    for row, record, (prompt, answer) in rows:
        if eos in answer and record.messages:  # a template writes its end, and more behind it
            answer = answer[: len(answer) - 1 - answer[::-1].index(eos)]
        elif end and answer[-1:] == end:
            answer = answer[:-1]  # it has one already
        ids = [*prompt, *answer, *end]
        truncated += len(ids) > max_length
        if len(prompt) >= max_length or not answer or len(ids) < 2:
            raise HamuError(
                f"row {row} of {texts.source} has no answer token among its first {max_length} "
                f"tokens (the prompt has {len(prompt)}); give a larger --max_length"
            )
        tokens.append(torch.tensor(ids[:max_length], dtype=torch.int32))
        starts.append(len(prompt) if loss_on == "answer" else 1)
    return TextData(texts, tuple(tokens), tuple(starts), truncated)


def _prompts_and_answers(
    texts: TextRecords, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Tokenize each prompt, with the tokens that start a text, and its answer, without an end.

    A prompt's tokens are always its own, so that a generation begins as the training did; the
    answer stands alone where one would be shared.
    """

    def ids(pieces: list[str], special: bool = False) -> list[list[int]]:
        return list(map(list, tokenizer(pieces, add_special_tokens=special)["input_ids"]))

    pairs = []
    for record in texts.records:
        asked, said = _as_text(record, tokenizer, texts.source)
        # Spaces at the end of a prompt go with the answer: most tokenizers join them with a word.
        bare = asked.rstrip(" ")
        pairs.append((bare, asked[len(bare) :] + said))
    prompts = ids([prompt for prompt, _ in pairs])
    wholes = ids([prompt + answer for prompt, answer in pairs])
    (one,), (started,) = ids(["a"]), ids(["a"], special=True)
    places = (n for n in range(len(started)) if started[n : n + len(one)] == one)
    start = started[: next(places, 0)]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    found = []
    for record, (_, said), prompt, whole in zip(texts.records, pairs, prompts, wholes, strict=True):
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else ids([said])[0]
        # The start stands once; a chat template, or the text itself, may have written it already.
        begin = [] if record.messages else start
        if prompt:
            prompt = prompt if prompt[: len(begin)] == begin else [*begin, *prompt]
        else:  # the first token of a text without a prompt is to be predicted too
            prompt = begin or bos
            answer = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
        found.append((prompt, answer))
    return found


def _as_text(
    record: TextRecord, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[str, str]:
    """Write prompt and answer as the model reads them; a chat template writes conversations."""
    if not record.messages:
        return record.prompt, record.answer
    with reading(f"a conversation of {source} does not fit the tokenizer's chat template"):
        template = _DATE + tokenizer.get_chat_template()
        written: list[Any] = [
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=messages is not record.messages,
            )
            for messages in (record.messages[:-1], record.messages)
        ]
        before, whole = written
        if not whole.startswith(before):
            raise ValueError("it changes what comes before the answer; give prompt and completion")
    return before, whole[len(before) :]


class TextCollator:
    """Pads a list of items at their right end: input_ids, attention_mask and labels, [B, T] each.

    Padding is masked and has the label -100. By default it is token 0, which any model has.
    """

    def __init__(self, pad_token_id: int | None = 0) -> None:
        self._padding = {"input_ids": pad_token_id or 0, "attention_mask": 0, "labels": IGNORED}

    def __call__(self, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The batch."""
        rows = [{"attention_mask": torch.ones_like(i["input_ids"])} | dict(i) for i in items]
        return {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
            for name, value in self._padding.items()
        }
