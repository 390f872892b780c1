"""Claims of Fig. 9's page, on trajectories whose answer is known."""

import pytest

from experiments.paper.stopping import Stopping

EPOCHS = list(range(26))


def claims(values, terminates=None):
    one = {
        "epoch": EPOCHS,
        "trajectory": [(value, 0.0) for value in values],
        "kappa": [0.1 * epoch for epoch in EPOCHS[1:]],
        "stop_threshold": [1.0] * 25,
        "terminates": terminates,
        "terminates_by_means": None,
    }
    _, slowing, timely = Stopping().claims({"hamu-q": one})[:3]
    return slowing.holds, timely.holds


def rising_until(peak):
    return [min(epoch, 2 * peak - epoch) * 0.01 for epoch in EPOCHS]


@pytest.mark.parametrize(
    ("values", "terminates", "slows", "timely"),
    [
        ([0.01 * e for e in EPOCHS], None, False, None),  # 13 epochs against 12 are no slowing
        ([0.01 * e - 1e-5 * e * e for e in EPOCHS], 24.2, True, None),  # it has not begun to fall
        (rising_until(20), 20.5, True, True),
        (rising_until(20), 24.0, True, False),  # a fifth of the gain is gone
        (rising_until(20), 10.0, True, False),  # early
        (rising_until(20), None, True, False),  # never met, though it falls
        ([-0.01 * e for e in EPOCHS], 24.0, False, False),  # it falls from the first step
    ],
)
def test_slowing_and_timely_stops_are_told(values, terminates, slows, timely):
    assert claims(values, terminates) == (slows, timely)
