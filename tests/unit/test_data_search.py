"""The length of a move by what is measured along it, on losses that are known there."""

import pytest
import torch

from hamu.training.data_search import DOUBLINGS, DataSearch
from hamu.training.goal import Standing


def along(loss):
    """A search on two parameters that moved from 1 to 2, where `loss` gives forget and retain loss of a length."""
    parameters = [torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)]
    looks = []

    def measure(length):
        assert parameters[0].tolist() == pytest.approx((search.good[0] + length).tolist()), "measured elsewhere"
        looks.append(length)
        return standing(loss, length)

    search = DataSearch(parameters, measure)
    search.keep()
    with torch.no_grad():
        for p in parameters:
            p.add_(1.0)
    return search, parameters, looks


def standing(loss, length):
    return Standing(*loss(length), 0.0)


def go(search, loss, is_worth, is_done=lambda now: False):
    return search.farther(standing(loss, 0.0), standing(loss, 1.0), is_worth, is_done)


def straight(length):
    return length, 0.0


def test_what_pays_is_carried_on():
    search, parameters, looks = along(straight)
    found = go(search, straight, lambda now: True)
    assert found.length == 2.0**DOUBLINGS == looks[-1]
    assert found.standing.forget_loss == found.length
    assert parameters[1].item() == 1.0 + found.length


def test_no_further_than_the_goal():
    search, _, looks = along(straight)
    assert go(search, straight, lambda now: True, lambda now: now.forget_loss >= 2).length == 2.0
    assert looks == [2.0]
    assert go(search, straight, lambda now: True, lambda now: True).length == 1.0


def test_between_a_length_that_pays_and_one_that_does_not_the_parabolas_decide():
    """0.1 t² is to be under 0.3 t: up to t = 3."""

    def loss(length):
        return length, 0.1 * length**2

    def is_worth(now):
        return now.retain_loss <= 0.3 * now.forget_loss + 1e-9

    search, parameters, looks = along(loss)
    assert go(search, loss, is_worth).length == 3.0
    assert looks == [2.0, 4.0, 3.0]
    assert parameters[1].item() == pytest.approx(4.0)


@pytest.mark.parametrize("cost", [lambda t: 9.0 * (t > 1), lambda t: float("nan") if t > 1 else 0.0])
def test_where_nothing_beyond_pays_it_stays_where_the_steps_ended(cost):
    def loss(length):
        return length, cost(length)

    search, parameters, _ = along(loss)
    assert go(search, loss, lambda now: now.retain_loss <= 0.5).length == 1.0
    assert parameters[0].tolist() == pytest.approx([2.0] * 3)


def test_more_of_what_forgets_nothing_is_not_wanted():
    def loss(length):
        return -length, -length

    search, _, looks = along(loss)
    assert go(search, loss, lambda now: True).length == 1.0
    assert looks == [2.0]


def test_half_of_a_move_or_half_of_that_or_nothing():
    for limit, length in ((0.6, 0.5), (0.3, 0.25), (0.1, None)):
        search, parameters, _ = along(straight)
        found = search.nearer(lambda now, limit=limit: now.forget_loss <= limit)
        assert (None if found is None else found.length) == length
        assert parameters[1].item() == 1.0 + (length or 0.0)


def test_the_next_move_starts_from_the_state_that_is_kept():
    search, parameters, _ = along(straight)
    search.keep()
    with torch.no_grad():
        for p in parameters:
            p.add_(1.0)
    assert search.nearer(lambda now: False) is None
    assert parameters[1].item() == 2.0
