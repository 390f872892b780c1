"""Checkpoints that stay in a folder."""

import pytest

from hamu.errors import HamuError
from hamu.unlearning.trainer.resumable import Checkpoints


def write(checkpoints, *steps, most=None):
    for step in steps:
        with checkpoints.writing(step) as folder:
            (folder / "weights").write_bytes(bytes([step]))
        checkpoints.limit(most, step)


def names(folder):
    return sorted((p.name for p in folder.iterdir()), key=lambda name: int(name.split("-")[1]))


def test_the_newest_stay_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 50, 60)
    write(checkpoints, 3, 6, 9, most=2)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-9"], "those of an earlier run go first"
    with checkpoints.writing(12):
        pass
    checkpoints.limit(2, 12, str(tmp_path / "checkpoint-6"))
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-12"]
    checkpoints.limit(0, 12)  # no limit, as transformers has it
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-12"]


def test_checkpoints_of_another_program_stay(tmp_path, caplog):
    write(Checkpoints(tmp_path), 1, 2)
    (tmp_path / "checkpoint-2/weights").write_bytes(b"damaged")
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500/trainer_state.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() == tmp_path / "checkpoint-1"
    assert len(caplog.messages) == 2
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-500"]
    write(Checkpoints(tmp_path), 3, most=1)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-500"]


def test_damaged_checkpoints_stay_where_no_whole_one_is_left(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    (tmp_path / "checkpoint-1/weights").write_bytes(b"damaged")
    with pytest.raises(HamuError, match=f"no whole checkpoint in {tmp_path}"):
        checkpoints.newest(required=True)
    assert names(tmp_path) == ["checkpoint-1"]
    assert checkpoints.newest() is None, "the run starts anew"
    assert names(tmp_path) == []
