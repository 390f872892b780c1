"""Files that runs leave: damaged JSON is named, and the mask decides who may open what."""

import os
import stat

import pytest
from torch import nn

from hamu import HamuError
from hamu.errors import first_line
from hamu.files import parse_json, read_json
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.resumable import Checkpoints


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_damaged_file_is_named_with_what_to_remove(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(HamuError, match=r"record\.json is damaged: .*; remove .*/record\.json and"):
        read_json(path)
    with pytest.raises(HamuError, match=f"remove {tmp_path} and give"):
        read_json(path, remove=tmp_path)
    path.write_text('{"seed": 1}')
    assert parse_json(path) == read_json(path) == {"seed": 1}


@pytest.fixture(params=[0o022, 0o027])
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_all_is_as_open_as_the_mask_allows_but_settings_that_may_name_a_person(tmp_path, mask):
    with RunFolder(tmp_path / "run") as folder:
        assert mode(folder.write_config({"method": "ga"})) == 0o666 & ~mask
        assert mode(folder.write_config({"forget_filter": "author=Jane Doe"})) == 0o600
        assert mode(folder.save_model(nn.Linear(2, 2))) == 0o777 & ~mask
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(1):
        pass
    assert mode(checkpoints.path(1)) == 0o777 & ~mask


@pytest.mark.parametrize(("text", "said"), [
    ("no such file\nlook above", "no such file"),
    ("\n  errors in loading:\n\tthe shapes differ\n\tand more", "errors in loading: the shapes differ"),
    (" \n", "OSError"),
])  # fmt: skip
def test_the_first_line_of_a_librarys_error_is_taken_with_what_it_announces(text, said):
    assert first_line(OSError(text)) == said
