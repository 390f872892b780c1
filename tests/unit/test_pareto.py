"""Which points no other beats, and the area that they cover: by hand, and against counting random points."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamu import HamuError
from hamu.evaluation import Gains, hypervolume, hypervolume_reference, pareto_optimal

COORDINATE = st.floats(-10, 10, allow_subnormal=False)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12)


@pytest.mark.parametrize(
    ("points", "optimal"),
    [
        ([], []),
        ([(-3.0, -3.0)], [True]),
        ([(1, 2), (2, 1), (0, 0)], [True, True, False]),
        ([(1, 1), (1, 1)], [True, True]),
        ([(1, 1), (1, 2)], [False, True]),
        ([(2, 1), (1, 1), (3, 0), (0, 3)], [True, False, True, True]),
    ],
)
def test_a_point_is_optimal_unless_another_is_better_in_one_and_no_worse_in_the_other(
    points, optimal
):
    assert pareto_optimal(points) == optimal


@given(POINTS)
def test_every_point_that_is_not_optimal_is_beaten_by_one_that_is(points):
    optimal = pareto_optimal(points)
    front = [point for point, is_optimal in zip(points, optimal, strict=True) if is_optimal]
    assert bool(front) == bool(points)
    for (x, y), is_optimal in zip(points, optimal, strict=True):
        assert is_optimal or any(a >= x and b >= y and (a, b) != (x, y) for a, b in front)


@pytest.mark.parametrize(
    ("points", "reference", "area"),
    [
        ([], (0, 0), 0),
        ([(2, 3)], (0, 0), 6),
        ([(2, 3)], (1, -1), 4),
        ([(2, 3), (2, 3)], (0, 0), 6),
        ([(1, 3), (3, 1)], (0, 0), 5),
        ([(3, 1), (2, 2), (1, 3)], (0, 0), 6),
        ([(3, 1), (2, 2), (1, 3), (1, 1)], (0, 0), 6),
        ([(5, -1), (-1, 5)], (0, 0), 0),
        ([(5, -1), (-1, 5), (1, 1)], (0, 0), 1),
        ([(0, 0)], (0, 0), 0),
    ],
)
def test_areas_that_can_be_counted(points, reference, area):
    assert hypervolume(points, reference) == area
    assert hypervolume(points[::-1], reference) == area


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_share_of_random_points_below_some_point(seed):
    draws = np.random.default_rng(seed)
    points = draws.uniform(-0.3, 1, (int(draws.integers(1, 15)), 2))
    samples = draws.uniform(0, 1, (200_000, 2))
    below = (samples[:, None, :] <= points[None]).all(-1).any(-1).mean()
    error = math.sqrt(0.25 / len(samples))
    assert hypervolume([tuple(point) for point in points.tolist()], (0.0, 0.0)) == pytest.approx(
        below, abs=5 * error
    )


@given(POINTS, COORDINATE, COORDINATE)
def test_points_that_are_beaten_add_nothing_and_others_take_nothing_away(points, x, y):
    reference = (-10.0, -10.0)
    area = hypervolume(points, reference)
    front = [
        point
        for point, is_optimal in zip(points, pareto_optimal(points), strict=True)
        if is_optimal
    ]
    assert hypervolume(front, reference) == pytest.approx(area)
    assert hypervolume([*points, (x, y)], reference) >= area - 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_points_that_are_not_finite_are_refused(bad):
    for call in (lambda: pareto_optimal([(0.0, bad)]), lambda: hypervolume([(bad, 0.0)], (0.0, 0.0)),
                 lambda: hypervolume([], (0.0, bad))):  # fmt: skip
        with pytest.raises(HamuError, match="is not finite; leave out what diverged"):
            call()


@pytest.mark.parametrize(
    ("worst", "retain"), [(0.3, 0.0), (0.0, 0.0), (-0.4, -0.4), (-1.0, -1.0), (-7.0, -1.0)]
)
def test_hypervolumes_are_seen_from_the_worst_retain_loss_within_bounds(worst, retain):
    assert hypervolume_reference(worst) == Gains(retain=retain, forget=0.0)


def test_the_joint_gain_is_the_smaller_one():
    assert (Gains(retain=0.2, forget=-0.1).joint, Gains(retain=-0.2, forget=0.1).joint) == (
        -0.1,
        -0.2,
    )
