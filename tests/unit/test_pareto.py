"""Points that no other beats and the area they cover, by hand and against random points."""

import math

import numpy as np
import pytest

from hamu import HamuError
from hamu.evaluation import Gains, hypervolume, pareto_optimal
from hamu.evaluation.gains import Level, state_at


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1), (1, 1)], [True, True]),
        ([(1, 1), (1, 2)], [False, True]),
        ([(2, 1), (1, 1), (3, 0), (0, 3)], [True, False, True, True]),
    ],
)
def test_a_point_is_optimal_unless_another_dominates_it(points, front):
    assert pareto_optimal(points) == front


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_share_of_random_points_below_some_point(seed):
    draws = np.random.default_rng(seed)
    points = draws.uniform(-0.3, 1, (int(draws.integers(1, 15)), 2))
    samples = draws.uniform(0, 1, (200_000, 2))
    below = (samples[:, None, :] <= points[None]).all(-1).any(-1).mean()
    area = hypervolume([tuple(point) for point in points.tolist()], (0.0, 0.0))
    assert area == pytest.approx(below, abs=5 * math.sqrt(0.25 / len(samples)))
    moved = [(x + 1.0, y - 0.5) for x, y in points.tolist()]
    assert hypervolume(moved, (1.0, -0.5)) == pytest.approx(area)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_points_that_are_not_finite_are_refused(bad):
    for refused in (
        lambda: hypervolume([(bad, 0.0)], (0.0, 0.0)),
        lambda: hypervolume([], (0.0, bad)),
        lambda: pareto_optimal([(0.0, bad)]),
    ):
        with pytest.raises(HamuError, match="is not finite; leave out what diverged"):
            refused()


def test_the_joint_gain_is_the_smaller_one_if_both_are_finite():
    assert [Gains(retain=gain, forget=0.1).joint for gain in (-0.4, 0.3)] == [-0.4, 0.1]
    assert math.isnan(Gains(retain=0.3, forget=math.nan).joint)


def evaluated(*points, start=(0.5, 0.25)):
    """Logged evaluations, two steps apart: the forget loss, the retain loss and the test accuracy."""
    return [
        {"step": 2 * n, "eval_forget_loss": f, "eval_retain_loss": r, "eval_test_accuracy": 1.0 - n / 10,
         "eval_forget_gain": f and f - start[0], "eval_retain_gain": start[1] - r}
        for n, (f, r) in enumerate([start, *points])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("points", "level", "state"),
    [  # forget loss, retain loss, test accuracy, step, and the next evaluated step
        ([(1.5, 0.5), (3.5, 1.5)], ("forget", 2.0), (2.0, 0.75, 0.875, 2.5, 4)),
        # of a run that recovers the best state beyond the level
        ([(4.0, 3.0), (3.0, 0.3), (1.0, 0.1)], ("forget", 2.0), (2.0, 0.2, 0.75, 5.0, 4)),
        ([(4.0, 3.0), (3.0, 0.1)], ("forget", 2.0), (3.0, 0.1, 0.8, 4, 4)),
        # none within a jump to more than twice the level
        ([(50.0, 10.0), (60.0, 9.0)], ("forget", 2.0), (60.0, 9.0, 0.8, 4, 4)),
        ([(2.5, 0.5)], ("forget", 1.0), (2.5, 0.5, 0.9, 2, 2)),
        ([(2.0, 0.75), (4.0, 3.0)], ("forget", 2.0), (2.0, 0.75, 0.9, 2, 2)),  # at the level
        ([(2.0, 0.75), (4.0, 1.75), (9.0, 9.0)], ("retain", 1.25), (3.0, 1.25, 0.85, 3.0, 2)),
        ([(2.0, 0.75), (4.0, 1.75)], ("retain", 0.1), None),
        ([(1.0, 0.5), (4.9, 0.5)], ("forget", 5.0), None),
        ([(1.0, 0.5), (4.0, math.nan), (9.0, 0.5)], ("forget", 5.0), None),
        ([(None, 0.5), (9.0, 0.5)], ("forget", 5.0), None),
    ],
)
def test_the_state_at_a_level_is_the_best_beyond_it_or_between_evaluations(points, level, state):
    """Linear between two evaluations; none once a run has diverged."""
    names = ("eval_forget_loss", "eval_retain_loss", "eval_test_accuracy", "step", "evaluated")
    found = state_at(evaluated(*points), Level(*level))
    assert (found and tuple(found[name] for name in names)) == (state and pytest.approx(state))


@pytest.mark.parametrize("text", ["forget", "test=1", "forget=x", "retain=0", "forget=inf"])
def test_a_level_that_is_none_is_refused(text):
    with pytest.raises(HamuError, match=f"^at '{text}' must be forget=LOSS or retain=LOSS"):
        Level.parse(text)
    assert Level.parse("retain=0.25") == ("retain", 0.25)
