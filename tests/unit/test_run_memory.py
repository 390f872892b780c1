"""What a run remembers of itself comes back from a checkpoint, also from one that names no kind of end."""

import json

import pytest

from hamu.ends import End
from hamu.training.run_state import RunMemory


def back(state):
    memory = RunMemory()
    memory.load_state_dict(json.loads(json.dumps(state)))
    return memory


@pytest.mark.parametrize("end", [None, End("criterion", "it must hurt"), End("retain loss", "it is above 1")])
def test_a_memory_comes_back_whole(end):
    memory = RunMemory(evaluated=3, start={"forget_loss": 0.5}, end=end)
    for count in (memory.take, memory.take, memory.skip, memory.undo, memory.skip):
        count()
    assert (memory.taken, memory.skipped, memory.skips_in_a_row) == (1, 3, 2)
    assert back(memory.state_dict()) == memory


@pytest.mark.parametrize(("diverged", "kind"), [(True, "retain loss"), (False, "other")])
def test_a_checkpoint_without_a_kind_of_end_is_of_another_kind_but_for_one_that_diverged(diverged, kind):
    state = RunMemory(end=End("other", "of old")).state_dict() | {"diverged": diverged}
    del state["ended_kind"]
    assert back(state).end == End(kind, "of old")
    assert back(state).diverged == diverged
