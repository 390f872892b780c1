"""Texts with a prompt and an answer, read from JSON, JSON lines, CSV, parquet or the hub.

A record is a conversation (`messages`), a `prompt` with its `completion`, a `question` with its
`answer`, an `instruction` with its `input` and `output`, or `text`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamu.data.sources import (
    MINIATURE,
    files_of,
    files_of_split,
    is_of_hub,
    load_from_hub,
    parquet_table,
    reading,
)
from hamu.errors import HamuError

QUESTION_TEMPLATE = "Question: {question}\nAnswer:"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MINIATURE = Path(__file__).with_name("fictitious_qa.jsonl")
_CONVERSATIONS = ("messages", "conversations")
_ALPACA = ("instruction", "output")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"), _ALPACA)
_SHAPES = (*(("", name) for name in _CONVERSATIONS), *_PAIRS, ("", "text"))
_PLAIN = "none"  # as the column of answers: plain text has none
_ANSWERS = {word for pair in _PAIRS for word in pair[1:]} | {"label", "target", "reply", "solution"}


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

        They begin as the answers do: with the same prefix, and the same space behind it. Each
        record must have a text, or a list of texts, in this column.
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
                messages = record.messages
                if messages:
                    messages = (*messages[:-1], {**messages[-1], "content": answer})
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
    rows = _rows(source, split)
    if not rows:
        raise HamuError(f"{source} is empty: it has no records")
    numbers = list(range(len(rows)))
    if source == MINIATURE:
        part = "train" if split == "train" else "holdout"
        numbers = [number for number in numbers if rows[number]["split"] == part]
    columns = list(rows[0]) if isinstance(rows[0], dict) else []
    prompt, answer = _chosen_columns(columns, source, prompt_column, answer_column)
    template, prefix = None, ""
    if prompt == "question" or (prompt and prompt_column is not None):
        template, prefix = question_template, answer_prefix
    records = tuple(
        _record(rows[number], prompt, answer, template, prefix, f"row {number} of {source}")
        for number in numbers
    )
    return TextRecords(records, source, torch.tensor(numbers))


def is_text(source: str) -> bool:
    """Tell text from images: by ending, a folder by its training file, parquet by its columns.

    A data set of the hub can be either, and is taken for images.
    """
    if source == MINIATURE or source.lower().endswith((".jsonl", ".json", ".csv")):
        return True
    path = Path(source)
    if path.is_dir():
        inner = files_of_split(path, "train", _SUFFIXES)
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
    return source == MINIATURE or (path.is_dir() and bool(files_of_split(path, "test", _SUFFIXES)))


def column_names(columns: Iterable[Any], source: str) -> str:
    """Join the names of columns for a message; some may be a record of a file without header."""
    names = [str(column) for column in columns]
    if any(len(name) > 40 or name.count(" ") > 2 for name in names):
        raise HamuError(
            f"{source} has {len(names)} columns whose names look like texts; does the file lack "
            f"its header? If not, name two with --prompt_column and --answer_column"
        )
    return ", ".join(names)


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
    """Read a JSON list, one JSON value, or a value per line."""
    content = path.read_text(encoding="utf-8-sig")
    try:
        found = json.loads(content)
        return found if isinstance(found, list) else [found]
    except ValueError:
        if content.lstrip().startswith("["):
            raise
    rows = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            with reading(f"line {number} of {path} cannot be read as JSON"):
                rows.append(json.loads(line))
    return rows


def _chosen_columns(
    columns: list[str], source: str, prompt: str | None, answer: str | None
) -> tuple[str, str]:
    """Choose the columns of prompt and answer; that of the prompt is "" for other shapes."""
    if answer == _PLAIN and _PLAIN not in columns:
        chosen = ("", prompt or "text")
    elif prompt or answer:
        chosen = (prompt or "question", answer or "answer")
    else:
        found = next((shape for shape in _SHAPES if {*shape} - {""} <= {*columns}), None)
        if found is None:
            raise HamuError(
                f"{source} has the columns {column_names(columns, source) or 'none'}; expected "
                f"question and answer, prompt and completion, messages, or text; name others with "
                f"--prompt_column and --answer_column"
            )
        beside = next((c for c in columns if c.strip().lower().removesuffix("s") in _ANSWERS), None)
        if found == ("", "text") and beside is not None:
            raise HamuError(
                f"{source} has the column {beside} beside text, which looks like its answer and "
                f"would not be used; give --prompt_column text --answer_column {beside} to train "
                f"on it, or --answer_column {_PLAIN} to leave it out"
            )
        return found
    missing = next((name for name in chosen if name and name not in columns), None)
    if missing is not None:
        raise HamuError(f"{source} has no column {missing}; it has {column_names(columns, source)}")
    return chosen


def _record(
    row: Any, prompt: str, answer: str, template: str | None, prefix: str, where: str
) -> TextRecord:
    """Make a record of a row; `where` names the row in messages, which never show its content."""
    if not isinstance(row, dict):
        raise HamuError(f"{where} is a {type(row).__name__}; expected a record")
    if not prompt and answer in _CONVERSATIONS:
        messages = _conversation(row.get(answer), where)
        *before, last = (message["content"] for message in messages)
        record = TextRecord("\n".join(before), last, row, messages)
    else:
        asked = _cell(row, prompt, where, may_be_empty=template is None) if prompt else ""
        if template is not None:
            asked = template.replace("{question}", asked)
        elif (prompt, answer) == _ALPACA and row.get("input"):
            asked = f"{asked}\n{_cell(row, 'input', where)}"
        said = prefix + _cell(row, answer, where)
        record = TextRecord(asked, said, row, answer_prefix=prefix)
    with reading(f"{where} is not Unicode"):  # JSON allows halves of characters
        (record.prompt + record.answer).encode()
    return record


def _cell(row: Mapping[str, Any], column: str, where: str, may_be_empty: bool = False) -> str:
    value = row.get(column)
    if _is_text(value) or (may_be_empty and value == ""):
        return str(value)
    found = type(value).__name__ if value and not isinstance(value, str) else "nothing"
    raise HamuError(f"{where} has no text in {column}, but {found}")


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
