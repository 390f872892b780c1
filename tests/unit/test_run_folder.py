"""Two runs that want one folder, and folders in which nothing was written."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from torch import nn

from hamu import HamuError
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.checkpoints import seal

INPUTS = {"forget set": None, "original model": None}
UNDER_WAY = "another run, or a process that a run left behind, is using"


def visible(folder):
    """All but the lock of a run that is writing."""
    return [path for path in folder.iterdir() if path.name != ".lock"]


def test_a_folder_in_which_a_run_writes_is_refused_at_once(tmp_path):
    with RunFolder(tmp_path / "out") as first:
        first.write_json("inputs.json", INPUTS)
        for how in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(HamuError, match=UNDER_WAY):
                RunFolder(tmp_path / "out", **how)
    RunFolder(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_began_together_the_second_to_write_is_refused_and_changes_nothing(
    tmp_path, overwrite
):
    first, second = (RunFolder(tmp_path / "out", overwrite=overwrite) for _ in range(2))
    with first:
        first.write_text("steps.jsonl", "first\n")
        with second, pytest.raises(HamuError, match=UNDER_WAY):
            second.write_text("steps.jsonl", "second\n")
        assert (tmp_path / "out/steps.jsonl").read_text() == "first\n"


def test_what_another_run_has_left_meanwhile_is_not_mixed_with(tmp_path):
    first, second, third = (RunFolder(tmp_path / "out", overwrite=n == 2) for n in range(3))
    with first:
        first.write_json("inputs.json", INPUTS)
        first.write_text("record.md", "first\n")
    with second, pytest.raises(HamuError, match="holds what is left of a run that cannot go on"):
        second.write_text("steps.jsonl", "second\n")
    with third:
        third.write_text("steps.jsonl", "third\n")
    assert [path.name for path in visible(tmp_path / "out")] == ["steps.jsonl"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_the_file_system_has_no_locks_a_run_writes_without(tmp_path, monkeypatch, number):
    def flock(handle, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / "out").mkdir()
    with RunFolder(tmp_path / "out") as folder:
        assert folder.write_text("steps.jsonl", "").is_file()


def test_folders_that_were_made_for_nothing_go(tmp_path):
    with RunFolder(tmp_path / "deep/er/out") as folder:
        folder.prepare()
    assert not any(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with RunFolder(tmp_path / "mine") as folder:
        folder.prepare()
    assert (tmp_path / "mine").is_dir(), "it was there before"


LOOKS = {"retain": {}, "forget": {}}  # of an evaluation
RECORDED = {"format": "hamu-unlearning-record"}
OTHER = "choose another --output_dir, or replace it with --overwrite"


@pytest.mark.parametrize(("contents", "use"), [
    ({"config.yaml": {}, "inputs.json": INPUTS}, "go on with it by hamu unlearn --resume --output_dir"),
    ({"config.yaml": {}, "inputs.json": INPUTS, "evaluation.json": LOOKS}, "holds an interrupted run; .* unlearn"),
    ({"config.yaml": {}, "inputs.json": {"training set": None}}, "go on with it by hamu train --resume --output_dir"),
    ({"config.yaml": {}, "inputs.json": INPUTS, "record.json": RECORDED}, f"holds a finished run; {OTHER}"),
    ({"config.yaml": {}, "evaluation.json": LOOKS}, f"holds a finished run; {OTHER}"),
    ({"inputs.json": INPUTS}, f"holds what is left of a run that cannot go on; {OTHER}"),
    ({"thesis.txt": {}}, r"is in use: it holds thesis.txt, which is not of a run; choose another --output_dir$"),
])  # fmt: skip
def test_a_folder_that_is_taken_says_by_what_and_names_the_way_out(tmp_path, contents, use):
    fill(tmp_path / "out", {name: json.dumps(content) for name, content in contents.items()})
    before = files_of(tmp_path)
    with pytest.raises(HamuError, match=f"/out .*{use}"):
        RunFolder(tmp_path / "out")
    assert files_of(tmp_path) == before


def test_a_place_where_no_folder_can_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(
        HamuError, match=r"the output folder .*/out is a file; choose another --output_dir"
    ):
        RunFolder(tmp_path / "out")
    for place, why in (
        ("out/deeper", f"{tmp_path}/out is a file"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(HamuError, match=f"cannot be made: {why}; choose another --output_dir"):
            RunFolder(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left of trying"
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the superuser may write anywhere
    with pytest.raises(
        HamuError, match=rf"the output folder .*/new cannot be made: {tmp_path} is not writable"
    ):
        RunFolder(tmp_path / "new")


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize(
    "left", [".comparison.json.x1_2abcd", ".inputs.json.x1_2abcd", ".comparison.png.tmp"]
)
def test_what_an_interrupted_first_write_has_left_is_in_nobodys_way(tmp_path, how, left):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / left).write_text("{")
    with RunFolder(tmp_path / "out", **how) as folder:
        folder.write_text("steps.jsonl", "")
    assert [path.name for path in visible(tmp_path / "out")] == ["steps.jsonl"]


def files_of(folder):
    return {
        path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")
    }


def fill(folder, contents):
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(("contents", "named"), [
    ({"checkpoint-500/pytorch_model.bin": "x", "checkpoint-500/optimizer.pt": "x", "runs/log": "x"}, "checkpoint-500"),
    ({"checkpoint-500/manifest.json": '{"files": ["a"]}'}, "checkpoint-500"),
    ({"checkpoint-best/manifest.json": '{"a": {"size": 1, "sha256": "0"}}'}, "checkpoint-best"),
    ({"config.yaml": "lr: 1", "model/best.pt": "x", "runs/log": "x", "summary.json": '{"loss": 1}'}, "config.yaml"),
    ({"evaluation.json": '{"accuracy": 0.9}', "report.html": "x"}, "evaluation.json"),
    ({"evaluation.json": '["retain", "forget"]', "inputs.json": "{"}, "evaluation.json"),
    ({"model/best.pt": "x"}, "model"),
])  # fmt: skip
def test_what_no_run_has_left_outlives_an_overwrite(tmp_path, contents, named):
    fill(tmp_path / "out", contents)
    before = files_of(tmp_path)
    with pytest.raises(
        HamuError,
        match=f"/out holds {named}, which is not of a run; --overwrite only replaces runs",
    ):
        RunFolder(tmp_path / "out", overwrite=True)
    assert files_of(tmp_path) == before


def test_a_checkpoint_of_somebody_else_outlives_a_run_beside_it(tmp_path):
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({}, INPUTS)
    for name in ("checkpoint-1", "checkpoint-500"):
        fill(tmp_path / "out" / name, {"optimizer.pt": name})
    seal(tmp_path / "out/checkpoint-1")
    with pytest.raises(HamuError, match="/out holds checkpoint-500, which is not of a run"):
        RunFolder(tmp_path / "out", overwrite=True)
    shutil.rmtree(tmp_path / "out/checkpoint-500")
    with RunFolder(tmp_path / "out", overwrite=True) as folder:
        folder.prepare()
        assert not any(visible(tmp_path / "out"))


def test_a_run_that_is_removed_shows_to_the_last_that_it_is_one(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({}, INPUTS)
        folder.write_text("steps.jsonl", "")
    removed = []
    unlink = Path.unlink

    def noting(path, **how):
        removed.extend([path.name] if path.name != ".lock" else [])
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", noting)
    with RunFolder(tmp_path / "out", overwrite=True) as folder:
        folder.prepare()
    assert (removed[0], removed[-1], len(removed)) == ("config.yaml", "inputs.json", 3)


def test_of_a_link_in_a_run_the_link_alone_goes(tmp_path):
    fill(tmp_path / "elsewhere", {"model.safetensors": "mine"})
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({}, INPUTS)
    for name in ("model", "merged"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out/hardness.json").symlink_to(tmp_path / "nowhere")
    with RunFolder(tmp_path / "out", overwrite=True) as folder:
        folder.prepare()
        assert not any(visible(tmp_path / "out"))
    for target in ("elsewhere", "nowhere"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/model").symlink_to(tmp_path / target)
        with RunFolder(tmp_path / "out", resume=True) as folder:
            folder.save_model(nn.Linear(1, 1))
        assert [path.name for path in (tmp_path / "out/model").iterdir()] == ["model.safetensors"]
        assert not (tmp_path / "out/model").is_symlink()
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "elsewhere/model.safetensors").read_text() == "mine"


def test_an_output_folder_below_a_link_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("gone/away")
    for path in (tmp_path / "link", tmp_path / "link/out"):
        with pytest.raises(HamuError, match=rf"{path} cannot be made: .*/link is a link to gone/away, which is not "
                                            r"there; make that, or choose another --output_dir"):  # fmt: skip
            RunFolder(path)


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: File too large"), OSError(28, "No space left")]
)
def test_a_model_that_finds_no_room_leaves_nothing_half(tmp_path, monkeypatch, error):
    def full(model, folder):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr("hamu.unlearning.run_folder.save_model", full)
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({}, INPUTS)
        with pytest.raises(HamuError, match=r"the model cannot be written into .*/out: .*(File too large|No space left)"
                                            r"; where it is full make room, then go on with --resume"):  # fmt: skip
            folder.save_model(None)
    assert sorted(path.name for path in visible(tmp_path / "out")) == ["config.yaml", "inputs.json"]


def test_what_a_broken_off_removal_has_left_may_go(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "out") as folder:
        folder.begin({"seed": 1}, {"forget set": {}})
    checkpoint = tmp_path / "out/checkpoint-4"
    checkpoint.mkdir()
    for name, text in (("manifest.json", '{"weights": {"sha256": ""}}'), ("weights", "")):
        (checkpoint / name).write_text(text)
    remove = shutil.rmtree

    def broken_off(path, **how):
        if Path(path).name.endswith("removed") and (Path(path) / "manifest.json").exists():
            (Path(path) / "manifest.json").unlink()
            raise KeyboardInterrupt
        remove(path, **how)

    monkeypatch.setattr("hamu.files.shutil.rmtree", broken_off)
    with pytest.raises(KeyboardInterrupt), RunFolder(tmp_path / "out", overwrite=True) as folder:
        folder.prepare()
    with RunFolder(tmp_path / "out", overwrite=True) as folder:
        folder.prepare()
    assert list(visible(tmp_path / "out")) == []
