"""The meters of benchmarks/memory.py count what is known to be allocated."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _memory_meter import AllocationMeter, TensorMeter

METERS = pytest.mark.parametrize("new_meter", [AllocationMeter, TensorMeter])
N = 1 << 18  # floats of a tensor
SIZE = 4 * N


def levels(meter, name):
    phase = meter.phases[name]
    return phase.start, phase.peak, phase.end


@METERS
def test_a_tensor_counts_until_its_last_view_is_freed_and_operations_in_place_take_nothing(
    new_meter,
):
    before = torch.zeros(N)
    with new_meter() as meter:
        with meter.phase("made"):
            a = torch.tensor([0.0] * N)
        with meter.phase("twice"):
            b = torch.empty(2 * N)
        with meter.phase("views"):
            row = a.view(2, -1).t()[3:4]
            a.zero_()
            torch._foreach_add_([a, before], [before, a])
            torch.add(a, a, out=a)
        with meter.phase("one held"):
            del a, before
        with meter.phase("none held"):
            del row
        del b
    assert levels(meter, "made") == (0, SIZE, SIZE)
    assert levels(meter, "twice") == (SIZE, 3 * SIZE, 3 * SIZE)
    assert levels(meter, "views") == levels(meter, "one held") == (3 * SIZE,) * 3
    assert levels(meter, "none held") == (3 * SIZE, 3 * SIZE, 2 * SIZE)


def test_only_the_allocation_meter_sees_what_an_operator_takes_for_itself():
    wide, half = torch.zeros(N), torch.zeros(N, dtype=torch.bfloat16)
    peaks = []
    for new_meter in (AllocationMeter, TensorMeter):
        with new_meter() as meter, meter.phase("all"):
            wide.add_(half)  # on a CPU, half is widened first
        peaks.append(meter.phases["all"].peak)
    assert peaks == [SIZE, 0]
