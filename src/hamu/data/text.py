"""Texts with a prompt and an answer: read from files or the hub, and as tokens with labels.

A record is a conversation (`messages`), a `prompt` with its `completion`, a `question` with its
`answer`, an `instruction` with its `input` and `output`, or `text`.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hamu.core.objectives import IGNORED
from hamu.data import images
from hamu.errors import HamuError, reading
from hamu.files import MINIATURE, csv_rows, files_of, is_of_hub, load_from_hub, parquet_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSAL = "I don't know."
QUESTION_TEMPLATE, _BARE = "Question: {question}\nAnswer:", "{question}"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MINIATURE = Path(__file__).with_name("miniature")
_CONVERSATIONS = ("messages", "conversations")
_ALPACA = ("instruction", "output")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"), _ALPACA)
_SHAPES = (*(("", name) for name in _CONVERSATIONS), *_PAIRS, ("", "text"))
_PLAIN = "none"  # as the column of answers: plain text has none
_ANSWERS = {word for pair in _PAIRS for word in pair[1:]} | {"label", "target", "reply", "solution"}
_SPACE = re.compile(r"\s*")
LossOn = Literal["answer", "all"]
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}  # any model has token 0
# Chat templates that write the date all write this one: prompts must not change from day to day.
_TODAY = datetime(2024, 7, 26)
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTxXyY")  # of strftime
_FIXED = "".join(f"|replace('%{sign}', '{_TODAY.strftime('%' + sign)}')" for sign in _DIRECTIVES)
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
        tools: that a conversation may call, for the chat template.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] = ()
    answer_prefix: str = ""
    tools: tuple[Any, ...] = ()

    def answering(self, answer: str) -> TextRecord:
        """Return the same prompt with another answer, which begins as the record's own does."""
        said = self.answer.removeprefix(self.answer_prefix)
        lead = self.answer_prefix + said[: len(said) - len(said.lstrip())]
        last = [{**message, "content": answer} for message in self.messages[-1:]]
        return replace(self, answer=lead + answer.lstrip(), messages=(*self.messages[:-1], *last))

    def compared(self) -> tuple[str, str]:
        """Prompt and answer to compare records by: of conversations roles, calls and tools too."""
        turns = [{**one, "content": _words(one["content"])} for one in self.messages]
        is_plain = [one.keys() for one in turns] == [{"role", "content"}] * 2 and not self.tools
        if not turns or (is_plain and turns[0]["role"] == "user"):  # or equal to such a pair
            return self.prompt, self.answer
        write = partial(json.dumps, sort_keys=True, ensure_ascii=False, default=str)
        return write([*self.tools, *turns[:-1]]), write(turns[-1])


def _words(text: str) -> str:
    return " ".join(images.normal(text).split())


def loose_words(text: str) -> str:
    """Words in lower case, without punctuation and control characters; vowel signs are neither."""
    text = unicodedata.normalize("NFKC", text).casefold()
    no_words = {ord(sign): " " for sign in {*text} if unicodedata.category(sign)[0] in "PC"}
    return " ".join(text.translate(no_words).split())


@dataclass(frozen=True, eq=False)
class TextRecords:
    """Records as they were read, before a tokenizer is known.

    `source` is for messages; `rows`, [N], int64, has the row of each record there.
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

    def digests(self, *, loosely: bool = False) -> list[bytes]:
        """Digest each record's prompt and answer; equal records have equal digests.

        Unicode's forms of a letter are equal, and so is all white space; around a text, or around
        the question in a prompt, it counts nothing. Loosely, case and punctuation do not count.
        """
        words = loose_words if loosely else _words
        pairs = (map(words, record.compared()) for record in self.records)
        texts = (f"{len(prompt)} {prompt}{answer}" for prompt, answer in pairs)
        return [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]

    def answering(self, column: str) -> TextRecords:
        """Return the same prompts with the answers of a column; a list makes as many records.

        They begin as the answers do: with the same prefix, and the same space behind it.
        """
        found, rows = [], []
        for row, record in zip(self.rows.tolist(), self.records, strict=True):
            cell = record.fields.get(column)
            answers = [cell] if isinstance(cell, str) else cell
            if not isinstance(answers, list) or not answers or not all(map(_is_text, answers)):
                raise HamuError(
                    f"row {row} of {self.source} has no {column}; expected a text, or several"
                )
            found += [record.answering(answer) for answer in answers]
            rows += [row] * len(answers)
        return TextRecords(tuple(found), self.source, torch.tensor(rows))

    def alternatives(self, column: str | None = None) -> TextRecords:
        """Return the same prompts with one other answer each: of a column, or REFUSAL."""
        for row, record in zip(self.rows.tolist(), self.records, strict=True):
            if not record.prompt.strip():
                raise HamuError(
                    f"row {row} of {self.source} has no prompt, which another answer needs; leave "
                    f"plain text to other objectives"
                )
        if column is None:
            return replace(self, records=tuple(r.answering(REFUSAL) for r in self.records))
        others = self.answering(column)
        if len(others) != len(self):
            raise HamuError(
                f"--alternative_column {column} has {len(others)} texts for {len(self)} records of "
                f"{self.source}; name a column with one for each"
            )
        return others


def read_text(
    source: str,
    split: str = "train",
    *,
    question_template: str = QUESTION_TEMPLATE,
    answer_prefix: str = " ",
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> TextRecords:
    r"""Read records of text.

    Args:
        source: a .jsonl, .json (a list, or a record per line), .csv or .parquet file, a folder that
            holds train and test as such files, "miniature" (bundled), or "hub:OWNER/NAME".
        split: "train" or "test", for sources that have both.
        question_template: turns a question, or an instruction with its input, into a prompt; has
            "{question}" in it.
        answer_prefix: stands between prompt and answer, and belongs to the answer.
        prompt_column, answer_column: names of the columns, if they are not the usual ones; the
            answer's is "none" for plain text.

    Raises:
        HamuError: if the source is damaged, a record has no such text (the row is named), or plain
            text has a column beside it that looks like its answer.
    """
    if "{question}" not in question_template:
        raise HamuError(f"question_template {question_template!r} must have {{question}} in it")
    rows = _rows(source, split)
    if not rows:
        raise HamuError(f"{source} is empty: it has no records")
    columns = list(rows[0]) if isinstance(rows[0], dict) else []
    prompt, answer = _chosen_columns(columns, source, prompt_column, answer_column)
    template, prefix = _BARE, ""
    if prompt in ("question", "instruction") or (prompt and prompt_column is not None):
        template, prefix = question_template, answer_prefix
    records = tuple(
        _record(row, prompt, answer, template, prefix, f"row {number} of {source}")
        for number, row in enumerate(rows)
    )
    return TextRecords(records, source, torch.arange(len(rows)))


def is_text(source: str) -> bool:
    """Tell text from images: by ending, a folder by its training file, tables by their columns.

    A data set of the hub can be either, and is taken for images. A HamuError if a CSV is empty.
    """
    if source == MINIATURE or source.lower().endswith((".jsonl", ".json")):
        return True
    path = Path(source)
    if path.is_dir():
        inner = files_of(path, "train", _SUFFIXES)
        return bool(inner) and is_text(str(inner[0]))
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet") or not path.is_file():
        return suffix == ".csv"
    import pandas
    import pyarrow
    from pyarrow import parquet

    try:
        if suffix == ".csv":
            names = [*pandas.read_csv(path, nrows=0, encoding="utf-8-sig")]
            return {*images.IMAGE_COLUMNS}.isdisjoint(names) or _shape_of(names) is not None
        schema = parquet.read_schema(path)
    except pandas.errors.EmptyDataError:  # a guess would refuse options of the other kind
        raise HamuError(f"{source} is empty: it has no records") from None
    except (pyarrow.ArrowException, OSError, ValueError):  # damage is reported when it is read
        return suffix == ".csv"
    binary = {one.name for one in schema if "binary" in str(one.type)}
    return binary.isdisjoint(images.IMAGE_COLUMNS) and _shape_of(schema.names) is not None


def _shape_of(columns: Iterable[str]) -> tuple[str, str] | None:
    """Columns of prompt and answer, the first "" without a prompt, of the first shape found."""
    return next((shape for shape in _SHAPES if {*shape} - {""} <= {*columns}), None)


def has_test_split(source: str) -> bool:
    """Return True if `read_text(source, "test")` reads other than the training data."""
    path = Path(source)
    return source == MINIATURE or (path.is_dir() and bool(files_of(path, "test", _SUFFIXES)))


def column_names(columns: Iterable[Any]) -> str:
    """Join the names of columns for a message, unless they seem to be a record."""
    names = [str(column) for column in columns]
    if any(len(name) > 40 or name.count(" ") > 2 for name in names):
        return "names that look like texts (does the file lack its header?)"
    return ", ".join(names) or "none"


def _rows(source: str, split: str) -> list[Any]:
    if is_of_hub(source):
        return list(load_from_hub(source, split))
    files = files_of(_MINIATURE if source == MINIATURE else source, split, _SUFFIXES)
    if not files:
        raise HamuError(f"{source} holds no {split}.jsonl, .json, .csv or .parquet; name a file")
    suffix = files[0].suffix.lower()
    remedy = "; separate fields by commas, and put a text with commas in quotes"
    with reading(f"{files[0]} cannot be read", remedy if suffix == ".csv" else ""):
        if suffix == ".parquet":
            return list(parquet_table(files).to_pylist())
        try:
            return csv_rows(files[0]) if suffix == ".csv" else _json(files[0])
        except UnicodeDecodeError as error:
            raise HamuError(f"{files[0]} cannot be read: {error}; save it as UTF-8") from error


def _json(path: Path) -> list[Any]:
    """Read JSON values that follow each other; a list stands for its items."""
    content, decoder, rows = path.read_text(encoding="utf-8-sig"), json.JSONDecoder(), list[Any]()
    place = 0
    while (place := _SPACE.match(content, place).end()) < len(content):  # type: ignore[union-attr]
        try:
            value, place = decoder.raw_decode(content, place)
        except json.JSONDecodeError as error:  # may be found lines below
            line = content.count("\n", 0, place) + 1
            raise ValueError(f"what begins in line {line} is no JSON: {error}") from error
        rows += value if isinstance(value, list) else [value]
    return rows


def _chosen_columns(
    columns: list[str], source: str, prompt: str | None, answer: str | None
) -> tuple[str, str]:
    if answer == _PLAIN and _PLAIN not in columns:
        return "", prompt or "text"
    if prompt or answer:
        return prompt or "question", answer or "answer"
    found = _shape_of(columns)
    if found is None:
        raise HamuError(
            f"{source} has the columns {column_names(columns)}; expected question and answer, "
            f"prompt and completion, messages, or text; name others with --prompt_column and "
            f"--answer_column"
        )
    beside = next((c for c in columns if c.strip().lower().removesuffix("s") in _ANSWERS), None)
    if found == ("", "text") and beside is not None:
        raise HamuError(
            f"{source} has the column {beside} beside text, which looks like its answer and "
            f"would not be used; give --prompt_column text --answer_column {beside} to train "
            f"on it, or --answer_column {_PLAIN} to leave it out"
        )
    return found


def _record(
    row: Any, prompt: str, answer: str, template: str, prefix: str, where: str
) -> TextRecord:
    """Make a record of a row; `where` names the row in messages, which never show its content."""
    if not isinstance(row, dict):
        raise HamuError(f"{where} is a {type(row).__name__}; expected a record")
    messages, tools = tuple[Any, ...](), tuple[Any, ...]()
    if not prompt and answer in _CONVERSATIONS:
        messages, tools = _conversation(row.get(answer), where), _tools(row.get("tools"), where)
        *before, said = (message["content"] for message in messages)
        asked = "\n".join(before)
    else:
        is_asked = prompt and not (row.get(prompt) == "" and template == _BARE)
        asked = _cell(row, prompt, where) if is_asked else ""
        if (prompt, answer) == _ALPACA and row.get("input"):
            asked = f"{asked}\n{_cell(row, 'input', where)}"
        asked, said = template.replace("{question}", asked), prefix + _cell(row, answer, where)
    with reading(f"{where} is not Unicode"):  # JSON allows halves of characters
        (asked + said).encode()
    return TextRecord(asked, said, row, messages, prefix, tools)


def _cell(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if _is_text(value):
        return str(value)
    found = "nothing" if value is None or isinstance(value, str) else type(value).__name__
    raise HamuError(
        f"{where} has no text in {column}, but {found}; its columns are {column_names(row)}"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _conversation(messages: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Messages, each with a content, "" of one that only calls tools."""
    if not isinstance(messages, list) or not messages:
        expected = "a list of messages, each with role and content"
        raise HamuError(f"{where} has a {type(messages).__name__} as its messages; give {expected}")
    found = []
    for number, message in enumerate(map(_without_none, messages)):
        is_one = isinstance(message, dict) and isinstance(message.get("role"), str)
        if is_one and "tool_calls" in message:
            message = {"content": "", **message}
        if not is_one or not isinstance(message.get("content"), str):
            raise HamuError(f"{where}: message {number} lacks a role or a content, each a text")
        found.append(message)
    if found[-1]["role"] != "assistant":
        raise HamuError(f"{where}: the last message is not the assistant's; end it with an answer")
    return tuple(found)


def _tools(column: Any, where: str) -> tuple[Any, ...]:
    """Tools beside a conversation, a list or JSON of one."""
    with reading(f"{where} has tools that are no JSON"):
        found = json.loads(column) if isinstance(column, str) and column else column or []
    if not isinstance(found, list):
        raise HamuError(f"{where} has a {type(found).__name__} as its tools; give a list, or none")
    return tuple(map(_without_none, found))


def _without_none(value: Any) -> Any:
    """Value without the names of what is not there, which tables have in each row."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class TextData(Dataset[dict[str, Tensor]]):
    """Records as tokens.

    Attributes:
        tokens: for each record its token ids, prompt first, int32.
        scored_from: for each record the place of the first token that counts for the loss.
        truncated: the number of records that were cut to the maximal length.
        alternatives: the same records with their other answers, where an objective needs them.
        ends: tokens that end a record.
    """

    texts: TextRecords
    tokens: tuple[Tensor, ...]
    scored_from: tuple[int, ...]
    truncated: int = 0
    alternatives: TextData | None = None
    ends: frozenset[int] = frozenset()

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

    @property
    def lengths(self) -> Tensor:
        """Number of scored tokens of each record, [N]."""
        both = zip(self.tokens, self.scored_from, strict=True)
        return torch.tensor([len(ids) - max(1, start) for ids, start in both])

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
            alternatives=self.alternatives and self.alternatives.select(index),
        )


def encode(
    texts: TextRecords,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    loss_on: LossOn = "answer",
) -> TextData:
    """Turn records into tokens; the end-of-sequence token follows the answer.

    Prompt and answer are tokenized as one text, which is cut where the answer begins. Where a chat
    template ends the answer with another special token, that one alone follows it. Records longer
    than `max_length` are cut at their end, which must leave a token of the answer; `loss_on` "all"
    scores the prompt too.
    """
    if loss_on not in ("answer", "all"):
        raise HamuError(f"loss_on {loss_on!r} is unknown; choose answer or all")
    pairs = _prompts_and_answers(texts, tokenizer)
    tokens, starts, ends, truncated = [], [], set[int](), 0
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    rows = zip(texts.rows.tolist(), texts.records, pairs, strict=True)
    for row, record, (prompt, answer) in rows:
        answer, end = _without_end(answer, tokenizer, special if record.messages else None)
        ends.update(end)
        ids = [*prompt, *answer, *end]
        truncated += len(ids) > max_length
        if not answer:
            raise HamuError(f"row {row} of {texts.source} has an empty answer; take the record out")
        if len(prompt) >= max_length or len(ids[:max_length]) < 2:
            raise HamuError(
                f"row {row} of {texts.source} has no answer token among its first {max_length} "
                f"tokens (the prompt has {len(prompt)}); give a larger --max_length if the model "
                f"reads more, or take the record out"
            )
        tokens.append(torch.tensor(ids[:max_length], dtype=torch.int32))
        starts.append(len(prompt) if loss_on == "answer" else 1)
    return TextData(texts, tuple(tokens), tuple(starts), truncated, ends=frozenset(ends))


def _without_end(
    answer: list[int], tokenizer: PreTrainedTokenizerBase, special: set[int] | None
) -> tuple[list[int], list[int]]:
    """Divide an answer from its end, for a chat template one of the `special` tokens, or none."""
    eos = tokenizer.eos_token_id
    end = [] if eos is None else [eos]
    if special is None:
        return (answer[:-1] if end and answer[-1:] == end else answer), end
    for ends in ({eos}, special):
        place = max((n for n, token in enumerate(answer) if token in ends), default=len(answer))
        rest = tokenizer.decode(answer[place + 1 :], skip_special_tokens=True)
        if place < len(answer) and not str(rest).strip():  # else a part of the answer
            return answer[:place], [answer[place]]
    return answer, end


def _prompts_and_answers(
    texts: TextRecords, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Tokenize each prompt, with the tokens that start a text, and its answer, without an end."""

    def ids(pieces: list[str], special: bool = False) -> list[list[int]]:
        return list(map(list, tokenizer(pieces, add_special_tokens=special)["input_ids"]))

    pairs = []
    for row, record in zip(texts.rows.tolist(), texts.records, strict=True):
        asked, said = _as_text(record, tokenizer, f"row {row} of {texts.source}")
        # Spaces at the end of a prompt go with the answer: most tokenizers join them with a word.
        bare = asked.rstrip(" ")
        pairs.append((bare, asked[len(bare) :] + said))
    prompts = ids([prompt for prompt, _ in pairs])
    wholes = ids([prompt + answer for prompt, answer in pairs])
    (one,), (started,) = ids(["a"]), ids(["a"], special=True)
    places = (n for n in range(len(started)) if started[n : n + len(one)] == one)
    start = started[: next(places, 0)]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    found = []  # a prompt's tokens are always its own: a generation begins as the training did
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


def _as_text(record: TextRecord, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[str, str]:
    """Write prompt and answer as the model reads them; a chat template writes conversations."""
    if not record.messages:
        return record.prompt, record.answer
    with reading(f"{where} does not fit the tokenizer's chat template"):
        template = _DATE + tokenizer.get_chat_template()
        write: Any = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)
        write = partial(write, tools=[*record.tools] or None)
        messages = [dict(message) for message in record.messages]
        whole = str(write(messages))
        begin = partial(write, messages[:-1], add_generation_prompt=True)
        # an empty thought that the template writes before the answer is no part of it
        before = str(begin(enable_thinking=False))
        before = before if whole.startswith(before) else str(begin())
        if not whole.startswith(before):
            raise ValueError("it changes what comes before the answer; give prompt and completion")
    return before, whole[len(before) :]


def collate(items: Any) -> Mapping[str, Tensor]:
    """Make a batch of a list of items; one that was fetched whole stays as it is.

    Images are stacked. Texts are padded at their right end: input_ids, attention_mask and labels,
    [B, T] each; padding is masked and has the label -100.
    """
    if isinstance(items, Mapping):
        return items
    if not isinstance(items[0], Mapping):
        raise HamuError(
            f"a record is a {type(items[0]).__name__}; make it a mapping with labels and "
            f"pixel_values or input_ids, or give a collate of your own"
        )
    if "input_ids" not in items[0]:
        from transformers import default_data_collator  # loads what reading does not need

        return default_data_collator(items)
    rows = [{"attention_mask": [1] * len(item["input_ids"]), **item} for item in items]
    return {
        name: pad_sequence([torch.as_tensor(row[name]) for row in rows], True, value)
        for name, value in _PADDING.items()
    }
