"""What the data do not see of a step, learned from measurements whose shares are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamu.training.unseen import Change, Unseen

STEP = Change(first_order=-0.15, own=-0.2, bend=0.05)


def seen_of(change, noise, bend):
    """What the data see of it if these are the shares that they do not see."""
    return change.first_order - noise * change.own + (1 - bend) * change.bend


def taught(*seen, changes=None):
    unseen = Unseen()
    for change, measured in zip(changes or [STEP] * len(seen), seen, strict=True):
        unseen.learn(change, measured)
    return unseen


def test_until_something_is_known_half_is_noise_and_all_of_the_bend_is_there():
    assert Unseen().on_data(STEP) == pytest.approx(-0.15 + 0.1 + 0.05)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_one_measurement_makes_both_shares_equal(share):
    unseen = taught(seen_of(STEP, share, share))
    assert unseen.noise == pytest.approx(share, abs=0.02)
    assert unseen.bend == pytest.approx(share, abs=0.02)


@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.sampled_from([-1.0, 1.0]))
def test_steps_of_several_lengths_tell_them_apart(noise, bend, sign):
    """A short step has hardly a bend. The sides differ in the sign of what is their own. As the two are held together,
    some of the difference is lost, at most half of it.
    """
    step = Change(sign * 0.15, sign * 0.2, 0.05)
    changes = [step.stretched(length) for length in (0.05, 1.0, 2.0, 4.0) * 5]
    unseen = taught(*(seen_of(c, noise, bend) for c in changes), changes=changes)
    lost = 0.02 + 0.5 * abs(noise - bend)
    assert unseen.noise == pytest.approx(noise, abs=lost)
    assert unseen.bend == pytest.approx(bend, abs=lost)
    alike = taught(*(seen_of(c, noise, noise) for c in changes), changes=changes)
    assert alike.noise == pytest.approx(noise, abs=0.01)


@pytest.mark.parametrize(("measured", "share"), [(-9.0, 0.0), (9.0, 1.0)])
def test_they_are_shares_whatever_was_measured(measured, share):
    unseen = taught(measured)
    assert unseen.noise == share
    assert 0 <= unseen.bend <= 1


def test_what_cannot_be_told_is_not_learned():
    unseen = Unseen()
    unseen.learn(Change(), 1.0)
    unseen.learn(STEP, float("nan"))
    unseen.learn(Change(1.0, 1.0, float("inf")), 1.0)
    assert (unseen.noise, unseen.bend) == (0.5, 0.0)


def test_later_measurements_count_more():
    more, less = seen_of(STEP, 0.8, 0.8), seen_of(STEP, 0.2, 0.2)
    assert taught(less, more).noise > 0.5 > taught(more, less).noise


def test_a_checkpoint_keeps_it():
    one = taught(seen_of(STEP, 0.3, 0.6))
    other = Unseen()
    other.load_state_dict(one.state_dict())
    for unseen in (one, other):
        unseen.learn(STEP.stretched(3.0), seen_of(STEP.stretched(3.0), 0.3, 0.6))
    assert (one.noise, one.bend) == (other.noise, other.bend)
    assert one.noise != 0.5


def test_changes_add_up_and_stretch():
    assert Change(1.0, 2.0, 3.0) + Change(0.5, 0.5, 0.5) == Change(1.5, 2.5, 3.5)
    assert Change(1.0, 2.0, 3.0).stretched(2.0) == Change(2.0, 4.0, 12.0)
