"""The same run in one, two and four processes ends with the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hamu import HamuError
from hamu.core.distributed.layout import SplitPairing
from hamu.core.distributed.sharded import Sharded
from hamu.unlearning.trainer.sides import ShareSampler

WORKER = Path(__file__).parent / "worker.py"
CASES = [
    f"{kind}/{method}/1/sgd"
    for kind in ("conv", "llama")
    for method in ("hamu-q", "hamu-u", "gdiff", "kl", "gru")
]
CASES += ["conv/hamu-q/3/sgd", "llama/hamu-u/3/sgd", "llama/hamu-q/1/adamw_torch", "conv/ga/1/sgd"]
# what only several processes can do, and the case that it must equal
SPLIT = {f"{case}/{how}": case for case in CASES if "ga/" not in case for how in ("split",)}
SPLIT |= {f"{case}/small": case for case in ("conv/hamu-q/1/sgd", "llama/hamu-u/3/sgd")}
ADAPTED = ["lora/hamu-q/1/sgd", "lora/kl/1/sgd"]
# in four processes: how their sums are shared out, not what every method makes of the sums
OURS = [case for case in CASES if "/hamu-" in case or "ga/" in case]
SHARDED = {f"{case}/shard": case for case in (*CASES, *ADAPTED)}
RESUMED = ["conv/hamu-q/1/sgd", "llama/hamu-u/3/sgd", "llama/hamu-q/1/adamw_torch", "lora/kl/1/sgd"]
SPOILED = [
    f"conv/hamu-q/1/sgd/{kind}{layout}"
    for kind in ("spoiled", "infinite")
    for layout in ("", "-split", "-shard")
]
TARGETED = [f"conv/hamu-q/1/sgd/{how}" for how in ("targeted", "targeted-split", "targeted-shard")]
# the second one corrects its steps, the third one measures twice
ROUNDED = [
    f"{case}/rounded"
    for case in ("conv/hamu-q/1/sgd", "conv/hamu-q/1/adamw_torch", "alike/hamu-q/1/sgd")
]
STEPS = 12


def with_settings(cases, steps=STEPS, **settings):
    return {case: {"steps": steps} | settings for case in cases}


def launch(processes, folder, cases):
    """Run the worker once, as it takes long to start; what each process saved, by case."""
    folder.mkdir()
    done = subprocess.run([sys.executable, str(WORKER), str(folder), str(processes), json.dumps(cases)],
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    return {
        case: [
            torch.load(folder / f"{case.replace('/', '-')}-{rank}.pt") for rank in range(processes)
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module")
def alone(place):
    """What one process saves."""
    saved = with_settings((f"{case}/saved" for case in RESUMED), steps=STEPS // 2, saves=True)
    return launch(1, place / "alone", with_settings([*CASES, *ADAPTED]) | saved)


@pytest.fixture(scope="module")
def two(place, alone):
    """What two processes save, in all that is tried with two."""
    cases = with_settings([*CASES, *SPLIT, *SHARDED, *ROUNDED, "rough/hamu-q/1/sgd"])
    cases |= with_settings(SPOILED, steps=4) | with_settings(["batchnorm/hamu-q/1/sgd"], steps=3)
    cases |= with_settings(TARGETED, target=max(forget_losses(alone)) - 1e-6)
    cases |= with_settings(
        (f"{case}/shard-saved" for case in RESUMED), steps=STEPS // 2, saves=True
    )
    resumed = (
        f"{case}/{how}" for case in RESUMED for how in ("resumed", "shard-resumed", "split-resumed")
    )
    cases |= with_settings(resumed, resumes=str(place / "alone"))
    refused = (
        "conv/hamu-q/1/sgd/parted",
        "conv/hamu-q/1/sgd/unequal",
        "batchnorm/hamu-q/1/sgd/split",
    )
    return launch(2, place / "two", cases | with_settings(refused, steps=4, fails=True))


def forget_losses(alone):
    return [entry["forget_loss"] for entry in alone["conv/hamu-q/1/sgd"][0]["log"]]


def assert_same_weights(found, expected, case):
    for one in found:
        assert one["weights"].keys() == expected["weights"].keys()
        for name, weight in one["weights"].items():
            worst = (weight - expected["weights"][name]).abs().max().item()
            assert worst <= 1e-10, f"{case}: {name} differs by {worst}"


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_ends_with_the_same_weights(processes, alone, two, place):
    cases, more = CASES, SPLIT | SHARDED
    if processes == 4:
        cases, more = OURS, {case: same for case, same in SPLIT.items() if same in OURS}
    found = (
        two if processes == 2 else launch(processes, place / "four", with_settings([*cases, *more]))
    )
    for case in (*cases, *more):
        expected = alone[more.get(case, case)][0]
        assert_same_weights(found[case], expected, case)
        for one in found[case]:  # every process has the predictions of all records, in their order
            for name, losses in one["losses"].items():
                torch.testing.assert_close(losses, expected["losses"][name], rtol=1e-5, atol=1e-6)
        mine = found[case][0]
        for ours, theirs in zip(mine["log"], expected["log"], strict=True):
            for key in (
                "retain_loss",
                "forget_loss",
                "kappa",
                "realised_forget_change",
                "first_order_retain_change",
            ):
                if key in theirs and not (case in more and "adamw" in case and "_change" in key):
                    assert ours[key] == pytest.approx(theirs[key], rel=1e-7, abs=1e-12), (
                        f"{case}: {key}"
                    )
        # where no process has both whole gradients, what AdamW makes of g* cannot be seen
        unseen = case in more and "adamw" in case
        assert (mine["promise"] is None) if unseen else (mine["promise"]["checked"] == STEPS)


def test_a_run_resumes_in_another_number_of_processes_and_another_layout(alone, two, place):
    again = launch(1, place / "again", with_settings(RESUMED, resumes=str(place / "two")))
    for case in RESUMED:
        assert_same_weights(again[case], alone[case][0], f"{case} from shards")
        for how in ("resumed", "shard-resumed", "split-resumed"):
            assert_same_weights(two[f"{case}/{how}"], alone[case][0], f"{case}/{how}")


def test_a_value_that_is_not_finite_on_one_process_skips_the_step_on_all(two):
    """Of a gradient, or of a loss alone."""
    for case in SPOILED:
        for one in two[case]:
            assert [entry["taken"] for entry in one["log"]] == [1.0, 0.0, 1.0, 1.0], case
            assert all(torch.isfinite(weight).all() for weight in one["weights"].values())
        first, second = (one["weights"] for one in two[case])
        assert all(torch.equal(first[name], second[name]) for name in first), case


def test_an_early_end_is_the_same_in_every_process_and_layout(alone, two):
    losses = forget_losses(alone)
    first = next(number for number, loss in enumerate(losses) if loss >= max(losses) - 1e-6)
    assert first > 0, "some steps are taken before"
    for case in TARGETED:
        for one in two[case]:
            assert one["ended"].startswith(
                f"the forget loss of a step, {losses[first]:.4g}, has reached "
            )
            assert sum(entry["taken"] for entry in one["log"]) == first


def test_all_processes_judge_a_model_in_half_precision_alike(two):
    """Each has its own logits, by which the rounding of the losses is told, and a step stays or is undone."""
    one, other = two["rough/hamu-q/1/sgd"]
    for ours, theirs in zip(one["log"], other["log"], strict=True):
        assert ours["rounding"] == theirs["rounding"] > 1e-5
        assert [ours[name] for name in ("taken", "trust_scale")] == [
            theirs[name] for name in ("taken", "trust_scale")
        ]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


def test_processes_that_round_otherwise_take_the_same_steps(two):
    for case in ROUNDED:
        one, other = two[case]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), f"{case}: {name}"


@pytest.mark.parametrize("how", ["parted", "unequal"])
def test_processes_whose_weights_part_on_the_way_or_at_the_start_are_told(two, how):
    for said in two[f"conv/hamu-q/1/sgd/{how}"]:
        assert "conv.bias is not the same on all processes" in said


def test_an_evaluation_is_of_the_model_that_is_saved(two):
    """Where BatchNorm's statistics go along, each process has those of its own records; the first one saves."""
    one, other = two["batchnorm/hamu-q/1/sgd"]
    torch.testing.assert_close(one["losses"]["retain"], one["own losses"], rtol=0, atol=1e-12)
    assert torch.equal(one["losses"]["retain"], other["losses"]["retain"])
    for said in two["batchnorm/hamu-q/1/sgd/split"]:
        assert "with split pairing a process sees one side alone, and its BatchNorm" in said


def test_a_sharded_model_takes_the_same_steps_in_a_loop_of_ones_own():
    worker = WORKER.with_name("sharded_worker.py")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                           "4", str(worker)], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.strip().splitlines()[-1]) <= 1e-10


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
    with pytest.raises(
        HamuError, match="split pairing needs an even number of processes; there are 1"
    ):
        SplitPairing([weight], [0])
    with pytest.raises(
        HamuError,
        match="shard all trainable parameters over the same processes, with fully_shard on",
    ):
        Sharded([weight], [0])


def test_shares_of_every_process_make_up_the_same_batches():
    for processes in (1, 2, 3, 4):
        shares = [list(ShareSampler(10, 4, rank, processes)) for rank in range(processes)]
        for number, batch in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
            read = sorted(i for share in shares for i in share[number] if i >= 0)
            assert read == batch
            assert all(share[number] for share in shares), "all take part in every step"
