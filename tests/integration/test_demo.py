"""The demo, cut short: of texts one epoch, of both tasks a few methods."""

import json

import pytest

from hamu.cli import demo, main
from hamu.core.methods import method_classes


@pytest.fixture
def ends(monkeypatch, tmp_path):
    """Runs the demo with these methods alone; returns what comes out of each."""

    def call(task, *names):
        chosen = {name: method_classes()[name] for name in names}
        monkeypatch.setattr(demo, "method_classes", lambda: chosen)
        words = ["demo", "--task", task, "--output_dir", str(tmp_path / "demo")]
        assert main(words) == 0
        summary = json.loads((tmp_path / "demo/summary.json").read_text())
        assert list(summary["methods"]) == list(names)
        assert len(summary["hardness"]) == len(demo.PROBLEMS[task][2])
        assert (tmp_path / "demo/trajectories.png").stat().st_size > 10_000
        assert main(words) == 2, "a second demo does not replace the first unasked"
        return summary["methods"]

    return call


def test_the_demo_of_texts_tells_the_whole_story(ends, monkeypatch, capsys):
    for settings in (demo.TRAIN["text"], demo.UNLEARN["text"]):
        monkeypatch.setitem(settings, "num_train_epochs", 1)
    found = ends("text", "hamu-q", "ft", "ga", "npo")
    assert all(len(row["trajectory"]) == 2 for row in found.values()), "at the start and the end"
    assert found["ga"]["retain_gain"] < found["ft"]["retain_gain"]
    printed = capsys.readouterr()
    assert all(name in printed.out for name in found)
    assert "--overwrite" in printed.err


def test_the_demo_of_images_ends_as_the_papers_comparison_does(ends):
    found = ends("image", "hamu-q", "ft", "ga", "scrub")
    assert found["hamu-q"]["forget_gain"] > 0.3
    assert found["hamu-q"]["retain_gain"] > 0
    assert found["ft"]["forget_gain"] < 0.1, "fine-tuning does not forget"
    assert found["scrub"]["forget_gain"] < 0.1
    assert found["ga"]["retain_gain"] < -0.1, "ascent destroys"
