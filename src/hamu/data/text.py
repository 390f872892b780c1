"""Texts to learn and unlearn: records with a prompt and an answer, and their tokens."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hamu.core.objectives import IGNORED
from hamu.data.tokenizing import prompts_and_answers
from hamu.errors import HamuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["answer", "all"]


@dataclass(frozen=True)
class TextRecord:
    """One record.

    Attributes:
        prompt: what the model is given, "" for plain text.
        answer: what it is to say.
        fields: everything that the source says about the record, by column.
        messages: a conversation whose last message is the answer; the tokenizer's chat template turns it into prompt
            and answer, which are the plain texts of the two until then.
        answer_prefix: what the answer begins with that its source does not say; other answers begin with it too.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...] = ()
    answer_prefix: str = ""


@dataclass(frozen=True, eq=False)
class TextRecords:
    """Records as they were read, before a tokenizer is known.

    Attributes:
        records: the records.
        source: where they come from, for messages.
        rows: [N], int64, the row of each record in its source.
    """

    records: tuple[TextRecord, ...]
    source: str
    rows: Tensor

    def __len__(self) -> int:
        return len(self.records)

    def select(self, positions: Tensor | Sequence[int]) -> TextRecords:
        """The records at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return replace(
            self, records=tuple(self.records[i] for i in index.tolist()), rows=self.rows[index]
        )

    def matched(self, other: TextRecords) -> TextRecords:
        """A second data set in a form that fits this one: any text does."""
        return other

    def digests(self) -> list[bytes]:
        """A digest of each record's prompt and answer, by which equal records are recognised."""
        return [
            hashlib.blake2b(
                f"{len(r.prompt)} {r.prompt}{r.answer}".encode(), digest_size=16
            ).digest()
            for r in self.records
        ]

    def answering(self, column: str) -> TextRecords:
        """The same prompts with other answers, those of a column; a list there makes as many records.

        They begin as the answers do: with the same prefix, and the same space behind it.

        Raises:
            HamuError: if a record has no such column, or there something else than a text or a list of texts.
        """
        found, rows = [], []
        for row, record in zip(self.rows.tolist(), self.records, strict=True):
            value = record.fields.get(column)
            if not value:
                raise HamuError(
                    f"row {row} of {self.source} has no {column}; this figure needs one for each record"
                )
            other = _other_than_texts(value)
            if other is not None:
                raise HamuError(
                    f"row {row} of {self.source} has {other} in {column}; expected a text, or a list of texts"
                )
            said = record.answer.removeprefix(record.answer_prefix)
            lead = record.answer_prefix + said[: len(said) - len(said.lstrip())]
            for answer in [value] if isinstance(value, str) else value:
                messages = record.messages and (
                    *record.messages[:-1],
                    {**record.messages[-1], "content": answer},
                )
                found.append(replace(record, answer=lead + answer, messages=messages))
                rows.append(row)
        return TextRecords(tuple(found), self.source, torch.tensor(rows))


def _other_than_texts(value: Any) -> str | None:
    """What a cell of answers has instead of them; None if it is a text, or a list of texts with something in each."""
    if isinstance(value, str):
        return "a list written as text" if _is_list_as_text(value) else None
    if not isinstance(value, list):
        return f"a value of type {type(value).__name__}"
    wrong = [one for one in value if not (isinstance(one, str) and one.strip())]
    if not wrong:
        return None
    kind = type(wrong[0]).__name__
    return "a list with an empty text" if kind == "str" else f"a list with a value of type {kind}"


def _is_list_as_text(text: str) -> bool:
    """Such as "['a', 'b']", which CSV has of a list."""
    if not text.lstrip().startswith("["):
        return False
    try:
        found = ast.literal_eval(text.strip())
        return (
            isinstance(found, list) and bool(found) and all(isinstance(one, str) for one in found)
        )
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


@dataclass(frozen=True, eq=False)
class TextData(Dataset[dict[str, Tensor]]):
    """Records as tokens.

    Attributes:
        texts: the records.
        tokens: for each record its token ids, prompt first, int32.
        scored_from: for each record the place of the first token that counts for the loss.
        truncated: how many records were cut to the maximal length.
    """

    texts: TextRecords
    tokens: tuple[Tensor, ...]
    scored_from: tuple[int, ...]
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids [T] and labels [T], where what is not scored is -100."""
        ids = self.tokens[index].long()
        labels = ids.clone()
        labels[: max(1, self.scored_from[index])] = IGNORED  # nothing predicts the first token
        return {"input_ids": ids, "labels": labels}

    @property
    def rows(self) -> Tensor:
        """The row of each record in its source, [N]."""
        return self.texts.rows

    def prompt(self, index: int) -> Tensor:
        """The tokens of the prompt alone, [T], as a generation is begun."""
        return self.tokens[index][: self.scored_from[index]].long()

    def select(self, positions: Tensor | Sequence[int]) -> TextData:
        """The records at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long).tolist()
        return replace(
            self,
            texts=self.texts.select(index),
            tokens=tuple(self.tokens[i] for i in index),
            scored_from=tuple(self.scored_from[i] for i in index),
        )


def encode(
    texts: TextRecords,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    loss_on: LossOn = "answer",
) -> TextData:
    """Turn records into tokens.

    Prompt and answer are tokenized as one text and cut where the answer begins, see `prompts_and_answers`; the
    end-of-sequence token follows the answer.

    Args:
        texts: the records.
        tokenizer: the model's tokenizer.
        max_length: longer records are cut at their end.
        loss_on: "answer", or "all" to score the prompt too.

    Raises:
        HamuError: if a record has no answer token left or is one token in all, or a conversation meets a tokenizer
            without a chat template that fits it.
    """
    if loss_on not in ("answer", "all"):
        raise HamuError(f"loss_on {loss_on!r} is unknown; choose answer or all")
    if max_length < 2:
        raise HamuError(f"max_length {max_length} must be at least 2 tokens")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pairs = prompts_and_answers(texts.records, tokenizer, texts.source)
    tokens, starts, truncated = [], [], 0
    for row, record, (prompt, answer) in zip(
        texts.rows.tolist(), texts.records, pairs, strict=True
    ):
        if (
            end and end[0] in answer and record.messages
        ):  # a chat template writes its end, and sometimes more behind it
            answer = answer[: len(answer) - 1 - answer[::-1].index(end[0])]
        elif end and answer[-1:] == end:
            answer = answer[:-1]  # it has one already
        ids = [*prompt, *answer, *end]
        truncated += len(ids) > max_length
        if len(prompt) >= max_length or not answer:
            raise HamuError(
                f"row {row} of {texts.source} has no answer token among its first {max_length} tokens (the prompt has "
                f"{len(prompt)}); give a larger --max_length, or leave the record out"
            )
        if len(ids) < 2:
            raise HamuError(
                f"row {row} of {texts.source} is one token, which nothing precedes; leave the record out"
            )
        tokens.append(torch.tensor(ids[:max_length], dtype=torch.int32))
        starts.append(len(prompt) if loss_on == "answer" else 1)
    return TextData(texts, tuple(tokens), tuple(starts), truncated)


class TextCollator:
    """Pads a list of items at their right end: input_ids, attention_mask and labels, [B, T] each.

    Args:
        pad_token_id: what stands in input_ids there; it is masked, and its label is -100. A tokenizer's own may have
            no embedding in the model, or be None; 0, the default, has one in each.
    """

    def __init__(self, pad_token_id: int | None = 0) -> None:
        self._pad = pad_token_id or 0

    def __call__(self, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The batch."""
        pad = torch.nn.utils.rnn.pad_sequence
        ids = [item["input_ids"] for item in items]
        return {
            "input_ids": pad(ids, batch_first=True, padding_value=self._pad),
            "attention_mask": pad(
                [torch.ones_like(i) for i in ids], batch_first=True, padding_value=0
            ),
            "labels": pad(
                [item["labels"] for item in items], batch_first=True, padding_value=IGNORED
            ),
        }
