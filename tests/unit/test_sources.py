"""What the name of a data set or model stands for."""

import pytest

from hamu import HamuError
from hamu.data.sources import DIGITS, MINIATURE, existing, is_local, located


@pytest.mark.parametrize(
    ("source", "bundled", "place"),
    [
        ("rows.jsonl", MINIATURE, "data/rows.jsonl"),
        ("/rows.jsonl", MINIATURE, "/rows.jsonl"),
        ("hub:owner/name", MINIATURE, "hub:owner/name"),
        ("hub:owner/name", DIGITS, "hub:owner/name"),
        (MINIATURE, MINIATURE, MINIATURE),
        (DIGITS, DIGITS, DIGITS),
        (DIGITS, MINIATURE, "data/digits"),  # a folder of texts may be called so
    ],
)
def test_a_path_alone_is_relative_to_the_folder_of_the_data(source, bundled, place):
    assert located(source, "data", bundled) == place
    assert located(source, None, bundled) == source
    assert is_local(source, bundled) is (place.endswith(("rows.jsonl", "data/digits")))


def test_a_path_where_nothing_is_is_named(tmp_path):
    assert existing(str(tmp_path)) == tmp_path
    with pytest.raises(
        HamuError, match=r"rows\.jsonl is neither a file nor a folder; check the path"
    ):
        existing(str(tmp_path / "rows.jsonl"))
