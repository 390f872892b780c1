"""Unlearning by goal: every record counts, the budget holds, and what a lasting run forgets stays forgotten."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import weights
from run_files import report_in, write_rows
from torch.nn import functional as F
from transformers import TrainerCallback

from hamu import UnlearnTrainer
from hamu.core.forward import predict_logits
from hamu.core.objectives import log_odds
from hamu.data import collate, forget_class, forget_rows, read_text
from hamu.errors import HamuError
from hamu.evaluation import Predictions, predict
from hamu.unlearning.lookahead import Lookahead

SMALL = {"auto": True, "max_steps": 40, "per_device_train_batch_size": 64}
EVERY_FOURTH = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4}
ROWS = [0, 7, 20, 33, 41, 58, 60, 77, 84, 95, 103, 118]


def predicted(model, data):
    return predict(model, data, 512)


def retain_loss(model, problem):
    return predicted(model, problem.retain).losses.mean().item()


@pytest.fixture(scope="module")
def whole_class(digits):
    """No record of the digit 3 is retained."""
    return forget_class(*digits, 3)


@pytest.fixture(scope="module")
def rows(digits):
    return forget_rows(*digits, ROWS)


def by_goal(trainer_of, model, problem, **settings):
    trainer = trainer_of(model, **problem.sets(), **SMALL | settings)
    trainer.train()
    return trainer


def test_a_class_is_erased_within_the_budget(model, trainer_of, whole_class):
    before = retain_loss(model, whole_class)
    trainer = by_goal(trainer_of, model, whole_class)
    assert trainer.goal_run.goal.kind == "erased", "the default where none of the class is retained"
    assert trainer.stop.kind == "goal"
    assert predicted(model, whole_class.forget).correct.double().mean() <= 0.05
    rise = retain_loss(model, whole_class) - before
    assert rise <= 0.02, "of all retain records, not of those measured on the way"
    logged = [entry for entry in trainer.state.log_history if "taken" in entry][-1]
    for entry in (trainer.controller.history[-1], logged):
        assert entry["retain_rise"] == pytest.approx(rise, abs=1e-5)
    assert logged["forgotten_share"] >= 0.95
    assert trainer.steps_taken < 40
    assert any(positions for _, positions in trainer.goal_run.state_dict()["focus"])
    trainer.controller.updates_of_best -= 2  # as if it had gone back before
    trainer.evaluate()
    assert trainer.history()["steps_in_model"] == trainer.steps_taken - 2
    evaluated = [one["step"] for one in trainer.state.log_history if "eval_forget_loss" in one]
    assert evaluated[-1] == trainer.state.global_step > 2
    sampled = trainer_of(model, **whole_class.sets(), **SMALL, max_eval_samples=100)
    assert sampled.goal_run.goal.kind == "erased", "it follows from all records"


@pytest.mark.parametrize(("lasting", "most", "drawn"), [
    (False, torch.inf, [*range(6, 12)]), (True, torch.inf, []), (False, 5.0, []),
])  # fmt: skip
def test_forget_batches_are_of_records_not_there_yet_where_none_can_come_back(
    model, trainer_of, rows, lasting, most, drawn
):
    asked = {"target_forget_loss": 0.7, "lasting": lasting}
    run = trainer_of(model, **rows.sets(), **SMALL, **asked).goal_run
    now = run.stand()
    first = torch.arange(len(ROWS)) < 6
    targets = replace(now.targets, most=torch.full_like(now.losses, most))
    for step, place in ((0, 0), (1, 2 * 64), (2, 3 * 64)):  # the loader holds the next batch
        run.trainer.state.global_step = step
        run.focus(replace(now, forgotten=first, targets=targets))
        assert run.state_dict()["focus"][-1] == (place, drawn)


def test_some_retain_records_tell_the_rise_to_three_standard_errors_since_all_were_measured(
    model, trainer_of, rows
):
    trainer = trainer_of(model, **rows.sets(), **SMALL, target_forget_loss=0.7)
    trainer.start_predictions = {"retain": predicted(model, rows.retain)}
    some = trainer.evaluations.some_retain
    assert len(some) == 500
    assert trainer.goal_run.stand().retain_error == 0.0
    for scale in (0.9, 0.7):
        known = predicted(model, some).losses
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        change = predicted(model, some).losses - known
        now = trainer.goal_run.stand()
        assert now.retain_error == pytest.approx(3 * (change.var(correction=0) / 500).sqrt().item())
        rise = retain_loss(model, rows) - trainer.start_predictions["retain"].losses.mean().item()
        assert trainer.goal_run.retain_rise() == pytest.approx(rise)


def test_measurements_take_a_quarter_of_the_time_and_leave_three_steps_between(
    model, trainer_of, rows
):
    def every(retained, batch):
        data = rows.sets() | {"retain": rows.retain.select(range(retained))}
        asked = {"target_forget_loss": 0.7, "per_device_train_batch_size": batch}
        return trainer_of(model, **data, **SMALL | asked).controller.every

    # a measurement passes 100 + 12 records forwards; 7 steps pass 8 + 8 forwards and backwards
    assert [every(100, 8), every(100, 64), every(20, 64)] == [7, 3, 3]
    assert every(500, 64) == 7, "forget records beyond the forget set are not drawn"


def test_a_resumed_run_draws_the_batch_that_the_loader_held(model, trainer_of, digits):
    """Each forgotten record leaves the forget data, from the batch on that is not yet drawn."""
    problem = forget_rows(*digits, list(range(0, 300, 10)))
    asked = {"target_forget_loss": 0.3, "max_retain_increase": 1.0, "max_steps": 40}
    asked |= {"per_device_train_batch_size": 8, "save_strategy": "steps"}
    data = problem.sets()
    asked["save_steps"] = 1
    whole = by_goal(trainer_of, copy.deepcopy(model), problem, **asked)
    start, first, *others = whole.controller.history
    assert start["forgotten"] != first["forgotten"], "the forget data change with this step"
    assert others
    for step in (first["step"], first["step"] + 1):  # it is measured at the first one
        resumed = trainer_of(copy.deepcopy(model), **data, **SMALL | asked)
        resumed.train(f"{whole.args.output_dir}/checkpoint-{step}")
        assert resumed.controller.history == whole.controller.history
        assert torch.equal(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize(("kind", "asked"), [
    ("unseen", {}),
    ("loss", {"target_forget_loss": 0.7, "target_share": 0.75, "max_retain_increase": 0.5}),
    ("retrained", {"goal": "retrained", "target_share": 0.5, "max_retain_increase": 0.5}),
])  # fmt: skip
def test_each_record_reaches_the_goal_and_none_pays_for_another(
    model, trainer_of, rows, kind, asked
):
    found = predicted(model, rows.forget)
    retrained = Predictions(0.5 * found.logits, found.labels)  # of a model less sure of each
    trainer = by_goal(trainer_of, model, rows, retain_predictions=retrained, **asked)
    assert (trainer.goal_run.goal.kind, trainer.stop.kind) == (kind, "goal")
    standing = trainer.goal_run.goal.standing(predicted(model, rows.forget))
    assert standing.share >= asked.get("target_share", 0.95)
    assert trainer.controller.history[-1]["forgotten"] == standing.count
    state = trainer.goal_run.state_dict()
    is_saved = state["reference"] is not None
    assert is_saved == (kind == "unseen"), "a resumed run is given that of a retain model"
    again = trainer_of(model, **rows.sets(), **SMALL | asked, retain_predictions=retrained)
    again = again.goal_run
    again.load_state_dict(state)
    first = trainer.goal_run.goal.reference
    assert again.goal.reference == first
    trainer.train()
    is_new = trainer.goal_run.goal.reference is not first
    assert is_new == (kind == "unseen"), "a second run compares with its own start"


def test_a_run_in_another_number_of_processes_is_told_the_batch_that_it_needs(
    model, trainer_of, rows, monkeypatch
):
    data, asked = rows.sets(), SMALL | {"target_forget_loss": 1.0}
    state = trainer_of(model, **data, **asked).run_state()
    halves = "--gradient_accumulation_steps 1 --per_device_train_batch_size 32"
    ways = {2: f"give {halves}", 3: "start a number of processes that divides 64"}
    for processes, way in ways.items():
        monkeypatch.setattr(UnlearnTrainer, "_sharing", processes)
        now = f"1 a step of 64 records over all processes, and would have 1 of {64 * processes}"
        with pytest.raises(HamuError, match=rf"keeps its batches: it had {now}; {way}$"):
            trainer_of(model, **data, **asked).load_run_state(state)
    monkeypatch.setattr(UnlearnTrainer, "_sharing", 2)
    asked["per_device_train_batch_size"] = 32
    trainer_of(model, **data, **asked).load_run_state(state)


def test_without_a_start_nothing_is_said_of_it(model, trainer_of, rows):
    data = rows.sets()
    trainer = trainer_of(model, **data, method="ga", max_steps=2)
    trainer.train()
    assert "eval_forget_loss" in (found := trainer.evaluate())
    assert not [name for name in found if name.endswith("_gain")]
    assert trainer.goal_run.figures() is None, "unseen losses were the start model's"


def test_predictions_of_other_records_are_refused(model, trainer_of, rows):
    found = predicted(model, rows.forget)
    short = Predictions(found.logits[1:], found.labels[1:])
    with pytest.raises(HamuError, match=r"^retain_predictions are of 11 records, .* has 12;"):
        by_goal(trainer_of, model, rows, retain_predictions=short, goal="retrained")
    sample = {"goal": "retrained", "max_eval_samples": 10, "retain_predictions": found}
    with pytest.raises(HamuError, match=r"^retain_predictions are of 12 records, .* has 10;"):
        trainer_of(model, **rows.sets(), **sample)


def test_a_callback_that_ends_it_at_an_evaluation_leaves_the_best_state(model, trainer_of, rows):
    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step > 0

    asked = {"target_forget_loss": 30.0, "max_retain_increase": 0.0, "callbacks": [Stop()]}
    trainer = by_goal(trainer_of, model, rows, **asked, **EVERY_FOURTH)
    assert trainer.state.global_step == 4
    assert trainer.controller.ended
    assert trainer.stop_reason.startswith("a callback ended it; the goal is not reached: ")
    assert trainer.goal_run.stand().retain_loss <= trainer.controller.start_loss + 1e-9
    assert trainer.predictions == {}, "those of the evaluation are of other weights"


def test_the_log_calls_no_run_that_took_all_its_steps_stopped(model, trainer_of, rows):
    trainer = by_goal(trainer_of, model, rows, target_forget_loss=30.0, max_steps=2)
    trainer.evaluate()
    assert trainer.goal_run.figures()["reached"] is False
    logged = [entry["stopped"] for entry in trainer.state.log_history if "taken" in entry]
    assert (trainer.stop.kind, logged) == ("all steps", [0, 0])


def test_a_goal_that_is_reached_at_the_start_takes_no_step(model, trainer_of, rows):
    before = copy.deepcopy(model.state_dict())
    trainer = by_goal(trainer_of, model, rows, target_forget_loss=1e-9)
    assert trainer.steps_taken == 0
    assert trainer.stop_reason.startswith("the goal is reached at the start: 12 of 12 records")
    assert trainer.stop_reason.endswith("; a higher --target_forget_loss asks for more")
    assert all(value.equal(before[name]) for name, value in model.cpu().state_dict().items())


def test_a_run_by_hand_raises_records_to_their_targets_too(model, trainer_of, rows):
    data = rows.sets()
    settings = {"target_forget_loss": 0.5, "learning_rate": 3e-4, "optim": "adamw_torch"}
    bounded = {"forget_objective": "bounded", "max_steps": 8, "per_device_train_batch_size": 64}
    trainer = trainer_of(model, **data, **settings, **bounded)
    before = predicted(model, rows.forget).losses
    trainer.train()
    after = predicted(model, rows.forget).losses
    assert trainer.controller is None
    assert trainer.goal_run.limits.shape == (len(ROWS), 2)
    assert (after > before)[before < 0.4].double().mean() > 0.8
    assert trainer.promise["checked"] > 0, "a step is judged by the same objective"
    first = trainer.goal_run.limits
    trainer.train()
    assert trainer.goal_run.limits is not first, "a second run measures its own start"
    lasting = trainer_of(model, **data, **settings, lasting=True, max_steps=2)
    lasting.train()
    assert lasting.steps_taken == 2
    assert not (lasting.promise or {}).get("checked"), "its forget loss is of another place"
    ends = {"min_forget_loss": 1e6, "max_forget_loss": 1e-9, "max_steps": 2}
    assert by_goal(trainer_of, model, rows, lasting=True, **ends).stop.kind == "all steps"
    assert trainer_of(model, **data, **settings | ends).train().global_step == 1


def recognised_after_fine_tuning(model, problem, steps):
    """The share of the forget set that is recognised after so many ordinary steps on the retain set, at each."""
    generator = torch.Generator().manual_seed(7)
    model.cpu()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for step in range(1, max(steps) + 1):
        drawn = torch.randperm(len(problem.retain), generator=generator)[:64]
        batch = collate(problem.retain.__getitems__(drawn.tolist()))
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(predict_logits(model, batch), batch["labels"]).backward()
        optimizer.step()
        if step in steps:
            found.append(predicted(model, problem.forget).correct.double().mean().item())
    return found


def rehearsed(history):
    key = "forgotten_after_fine_tuning"
    return [row[key] for row in history if key in row]


def test_what_a_lasting_run_forgets_is_not_found_again_by_fine_tuning(
    model, trainer_of, whole_class
):
    plain = copy.deepcopy(model)
    before = retain_loss(model, whole_class)
    lasting = {"lasting": True, "lookahead_steps": 20, "max_steps": 160}
    trainer = by_goal(trainer_of, model, whole_class, **lasting)
    assert trainer.stop.kind == "goal"
    assert min(rehearsed(trainer.controller.history)[-2:]) >= 0.95 * len(whole_class.forget)
    assert retain_loss(model, whole_class) <= before + 0.03
    assert max(recognised_after_fine_tuning(model, whole_class, (20, 40))) <= 0.1
    by_goal(trainer_of, plain, whole_class)
    assert predicted(plain, whole_class.forget).correct.double().mean() <= 0.05
    found_again = max(recognised_after_fine_tuning(plain, whole_class, (20, 40)))
    assert found_again > 0.3, "without it, it is found again"


@pytest.mark.parametrize("adapter", [(), ("--lora", "--lora_rank", 32, "--lora_alpha", 64)])
def test_a_lasting_run_of_a_language_model_stands_its_rehearsals(
    cli, tmp_path, saved_text_model, adapter
):
    records = read_text("miniature").records
    for name, some in (("train", records[:24]), ("test", records[48:72])):
        rows = [{"question": r.prompt, "answer": r.answer} for r in some]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    data = ("--data", "train.jsonl", "--test_data", "test.jsonl", "--model", saved_text_model)
    asked = ("--forget_rows", "0,1,2,3,4,5", "--max_retain_increase", 0.5)
    lasting = ("--lasting", "--lookahead_steps", 10, "--max_steps", 300)
    code, _, err = cli("unlearn", *data, *asked, *lasting, *adapter, "--output_dir", "out")
    assert (code, err) == (0, "")
    report = report_in(tmp_path / "out")
    assert report["ended_kind"] == "goal"
    assert report["goal"]["after"]["forgotten"] == 6
    assert rehearsed(report["controller"])[-2:] == [6, 6]
    said = " ".join(report_in(tmp_path / "out", "record.json")["statement"])
    assert "in rehearsal" in said
    assert "not tested" not in said


def test_a_rehearsal_looks_half_way_and_at_the_end_at_batches_of_its_step(
    model, trainer_of, rows, monkeypatch
):
    lasting = {"lasting": True, "lookahead_steps": 6, "target_forget_loss": 0.7}
    run = trainer_of(model, **rows.sets(), **SMALL, **lasting).goal_run
    drawn = []

    @contextmanager
    def noted(batches):
        drawn.append([batch["labels"] for batch in batches])
        yield

    monkeypatch.setattr(run.lookahead, "rehearsed", noted)
    for step in (5, 5, 6):
        run.trainer.state.global_step = step
        assert len(run.rehearse()) == 2
    assert [[len(labels) for labels in one] for one in drawn] == [[64] * 3, [64] * 6] * 3
    half, end, again, _, other, _ = (torch.cat(one) for one in drawn)
    assert torch.equal(half, end[: 3 * 64])
    assert torch.equal(half, again)
    assert not torch.equal(half, other)


def test_a_lasting_run_takes_an_erased_record_further_ahead(model, trainer_of, rows):
    def aims(**asked):
        run = trainer_of(model, **rows.sets(), **SMALL, **asked).goal_run
        run.focus(run.stand())
        return run.limits[:, 0]

    lasting = {"lasting": True, "lookahead_steps": 6}
    plain, further = aims(goal="erased"), aims(goal="erased", **lasting)
    torch.testing.assert_close(log_odds(further), log_odds(plain) + 3)
    asked = {"target_forget_loss": 0.7}
    assert torch.equal(aims(**asked), aims(**asked, **lasting)), "the others' targets are stated"


def test_accumulation_looks_ahead_once_a_step(model, trainer_of, whole_class, monkeypatch):
    starts, advance = [], Lookahead.advance

    def noted(self, batches):
        starts.append([len(retain["labels"]) for retain, _ in batches])
        advance(self, batches)

    monkeypatch.setattr(Lookahead, "advance", noted)
    parts = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    lasting = {"lasting": True, "lookahead_steps": 6, "max_steps": 8}
    trainer = by_goal(trainer_of, model, whole_class, **lasting, **parts)
    assert starts == [[16] * 4] * 8
    assert trainer.steps_taken == 8
    assert trainer.lookahead.cycles >= 1


@pytest.mark.parametrize(("asked", "kind", "share", "budget"), [
    (("--forget_class", 3), "erased", 0.95, 0.02),
    (("--forget_rows", ",".join(map(str, range(40))), "--max_retain_increase", 0.3), "unseen", 0.95, 0.3),
    (("--forget_class", 3, "--goal", "unseen", "--target_share", 0.5), "unseen", 0.5, 0.02),
])  # fmt: skip
def test_the_plain_command_runs_by_goal_and_names_its_budget(
    cli, few_digits, saved_model, tmp_path, asked, kind, share, budget
):
    data = ("--data", few_digits, "--model", saved_model)
    code, out, err = cli("unlearn", *data, *asked, "--max_steps", 30, "--output_dir", "out")
    assert (code, err) == (0, "")
    assert f"(goal {kind}, {share:.0%} wanted)" in out
    assert f"of +{budget} allowed" in out
    report = report_in(tmp_path / "out")
    goal, after = report["goal"], report["goal"]["after"]
    assert (goal["kind"], goal["share"], goal["budget"]) == (kind, share, budget)
    assert after["forgotten"] == report["controller"][-1]["forgotten"]
    assert goal["reached"] == (after["forgotten"] >= share * after["records"])
    record = report_in(tmp_path / "out", "record.json")
    assert record["goal"]["reached"] == goal["reached"]
    assert cli("verify", "out", "--no_models")[0] == 0


def test_every_run_counts_from_its_own_start(model, trainer_of, rows):
    trainer = by_goal(trainer_of, model, rows, target_forget_loss=1e-9)
    assert trainer.steps_taken == 0, "the goal is reached at the start"
    with torch.no_grad():
        model.classifier.weight.mul_(0.5)
    trainer.train()
    now = trainer.start_predictions["retain"].losses.mean().item()
    assert now == pytest.approx(retain_loss(model, rows))


@pytest.mark.parametrize("logit", [torch.nan, -torch.inf])
def test_a_retain_model_without_a_finite_loss_is_refused(model, trainer_of, rows, logit):
    found = predicted(model, rows.forget)
    logits = found.logits.clone()
    logits[0, found.labels[0]] = logit
    theirs = replace(found, logits=logits)
    with pytest.raises(
        HamuError, match="retain model's losses are not finite for forget rows, first"
    ):
        by_goal(trainer_of, model, rows, goal="retrained", retain_predictions=theirs)
