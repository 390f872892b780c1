"""Processes wait for what one writes or finds, and all find tensors that differ."""

import json
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_processes import in_two_processes

from hamu import HamuError, HamuQ, PairedGradients
from hamu.core.distributed import check_equal, from_main
from hamu.core.distributed.sharded import shard, whole_state
from hamu.unlearning.trainer import resumable
from hamu.unlearning.trainer.resumable import Checkpoints

LATE = 0.3  # seconds


def test_a_checkpoint_holds_what_the_last_process_wrote_before_any_goes_on(tmp_path, monkeypatch):
    seal = resumable.seal

    def late(folder):
        time.sleep(LATE)
        seal(folder)

    def save(rank):
        run, begun = Checkpoints(tmp_path / "run"), []

        def begin():  # once the checkpoint is whole, for an earlier run gives way
            begun.append((run.staged / "checkpoint-3/manifest.json").is_file())

        with run.writing(3, begin) as folder:
            time.sleep(LATE * rank)
            (folder / f"rng_state_{rank}.pth").write_text("state")
        return len(begun), begun[0] or rank == 1, run.path(3).is_dir()

    monkeypatch.setattr(resumable, "seal", late)
    assert in_two_processes(save, tmp_path) == [(1, True, True)] * 2
    listed = json.loads((tmp_path / "run/checkpoint-3/manifest.json").read_text())
    assert sorted(listed) == ["rng_state_0.pth", "rng_state_1.pth"]


@pytest.mark.parametrize("error", [None, HamuError("not here"), KeyError("a")])
def test_every_process_gets_what_the_main_process_finds_or_its_error(tmp_path, error):
    def find():
        if error is not None:
            raise error
        return f"found by {dist.get_rank()}"

    answers = in_two_processes(lambda rank: from_main(find), tmp_path)
    expected = "found by 0" if error is None else f"{type(error).__name__}: {error}"
    assert answers == [expected] * 2


def moved(tensor, *ulps):
    """Move the first entries of a float tensor by so many of their last digits."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[: len(ulps)] += torch.tensor(ulps, dtype=bits.dtype)


CHANGES = {
    "nothing": lambda t: None,
    "opposite digits": lambda t: moved(t, 1, -1),
    "swapped": lambda t: t.copy_(t[[11, *range(1, 11), 0]]),
    "two signs": lambda t: t[3:5].neg_(),
}


def test_tensors_that_differ_in_any_bits_are_found_and_strides_do_not_count(tmp_path):
    def differs(names, *tensors):
        try:
            check_equal(names, tensors)
        except HamuError as error:
            return str(error).split(" ")[0]
        return ""

    def compare(rank):
        found = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            start = torch.randn(12, generator=torch.Generator().manual_seed(0)).to(dtype)
            for name, change in CHANGES.items():
                tensor = start.clone()
                if rank:
                    change(tensor)
                found[f"{name}, {dtype}"] = differs(["same", "other"], start, tensor)
        turned = torch.arange(12.0).reshape(4, 3)
        if rank:  # the same values in another order of memory
            turned = turned.t().contiguous().t()
        empty, nan = torch.empty(0, 3), torch.tensor(math.nan)
        found["nothing, other strides"] = differs(list("abc"), turned, empty, nan)
        return found

    one, two = in_two_processes(compare, tmp_path)
    assert one == two
    for case, answer in one.items():
        assert answer == ("" if case.startswith("nothing") else "other"), case


def test_gradients_that_one_process_lacks_are_an_error_in_each(tmp_path):
    """Of two forward passes DistributedDataParallel sums up the gradient of one alone."""

    def parted(rank):
        generator = torch.Generator().manual_seed(rank)
        x, y = torch.randn(2, 6, 5, generator=generator)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)))
        pair, found = PairedGradients(model, HamuQ(0.1, constraint_mode="relative")), []
        for both_first, size in ((False, 1.0), (True, 1.0), (True, 1e-4)):
            try:
                retain = model(x).square().mean()
                forget = size * model(y).square().mean() if both_first else None
                with pair.retain():
                    retain.backward()
                with pair.forget():
                    (model(y).square().mean() if forget is None else forget).backward()
                found.append(pair.combine().decision)
            except HamuError as error:
                found.append(str(error))
        return found

    def alone(rank):  # replicas that have nothing to do with each other
        own = [dist.new_group([one]) for one in range(2)][rank]
        model = nn.parallel.DistributedDataParallel(nn.Linear(5, 1), process_group=own)
        pair = PairedGradients(model, HamuQ(0.1, constraint_mode="relative"))
        for collect in (pair.retain, pair.forget):
            with collect():
                model(torch.randn(6, 5) + rank).square().mean().backward()
        return pair.combine().decision

    (tmp_path / "alone").mkdir()
    assert in_two_processes(alone, tmp_path / "alone") == ["step", "step"]
    for good, *bad in in_two_processes(parted, tmp_path):
        assert good == "step"
        assert all("call the model and backward() for one side before" in one for one in bad)


def test_tied_weights_of_a_sharded_model_are_gathered_once(tmp_path):
    def gathered(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        whole = model[0].weight.detach().clone()
        shard(model, "cpu")
        state = whole_state(model)
        places = {value.data_ptr() for value in state.values()}
        return len(state), len(places), [torch.equal(value, whole) for value in state.values()]

    assert in_two_processes(gathered, tmp_path) == [(2, 1, [True, True]), (0, 0, [])]
