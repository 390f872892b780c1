"""What a run remembers of itself comes back from a checkpoint."""

import json

import pytest

from hamu.unlearning.stop_reason import StopReason
from hamu.unlearning.trainer.run_memory import RunMemory


def back(state):
    memory = RunMemory()
    memory.load_state_dict(json.loads(json.dumps(state)))
    return memory


@pytest.mark.parametrize(
    "end",
    [None, StopReason("criterion", "it must hurt"), StopReason("retain loss", "it is above 1")],
)
def test_a_memory_comes_back_whole(end):
    memory = RunMemory(evaluated=3, start={"forget_loss": 0.5}, end=end)
    for count in (memory.take, memory.take, memory.skip, memory.undo, memory.skip):
        count()
    assert (memory.taken, memory.skipped, memory.skips_in_a_row) == (1, 3, 2)
    assert back(memory.state_dict()) == memory
    assert memory.diverged == (end is not None and end.kind == "retain loss")
