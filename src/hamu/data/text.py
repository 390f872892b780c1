"""Texts with a prompt and an answer, read from JSON, JSON lines, CSV, parquet or the hub.

A record is a conversation (`messages`), a `prompt` with its `completion`, a `question` with its
`answer`, an `instruction` with its `input` and `output`, or `text`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamu.data.sources import (
    MINIATURE,
    files_of,
    is_of_hub,
    load_from_hub,
    parquet_table,
    reading,
)
from hamu.errors import HamuError

QUESTION_TEMPLATE, _BARE = "Question: {question}\nAnswer:", "{question}"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MINIATURE = Path(__file__).with_name("fictitious_qa.jsonl")
_CONVERSATIONS = ("messages", "conversations")
_ALPACA = ("instruction", "output")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"), _ALPACA)
_SHAPES = (*(("", name) for name in _CONVERSATIONS), *_PAIRS, ("", "text"))
_PLAIN = "none"  # as the column of answers: plain text has none
_ANSWERS = {word for pair in _PAIRS for word in pair[1:]} | {"label", "target", "reply", "solution"}
_SPACE = re.compile(r"\s*")


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
            cell = record.fields.get(column)
            answers = [cell] if isinstance(cell, str) else cell
            if not isinstance(answers, list) or not answers or not all(map(_is_text, answers)):
                raise HamuError(
                    f"row {row} of {self.source} has no {column}; expected a text, or several"
                )
            said = record.answer.removeprefix(record.answer_prefix)
            lead = record.answer_prefix + said[: len(said) - len(said.lstrip())]
            for answer in answers:
                last = [{**message, "content": answer} for message in record.messages[-1:]]
                messages = (*record.messages[:-1], *last)
                found.append(replace(record, answer=lead + answer, messages=messages))
                rows.append(row)
        return TextRecords(tuple(found), self.source, torch.tensor(rows))


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
        question_template: turns a question into a prompt; has "{question}" in it.
        answer_prefix: stands between prompt and answer, and belongs to the answer.
        prompt_column, answer_column: names of the columns, if they are not the usual ones; the
            answer's is "none" for plain text.

    Raises:
        HamuError: if the source is missing, empty or damaged, a record has no such text (the row is
            named), or plain text has a column beside it that looks like its answer.
    """
    if "{question}" not in question_template:
        raise HamuError(f"question_template {question_template!r} must have {{question}} in it")
    rows = dict(enumerate(_rows(source, split)))
    if not rows:
        raise HamuError(f"{source} is empty: it has no records")
    if source == MINIATURE:
        part = "train" if split == "train" else "holdout"
        rows = {number: row for number, row in rows.items() if row["split"] == part}
    first = next(iter(rows.values()))
    columns = list(first) if isinstance(first, dict) else []
    prompt, answer = _chosen_columns(columns, source, prompt_column, answer_column)
    template, prefix = _BARE, ""
    if prompt == "question" or (prompt and prompt_column is not None):
        template, prefix = question_template, answer_prefix
    records = tuple(
        _record(row, prompt, answer, template, prefix, f"row {number} of {source}")
        for number, row in rows.items()
    )
    return TextRecords(records, source, torch.tensor(list(rows)))


def is_text(source: str) -> bool:
    """Tell text from images: by ending, a folder by its training file, parquet by its columns.

    A data set of the hub can be either, and is taken for images.
    """
    if source == MINIATURE or source.lower().endswith((".jsonl", ".json", ".csv")):
        return True
    path = Path(source)
    if path.is_dir():
        inner = files_of(path, "train", _SUFFIXES)
        return bool(inner) and is_text(str(inner[0]))
    if path.suffix.lower() != ".parquet" or not path.is_file():
        return False
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):  # a damaged file is reported when it is read
        return False
    has_bytes = any("binary" in str(kind) for kind in schema.types)  # as images are
    return not has_bytes and any({*shape} - {""} <= {*schema.names} for shape in _SHAPES)


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
    with reading(f"{files[0]} cannot be read"):
        if suffix == ".parquet":
            return list(parquet_table(files).to_pylist())
        return _csv(files[0]) if suffix == ".csv" else _json(files[0])


def _csv(path: Path) -> list[Any]:
    import pandas

    frame = pandas.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    if not isinstance(frame.index, pandas.RangeIndex):  # pandas takes what is too much for an index
        raise HamuError(f"{path} has more cells than its header; put a text with commas in quotes")
    return list(frame.fillna("").to_dict("records"))


def _json(path: Path) -> list[Any]:
    """Read JSON values that follow each other; a list stands for its items."""
    content, decoder, rows = path.read_text(encoding="utf-8-sig"), json.JSONDecoder(), list[Any]()
    place = 0
    while (place := _SPACE.match(content, place).end()) < len(content):  # type: ignore[union-attr]
        value, place = decoder.raw_decode(content, place)
        rows += value if isinstance(value, list) else [value]
    return rows


def _chosen_columns(
    columns: list[str], source: str, prompt: str | None, answer: str | None
) -> tuple[str, str]:
    """Choose the columns of prompt and answer; that of the prompt is "" for other shapes."""
    if answer == _PLAIN and _PLAIN not in columns:
        return "", prompt or "text"
    if prompt or answer:
        return prompt or "question", answer or "answer"
    found = next((shape for shape in _SHAPES if {*shape} - {""} <= {*columns}), None)
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
    messages: tuple[Any, ...] = ()
    if not prompt and answer in _CONVERSATIONS:
        messages = _conversation(row.get(answer), where)
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
    return TextRecord(asked, said, row, messages, prefix)


def _cell(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if _is_text(value):
        return str(value)
    found = type(value).__name__ if value and not isinstance(value, str) else "nothing"
    raise HamuError(
        f"{where} has no text in {column}, but {found}; its columns are {column_names(row)}"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _conversation(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    good = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages
    )
    if not good or not messages or messages[-1].get("role") != "assistant":
        raise HamuError(
            f"{where} is no list of messages with role and content, the last of the assistant"
        )
    return tuple(messages)
