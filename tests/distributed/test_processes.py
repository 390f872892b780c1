"""The same run in one, two and four processes, in every layout, ends with the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hamu import HamuError
from hamu.core.distributed.sharded import Sharded
from hamu.unlearning.trainer.sides import batches_of_share

WORKER = Path(__file__).parent / "worker.py"
CONV, LLAMA = "conv/hamu-q/1/sgd", "llama/hamu-u/3/sgd"
ADAM, LORA = "llama/hamu-q/1/adamw_torch", "lora/kl/1/sgd"
CASES = [CONV, LLAMA, ADAM, *(f"conv/{method}/1/sgd" for method in ("ga", "kl", "gru"))]
# what only several processes can do, and the case that it must equal
SPLIT = {f"{case}/split": case for case in CASES if "ga/" not in case}
SPLIT |= {f"{case}/small": case for case in (CONV, LLAMA)}
BOUNDED = f"{CONV}/bounded"  # by hand and without a start: measured at the first step
SPLIT[f"{BOUNDED}-split"] = BOUNDED
SHARDED = {f"{case}/shard": case for case in (*CASES, LORA)}
SHARDED[f"{CONV}/shard-bf16"] = CONV
LOOPS = [f"loop/{name}/{n}/adamw" for n, name in ((1, "hamu-q"), (2, "hamu-u"), (2, "gru"))]
# in four processes: how they share sums out, not what every method makes of the sums
OURS = [CONV, LLAMA, *LOOPS]
RESUMED = [ADAM, LORA]
RESUMED_IN_TWO = [f"{case}/{how}resumed" for case in RESUMED for how in ("", "shard-", "split-")]
PARTED = f"{CONV}/unequal"
BY_GOAL = [f"conv/hamu-q/1/adamw_torch/{goal}" for goal in ("goal", "goal-near")]
GOAL_RESUMED = f"{BY_GOAL[1]}-resumed"
SPOILED = [f"{CONV}/{how}" for how in ("spoiled", "spoiled-split", "spoiled-shard", "infinite")]
TARGETED = [f"{CONV}/{how}" for how in ("targeted", "targeted-split", "targeted-shard")]
# the second one corrects its steps, the third one measures twice
ROUNDED = [f"{case}/rounded" for case in (CONV, "conv/hamu-q/1/adamw_torch", "alike/hamu-q/1/sgd")]
STEPS = 4
LOGGED = ("retain_loss", "forget_loss", "kappa")
CHANGES = ("realised_forget_change", "first_order_retain_change")


def with_settings(cases, steps=STEPS, **settings):
    return {case: {"steps": steps} | settings for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By launch and case, what each process saves: all by one worker, as it takes long to start."""
    place = tmp_path_factory.mktemp("launches")
    half = {"steps": STEPS // 2, "saves": STEPS // 2}
    alone = with_settings([*CASES, BOUNDED, LORA, *LOOPS]) | with_settings(BY_GOAL, steps=40)
    alone[BY_GOAL[1]]["saves"] = 20
    alone |= with_settings((f"{case}/saved" for case in RESUMED), **half)
    two = with_settings([*CASES, *LOOPS, *SPLIT, *SHARDED, *ROUNDED, "rough/hamu-q/1/sgd"])
    two |= with_settings(SPOILED) | with_settings(["batchnorm/hamu-q/1/sgd"], steps=3)
    two |= with_settings(TARGETED, target=CONV) | with_settings(BY_GOAL, steps=40)
    two |= with_settings((f"{case}/shard-saved" for case in RESUMED), **half)
    two |= with_settings(RESUMED_IN_TWO, resumes=str(place / "alone"))
    two |= with_settings([GOAL_RESUMED], steps=40, resumes=str(place / "alone"))
    two |= with_settings([PARTED, "batchnorm/hamu-q/1/sgd/split"], fails=True)
    four = [*OURS, *(case for case, same in (SPLIT | SHARDED).items() if same in OURS)]
    four = with_settings(four) | with_settings(RESUMED, resumes=str(place / "two"))
    launches = [("alone", 1, alone), ("two", 2, two), ("four", 4, four)]
    for name, _, _ in launches:
        (place / name).mkdir()
    done = subprocess.run(
        [sys.executable, str(WORKER), str(place), json.dumps(launches)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    saved = {}
    for name, processes, cases in launches:
        files = {case: place / name / case.replace("/", "-") for case in cases}
        saved[name] = {
            case: [torch.load(f"{file}-{rank}.pt") for rank in range(processes)]
            for case, file in files.items()
        }
    return saved


def assert_same_weights(found, expected, case):
    for one in found:
        assert one["weights"].keys() == expected["weights"].keys()
        for name, weight in one["weights"].items():
            worst = (weight - expected["weights"][name]).abs().max().item()
            assert worst <= 1e-10, f"{case}: {name} differs by {worst}"


def assert_same_figures(found, expected, unseen):
    """Predictions of all records in their order on every process, and the log of the steps."""
    for one in found:
        for name, losses in one["losses"].items():
            torch.testing.assert_close(losses, expected["losses"][name], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found[0]["log"], expected["log"], strict=True):
        for key in (*LOGGED, *(() if unseen else CHANGES)):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-7, abs=1e-12), key
    promise = found[0]["promise"]
    assert (promise is None) if unseen else (promise["checked"] == STEPS)


def test_any_number_of_processes_ends_with_the_same_weights(found):
    cases = [*CASES, *LOOPS, *SPLIT, *SHARDED]
    four = {case: one for case, one in found["four"].items() if case not in RESUMED}
    for saved in (found["two"], four):
        for case in (case for case in cases if case in saved):
            expected = found["alone"][(SPLIT | SHARDED).get(case, case)][0]
            assert_same_weights(saved[case], expected, case)
            if case not in LOOPS:
                # where no process has both whole gradients, what AdamW makes of g* cannot be seen
                unseen = case not in CASES and "adamw" in case
                assert_same_figures(saved[case], expected, unseen)


def test_a_run_resumes_in_another_number_of_processes_and_another_layout(found):
    alone, two = found["alone"], found["two"]
    for case in RESUMED:
        assert_same_weights(found["four"][case], alone[case][0], f"{case} from shards")
    assert_same_weights(two[GOAL_RESUMED], alone[BY_GOAL[1]][0], GOAL_RESUMED)
    for case in RESUMED_IN_TWO:
        assert_same_weights(two[case], alone[case.rpartition("/")[0]][0], case)


def test_a_run_by_goal_measures_adapts_and_ends_as_in_one_process(found):
    alone, two = found["alone"], found["two"]
    for case in BY_GOAL:
        assert_same_weights(two[case], alone[case][0], case)
        [expected] = alone[case]
        for one in two[case]:
            assert one["ended_kind"] == expected["ended_kind"]
            for ours, theirs in zip(one["controller"], expected["controller"], strict=True):
                assert (ours["step"], ours["demand"]) == (theirs["step"], theirs["demand"])
                assert ours["retain_loss"] == pytest.approx(theirs["retain_loss"], rel=1e-3)
                assert abs(ours["forgotten"] - theirs["forgotten"]) <= 2
    first, *_, last = expected["controller"]
    assert last["forgotten"] > first["forgotten"]
    assert last["demand"] != first["demand"]


def test_a_gradient_or_loss_that_is_not_finite_on_one_process_skips_the_step_on_all(found):
    for case in SPOILED:
        for one in found["two"][case]:
            assert [entry["taken"] for entry in one["log"]] == [1.0, 0.0, 1.0, 1.0], case
            assert all(torch.isfinite(weight).all() for weight in one["weights"].values())
        assert_equal_on_both(found["two"][case])


def assert_equal_on_both(found):
    one, other = (process["weights"] for process in found)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_early_end_is_the_same_in_every_process_and_layout(found):
    losses = [entry["forget_loss"] for entry in found["alone"][CONV][0]["log"]]
    first = next(number for number, loss in enumerate(losses) if loss >= max(losses) - 1e-6)
    assert first > 0, "some steps are taken before"
    message = f"the forget loss of a step, {losses[first]:.4g}, has reached "
    for case in TARGETED:
        for one in found["two"][case]:
            assert one["ended"].startswith(message)
            assert sum(entry["taken"] for entry in one["log"]) == first


def test_all_processes_judge_a_model_in_half_precision_alike(found):
    """The rounding of the losses is judged by each one's own logits, and a step stays or is undone."""
    both = found["two"]["rough/hamu-q/1/sgd"]
    for ours, theirs in zip(*(one["log"] for one in both), strict=True):
        assert ours["rounding"] == theirs["rounding"] > 1e-5
        assert [ours[k] == theirs[k] for k in ("taken", "trust_scale")] == [True, True]
    assert_equal_on_both(both)


def test_processes_that_round_otherwise_take_the_same_steps(found):
    for case in ROUNDED:
        assert_equal_on_both(found["two"][case])


def test_weights_that_differ_between_processes_are_an_error(found):
    for message in found["two"][PARTED]:
        assert "conv.bias is not the same on all processes" in message


def test_an_evaluation_is_of_the_model_that_is_saved(found):
    """Each process trains its own BatchNorm statistics; the first one saves."""
    one, other = found["two"]["batchnorm/hamu-q/1/sgd"]
    torch.testing.assert_close(one["losses"]["retain"], one["own losses"], rtol=0, atol=1e-12)
    assert torch.equal(one["losses"]["retain"], other["losses"]["retain"])
    for message in found["two"]["batchnorm/hamu-q/1/sgd/split"]:
        assert "BatchNorm" in message


def test_a_model_that_lies_in_no_processes_is_not_taken_for_a_sharded_one():
    with pytest.raises(HamuError, match="shard all trainable parameters over the same processes"):
        Sharded([torch.nn.Parameter(torch.ones(2))], [0])


def test_shares_of_every_process_make_up_the_same_batches():
    for processes in (1, 2, 3, 4):
        shares = [batches_of_share(10, 4, rank, processes) for rank in range(processes)]
        for number, batch in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
            read = sorted(i for share in shares for i in share[number] if i >= 0)
            assert read == batch
            assert all(share[number] for share in shares), "all take part in every step"
