"""Points that no other beats and the area they cover, by hand and against random points."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamu import HamuError
from hamu.evaluation import Gains, hypervolume, pareto_optimal
from hamu.evaluation.gains import hypervolume_reference

COORDINATE = st.floats(-10, 10, allow_subnormal=False)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12)


def front_of(points):
    optimal = pareto_optimal(points)
    return [point for point, is_optimal in zip(points, optimal, strict=True) if is_optimal]


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1), (1, 1)], [(1, 1), (1, 1)]),
        ([(1, 1), (1, 2)], [(1, 2)]),
        ([(2, 1), (1, 1), (3, 0), (0, 3)], [(2, 1), (3, 0), (0, 3)]),
    ],
)
def test_a_point_is_optimal_unless_another_is_better_in_one_and_no_worse_in_the_other(
    points, front
):
    assert front_of(points) == front


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_share_of_random_points_below_some_point(seed):
    draws = np.random.default_rng(seed)
    points = draws.uniform(-0.3, 1, (int(draws.integers(1, 15)), 2))
    samples = draws.uniform(0, 1, (200_000, 2))
    below = (samples[:, None, :] <= points[None]).all(-1).any(-1).mean()
    area = hypervolume([tuple(point) for point in points.tolist()], (0.0, 0.0))
    assert area == pytest.approx(below, abs=5 * math.sqrt(0.25 / len(samples)))


@given(POINTS, COORDINATE, COORDINATE)
def test_points_that_are_beaten_add_nothing_and_others_take_nothing_away(points, x, y):
    reference, front = (-10.0, -10.0), front_of(points)
    area = hypervolume(points, reference)
    assert bool(front) == bool(points)
    for point in set(points) - set(front):
        assert any(a >= point[0] and b >= point[1] for a, b in front)
    assert hypervolume(front, reference) == pytest.approx(area)
    assert hypervolume([*points, (x, y)], reference) >= area - 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_points_that_are_not_finite_are_refused(bad):
    for points, reference in ([(bad, 0.0)], (0.0, 0.0)), ([], (0.0, bad)):
        with pytest.raises(HamuError, match="is not finite; leave out what diverged"):
            hypervolume(points, reference)
    with pytest.raises(HamuError, match="is not finite; leave out what diverged"):
        pareto_optimal([(0.0, bad)])


@pytest.mark.parametrize(
    ("worst", "retain"), [(0.3, 0.0), (0.0, 0.0), (-0.4, -0.4), (-1.0, -1.0), (-7.0, -1.0)]
)
def test_hypervolumes_are_seen_from_the_worst_retain_loss_within_bounds(worst, retain):
    assert hypervolume_reference(worst) == Gains(retain=retain, forget=0.0)
    assert Gains(retain=worst, forget=0.1).joint == min(worst, 0.1)
