"""Two runs that want one folder, and folders that are taken."""

import errno
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_files import contents
from safetensors import SafetensorError
from torch import nn

from hamu import HamuError
from hamu.unlearning.run_folder import MARK, RunFolder
from hamu.unlearning.trainer.resumable import seal

INPUTS = {"forget set": None, "original model": None}
UNDER_WAY = "another run, or a process that a run left behind, is using"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in (".hamu.lock", MARK))


def fill(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def begun(tmp_path):
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({}, INPUTS)
    return tmp_path / "out"


def test_a_folder_in_which_a_run_writes_is_refused_at_once(tmp_path):
    with RunFolder(tmp_path / "out") as first:
        first.write_json("inputs.json", INPUTS)
        for how in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(HamuError, match=UNDER_WAY):
                RunFolder(tmp_path / "out", **how)
    RunFolder(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_began_together_the_second_is_refused_before_its_work(tmp_path, overwrite):
    first, second, third = (RunFolder(tmp_path / "out", overwrite=overwrite) for _ in range(3))
    with first:
        with pytest.raises(HamuError, match=UNDER_WAY), second:
            pytest.fail("it may take hours until it writes")
        first.write_text("steps.jsonl", "first\n")
    assert (tmp_path / "out/steps.jsonl").read_text() == "first\n"
    taken = pytest.raises(HamuError, match="holds a run; choose another --output_dir")
    with third, nullcontext() if overwrite else taken:
        third.write_text("record.md", "third\n")
    assert names_in(tmp_path / "out") == ["record.md" if overwrite else "steps.jsonl"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_the_file_system_has_no_locks_a_run_writes_without(tmp_path, monkeypatch, number):
    def flock(handle, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with RunFolder(tmp_path / "out") as folder:
        assert folder.write_text("steps.jsonl", "").is_file()


def test_folders_that_were_made_for_nothing_go(tmp_path):
    with RunFolder(tmp_path / "deep/er/out") as folder:
        folder.prepare()
    assert not any(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with RunFolder(tmp_path / "mine") as folder:
        folder.prepare()
    assert list((tmp_path / "mine").iterdir()) == [], "it was there before"


BEGUN = {"config.yaml": {}, "inputs.json": INPUTS}
OTHER = "choose another --output_dir, or replace it with --overwrite"
FOREIGN = "which is not of a run; --overwrite only replaces runs, so choose another --output_dir$"


@pytest.mark.parametrize(("given", "use", "overwrite"), [
    (BEGUN, "an unfinished run; go on with it by hamu unlearn --resume --output_dir '/.*/my out', ", False),
    (BEGUN | {"inputs.json": {"training set": None}}, "an unfinished run; .* hamu train", False),
    (BEGUN | {"record.json": {}}, f"a run; {OTHER}", False),
    ({"evaluation.json": {}}, f"a run; {OTHER}", False),
    ({"thesis.txt": ""}, f"thesis.txt, {FOREIGN}", False),
    ({"checkpoint-500/optimizer.pt": "x", "runs/log": "x"}, f"checkpoint-500, {FOREIGN}", True),
    ({"model/best.pt": "x", "thesis.txt": "x"}, f"thesis.txt, {FOREIGN}", True),
    ({"config.yaml": "lr: 1", "summary.json": {}, MARK: None}, f"config.yaml, {FOREIGN}", True),
])  # fmt: skip
def test_a_folder_that_is_taken_stays_as_it_is_and_says_by_what(tmp_path, given, use, overwrite):
    marked = {name: text for name, text in ({MARK: ""} | given).items() if text is not None}
    fill(tmp_path / "my out", marked)
    before = contents(tmp_path)
    with pytest.raises(HamuError, match=f"/my out .*holds {use}"):
        RunFolder(tmp_path / "my out", overwrite=overwrite)
    assert contents(tmp_path) == before


def test_a_place_where_no_folder_can_be_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    (tmp_path / "link").symlink_to("gone/away")
    (tmp_path / "loop").symlink_to("loop")
    for place in ("out", "out/deeper", "x" * 300, "link", "link/out", "loop", "loop/out"):
        cannot = f"{place} cannot be made: .*; choose another --output_dir"
        with pytest.raises(HamuError, match=cannot):
            RunFolder(tmp_path / place)
    assert names_in(tmp_path) == ["link", "loop", "out"], "nothing is left of trying"


def test_a_folder_that_may_only_be_read_is_not_said_to_be_missing(begun, monkeypatch):
    def read_only(lock):
        raise PermissionError(errno.EACCES, "Permission denied", str(begun / ".hamu.lock"))

    monkeypatch.setattr("hamu.unlearning.run_folder.FileLock.acquire", read_only)
    message = r"out cannot be written: .* denied: '.*/\.hamu\.lock'; allow it, or choose another"
    with pytest.raises(HamuError, match=message):
        RunFolder(begun, resume=True)


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize(
    "left", [".comparison.json.x1_2abcd", ".inputs.json.x1_2abcd", ".comparison.png.tmp"]
)
def test_what_an_interrupted_first_write_has_left_is_in_nobodys_way(tmp_path, how, left):
    fill(tmp_path / "out", {left: "{", MARK: ""})
    with RunFolder(tmp_path / "out", **how) as folder:
        folder.write_text("steps.jsonl", "")
    assert names_in(tmp_path / "out") == ["steps.jsonl"]


def test_a_run_that_was_killed_before_it_wrote_its_settings_is_in_nobodys_way(begun):
    fill(begun, {"config.yaml": "", ".config.yaml.x1_2abcd": "mo"})
    with pytest.raises(HamuError, match="holds an unfinished run"):
        RunFolder(begun)
    (begun / "config.yaml").unlink()
    with RunFolder(begun) as folder:
        folder.write_text("steps.jsonl", "")
    assert names_in(begun) == ["steps.jsonl"]
    fill(begun, {"inputs.json": INPUTS})
    with pytest.raises(HamuError, match="holds a run"):
        RunFolder(begun)


@pytest.mark.parametrize("mine", [".lock", ".model.backup/a", ".config.yaml.swp", "runs/a/model/b"])
def test_what_is_not_of_a_run_stays(begun, mine):
    fill(begun, {mine: "mine"})
    with pytest.raises(HamuError, match="which is not of a run"):
        RunFolder(begun, overwrite=True)
    with RunFolder(begun, resume=True) as folder:
        folder.write_text("steps.jsonl", "")
    assert (begun / mine).read_text() == "mine"


def test_a_run_outlives_an_overwrite_until_there_is_a_file_to_put_in_its_place(begun):
    fill(begun, {"checkpoint-1/weights": "x", "steps.jsonl": ""})
    seal(begun / "checkpoint-1")
    before = contents(begun)
    with RunFolder(begun, overwrite=True):
        pass
    assert contents(begun) == before
    with RunFolder(begun, overwrite=True) as folder:
        folder.write_text("steps.jsonl", "new")
    assert names_in(begun) == ["steps.jsonl"]


def test_of_a_link_in_a_run_the_link_alone_goes(begun, tmp_path):
    fill(tmp_path / "elsewhere", {"model.safetensors": "mine"})
    for name in ("model", "merged"):
        (begun / name).symlink_to(tmp_path / "elsewhere")
    (begun / "steps.jsonl").symlink_to(tmp_path / "nowhere")
    with RunFolder(begun, overwrite=True) as folder:
        folder.prepare()
        assert names_in(begun) == []
    (begun / "model").symlink_to(tmp_path / "elsewhere")
    with RunFolder(begun, resume=True) as folder:
        folder.save_model(nn.Linear(1, 1))
    assert [path.name for path in (begun / "model").iterdir()] == ["model.safetensors"]
    assert not (begun / "model").is_symlink()
    assert (tmp_path / "elsewhere/model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("error", [SafetensorError("File too large"), OSError(28, "No space left")])
@pytest.mark.parametrize(("saved", "name", "remedy"), [
    ({}, "model", "then run it anew with --resume; --save_strategy steps would keep checkpoints"),
    ({"checkpoint-4/manifest.json": "{}"}, "model", "then go on with --resume"),
    ({}, "merged", "and merge in another run; what else this one leaves is complete"),
])  # fmt: skip
def test_a_model_that_finds_no_room_leaves_nothing_half_and_says_what_is_lost(
    begun, monkeypatch, error, saved, name, remedy
):
    def full(model, folder):
        (folder / "config.json").write_text("{}")
        raise error

    fill(begun, saved)
    there = names_in(begun)
    monkeypatch.setattr("hamu.unlearning.run_folder.save_model", full)
    message = rf"cannot be written into .*/out: .*(too large|space left); make room, {remedy}$"
    with RunFolder(begun, resume=True) as folder, pytest.raises(HamuError, match=message):
        folder.save_model(None, name=name)
    assert names_in(begun) == there


def test_a_model_is_flushed_to_the_disk_before_it_is_in_its_place(begun, monkeypatch):
    flushed = []
    monkeypatch.setattr("hamu.files.sync", lambda path: flushed.append(Path(path)))
    with RunFolder(begun, resume=True) as folder:
        folder.save_model(nn.Linear(1, 1), lambda place: (place / "README.md").write_text("x"))
    names = [path.name for path in flushed]
    assert sorted(names[:2]) == ["README.md", "model.safetensors"]
    assert names[2:] == ["model", "out"], "the folders, which hold their names"
    assert flushed[0].parent != begun / "model"


def test_too_little_room_is_refused_as_an_earlier_run_stays_until_another_is_saved(
    begun, monkeypatch
):
    disk = SimpleNamespace(total=10_000, free=5_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    RunFolder(begun.parent / "new/one").check_room(5_000)
    message = r"has room for 5e-06 GB, what is saved at the end takes 5.6e-06 GB{}; make room, or"
    for new, how, stays in (
        ("new", {}, ""),
        ("out", {"overwrite": True}, ", while the earlier run stays"),
    ):
        with pytest.raises(HamuError, match=message.format(stays)):
            RunFolder(begun.parent / new, **how).check_room(5_600)
    disk.total = 0  # not known
    RunFolder(begun.parent / "new").check_room(5_600)


def test_what_a_killed_run_was_writing_goes_before_another_begins(begun):
    left = {
        ".model.ab12cd_9/model/model.safetensors": "x",
        ".checkpoint-staged/checkpoint-2/x": "x",
    }
    fill(begun, left | {"model/model.safetensors": "x"})
    with RunFolder(begun, overwrite=True):
        assert names_in(begun) == ["config.yaml", "inputs.json", "model"]


def test_what_a_broken_off_removal_has_left_may_go(begun, monkeypatch):
    fill(begun, {"checkpoint-4/weights": ""})
    seal(begun / "checkpoint-4")
    remove = shutil.rmtree

    def broken_off(path, **how):
        if Path(path).name.endswith("removed") and (Path(path) / "manifest.json").exists():
            (Path(path) / "manifest.json").unlink()
            raise KeyboardInterrupt
        remove(path, **how)

    monkeypatch.setattr("hamu.files.shutil.rmtree", broken_off)
    with pytest.raises(KeyboardInterrupt), RunFolder(begun, overwrite=True) as folder:
        folder.prepare()
    with RunFolder(begun, overwrite=True) as folder:
        folder.prepare()
        assert names_in(begun) == []
