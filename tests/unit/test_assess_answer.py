"""The first sentence of an assessment: how hard, whether to start, and what that rests on."""

from dataclasses import replace

import pytest
import torch
from helpers import gram_at
from torch import nn
from torch.utils.data import default_collate

from hamu import HamuQ, HamuU
from hamu.assess import assess_model, frontier, judge, plain_answer


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    records = [{"pixel_values": torch.randn(3), "labels": i % 2} for i in range(40)]
    return assess_model(
        nn.Linear(3, 2), records, records[:12], collate=default_collate, batch_size=10, most_batches=2,
        curvature_samples=0, conflicts=False,
    )  # fmt: skip


@pytest.mark.parametrize("variant", [HamuQ, HamuU])
@pytest.mark.parametrize(
    ("cosines", "constraint", "mode", "answer"),
    [
        ([-0.5], 0.5, "relative", "It will be easy, start: "),
        ([0.8], 0.5, "relative", "It will be moderately hard, start: "),
        ([0.98], 0.1, "relative", "It will be hard, start: "),
        ([0.98], 0.5, "relative", "It will be hard, and this demand has a price: it will "),
        (
            [0.98],
            0.5,
            "relative",
            "or start with --constraint_mode relative --constraint 0.1, which is free",
        ),
        ([0.5], 100.0, "absolute", "Do not start with this demand, which no step can meet"),
        (
            [0.9995],
            0.5,
            "relative",
            "do not start: only 3.2% of what the gradients allow is free, and more than that",
        ),
        (
            [0.9992],
            0.02,
            "relative",
            "It will be very hard: this demand costs nothing, but it forgets next to nothing",
        ),
        ([1.0, 1.0], 0.5, "relative", "do not start: no demand is free"),
    ],
)
def test_it_answers_how_hard_it_will_be_and_whether_to_start(
    found, variant, cosines, constraint, mode, answer
):
    method = variant(constraint, mode)
    curve = frontier(gram_at([2.0] * len(cosines), [1.0] * len(cosines), cosines), method)
    verdict = judge(curve, method, (1.0, 1.0), None)
    text = plain_answer(
        replace(found, method=method, frontiers={method.name: curve}, verdict=verdict)
    )
    assert answer in text
    assert (
        ("no demand is free" in text)
        == (curve.free_limit == 0)
        == (verdict.headline == "stop: every step must hurt")
    )


def test_it_names_what_makes_it_doubtful(found):
    regime = found.hardness.regime
    sure = replace(
        found.intervals, regimes=dict.fromkeys(found.intervals.regimes, 0.0) | {regime: 1.0}
    )
    assert plain_answer(replace(found, intervals=sure)).endswith("to first order).")
    unsure = replace(sure, regimes=sure.regimes | {regime: 0.6})
    assert "60% of resamples agree" in plain_answer(replace(found, intervals=unsure))
