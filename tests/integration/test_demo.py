"""The demo, cut short: the same steps with one epoch of everything."""

import json

import pytest

from hamu.cli import main
from hamu.cli.demo import Digits, FictitiousAuthors
from hamu.core.methods import method_classes


@pytest.mark.parametrize(("task", "scenario"), [("image", Digits), ("text", FictitiousAuthors)])
def test_the_demo_tells_the_whole_story(task, scenario, tmp_path, monkeypatch, capsys):
    for settings in (scenario.train_settings, scenario.unlearn_settings):
        monkeypatch.setitem(settings, "num_train_epochs", 1)
    methods = method_classes()
    if task == "text":  # all methods run on images
        methods = {name: methods[name] for name in ("hamu-q", "ft", "ga", "npo")}
        monkeypatch.setattr("hamu.cli.demo.method_classes", lambda: methods)
    folder = tmp_path / "demo"
    demo = ["demo", "--task", task, "--output_dir", str(folder)]
    assert main(demo) == 0
    printed = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["methods"]) == list(methods)
    assert len(summary["hardness"]) == len(scenario(42).problems)
    for name, row in summary["methods"].items():
        assert name in printed
        assert len(row["trajectory"]) == 2, "before the first epoch and after it"
    assert summary["methods"]["ga"]["retain_gain"] < summary["methods"]["ft"]["retain_gain"]
    assert (folder / "trajectories.png").stat().st_size > 10_000
    assert "hamu unlearn" in printed
    assert main(demo) == 2, "a second demo does not replace the first unasked"
    assert "--overwrite" in capsys.readouterr().err


def test_the_demo_of_images_ends_as_the_papers_comparison_does(tmp_path, monkeypatch):
    methods = {name: method_classes()[name] for name in ("hamu-q", "ft", "ga", "scrub")}
    monkeypatch.setattr("hamu.cli.demo.method_classes", lambda: methods)
    assert main(["demo", "--output_dir", str(tmp_path / "demo")]) == 0
    ends = json.loads((tmp_path / "demo/summary.json").read_text())["methods"]
    assert ends["hamu-q"]["forget_gain"] > 0.3
    assert ends["hamu-q"]["retain_gain"] > 0
    assert ends["ft"]["forget_gain"] < 0.1, "fine-tuning does not forget"
    assert ends["scrub"]["forget_gain"] < 0.1
    assert ends["ga"]["retain_gain"] < -0.1, "ascent destroys"
