"""A step holds no more than benchmarks/memory.py says, on models that take seconds."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory


@pytest.mark.parametrize("case", memory.QUICK)
def test_one_process_holds_two_gradients_and_a_bucket_and_moves_none(case):
    found = memory.measured(case, "hamu-q")
    assert 2 * found["gradient"] < memory.peak(found) <= 2 * found["gradient"] + found["bucket"]
    assert found["moved"] == 0


def test_a_process_of_split_pairing_holds_one_gradient_and_two_buckets():
    found = memory.measured_with_split("llama_5m", 2)
    assert found["gradient"] < memory.peak(found) <= found["gradient"] + 2 * found["bucket"]


@pytest.mark.parametrize("method", memory.WITH_ORIGINAL)
def test_the_original_model_costs_a_copy_of_what_is_trained(method):
    without, found = (memory.measured("resnet20", name) for name in ("gdiff", method))
    extra = found["combine"] - without["combine"]
    assert found["gradient"] <= extra <= found["original"]
