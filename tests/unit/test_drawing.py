"""Which records are drawn: by the seed alone, and the same ones in every version."""

import pytest

from hamu.data.forget_sets import draw_positions, subset


def test_the_same_records_are_drawn_as_ever():
    """What version 0.1 draws: a later report of a run shows the records that an earlier one does."""
    assert draw_positions(10, 4, 3) == [6, 0, 3, 7]
    assert draw_positions(10, 2, 3) == [6, 0], "fewer are the first of more"
    assert draw_positions(10, 4, 4) != [6, 0, 3, 7]


@pytest.mark.parametrize("most", [None, 3, 4])
def test_all_records_are_the_data_set_itself(most):
    data = ["a", "b", "c"]
    assert draw_positions(len(data), most, 3) is None
    assert subset(data, most, 3) is data


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_subset_has_the_records_that_are_drawn(most):
    data = ["a", "b", "c"]
    assert list(subset(data, most, 3)) == [data[i] for i in draw_positions(3, most, 3)]
    assert len(subset(data, most, 3)) == most
