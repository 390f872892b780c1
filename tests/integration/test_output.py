"""Standard output that nobody reads, that holds nothing, or that lacks characters costs no result and no exit code."""

import os
import sys

import pytest

from hamu.cli import main

TRAIN = ("train", "--recipe", "digits", "--num_train_epochs", "1", "--output_dir")
RESULTS = ("config.yaml", "evaluation.json", "inputs.json", "model")


def code_of(words):
    try:
        return main(words)
    except SystemExit as left:
        return left.code


@pytest.fixture
def output(monkeypatch):
    """Puts a file in the place of standard output."""

    def put(file):
        monkeypatch.setattr(sys, "stdout", file)
        return file

    return put


@pytest.fixture
def broken_pipe():
    """A pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        yield pipe


def test_a_reader_who_leaves_costs_no_result(tmp_path, output, broken_pipe, capfd):
    output(broken_pipe)
    assert main([*TRAIN, str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(RESULTS)
    assert not capfd.readouterr().err


def test_a_full_disk_below_standard_output_is_said_once_all_is_saved(tmp_path, output, capfd):
    with open("/dev/full", "w") as full:
        output(full)
        assert main([*TRAIN, str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(RESULTS)
    assert capfd.readouterr().err == (
        "hamu train: standard output cannot be written: [Errno 28] No space left on device; what the command "
        "writes into files is there\n"
    )


def test_the_verdict_of_an_assessment_does_not_depend_on_who_reads_it(
    tmp_path, output, broken_pipe, saved_model
):
    words = ["assess", "--recipe", "digits", "--model", str(saved_model), "--assess_batches", "2",
             "--curvature_samples", "0", "--output_dir"]  # fmt: skip
    code = main([*words, str(tmp_path / "heard")])
    output(broken_pipe)
    assert main([*words, str(tmp_path / "unheard")]) == code
    assert (tmp_path / "unheard/assess.json").read_text() == (
        tmp_path / "heard/assess.json"
    ).read_text()
    with open(tmp_path / "ascii.txt", "w", encoding="ascii") as ascii_only:
        output(ascii_only)
        assert main([*words, str(tmp_path / "ascii")]) == code
    assert r"\u03ba" in (tmp_path / "ascii.txt").read_text()


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["report", "--help"], ["unlearn", "--help-all"]]
)
def test_help_that_is_cut_short_is_no_error(words, output, broken_pipe, capfd):
    output(broken_pipe)
    assert code_of(words) == 0
    assert not capfd.readouterr().err
    broken_pipe.flush()  # as Python does in the end


def test_help_that_cannot_be_written_is_an_error(output, capfd):
    with open("/dev/full", "w") as full:
        output(full)
        assert main(["unlearn", "--help"]) == 2
    assert capfd.readouterr().err == "hamu unlearn: [Errno 28] No space left on device\n"


def test_a_version_that_cannot_be_written_is_an_error(output, capfd):
    with open("/dev/full", "w") as full:
        output(full)
        assert main(["--version"]) == 2
    assert capfd.readouterr().err == "hamu: [Errno 28] No space left on device\n"
