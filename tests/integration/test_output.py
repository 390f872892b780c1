"""Standard output that nobody reads, that is full, or that lacks characters costs no result."""

import io
import os
import sys

from hamu.cli import main

TRAIN = ["train", "--data", "digits", "--model", "resnet8", "--max_steps", "1", "--output_dir"]
RESULTS = [".hamu", "config.yaml", "evaluation.json", "inputs.json", "model"]


def test_a_reader_who_leaves_costs_no_result(tmp_path, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main([*TRAIN, str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RESULTS
    assert not capfd.readouterr().err


def test_a_full_disk_below_standard_output_is_reported_after_all_is_saved(
    tmp_path, monkeypatch, capfd
):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*TRAIN, str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RESULTS
    err = capfd.readouterr().err
    assert err.startswith("hamu train: standard output cannot be written: [Errno 28] No space left")
    assert err.count("\n") == 1


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path, monkeypatch):
    with open(tmp_path / "ascii.txt", "w", encoding="ascii") as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)
        assert main(["methods"]) == 0
    assert r"D\xe9sid\xe9ri" in (tmp_path / "ascii.txt").read_text()


def test_an_error_that_nobody_reads_is_told_by_the_exit_code(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(["nothing"]) == 2
