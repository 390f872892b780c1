"""Standard output that nobody reads, that is full, or that lacks characters costs no result."""

import io
import os
import sys

import pytest

from hamu.cli import main

TRAIN = ["train", "--data", "digits", "--model", "resnet8", "--max_steps", "1", "--output_dir"]
RESULTS = [".hamu", "config.yaml", "evaluation.json", "inputs.json", "model"]


@pytest.fixture
def output(monkeypatch):
    """Replaces standard output by a file."""
    return lambda file: monkeypatch.setattr(sys, "stdout", file)


@pytest.fixture
def full():
    """A file on a disk without space."""
    with open("/dev/full", "w") as file:
        yield file


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
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RESULTS
    assert not capfd.readouterr().err
    broken_pipe.flush()  # as Python does in the end


def test_a_full_disk_below_standard_output_is_reported_after_all_is_saved(
    tmp_path, output, full, capfd
):
    output(full)
    assert main([*TRAIN, str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RESULTS
    err = capfd.readouterr().err
    assert err.startswith("hamu train: standard output cannot be written: [Errno 28] No space left")
    assert err.count("\n") == 1


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path, output):
    with open(tmp_path / "ascii.txt", "w", encoding="ascii") as ascii_only:
        output(ascii_only)
        assert main(["methods"]) == 0
    assert r"D\xe9sid\xe9ri" in (tmp_path / "ascii.txt").read_text()


def test_an_error_that_nobody_reads_is_told_by_the_exit_code(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(["nothing"]) == 2
