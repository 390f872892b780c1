"""Texts to learn and unlearn: records with a prompt and an answer, and their tokens."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hamu.core.objectives import IGNORED
from hamu.errors import HamuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["answer", "all"]
# Chat templates that write the date all write this one: prompts must not change from day to day.
TODAY = datetime(2024, 7, 26)
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTxXyY")  # of strftime
_FIXED = "".join(f"|replace('%{sign}', '{TODAY.strftime('%' + sign)}')" for sign in _DIRECTIVES)
_DATE = f"{{% macro strftime_now(format) %}}{{{{ format{_FIXED} }}}}{{% endmacro %}}\n"


@dataclass(frozen=True)
class TextRecord:
    """Prompt and answer.

    Attributes:
        prompt: the text before the answer, "" for plain text.
        answer: the text to learn or unlearn.
        fields: all columns of the record in its source.
        messages: a conversation whose last message is the answer; the tokenizer's chat template
            turns it into prompt and answer, which are the plain texts of the two until then.
        answer_prefix: text that was put before the answer, and is put before other answers too.
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
        """Return the records at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long)
        chosen = tuple(self.records[i] for i in index.tolist())
        return replace(self, records=chosen, rows=self.rows[index])

    def matched(self, other: TextRecords) -> TextRecords:
        """Return a second data set in a form that fits this one: any text does."""
        return other

    def digests(self) -> list[bytes]:
        """Digest each record's prompt and answer; equal records have equal digests."""
        texts = (f"{len(r.prompt)} {r.prompt}{r.answer}" for r in self.records)
        return [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]

    def answering(self, column: str) -> TextRecords:
        """Return the same prompts with the answers of a column; a list makes as many records.

        They begin as the answers do: with the same prefix, and the same space behind it.

        Raises:
            HamuError: if a record has no text, or list of texts, in this column.
        """
        found, rows = [], []
        for row, record in zip(self.rows.tolist(), self.records, strict=True):
            value = record.fields.get(column)
            where = f"row {row} of {self.source} has"
            if not value:
                raise HamuError(f"{where} no {column}; this figure needs one for each record")
            other = _other_than_texts(value)
            if other is not None:
                raise HamuError(f"{where} {other} in {column}; expected a text, or a list of texts")
            said = record.answer.removeprefix(record.answer_prefix)
            lead = record.answer_prefix + said[: len(said) - len(said.lstrip())]
            for answer in [value] if isinstance(value, str) else value:
                messages = record.messages
                if messages:
                    messages = (*messages[:-1], {**messages[-1], "content": answer})
                found.append(replace(record, answer=lead + answer, messages=messages))
                rows.append(row)
        return TextRecords(tuple(found), self.source, torch.tensor(rows))


def _other_than_texts(value: Any) -> str | None:
    """Name the fault of a cell of answers; None for a text, or a list of texts."""
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
    """Recognise "['a', 'b']", the form of a list in CSV."""
    if not text.lstrip().startswith("["):
        return False
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return isinstance(found, list) and bool(found) and all(isinstance(one, str) for one in found)


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

    Prompt and answer are tokenized as one text and cut where the answer begins, see
    `_prompts_and_answers`; the end-of-sequence token follows the answer.

    Args:
        texts: the records.
        tokenizer: the model's tokenizer.
        max_length: longer records are cut at their end.
        loss_on: "answer", or "all" to score the prompt too.

    Raises:
        HamuError: if a record has no answer token left or is one token in all, or a conversation
            meets a tokenizer without a chat template that fits it.
    """
    if loss_on not in ("answer", "all"):
        raise HamuError(f"loss_on {loss_on!r} is unknown; choose answer or all")
    if max_length < 2:
        raise HamuError(f"max_length {max_length} must be at least 2 tokens")
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    pairs = _prompts_and_answers(texts, tokenizer)
    tokens, starts, truncated = [], [], 0
    for row, record, (prompt, answer) in zip(
        texts.rows.tolist(), texts.records, pairs, strict=True
    ):
        if eos in answer and record.messages:  # a template writes its end, and more behind it
            answer = answer[: len(answer) - 1 - answer[::-1].index(eos)]
        elif end and answer[-1:] == end:
            answer = answer[:-1]  # it has one already
        ids = [*prompt, *answer, *end]
        truncated += len(ids) > max_length
        if len(prompt) >= max_length or not answer:
            raise HamuError(
                f"row {row} of {texts.source} has no answer token among its first {max_length} "
                f"tokens (the prompt has {len(prompt)}); give a larger --max_length, or leave the "
                f"record out"
            )
        if len(ids) < 2:
            raise HamuError(
                f"row {row} of {texts.source} is one token, which nothing precedes; leave the "
                f"record out"
            )
        tokens.append(torch.tensor(ids[:max_length], dtype=torch.int32))
        starts.append(len(prompt) if loss_on == "answer" else 1)
    return TextData(texts, tuple(tokens), tuple(starts), truncated)


def _prompts_and_answers(
    texts: TextRecords, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, with those that start a text, and of its answer, without an end.

    The two are tokenized as one text, as a model reads them: a tokenizer that puts a space before a
    text puts none before the answer. Spaces at the end of a prompt are tokenized with the answer,
    for most tokenizers join them with the word that follows. A prompt's tokens are always its own,
    so that a generation begins as the training did; an answer is tokenized apart where a token of
    the one text would stand across the border.
    """

    def ids(pieces: list[str]) -> list[list[int]]:
        if not pieces:
            return []
        found = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False)
        return [list(one) for one in found["input_ids"]]

    pairs = []
    for record in texts.records:
        asked, said = _as_text(record, tokenizer, texts.source)
        bare = asked.rstrip(" ")
        pairs.append((bare, asked[len(bare) :] + said))
    prompts = ids([prompt for prompt, _ in pairs])
    wholes = ids([prompt + answer for prompt, answer in pairs])
    joined = [whole[: len(prompt)] == prompt for prompt, whole in zip(prompts, wholes, strict=True)]
    apart = iter(ids([answer for (_, answer), one in zip(pairs, joined, strict=True) if not one]))
    start, found = _start(tokenizer), []
    for record, prompt, whole, one in zip(texts.records, prompts, wholes, joined, strict=True):
        answer = whole[len(prompt) :] if one else next(apart)
        begin = [] if record.messages else start
        # The start stands once; a chat template, or the text itself, may have written it already.
        if prompt:
            prompt = prompt if prompt[: len(begin)] == begin else [*begin, *prompt]
        else:  # the first token of a text without a prompt is to be predicted too
            bos = tokenizer.bos_token_id
            prompt = begin or ([] if bos is None else [bos])
            answer = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
        found.append((prompt, answer))
    return found


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer begins a text with."""
    bare, whole = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True)
    )
    if not bare:  # it has no "a": the special tokens alone are there
        return whole[:-1] if whole[-1:] == [tokenizer.eos_token_id] else whole
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)]


def _as_text(
    record: TextRecord, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[str, str]:
    """Prompt and answer as the model reads them; a chat template writes conversations."""
    if not record.messages:
        return record.prompt, record.answer
    if not tokenizer.chat_template:
        raise HamuError(
            f"{source} holds conversations, but the model's tokenizer has no chat template to "
            f"write them; give prompt and completion"
        )
    import jinja2

    before: Any
    whole: Any
    try:
        template = _DATE + tokenizer.get_chat_template()
        before, whole = (
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=start,
            )
            for messages, start in ((record.messages[:-1], True), (record.messages, False))
        )
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise HamuError(
            f"a conversation of {source} does not fit the tokenizer's chat template: {error}"
        ) from error
    if not whole.startswith(before):
        raise HamuError(
            "the tokenizer's chat template does not put the last message behind what comes before "
            "it; give prompt and completion"
        )
    return before, whole[len(before) :]


class TextCollator:
    """Pads a list of items at their right end: input_ids, attention_mask and labels, [B, T] each.

    Args:
        pad_token_id: the padding of input_ids, which is masked and has the label -100. A
            tokenizer's own may have no embedding in the model, or be None; 0 has one in each.
    """

    def __init__(self, pad_token_id: int | None = 0) -> None:
        self._padding = {"input_ids": pad_token_id or 0, "attention_mask": 0, "labels": IGNORED}

    def __call__(self, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The batch."""
        rows = [{"attention_mask": torch.ones_like(i["input_ids"])} | dict(i) for i in items]
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [row[name] for row in rows], batch_first=True, padding_value=value
            )
            for name, value in self._padding.items()
        }
