"""The same run in one, two and four processes ends with the same weights."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hamu import HamuError
from hamu.distributed import SplitPairing
from hamu.distributed.sharded import Sharded
from hamu.training.sharing import ShareSampler

WORKER = Path(__file__).parent / "worker.py"
CASES = [
    f"{kind}/{method}/1/sgd" for kind in ("conv", "llama") for method in ("hamu-q", "hamu-u", "gdiff", "kl", "gru")
]
CASES += ["conv/hamu-q/3/sgd", "llama/hamu-u/3/sgd", "llama/hamu-q/1/adamw_torch", "conv/ga/1/sgd"]
# what only several processes can do, and the case that it must equal
SPLIT = {f"{case}/{how}": case for case in CASES if "ga/" not in case for how in ("split",)}
SPLIT |= {f"{case}/small": case for case in ("conv/hamu-q/1/sgd", "llama/hamu-u/3/sgd")}
ADAPTED = ["lora/hamu-q/1/sgd", "lora/kl/1/sgd"]
SHARDED = {f"{case}/shard": case for case in (*CASES, *ADAPTED)}
RESUMED = ["conv/hamu-q/1/sgd", "llama/hamu-u/3/sgd", "llama/hamu-q/1/adamw_torch", "lora/kl/1/sgd"]
STEPS = 20


def launch(processes, folder, cases=CASES, steps=STEPS, **environment):
    """Run the worker; what each process saved, by case."""
    folder.mkdir()
    head = [sys.executable]
    if processes > 1:
        head += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([*head, str(WORKER), str(folder), str(steps), *cases], env=environment, timeout=420,
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    return {
        case: [torch.load(folder / f"{case.replace('/', '-')}-{rank}.pt") for rank in range(processes)]
        for case in cases
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return launch(1, tmp_path_factory.mktemp("alone") / "run", [*CASES, *ADAPTED])


def assert_same_weights(found, expected, case):
    for one in found:
        assert one["weights"].keys() == expected["weights"].keys()
        for name, weight in one["weights"].items():
            worst = (weight - expected["weights"][name]).abs().max().item()
            assert worst <= 1e-10, f"{case}: {name} differs by {worst}"


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_ends_with_the_same_weights(processes, alone, tmp_path):
    more = SPLIT | SHARDED if processes == 2 else SPLIT
    found = launch(processes, tmp_path / "run", [*CASES, *more])
    for case in (*CASES, *more):
        expected = alone[more.get(case, case)][0]
        assert_same_weights(found[case], expected, case)
        for one in found[case]:  # every process has the predictions of all records, in their order
            for name, losses in one["losses"].items():
                torch.testing.assert_close(losses, expected["losses"][name], rtol=1e-5, atol=1e-6)
        mine = found[case][0]
        for ours, theirs in zip(mine["log"], expected["log"], strict=True):
            for key in ("retain_loss", "forget_loss", "kappa", "realised_forget_change", "first_order_retain_change"):
                if key in theirs and not (case in more and "adamw" in case and "_change" in key):
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-7, abs=1e-12), f"{case}: {key}"
        # where no process has both whole gradients, what AdamW makes of g* cannot be seen
        unseen = case in more and "adamw" in case
        assert (mine["promise"] is None) if unseen else (mine["promise"]["checked"] == STEPS)


def test_a_run_resumes_in_another_number_of_processes_and_another_layout(alone, tmp_path):
    shards, halves = [f"{case}/shard" for case in RESUMED], [f"{case}/split" for case in RESUMED]
    launch(1, tmp_path / "one", RESUMED, STEPS // 2, HAMU_SAVE="1")
    launch(2, tmp_path / "cut", shards, STEPS // 2, HAMU_SAVE="1")
    for number, (processes, saved, cases) in enumerate([(2, "one", [*RESUMED, *shards, *halves]), (1, "cut", RESUMED)]):
        found = launch(processes, tmp_path / f"again{number}", cases, HAMU_RESUME=str(tmp_path / saved))
        for case in cases:
            assert_same_weights(found[case], alone["/".join(case.split("/")[:4])][0], f"{case} from {saved}")


def test_a_value_that_is_not_finite_on_one_process_skips_the_step_on_all(tmp_path):
    """Of a gradient, or of a loss alone."""
    kinds, layouts = ("spoiled", "infinite"), ("", "-split", "-shard")
    cases = [f"conv/hamu-q/1/sgd/{kind}{layout}" for kind in kinds for layout in layouts]
    found = launch(2, tmp_path / "run", cases, 4)
    for case in cases:
        for one in found[case]:
            assert [entry["taken"] for entry in one["log"]] == [1.0, 0.0, 1.0, 1.0], case
            assert all(torch.isfinite(weight).all() for weight in one["weights"].values())
        first, second = (one["weights"] for one in found[case])
        assert all(torch.equal(first[name], second[name]) for name in first), case


def test_an_early_end_is_the_same_in_every_process_and_layout(alone, tmp_path):
    case = "conv/hamu-q/1/sgd"
    losses = [entry["forget_loss"] for entry in alone[case][0]["log"]]
    target = max(losses) - 1e-6
    first = next(number for number, loss in enumerate(losses) if loss >= target)
    assert first > 0, "some steps are taken before"
    found = launch(2, tmp_path / "run", [case, f"{case}/split", f"{case}/shard"], HAMU_TARGET=str(target))
    for layout in found.values():
        for one in layout:
            assert one["ended"].startswith(f"the forget loss of a step, {losses[first]:.4g}, has reached the target")
            assert sum(entry["taken"] for entry in one["log"]) == first


def test_all_processes_judge_a_model_in_half_precision_alike(tmp_path):
    """Each has its own logits, by which the rounding of the losses is told, and a step stays or is undone."""
    one, other = launch(2, tmp_path / "run", ["rough/hamu-q/1/sgd"])["rough/hamu-q/1/sgd"]
    for ours, theirs in zip(one["log"], other["log"], strict=True):
        assert ours["rounding"] == theirs["rounding"] > 1e-5
        assert [ours[name] for name in ("taken", "trust_scale")] == [theirs[name] for name in ("taken", "trust_scale")]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


def test_processes_that_round_otherwise_take_the_same_steps(tmp_path):
    # the second one corrects its steps, the third one measures twice
    cases = [f"{case}/rounded" for case in ("conv/hamu-q/1/sgd", "conv/hamu-q/1/adamw_torch", "alike/hamu-q/1/sgd")]
    for case, (one, other) in launch(2, tmp_path / "run", cases).items():
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), f"{case}: {name}"


def test_processes_whose_weights_part_on_the_way_are_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"conv\.bias is not the same on all processes"):
        launch(2, tmp_path / "run", ["conv/hamu-q/1/sgd/parted"], steps=4)


def test_an_evaluation_is_of_the_model_that_is_saved(tmp_path):
    """Where BatchNorm's statistics go along, each process has those of its own records; the first one saves."""
    case = "batchnorm/hamu-q/1/sgd"
    one, other = launch(2, tmp_path / "run", [case], steps=3)[case]
    torch.testing.assert_close(one["losses"]["retain"], one["own losses"], rtol=0, atol=1e-12)
    assert torch.equal(one["losses"]["retain"], other["losses"]["retain"])
    with pytest.raises(RuntimeError, match="with split pairing a process sees one side alone, and its BatchNorm"):
        launch(2, tmp_path / "split", [f"{case}/split"], steps=1)


def test_the_runs_differ_from_case_to_case(alone):
    """Else the comparison above could not fail."""
    ends = [alone[case][0]["weights"] for case in CASES if case.startswith("conv") and "/1/" in case]
    for a, b in itertools.pairwise(ends):
        assert any(not torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_a_sharded_model_takes_the_same_steps_in_a_loop_of_ones_own():
    worker = WORKER.with_name("sharded_worker.py")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                           "4", str(worker)], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.strip().splitlines()[-1]) <= 1e-10


def test_processes_that_start_from_different_weights_are_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"conv\.bias is not the same on all processes"):
        launch(2, tmp_path / "run", ["conv/hamu-q/1/sgd/unequal"], steps=2)


def test_weights_that_differ_by_as_much_in_both_directions_or_in_their_places_are_told():
    worker = WORKER.with_name("digests_worker.py")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                           "2", str(worker)], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found) == 4 * (2 * 6 + 1) + 1
    for case, answer in found.items():
        assert answer == ("" if case.startswith("nothing") else "other"), case


def test_layouts_that_have_no_place_are_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(HamuError, match="split pairing needs an even number of processes; there are 1"):
        SplitPairing([weight], [0])
    with pytest.raises(HamuError, match="shard all trainable parameters over the same processes, with fully_shard on"):
        Sharded([weight], [0])


def test_shares_of_every_process_make_up_the_same_batches():
    for processes in (1, 2, 3, 4):
        shares = [list(ShareSampler(10, 4, rank, processes)) for rank in range(processes)]
        for number, batch in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
            read = sorted(i for share in shares for i in share[number] if i >= 0)
            assert read == batch
            assert all(share[number] for share in shares), "all take part in every step"
