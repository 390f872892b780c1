"""Who may open what a run leaves: everybody whom the mask allows, but for what may name a person."""

import os
import stat

import pytest
from torch import nn

from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.checkpoints import Checkpoints


@pytest.fixture(params=[0o022, 0o027])
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_all_is_as_open_as_the_mask_allows_but_settings_with_a_filter(tmp_path, mask):
    with RunFolder(tmp_path / "run") as folder:
        assert mode(folder.write_config({"method": "ga"})) == 0o666 & ~mask
        assert mode(folder.write_config({"forget_filter": "author=Jane Doe"})) == 0o600
        assert mode(folder.save_model(nn.Linear(2, 2))) == 0o777 & ~mask
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(1):
        pass
    assert mode(checkpoints.path(1)) == 0o777 & ~mask
