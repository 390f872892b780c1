"""JSON that an earlier command has left, and what of it cannot be read."""

import pytest

from hamu import HamuError
from hamu.files import parse_json, read_json


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_is_named_as_damaged_however_it_is(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(
        HamuError, match=r"record\.json is damaged: .*; remove .*/record\.json and give the same"
    ):
        read_json(path)


def test_what_is_to_be_removed_is_named_where_it_is_not_the_file(tmp_path):
    path = tmp_path / "record.json"
    path.write_text('{"seed": 1}')
    assert parse_json(path) == read_json(path) == {"seed": 1}
    path.write_text("{")
    with pytest.raises(HamuError, match=f"remove {tmp_path} and give"):
        read_json(path, remove=tmp_path)
