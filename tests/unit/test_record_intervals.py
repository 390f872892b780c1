"""Intervals of figures: what records tell, and no more."""

import math

import numpy as np
import pytest
import torch

from hamu.evaluation import Predictions, TokenPredictions
from hamu.evaluation.reports import change_intervals, record_intervals


def classifier(records, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Predictions(torch.randn(records, 4, generator=generator), torch.arange(records) % 4)


def texts(lengths, losses):
    record = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = torch.tensor(losses, dtype=torch.float64)
    return TokenPredictions(values, values < 1, values, values, record, len(lengths))


def test_an_interval_is_as_wide_as_the_standard_error_says():
    found = classifier(2000)
    losses = found.losses.numpy()
    error = losses.std() / math.sqrt(len(losses))
    low, high = record_intervals(found)["loss"]
    assert low == pytest.approx(losses.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(losses.mean() + 1.96 * error, abs=0.2 * error)


def test_tokens_of_one_text_are_drawn_together():
    """A hundred tokens of two texts are two observations: the interval reaches from one text's loss to the other's."""
    found = record_intervals(texts([50, 50], [0.5] * 50 + [2.0] * 50))
    assert found["loss"] == (0.5, 2.0)
    assert found["accuracy"] == (0.0, 1.0)
    assert found["probability"] == pytest.approx((math.exp(-2.0), math.exp(-0.5)))


def test_the_change_of_the_same_records_is_known_better_than_either_figure():
    before = classifier(2000)
    after = Predictions(before.logits + 0.05 * classifier(2000, seed=1).logits, before.labels)
    changes = (after.losses - before.losses).numpy()
    error = changes.std() / math.sqrt(len(changes))
    low, high = change_intervals(before, after)["loss"]
    assert low == pytest.approx(changes.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(changes.mean() + 1.96 * error, abs=0.2 * error)
    alone = record_intervals(after)["loss"]
    assert 10 * (high - low) < alone[1] - alone[0]
    assert change_intervals(before, before) == {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)}


def test_the_change_of_a_text_is_drawn_as_a_whole():
    before, after = (
        texts([50, 50], [0.5] * 50 + [2.0] * 50),
        texts([50, 50], [1.5] * 50 + [1.8] * 50),
    )
    assert change_intervals(before, after)["loss"] == pytest.approx((-0.2, 1.0))
    assert "loss" not in change_intervals(
        texts([1, 1], [np.inf, 1.0]), texts([1, 1], [np.inf, 1.0])
    )


def test_what_has_no_interval():
    assert record_intervals(classifier(1)) == {}
    assert set(record_intervals(texts([1, 1], [np.inf, 1.0]))) == {"accuracy", "probability"}
