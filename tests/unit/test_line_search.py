"""The length of a step by goal, on losses that are parabolas along it and so known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamu.training.line_search import LineSearch
from hamu.training.promise import StepOutcome
from hamu.training.unseen import Change


def along(gain, gain_bend, cost, cost_bend, length=1.0):
    """A step of this length t: the forget loss gains gain·t + gain_bend·t², the retain loss pays likewise."""
    return StepOutcome(
        {"forget": gain * length, "retain": cost * length},
        {"forget": gain * length + gain_bend * length**2, "retain": cost * length + cost_bend * length**2},
        {"forget": 1.0, "retain": 1.0}, "forget", 0.0, 0.0,
    )  # fmt: skip


def search(missing, allowed, own=(0.0, 0.0), noise=(0.5, 0.5)):
    """`own` and `noise` of the forget and of the retain side."""
    found = LineSearch()
    for side, share in zip(("forget", "retain"), noise, strict=True):
        found.unseen[side].noise = share
    found.aim(missing, allowed, dict(zip(("forget", "retain"), own, strict=True)))
    return found


def test_a_step_that_pays_nothing_is_made_as_long_as_it_takes_to_reach_the_goal():
    step = along(0.1, 0.0, -0.1, 0.0)
    assert search(0.35, 0.0).factor(step, 1.0, 100.0) == 4.0
    assert search(0.05, 0.0).factor(step, 1.0, 100.0) == 1.0
    assert search(9.0, 0.0).factor(step, 1.0, 100.0) == 8.0, "the next look goes on from there"


def test_it_goes_no_further_than_the_trust_region():
    assert search(9.0, 0.0).factor(along(0.1, 0.0, -0.1, 0.0), 1.0, 4.0) == 4.0
    assert search(9.0, 0.0).factor(along(0.1, 0.0, -0.1, 0.0), 4.0, 4.0) == 1.0


def test_it_ends_where_the_retain_loss_turns():
    """-0.1 t + 0.03 t² is above zero from t = 3.3 on."""
    assert search(9.0, 0.0).factor(along(0.1, 0.0, -0.1, 0.03), 1.0, 100.0) == 2.0


def test_a_step_that_goes_too_far_is_shortened():
    """0.1 t + 0.3 t² against 1.5 · 0.1 t, what a step with this price may cost: up to t = 1/6."""
    step = along(1.0, 0.0, 0.1, 0.3)
    found = search(9.0, 0.01)
    assert not found.fits(step, 1.0)
    assert found.factor(step, 1.0, 100.0) == 0.125


def test_where_no_length_fits_the_step_is_left_to_the_trust_region():
    losing = along(-0.1, 0.0, 0.0, 0.0)
    assert search(1.0, 0.1).factor(losing, 1.0, 100.0) == 1.0
    assert not search(1.0, 0.1).fits(losing, 1.0)
    assert not search(1.0, 0.1).fits(along(float("nan"), 0.0, 0.0, 0.0), 1.0)


def test_what_the_retain_batch_shows_is_corrected_by_the_noise_in_it():
    """The batch's retain loss falls by 0.01, all of it for the sake of its own gradient, of which some is noise."""
    step = along(0.1, 0.0, -0.1, 0.09)
    own = (0.0, -0.1)
    assert search(9.0, 0.0, own, (0.0, 0.0)).fits(step, 1.0)
    assert search(9.0, 0.0, own, (0.0, 0.1)).fits(step, 1.0)
    assert not search(9.0, 0.0, own, (0.0, 0.2)).fits(step, 1.0)
    assert not search(9.0, 0.0, (0.0, -0.01), (0.0, 0.2)).fits(step, 10.0), "the longer the step, the more"


def test_what_the_forget_batch_shows_is_corrected_too():
    """Of what the batch's forget loss gains the data see a tenth: it takes a longer step to reach the goal."""
    step = along(0.1, 0.0, -0.1, 0.0)
    assert search(0.1, 0.0, (0.1, 0.0), (0.0, 0.0)).factor(step, 1.0, 100.0) == 1.0
    assert search(0.1, 0.0, (0.1, 0.0), (0.9, 0.0)).factor(step, 1.0, 100.0) == 8.0
    assert not search(0.1, 0.0, (0.1, 0.0), (1.0, 0.0)).fits(step, 1.0), "all of it is noise"


def test_a_bend_that_the_data_do_not_see_limits_nothing():
    step = along(0.1, 0.0, -0.1, 0.09)
    found = search(9.0, 0.0)
    assert found.factor(step, 1.0, 100.0) == 1.0
    found.unseen["retain"].bend = 1.0
    assert found.factor(step, 1.0, 100.0) == 8.0


def test_each_side_learns_from_what_the_data_saw_of_it():
    found = search(9.0, 0.1, (0.2, -0.2))
    found.take(along(0.3, 0.0, -0.2, 0.0), 1.0)
    assert found.taken == {"forget": Change(0.3, 0.2, 0.0), "retain": Change(-0.2, -0.2, 0.0)}
    found.learn(found.taken, {"forget": 0.3, "retain": 0.0})
    assert found.unseen["forget"].noise == pytest.approx(0.0, abs=0.02)
    assert found.unseen["retain"].noise == pytest.approx(1.0, abs=0.02)
    assert found.on_data(found.taken) == pytest.approx((0.3, 0.0), abs=0.02)
    other = LineSearch()
    other.load_state_dict(found.state_dict())
    assert other.on_data(found.taken) == found.on_data(found.taken)


@given(
    st.floats(1e-4, 1), st.floats(-1, 1), st.floats(-1, 1), st.floats(0, 1), st.floats(1e-3, 10), st.floats(0, 1),
    st.floats(0, 1),
)  # fmt: skip
def test_on_parabolas_what_was_chosen_fits_and_gains_the_most(
    gain, gain_bend, cost, cost_bend, missing, allowed, noise
):
    found = search(missing, allowed, (0.1, -0.1), (noise, noise))
    step = along(gain, gain_bend, cost, cost_bend)
    factor = found.factor(step, 1.0, 8.0)
    chosen = along(gain, gain_bend, cost, cost_bend, factor)
    if factor != 1:
        assert found.fits(chosen, factor)
    for other in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        tried = along(gain, gain_bend, cost, cost_bend, other)
        gained = [found.on_data(found._changes(step, f))[0] for step, f in ((tried, other), (chosen, factor))]
        if found.fits(tried, other) and gained[0] > gained[1] + 1e-12:
            assert not found.fits(chosen, factor) or gained[1] >= missing - 1e-12
