"""Random inputs end in a result or in one line; benchmarks/fuzz.py tries as many as one likes."""

import pytest
from fuzzing import INPUTS, World
from hypothesis import HealthCheck, Phase, given, settings


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@settings(max_examples=60, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(tried=INPUTS)
def test_whatever_the_input_is_it_ends_in_a_result_or_in_one_line_and_nothing_else_is_touched(
    world, tried
):
    outcome = world.run(tried)
    assert not outcome.wrong, tried
    assert outcome.name != "refused, not foreseen", (outcome.said, tried)
