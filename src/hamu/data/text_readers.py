"""Reading texts: JSON, JSON lines, CSV, parquet, or a data set of the hub, in the usual shapes.

A record is a conversation (`messages`), a `prompt` with its `completion`, a `question` with its `answer`, an
`instruction` with its `input` and `output`, or `text`.
Only a source that starts with "hub:" may use the network.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hamu.data.hub import loading
from hamu.data.packed import parquet_table, text_columns
from hamu.data.parts import parts_of
from hamu.data.sources import HUB, MINIATURE, existing, is_of_hub
from hamu.data.text import TextRecord, TextRecords
from hamu.errors import HamuError, first_line

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MINIATURE = Path(__file__).with_name("fictitious_qa.jsonl")
QUESTION_TEMPLATE = "Question: {question}\nAnswer:"
_ALPACA = ("instruction", "output")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"), _ALPACA)
_NAME = re.compile(r"[\w()/#:.-]*( [\w()/#:.-]+){0,2}")  # of a column: at most three words
_CONVERSATIONS = ("messages", "conversations")
_PLAIN = "none"  # as the column of answers: plain text has none
_ANSWERS = {  # names of columns that hold answers, beside those of the pairs
    "label", "labels", "answer", "answers", "output", "outputs", "completion", "completions", "response", "responses",
    "target", "targets", "reply", "solution",
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
        source: a .jsonl, .json (a list, or a record per line), .csv or .parquet file, a folder that holds train and
            test as such files, "miniature" (bundled, fictitious), or "hub:OWNER/NAME", "hub:OWNER/NAME:CONFIG",
            either with "@SPLIT" at its end.
        split: "train" or "test", for sources that have both.
        question_template: how a question becomes a prompt; has "{question}" in it.
        answer_prefix: what stands between prompt and answer; it belongs to the answer, and to every other one.
        prompt_column, answer_column: names of the columns, if they are not the usual ones; "none" as that of answers
            says that a text has none beside it.

    Raises:
        HamuError: if the source is missing, empty or damaged, plain text has a column beside it that looks like its
            answer, or a record has no such text; the row is named.
    """
    if "{question}" not in question_template:
        raise HamuError(f"question_template {question_template!r} must have {{question}} in it")
    rows = list(_rows(source, split))
    if not rows:
        raise HamuError(f"{source} is empty: it has no records")
    numbers = list(range(len(rows)))
    if source == MINIATURE:
        numbers = [
            i for i in numbers if rows[i]["split"] == ("train" if split == "train" else "holdout")
        ]
    make = _shape(rows[0], source, prompt_column, answer_column, question_template, answer_prefix)
    records = []
    for number in numbers:
        if not isinstance(rows[number], dict):
            raise HamuError(
                f"row {number} of {source} is a {type(rows[number]).__name__}; expected a record"
            )
        records.append(make(number, rows[number]))
    return TextRecords(tuple(records), source, torch.tensor(numbers))


def is_text(source: str) -> bool:
    """Whether a source is text: by its ending, a folder by its training file, parquet by its columns.

    Data sets of the hub can be either, and are taken for images.
    """
    if source == MINIATURE or source.lower().endswith((".jsonl", ".json", ".csv")):
        return True
    path = Path(source)
    if path.is_dir():
        inner = _inner(path, "train")
        return bool(inner) and is_text(str(inner[0]))
    columns = text_columns(path) if path.suffix.lower() == ".parquet" and path.is_file() else []
    return "text" in columns or any(
        set(shape) <= set(columns) for shape in (*_PAIRS, *((c,) for c in _CONVERSATIONS))
    )


def has_test_split(source: str) -> bool:
    """Whether `read_text(source, "test")` reads something other than the training data."""
    return source == MINIATURE or (Path(source).is_dir() and bool(_inner(Path(source), "test")))


def matching(texts: TextRecords, expression: str) -> list[int]:
    """The positions of the records that a filter chooses.

    It is "COLUMN=VALUE", "COLUMN!=VALUE" or "COLUMN~REGEX"; the last looks anywhere in the column.

    Raises:
        HamuError: if the expression cannot be read, or names a column that is not there.
    """
    parsed = re.fullmatch(r"\s*(\w+)\s*(!=|=|~)\s*(.*)", expression, re.DOTALL)
    if parsed is None:
        raise HamuError(
            f"the filter {expression!r} cannot be read; write COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX"
        )
    column, operator, value = parsed.groups()
    try:
        found = re.compile(value).search if operator == "~" else None
    except re.error as error:
        raise HamuError(f"{value!r} in the filter is not a regular expression: {error}") from error
    chosen = []
    for position, record in enumerate(texts.records):
        if column not in record.fields:
            has = _names(record.fields, texts.source)
            raise HamuError(
                f"record {position} of {texts.source} has no column {column}; it has {has}"
            )
        written = _written(record.fields[column])
        if any(map(found, written)) if found else (value in written) == (operator == "="):
            chosen.append(position)
    return chosen


def _names(columns: Iterable[Any], source: str) -> str:
    """The names of columns, for a message.

    Raises:
        HamuError: if they are not all names: without its header, a file's first record stands there.
    """
    names = [str(column) for column in columns]
    if not all(len(name) <= 40 and _NAME.fullmatch(name) for name in names):
        raise HamuError(
            f"{source} has {len(names)} columns whose names look like texts; does the file lack its header? If not, "
            f"name two with --prompt_column and --answer_column"
        )
    return ", ".join(names)


def _written(value: Any) -> set[str]:
    """How a filter may name a value: as Python writes it, and true, false and null as JSON does."""
    return (
        {str(value), json.dumps(value)}
        if value is None or isinstance(value, bool)
        else {str(value)}
    )


def _rows(source: str, split: str) -> Iterable[Any]:
    if is_of_hub(source):
        return _hub(source, split)
    path = _MINIATURE if source == MINIATURE else existing(source)
    files = _inner(path, split) if path.is_dir() else [path]
    if not files:
        raise HamuError(f"{path} holds no {split}.jsonl, .json, .csv or .parquet; name a file")
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        return _parquet(files, path)
    (path,) = files
    if suffix not in SUFFIXES:
        raise HamuError(
            f"{path} is not text that can be read; give texts as .jsonl, .json, .csv or .parquet, images as .parquet, "
            f".npz or a folder per class"
        )
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HamuError(f"{path} is not UTF-8 text: {error}") from error
    return _csv(content, path) if suffix == ".csv" else _json(content, path)


def _inner(folder: Path, split: str) -> list[Path]:
    """The file of a split, or its parts; none if it has neither."""
    files = {file.name.lower(): file for file in sorted(folder.iterdir()) if file.is_file()}
    found = next(
        (files[f"{split}{suffix}"] for suffix in SUFFIXES if f"{split}{suffix}" in files), None
    )
    return parts_of(folder, split) if found is None else [found]


def _csv(content: str, path: Path) -> list[Any]:
    csv.field_size_limit(2**31 - 1)  # by default a cell ends at 131,072 characters
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    rows = []
    try:
        columns = list(reader.fieldnames or [])
        twice = next((name for name in columns if name and columns.count(name) > 1), None)
        if twice is not None:
            all_names = _names(columns, str(path))
            raise HamuError(
                f"{path} has the column {twice} twice, among {all_names}; rename or remove one"
            )
        for row in reader:
            beyond = row.pop(None, None)
            if beyond and any(beyond):  # a comma at the end of each line is none
                raise HamuError(
                    f"line {reader.line_num} of {path} has {len(columns) + len(beyond)} cells, the header "
                    f"{len(columns)}; put a text with commas in quotes"
                )
            rows.append(row)
    except csv.Error as error:
        raise HamuError(
            f"line {reader.line_num} of {path} cannot be read as CSV: {error}"
        ) from error
    return rows


def _json(content: str, path: Path) -> list[Any]:
    """One JSON list, a JSON value per line, or one over several lines."""
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
    import pyarrow

    try:
        return list(parquet_table(files).to_pylist())
    except HamuError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise HamuError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _hub(source: str, split: str) -> list[Any]:
    import datasets

    name, _, wanted = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    with loading(source, wanted or split):
        return list(datasets.load_dataset(name, config or None, split=wanted or split))


def _shape(
    first: Any,
    source: str,
    prompt_column: str | None,
    answer_column: str | None,
    template: str,
    prefix: str,
) -> Callable[[int, dict[str, Any]], TextRecord]:
    """How a row of this source becomes a record, judged by its first row."""
    columns = list(first) if isinstance(first, dict) else []

    def cell(number: int, row: dict[str, Any], column: str, may_be_empty: bool = False) -> str:
        value = row.get(column)
        if value is None or (isinstance(value, str) and not (may_be_empty or value.strip())):
            found = "nothing"
        elif not isinstance(value, str):
            found = type(value).__name__  # never what a record says
        elif not _is_unicode(value):
            found = "broken Unicode"
        else:
            return value
        raise HamuError(f"row {number} of {source} has no text in {column}, but {found}")

    def plain(number: int, row: dict[str, Any]) -> TextRecord:
        return TextRecord("", cell(number, row, prompt_column or "text"), row)

    if answer_column == _PLAIN and _PLAIN not in columns:
        if (prompt_column or "text") not in columns:
            raise HamuError(
                f"{source} has no column {prompt_column or 'text'}; it has {_names(columns, source)}"
            )
        return plain
    if prompt_column or answer_column:
        pair = (prompt_column or "question", answer_column or "answer")
        missing = [name for name in pair if name not in columns]
        if missing:
            raise HamuError(
                f"{source} has no column {missing[0]}; it has {_names(columns, source)}"
            )
    else:
        conversation = next((name for name in _CONVERSATIONS if name in columns), None)
        if conversation:
            return lambda number, row: _conversation(number, row, conversation, source)
        found = next((pair for pair in _PAIRS if set(pair) <= set(columns)), None)
        if found is None and "text" in columns:
            _check_no_answer(columns, source)
            return plain
        if found is None:
            raise HamuError(
                f"{source} has the columns {_names(columns, source) or 'none'}; expected question and answer, "
                f"prompt and completion, messages, or text; name others with --prompt_column and --answer_column"
            )
        pair = found
    if pair[0] == "question" or prompt_column:
        return lambda number, row: TextRecord(
            template.replace("{question}", cell(number, row, pair[0])),
            prefix + cell(number, row, pair[1]),
            row,
            answer_prefix=prefix,
        )

    def prompt(number: int, row: dict[str, Any]) -> str:
        """An instruction stands above what it is about, where there is that."""
        asked = cell(number, row, pair[0], True)
        about = (
            cell(number, row, "input", True)
            if pair == _ALPACA and row.get("input") is not None
            else ""
        )
        return f"{asked}\n{about}" if about else asked

    return lambda number, row: TextRecord(prompt(number, row), cell(number, row, pair[1]), row)


def _check_no_answer(columns: Sequence[str], source: str) -> None:
    """Check that no column beside plain text looks like its answer, of which nothing would be learned.

    Raises:
        HamuError: if one does.
    """
    answer = next((name for name in columns if name.strip().lower() in _ANSWERS), None)
    if answer is not None:
        raise HamuError(
            f"{source} has the column {answer} beside text, which looks like its answer and would not be used; give "
            f"--prompt_column text --answer_column {answer} to train on it, or --answer_column {_PLAIN} to leave it out"
        )


def _conversation(number: int, row: dict[str, Any], column: str, source: str) -> TextRecord:
    messages = row.get(column)
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("content"), str)
        and _is_unicode(m["content"])
        and "role" in m
        for m in messages
    )
    if not messages or not well_formed or messages[-1]["role"] != "assistant":
        raise HamuError(
            f"row {number} of {source} is not a conversation; {column} must be a list of messages with role and "
            f"content, the last one the assistant's"
        )
    prompt = "\n".join(m["content"] for m in messages[:-1])
    return TextRecord(prompt, messages[-1]["content"], row, tuple(messages))


def _is_unicode(text: str) -> bool:
    """Whether it can be written: JSON allows halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
