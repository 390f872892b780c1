"""Differences to the retain model are ours less its own, of images and of texts."""

import pytest
import torch

from hamu.evaluation import Predictions, classifier_report
from hamu.unlearning.record.figures import figures


def predicted(right, wrong):
    """Of so many records of class 0, right and wrong ones."""
    return Predictions(
        torch.tensor([[2.0, 0.0]] * right + [[0.0, 2.0]] * wrong), torch.zeros(right + wrong).long()
    )


def test_a_classifier_that_is_right_more_often_than_the_retain_model_is_above_zero():
    report = classifier_report(
        {"forget": predicted(3, 1)}, ("a", "b"), reference={"forget": predicted(1, 3)}
    )
    against = report["against_retain_model"]["forget"]
    assert against["accuracy_difference"] == pytest.approx(0.5)
    assert against["loss_difference"] == pytest.approx(-1.0)


def test_a_language_model_that_loses_more_than_the_retain_model_is_above_zero():
    ours, theirs = (
        {"records": 4, "loss": loss, "probability": share}
        for loss, share in ((3.0, 0.1), (1.0, 0.4))
    )
    report = {"forget": ours, "membership_inference": None, "retain_model": {"forget": theirs}}
    against = figures(report)["against_retain_model"]["forget"]
    assert against == {
        "loss_difference": pytest.approx(2.0),
        "probability_difference": pytest.approx(-0.3),
    }
