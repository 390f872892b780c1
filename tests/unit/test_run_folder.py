"""Two runs that want one folder, and folders in which nothing was written."""

import errno

import pytest

from hamu import HamuError
from hamu.run_folder import RunFolder

UNDER_WAY = "another run, or one that it left, is under way"


def test_a_folder_in_which_a_run_writes_is_refused_at_once(tmp_path):
    with RunFolder(tmp_path / "out") as first:
        first.write_json("evaluation.json", {})
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(HamuError, match=UNDER_WAY):
                RunFolder(tmp_path / "out", **how)
    RunFolder(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_began_together_the_second_to_write_is_refused_and_changes_nothing(tmp_path, overwrite):
    first, second = (RunFolder(tmp_path / "out", overwrite=overwrite) for _ in range(2))
    with first:
        first.write_text("steps.jsonl", "first\n")
        with second, pytest.raises(HamuError, match=UNDER_WAY):
            second.write_text("steps.jsonl", "second\n")
        assert (tmp_path / "out/steps.jsonl").read_text() == "first\n"


def test_what_another_run_has_left_meanwhile_is_not_mixed_with(tmp_path):
    first, second, third = (RunFolder(tmp_path / "out", overwrite=n == 2) for n in range(3))
    with first:
        first.write_text("steps.jsonl", "first\n")
        first.write_text("record.md", "first\n")
    with second, pytest.raises(HamuError, match="is in use"):
        second.write_text("steps.jsonl", "second\n")
    with third:
        third.write_text("steps.jsonl", "third\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["steps.jsonl"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
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


def test_a_place_where_no_folder_can_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(HamuError, match=r"the output folder .*/out is a file; choose another --output_dir"):
        RunFolder(tmp_path / "out")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the superuser may write anywhere
    with pytest.raises(HamuError, match=rf"the output folder .*/new cannot be made: {tmp_path} is not writable"):
        RunFolder(tmp_path / "new")


def test_a_line_that_no_run_has_written_is_named(tmp_path):
    with RunFolder(tmp_path / "out", resume=True) as folder:
        folder.write_text("steps.jsonl", '{"step": 1}\n[2]\n')
        with pytest.raises(HamuError, match=r"line 2 of .*steps\.jsonl is not of a step; take it out, or"):
            folder.keep_lines("steps.jsonl", lambda line: line["step"] < 3)


def test_one_file_keeps_its_folder(tmp_path):
    with RunFolder(tmp_path / "deep/out") as folder:
        folder.write_text("steps.jsonl", "")
    assert (tmp_path / "deep/out/steps.jsonl").is_file()


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("left", [".comparison.json.x1_2abcd", ".inputs.json.x1_2abcd", ".comparison.png.tmp"])
def test_what_an_interrupted_first_write_has_left_is_in_nobodys_way(tmp_path, how, left):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / left).write_text("{")
    with RunFolder(tmp_path / "out", **how) as folder:
        folder.write_text("steps.jsonl", "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["steps.jsonl"]


def test_files_that_are_no_longer_true_are_removed(tmp_path):
    with RunFolder(tmp_path / "out") as folder:
        folder.write_text("record.md", "")
        folder.write_text("steps.jsonl", "")
        folder.remove("record.md", "report.html")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["steps.jsonl"]
