"""Intervals of figures and of their changes: what records tell, and no more."""

import math

import numpy as np
import pytest
import torch

from hamu.evaluation import Predictions, TokenPredictions, classifier_report
from hamu.evaluation.reports import intervals
from hamu.unlearning.record import changes, figures


def classifier(records, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Predictions(torch.randn(records, 4, generator=generator), torch.arange(records) % 4)


def texts(lengths, losses):
    record = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = torch.tensor(losses, dtype=torch.float64)
    return TokenPredictions(values, values < 1, values, values, record, len(lengths))


def expected(values):
    """The 95% interval of a mean, and a tolerance for it."""
    error = values.std() / math.sqrt(len(values))
    ends = values.mean() - 1.96 * error, values.mean() + 1.96 * error
    return pytest.approx(ends, abs=0.2 * error)


def test_tokens_of_one_text_are_drawn_together():
    """A hundred tokens of two texts are two observations: the ends are the texts' losses."""
    before = texts([50, 50], [0.5] * 50 + [2.0] * 50)
    found = intervals(before)
    assert found["loss"] == (0.5, 2.0)
    assert found["accuracy"] == (0.0, 1.0)
    assert found["probability"] == pytest.approx((math.exp(-2.0), math.exp(-0.5)))
    after = texts([50, 50], [1.5] * 50 + [1.8] * 50)
    assert intervals(after, before)["loss"] == pytest.approx((-0.2, 1.0))


def test_the_change_of_the_same_records_is_known_better_than_either_figure():
    before = classifier(2000)
    after = Predictions(before.logits + 0.05 * classifier(2000, seed=1).logits, before.labels)
    low, high = intervals(after, before)["loss"]
    assert (low, high) == expected((after.losses - before.losses).numpy())
    alone = intervals(after)["loss"]
    assert 10 * (high - low) < alone[1] - alone[0]
    assert intervals(before, before) == {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)}


def test_what_has_no_interval():
    infinite = texts([1, 1], [np.inf, 1.0])
    assert intervals(classifier(1)) == {}
    assert set(intervals(infinite)) == {"accuracy", "probability"}
    assert "loss" not in intervals(infinite, infinite)


def test_a_recorded_change_is_after_less_before_and_its_interval_is_around_it():
    def surer(of, by):
        own = torch.nn.functional.one_hot(of.labels, of.logits.shape[1])
        return Predictions(of.logits + by * own, of.labels)

    sets = enumerate(("retain", "forget"))
    before = {name: surer(classifier(80, seed), 1.0) for seed, name in sets}
    after = {"retain": surer(before["retain"], 0.5), "forget": surer(before["forget"], -2.0)}
    was, now = (figures(classifier_report(one, [*"abcd"]), one) for one in (before, after))
    found = changes(was, now, (before, after), seed=0)
    assert found["forget"]["loss"] > 1.0 > -0.1 > found["retain"]["loss"]
    assert found["forget"]["accuracy"] < -0.2
    for name, change in found.items():
        for key in ("loss", "accuracy"):
            assert change[key] == pytest.approx(now["sets"][name][key] - was["sets"][name][key])
            low, high = change[f"{key}_interval"]
            assert low <= change[key] <= high
