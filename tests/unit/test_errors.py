"""Parts of a library's error that ours repeats."""

import pytest

from hamu.errors import first_line


@pytest.mark.parametrize(("text", "said"), [
    ("no such file\nlook above", "no such file"),
    ("\n  errors in loading:\n\tthe shapes differ\n\tand more", "errors in loading: the shapes differ"),
    (" \n", "OSError"),
])  # fmt: skip
def test_the_first_line_of_an_error_is_taken_with_what_it_announces(text, said):
    assert first_line(OSError(text)) == said
