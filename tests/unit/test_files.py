"""Files that runs leave: damaged JSON, what the mask lets others open, checkpoints that stay."""

import os
import stat

import pytest
import torch
from run_files import quota
from small_models import small_vision_transformer

from hamu import HamuError
from hamu.errors import first_line
from hamu.files import finding_room, parse_json, read_json
from hamu.models.storage import save_rest
from hamu.report.pictures import new_figure, save_figure
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


def test_a_file_that_finds_no_room_is_named_with_the_way_out(tmp_path):
    figure = new_figure(3, 2)
    with RunFolder(tmp_path / "run") as folder:
        for name, write in (
            ("evaluation.json", lambda name: folder.write_text(name, "x" * 600)),
            ("steps.jsonl", lambda name: folder.append_line(name, {"step": "x" * 600})),
            ("attack.png", lambda name: save_figure(figure, folder.path / name)),
        ):
            failure = f"{name} cannot be written: .*File too large; make room, and give the same"
            with quota(100), pytest.raises(HamuError, match=failure):
                write(name)
    failure = r"nothing: \[Errno 2\] No such file .*; mend that, and give the same command again"
    with pytest.raises(HamuError, match=failure), finding_room("nothing"):
        (tmp_path / "gone").read_text()


@pytest.mark.parametrize("size", [100, 70_000])
def test_torch_that_finds_no_room_is_told_from_its_other_errors(tmp_path, size):
    refused = pytest.raises(HamuError, match=r"nothing: .*; make room, wait")
    with quota(size), refused, finding_room("nothing", "wait"):
        torch.save(torch.zeros(100_000), tmp_path / "run.pt")
    with pytest.raises(RuntimeError, match="other"), finding_room("nothing", "wait"):
        raise RuntimeError("other")


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
        place = folder.save_model(small_vision_transformer())
        assert mode(place) == 0o777 & ~mask
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(1) as staged:
        save_rest(small_vision_transformer(), staged)
    assert mode(checkpoints.path(1)) == 0o777 & ~mask
    written = [*place.iterdir(), *checkpoints.path(1).iterdir()]
    assert {mode(path) for path in written} == {0o666 & ~mask}


@pytest.mark.parametrize(("text", "said"), [
    ("no such file\nlook above", "no such file"),
    ("\n  errors in loading:\n\tthe shapes differ\n\tand more", "errors in loading: the shapes differ"),
    (" \n", "OSError"),
])  # fmt: skip
def test_the_first_line_of_a_librarys_error_is_taken_with_what_it_announces(text, said):
    assert first_line(OSError(text)) == said


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
    checkpoints.limit(2, 12, best=6)
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
    assert checkpoints.newest() is None, "the run starts anew"
    assert names(tmp_path) == ["checkpoint-1"]
