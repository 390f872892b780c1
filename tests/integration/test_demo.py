"""The demo, cut short: the same steps with one epoch of everything, on a part of the data."""

import json

import pytest

from hamu.cli import demo, main
from hamu.core.methods import method_classes
from hamu.data import read_images


@pytest.fixture
def methods(monkeypatch):
    """Lets the demo run these methods alone."""

    def choose(*names):
        chosen = {name: method_classes()[name] for name in names}
        monkeypatch.setattr(demo, "method_classes", lambda: chosen)

    return choose


@pytest.mark.parametrize("task", ["image", "text"])
def test_the_demo_tells_the_whole_story(task, methods, tmp_path, monkeypatch, capsys):
    for settings in (demo.TRAIN[task], demo.UNLEARN[task]):
        monkeypatch.setitem(settings, "num_train_epochs", 1)
    names = list(method_classes())
    if task == "text":  # all methods run on images
        names = ["hamu-q", "ft", "ga", "npo"]
        methods(*names)
    else:
        few = lambda *split, **how: read_images(*split, **how).select(range(300))  # noqa: E731
        monkeypatch.setattr("hamu.unlearning.jobs.tasks.images.read_images", few)
    folder = tmp_path / "demo"
    words = ["demo", "--task", task, "--output_dir", str(folder)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["methods"]) == names
    assert len(summary["hardness"]) == len(demo.PROBLEMS[task][2])
    for name, row in summary["methods"].items():
        assert name in printed
        assert len(row["trajectory"]) == 2, "before the first epoch and after it"
    gains = {name: row["retain_gain"] for name, row in summary["methods"].items()}
    assert gains["ga"] < gains["ft"]
    assert (folder / "trajectories.png").stat().st_size > 10_000
    assert "hamu unlearn" in printed
    assert main(words) == 2, "a second demo does not replace the first unasked"
    assert "--overwrite" in capsys.readouterr().err


def test_the_demo_of_images_ends_as_the_papers_comparison_does(tmp_path, methods):
    methods("hamu-q", "ft", "ga", "scrub")
    assert main(["demo", "--output_dir", str(tmp_path / "demo")]) == 0
    ends = json.loads((tmp_path / "demo/summary.json").read_text())["methods"]
    assert ends["hamu-q"]["forget_gain"] > 0.3
    assert ends["hamu-q"]["retain_gain"] > 0
    assert ends["ft"]["forget_gain"] < 0.1, "fine-tuning does not forget"
    assert ends["scrub"]["forget_gain"] < 0.1
    assert ends["ga"]["retain_gain"] < -0.1, "ascent destroys"
