"""Text readers: JSON, JSON lines, CSV, parquet, or a data set of the hub, in the usual shapes.

A record is a conversation (`messages`), a `prompt` with its `completion`, a `question` with its
`answer`, an `instruction` with its `input` and `output`, or `text`. Only a source that starts with
"hub:" may use the network.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from hamu.data.sources import (
    MINIATURE,
    existing,
    is_of_hub,
    load_from_hub,
    parquet_table,
    parts_of,
)
from hamu.data.text import TextRecord, TextRecords
from hamu.errors import HamuError, first_line

QUESTION_TEMPLATE = "Question: {question}\nAnswer:"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MINIATURE = Path(__file__).with_name("fictitious_qa.jsonl")
_ALPACA = ("instruction", "output")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"), _ALPACA)
_NAME = re.compile(r"[\w()/#:.-]*( [\w()/#:.-]+){0,2}")  # of a column: at most three words
_CONVERSATIONS = ("messages", "conversations")
_PLAIN = "none"  # as the column of answers: plain text has none
_ANSWERS = {  # names of columns that hold answers, beside those of the pairs
    "label", "labels", "answer", "answers", "output", "outputs", "completion", "completions",
    "response", "responses", "target", "targets", "reply", "solution",
}  # fmt: skip


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
            holds train and test as such files, "miniature" (bundled, fictitious), or a data set of
            the hub (see `load_from_hub`).
        split: "train" or "test", for sources that have both.
        question_template: turns a question into a prompt; has "{question}" in it.
        answer_prefix: stands between prompt and answer, and belongs to the answer.
        prompt_column, answer_column: names of the columns, if they are not the usual ones; "none"
            as that of answers says that a text has none beside it.

    Raises:
        HamuError: if the source is missing, empty or damaged, plain text has a column beside it
            that looks like its answer, or a record has no such text; the row is named.
    """
    if "{question}" not in question_template:
        raise HamuError(f"question_template {question_template!r} must have {{question}} in it")
    rows = list(_rows(source, split))
    if not rows:
        raise HamuError(f"{source} is empty: it has no records")
    numbers = list(range(len(rows)))
    if source == MINIATURE:
        part = "train" if split == "train" else "holdout"
        numbers = [number for number in numbers if rows[number]["split"] == part]
    columns = list(rows[0]) if isinstance(rows[0], dict) else []
    prompt, answer = _chosen_columns(columns, source, prompt_column, answer_column)
    is_question = prompt == "question" or (bool(prompt) and prompt_column is not None)
    template, prefix = (question_template, answer_prefix) if is_question else (None, "")
    is_chat = not prompt and prompt_column is None and answer in _CONVERSATIONS
    shape = _Shape(source, prompt, answer, template, prefix, is_chat)
    records = tuple(shape.record(number, rows[number]) for number in numbers)
    return TextRecords(records, source, torch.tensor(numbers))


def is_text(source: str) -> bool:
    """Tell text from images: by ending, a folder by its training file, parquet by its columns.

    A data set of the hub can be either, and is taken for images.
    """
    if source == MINIATURE or source.lower().endswith((".jsonl", ".json", ".csv")):
        return True
    path = Path(source)
    if path.is_dir():
        inner = _inner(path, "train")
        return bool(inner) and is_text(str(inner[0]))
    columns = _text_columns(path) if path.suffix.lower() == ".parquet" and path.is_file() else set()
    shapes = (("text",), *_PAIRS, *((name,) for name in _CONVERSATIONS))
    return any(columns >= {*shape} for shape in shapes)


def _text_columns(path: Path) -> set[str]:
    """Column names of a parquet file; none if one has bytes, as images are, or it is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return set()
    inner = [field.type for kind in schema.types if pyarrow.types.is_struct(kind) for field in kind]
    binary = (pyarrow.types.is_binary, pyarrow.types.is_large_binary)
    has_bytes = any(test(one) for one in [*schema.types, *inner] for test in binary)
    return set() if has_bytes else {*schema.names}


def has_test_split(source: str) -> bool:
    """Return whether `read_text(source, "test")` reads other than the training data."""
    return source == MINIATURE or (Path(source).is_dir() and bool(_inner(Path(source), "test")))


def column_names(columns: Iterable[Any], source: str) -> str:
    """Join the names of columns for a message.

    Raises:
        HamuError: if some look like texts: without a header, they are a file's first record.
    """
    names = [str(column) for column in columns]
    if not all(len(name) <= 40 and _NAME.fullmatch(name) for name in names):
        raise HamuError(
            f"{source} has {len(names)} columns whose names look like texts; does the file lack "
            f"its header? If not, name two with --prompt_column and --answer_column"
        )
    return ", ".join(names)


def _rows(source: str, split: str) -> Iterable[Any]:
    if is_of_hub(source):
        return load_from_hub(source, split)  # type: ignore[no-any-return]
    path = _MINIATURE if source == MINIATURE else existing(source)
    files = _inner(path, split) if path.is_dir() else [path]
    if not files:
        raise HamuError(f"{path} holds no {split}.jsonl, .json, .csv or .parquet; name a file")
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        return _parquet(files, path)
    (path,) = files
    if suffix not in _SUFFIXES:
        raise HamuError(
            f"{path} is not text that can be read; give texts as .jsonl, .json, .csv or .parquet, "
            f"images as .parquet, .npz or a folder per class"
        )
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HamuError(f"{path} is not UTF-8 text: {error}") from error
    return _csv(content, path) if suffix == ".csv" else _json(content, path)


def _inner(folder: Path, split: str) -> list[Path]:
    """Find the file of a split, or its parts; none if it has neither."""
    files = {file.name.lower(): file for file in sorted(folder.iterdir()) if file.is_file()}
    found = [files[name] for end in _SUFFIXES if (name := f"{split}{end}") in files]
    return found[:1] or parts_of(folder, split)


def _csv(content: str, path: Path) -> list[Any]:
    csv.field_size_limit(2**31 - 1)  # by default a cell ends at 131,072 characters
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    rows = []
    try:
        columns = list(reader.fieldnames or [])
        twice = next((name for name in columns if name and columns.count(name) > 1), None)
        if twice is not None:
            names = column_names(columns, str(path))
            raise HamuError(
                f"{path} has the column {twice} twice, among {names}; rename or remove one"
            )
        for row in reader:
            beyond = row.pop(None, None)
            if beyond and any(beyond):  # a comma at the end of each line is none
                raise HamuError(
                    f"line {reader.line_num} of {path} has {len(columns) + len(beyond)} cells, the "
                    f"header {len(columns)}; put a text with commas in quotes"
                )
            rows.append(row)
    except csv.Error as error:
        raise HamuError(
            f"line {reader.line_num} of {path} cannot be read as CSV: {error}"
        ) from error
    return rows


def _json(content: str, path: Path) -> list[Any]:
    """Read one JSON list, a JSON value per line, or one over several lines."""
    if content.lstrip()[:1] == "[":
        try:
            return list(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise HamuError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    rows = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                with suppress(ValueError, RecursionError):
                    return [json.loads(content)]
                why = getattr(error, "msg", first_line(error))
                raise HamuError(f"line {number} of {path} cannot be read as JSON: {why}") from error
    return rows


def _parquet(files: Sequence[Path], path: Path) -> list[Any]:
    try:
        return list(parquet_table(files).to_pylist())
    except HamuError:
        raise
    except Exception as error:  # pyarrow raises many kinds for a damaged file; the cause is kept
        raise HamuError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _chosen_columns(
    columns: list[str], source: str, prompt: str | None, answer: str | None
) -> tuple[str, str]:
    """Choose the columns of prompt and answer; that of the prompt is "" for other shapes."""
    if answer == _PLAIN and _PLAIN not in columns:
        chosen = ("", prompt or "text")
    elif prompt or answer:
        chosen = (prompt or "question", answer or "answer")
    else:
        shapes = [("", name) for name in _CONVERSATIONS] + [*_PAIRS, ("", "text")]
        found = next((one for one in shapes if {*one} - {""} <= {*columns}), None)
        if found is None:
            raise HamuError(
                f"{source} has the columns {column_names(columns, source) or 'none'}; expected "
                f"question and answer, prompt and completion, messages, or text; name others with "
                f"--prompt_column and --answer_column"
            )
        beside = next((name for name in columns if name.strip().lower() in _ANSWERS), None)
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


@dataclass(frozen=True)
class _Shape:
    """The shape of the records of a source: columns, and what is written around their texts."""

    source: str
    prompt: str
    answer: str
    template: str | None
    prefix: str
    is_chat: bool

    def record(self, number: int, row: Any) -> TextRecord:
        """Make a record of a row."""
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise HamuError(f"row {number} of {self.source} is a {kind}; expected a record")
        if self.prompt:
            prompt = self._prompt(number, row)
            answer = self.prefix + self._cell(number, row, self.answer)
            return TextRecord(prompt, answer, row, answer_prefix=self.prefix)
        if not self.is_chat:
            return TextRecord("", self._cell(number, row, self.answer), row)
        messages = row.get(self.answer)
        if not _is_conversation(messages):
            raise HamuError(
                f"row {number} of {self.source} is not a conversation; {self.answer} must be a "
                f"list of messages with role and content, the last one the assistant's"
            )
        *before, last = (message["content"] for message in messages)
        return TextRecord("\n".join(before), last, row, tuple(messages))

    def _prompt(self, number: int, row: dict[str, Any]) -> str:
        if self.template is not None:
            question = self._cell(number, row, self.prompt)
            return self.template.replace("{question}", question)
        prompt = self._cell(number, row, self.prompt, may_be_empty=True)
        if (self.prompt, self.answer) != _ALPACA or row.get("input") is None:
            return prompt
        about = self._cell(number, row, "input", may_be_empty=True)
        return f"{prompt}\n{about}" if about else prompt

    def _cell(
        self, number: int, row: dict[str, Any], column: str, may_be_empty: bool = False
    ) -> str:
        value = row.get(column)
        if value is None or (isinstance(value, str) and not (may_be_empty or value.strip())):
            found = "nothing"
        elif not isinstance(value, str):
            found = type(value).__name__  # never what a record says
        elif not _is_unicode(value):
            found = "broken Unicode"
        else:
            return value
        raise HamuError(f"row {number} of {self.source} has no text in {column}, but {found}")


def _is_conversation(messages: Any) -> TypeGuard[list[dict[str, str]]]:
    """Return whether it is a list of messages, the last one the assistant's."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(m, dict)
            and isinstance(m.get("content"), str)
            and _is_unicode(m["content"])
            and "role" in m
            for m in messages
        )
        and messages[-1]["role"] == "assistant"
    )


def _is_unicode(text: str) -> bool:
    """Return whether it can be written: JSON allows halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
