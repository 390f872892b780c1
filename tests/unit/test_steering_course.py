"""When a run by goal looks at the data, how long it is patient, and what it takes a step to cost."""

import types
from dataclasses import replace

import pytest
import torch
from helpers import Holder, pair_at_angle

from hamu import HamuQ, PairedGradients
from hamu.gram import SIDES, PairGram
from hamu.training.goal import Goal, Standing
from hamu.training.line_search import LineSearch
from hamu.training.steering import Steering, _price
from hamu.training.unseen import Change

START = Standing(forget_loss=1.0, retain_loss=0.0, forget_accuracy=1.0)
BAD = Standing(forget_loss=1.5, retain_loss=9.0, forget_accuracy=1.0)


def good(turn):
    return replace(START, forget_loss=1.0 + 0.01 * turn)


class Course:
    """A run whose every look at the data finds what is scripted; the last of it again and again."""

    def __init__(self):
        pair = PairedGradients(Holder([torch.ones(3)]), HamuQ(0.5, "relative", stopping="off"))
        self.looks, self.ends, self.script = 0, [], [START]
        goal = Goal(5.0, None, max_retain_increase=0.1)
        self.lead = Steering(pair, goal, self._measure, self.ends.append, search=LineSearch())
        self._state = types.SimpleNamespace(global_step=0, max_steps=10_000)
        self._control = types.SimpleNamespace(should_training_stop=False)
        self.lead.on_train_begin(None, self._state, self._control)

    def _measure(self):
        self.looks += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def step(self):
        """Whether the data were looked at after it."""
        looks = self.looks
        self._state.global_step += 1
        self.lead.on_step_end(None, self._state, self._control)
        return self.looks > looks

    def move(self, *script):
        """Steps until the data are looked at; returns their number."""
        self.script = list(script)
        for steps in range(1, 20):
            if self.step():
                return steps
        return None


@pytest.mark.parametrize("way_out", [[good(1)], [BAD, good(1)]], ids=["all of a move", "half of a move"])
def test_it_is_patient_anew_after_every_move_that_stays(way_out):
    course = Course()
    for script in [[BAD]] * 5 + [way_out] + [[BAD]] * 5:
        course.move(*script)
    assert course.ends == []
    course.move(BAD)
    assert len(course.ends) == 1


def test_the_longer_it_goes_well_the_more_steps_there_are_between_two_looks():
    course = Course()
    assert [course.move(good(turn)) for turn in range(1, 9)] == [1, 2, 3, 4, 6, 8, 10, 10]
    assert [course.move(BAD), course.move(BAD), course.move(BAD)] == [10, 5, 3]


@pytest.mark.parametrize(("paid", "looks"), [(0.024, False), (0.026, True)])
def test_it_looks_as_soon_as_a_quarter_of_what_is_left_of_the_budget_may_be_spent(paid, looks):
    course = Course()
    for turn in range(1, 5):
        course.move(good(turn))
    course.lead.search.taken = {"forget": Change(), "retain": Change(first_order=paid)}
    assert course.step() is looks


def test_the_price_of_a_step_is_in_the_losses_as_they_are():
    """Both gradients are clipped, the forget gradient ten times as much; and infinite where nothing is gained."""
    retain, forget = pair_at_angle(12, 0.3, torch.Generator().manual_seed(0), 2.0, 20.0)
    raw = PairGram(retain.dot(retain)[None], forget.dot(forget)[None], retain.dot(forget)[None])
    clip = raw.clip_factors(1.0)
    gram = raw.scaled(*clip)
    weights = HamuQ(0.9, "relative", stopping="off").weigh(gram)
    step = -(weights.retain * clip[0] * retain + weights.forget * clip[1] * forget)
    seen = dict.fromkeys(SIDES, 1.0)
    assert _price(gram, weights, clip, seen) == pytest.approx((retain.dot(step) / forget.dot(step)).item())
    assert _price(gram, replace(weights, forget=-weights.forget), clip, seen) == float("inf")
