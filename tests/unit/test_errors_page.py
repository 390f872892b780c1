"""docs/errors.md has a row for every message of an error, and no other."""

import re
from collections import Counter
from pathlib import Path

import pytest
from error_templates import GAP, raised_errors
from recorded_errors import NOT_PRODUCED

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| (`+) ?(.+?) ?\1 \| (.+) \| (.+) \|$", re.MULTILINE)
PLACEHOLDER = re.compile(r"'<[^<>]+>'|<[^<>]+>")  # a text stands in quotes where it is wrong


@pytest.fixture(scope="module")
def rows():
    """(message, cause, remedy) of each row, the message as a template."""
    found = ROW.findall(PAGE.read_text())
    return [(PLACEHOLDER.sub(GAP, message), cause, remedy) for _, message, cause, remedy in found]


def test_every_message_has_one_row_and_every_row_a_message(rows):
    documented = Counter(message for message, _, _ in rows)
    raised = {one.template: f"{one.file}:{one.first}" for one in raised_errors()}
    without_a_row = [f"{place}: {message}" for message, place in raised.items() if message not in documented]
    assert not without_a_row, "add to docs/errors.md:\n" + "\n".join(without_a_row)
    without_a_source = sorted(documented.keys() - raised.keys())
    assert not without_a_source, "no error says this any more:\n" + "\n".join(without_a_source)
    assert [message for message, times in documented.items() if times > 1] == []


def test_every_line_of_a_table_of_messages_is_a_row(rows):
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows)


def test_cause_and_remedy_say_something(rows):
    for message, cause, remedy in rows:
        assert len(cause.split()) > 2, message
        assert remedy.endswith("."), message


def test_what_cannot_be_produced_is_raised_somewhere():
    assert NOT_PRODUCED.keys() <= {one.template for one in raised_errors()}
