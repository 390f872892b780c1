"""The record's figures of a change: later less earlier, and their intervals around them."""

import pytest
import torch

from hamu.evaluation import Predictions, classifier_report
from hamu.unlearning.record.figures import changes, figures


def surer(of, by):
    """The same records, the logits of their labels moved by so much."""
    own = torch.nn.functional.one_hot(of.labels, of.logits.shape[1])
    return Predictions(of.logits + by * own, of.labels)


def test_a_change_is_after_less_before_and_its_interval_is_around_it():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % 4
    before = {
        name: surer(Predictions(torch.randn(80, 4, generator=draw), labels), 1.0)
        for name in ("retain", "forget")
    }
    after = {"retain": surer(before["retain"], 0.5), "forget": surer(before["forget"], -2.0)}
    was, now = (
        figures(classifier_report(one, ["a", "b", "c", "d"]), one) for one in (before, after)
    )
    found = changes(was, now, (before, after), seed=0)
    assert found["forget"]["loss"] > 1.0
    assert found["forget"]["accuracy"] < -0.2
    assert found["retain"]["loss"] < -0.1
    for name, change in found.items():
        for key in ("loss", "accuracy"):
            assert change[key] == pytest.approx(now["sets"][name][key] - was["sets"][name][key])
            low, high = change[f"{key}_interval"]
            assert low <= change[key] <= high
