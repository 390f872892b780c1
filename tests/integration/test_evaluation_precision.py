"""All models of a run on images are evaluated in one precision (texts: test_text_models)."""

import json
import re

import pytest
import torch

from hamu.cli import main
from hamu.models import load_classifier

IMAGES = ["--data", "digits", "--forget_class", "3"]


@pytest.fixture
def report(tmp_path, saved_model):
    """Runs a command with a model; returns its evaluation.json."""

    def call(command, *words, name="out"):
        folder = tmp_path / name
        assert main([command, *IMAGES, *map(str, words), "--output_dir", str(folder)]) == 0
        return json.loads((folder / "evaluation.json").read_text())

    return call


def test_a_classifier_against_itself_differs_by_nothing_in_half_precision_too(report, saved_model):
    steps = ["--max_steps", "1", "--constraint_mode", "relative", "--stopping", "off", "--bf16"]
    models = ["--model", saved_model, "--retain_model", saved_model]
    before = report("unlearn", *models, *steps)["before"]
    nothing = dict.fromkeys(("loss_difference", "accuracy_difference", "kl"), 0.0)
    for figures in before["against_retain_model"].values():
        assert figures == nothing | {"agreement": 1.0}
    half = report("evaluate", "--model", saved_model, "--bf16", name="half")
    full = report("evaluate", "--model", saved_model, name="full")
    assert half["forget"] == before["forget"] != full["forget"]


@pytest.mark.parametrize("rho", [0, 0.75])
def test_the_test_set_without_the_class_is_measured_whether_all_or_part_of_it_goes(
    rho, report, saved_model
):
    found = report("evaluate", "--model", saved_model, "--retain_model", saved_model, "--rho", rho)
    whole, rest = found["test"], found["test_without_class"]
    assert whole["per_class_loss"].keys() - rest["per_class_loss"].keys() == {"3"}
    assert 0 < whole["samples"] - rest["samples"] < whole["samples"]
    differences = found["retain_model"]["membership_inference_difference"]
    assert differences == {"accuracy": 0.0, "auc": 0.0}


def test_figures_that_are_not_finite_are_null(saved_model, report, tmp_path, capsys):
    """JSON knows no NaN: readers other than Python's stop at it."""
    model = load_classifier(str(saved_model))
    with torch.no_grad():
        model.classifier.weight.mul_(1e38)
    model.save_pretrained(tmp_path / "huge")
    found = report("evaluate", "--model", tmp_path / "huge", "--retain_model", saved_model)
    text = (tmp_path / "out/evaluation.json").read_text()
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))
    assert found["forget"]["loss"] is None
    assert found["forget"]["accuracy"] is not None
    assert found["against_retain_model"]["forget"]["loss_difference"] is None
    assert found["membership_inference"] is None
    assert "all figures are in" in capsys.readouterr().out
