"""Unlearning by goal: it ends at the target, at the budget, or when every further step must hurt, and says which."""

import copy
import itertools
import json
import math
from dataclasses import replace

import pytest
from hamu.training.auto import apply_assessment
from hamu.training.goal import Goal, Standing
from hamu.training.steering import Steering
from hamu.training.unseen import Unseen

from hamu import HamuError, HamuQ, UnlearnConfig
from hamu.assess import assess
from hamu.cli import main
from hamu.data.images import collate
from hamu.training.measuring import Evaluations


def by_goal(trainer_of, model, problem, loss, budget, **settings):
    found = assess(model, problem.retain, problem.forget, collate=collate, method=HamuQ(0.5, "relative"),
                   conflicts=False, batch_size=256)  # fmt: skip
    args = {"auto": True, "target_forget_loss": loss, "max_retain_increase": budget} | settings
    config = UnlearnConfig(output_dir="unused", **args)
    apply_assessment(config, found)
    chosen = ("learning_rate", "constraint", "constraint_mode", "stopping", "trust_region", "trust_region_growth")
    trainer = trainer_of(model, **args | {name: getattr(config, name) for name in chosen})
    trainer.train()
    return trainer


def test_it_ends_at_the_target_within_the_budget(model, trainer_of, problem):
    trainer = by_goal(trainer_of, model, problem, 1.5, 0.05, max_steps=60, per_device_train_batch_size=128)
    assert "the goal is reached" in trainer.stop_reason
    assert trainer.end.kind == "goal"
    after = trainer.evaluate()
    assert after["eval_forget_loss"] >= 1.5
    start = trainer.steering._start
    assert after["eval_retain_loss"] <= start.retain_loss + 0.051  # the steering looks at a sample of the retain set
    assert trainer.steps_taken < 60


def test_a_loss_that_is_not_finite_is_no_goal_reached(model, trainer_of, problem, monkeypatch):
    monkeypatch.setattr(Evaluations, "standing", lambda self: Standing(math.inf, 0.2, 0.9))
    with pytest.raises(HamuError, match="the loss on the forget set is inf at the start, and no goal can be told by"):
        by_goal(trainer_of, model, problem, 1.5, 0.05, max_steps=4, per_device_train_batch_size=128)


def test_it_ends_at_the_budget_with_a_model_that_keeps_it(model, trainer_of, problem):
    trainer = by_goal(trainer_of, model, problem, 1e6, 0.0005, max_steps=30, per_device_train_batch_size=64)
    assert "the goal is not reached" in trainer.steering.goal_sentence
    assert any(row["retain_loss"] > trainer.steering._start.retain_loss + 0.0005 for row in trainer.steering.history)
    now = trainer.steering._measure()
    assert now.retain_loss <= trainer.steering._start.retain_loss + 0.0005
    assert now.forget_loss > trainer.steering._start.forget_loss


def test_of_a_state_that_costs_too_much_as_much_is_kept_as_the_budget_pays_for(model, trainer_of, problem):
    """The half of the way is measured where the whole was too far, and a run may end there."""
    trainer = by_goal(trainer_of, model, problem, 1e6, 0.002, max_steps=40, per_device_train_batch_size=128)
    limit = trainer.steering._start.retain_loss + 0.002
    rows = trainer.steering.history
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["length"] < 1]
    assert pairs, "nothing was ever too far"
    assert all(a["retain_loss"] > limit for a, _ in pairs)
    assert all(b["retain_loss"] < a["retain_loss"] for a, b in pairs)
    assert any(b["retain_loss"] <= limit for _, b in pairs)
    for unseen in trainer.steering.search.unseen.values():
        assert 0 <= unseen.noise <= 1
        assert 0 <= unseen.bend <= 1
        assert unseen.noise != 0.5, "nothing was learned"


def test_what_pays_is_carried_on_and_the_budget_holds_there_too(model, trainer_of, problem):
    """The run stands at the last length that paid, not at one that was only tried."""
    trainer = by_goal(trainer_of, model, problem, 2.0, 0.05, max_steps=20, per_device_train_batch_size=128)
    rows, limit = trainer.steering.history, trainer.steering._start.retain_loss + 0.05
    assert any(row["length"] > 1 for row in rows), "nothing was ever carried on"
    now = trainer.steering._measure()
    assert now.retain_loss <= limit
    assert any(row["forget_loss"] == pytest.approx(now.forget_loss, rel=1e-4) for row in rows)
    assert trainer.steering._now.forget_loss == pytest.approx(now.forget_loss, rel=1e-4)


def test_after_an_overspend_it_is_careful_by_the_step_that_cost_too_much(model, trainer_of, problem, monkeypatch):
    """And not by the next one, whose demand is set before the step is taken. Every look teaches, halfway too."""
    used, caps, taught = [], [], []
    demand, careful, learn = Steering.plan_from, Steering._be_careful, Unseen.learn

    def noting_demand(steering, *args):
        used.append(steering._method.constraint)
        demand(steering, *args)

    def noting_care(steering, kept):
        careful(steering, kept)
        caps.append((steering._cap, used[-1], steering._method.constraint))

    def noting_learn(unseen, change, measured):
        taught.append(measured)
        learn(unseen, change, measured)

    monkeypatch.setattr(Steering, "plan_from", noting_demand)
    monkeypatch.setattr(Steering, "_be_careful", noting_care)
    monkeypatch.setattr(Unseen, "learn", noting_learn)
    trainer = by_goal(trainer_of, model, problem, 1e6, 0.05, max_steps=40, per_device_train_batch_size=128)
    assert any(following != taken for _, taken, following in caps), "the next demand was never another"
    assert all(cap == pytest.approx(max(0.05, 0.6 * taken)) for cap, taken, _ in caps)
    assert len(taught) == 2 * len(trainer.steering.history)


def test_a_goal_that_is_reached_at_the_start_takes_no_step(model, trainer_of, problem):
    before = copy.deepcopy(model.state_dict())
    trainer = by_goal(trainer_of, model, problem, 1e-9, 0.01)
    assert trainer.steps_taken == 0
    assert "at the start" in trainer.stop_reason
    assert trainer.end.kind == "goal"
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_goal_of_loss_and_of_accuracy():
    now = Standing(forget_loss=1.0, retain_loss=0.1, forget_accuracy=0.6)
    assert Goal(1.0, None, 0.1).reached(now)
    assert not Goal(1.1, None, 0.1).reached(now)
    assert not Goal(1.0, None, 0.1).reached(replace(now, forget_loss=float("nan")))
    assert Goal(None, 0.6, 0.1).reached(now)
    assert not Goal(1.0, 0.5, 0.1).reached(now)
    assert Goal(1.5, None, 0.1).missing(now) == 0.5
    assert Goal(None, 0.5, 0.1).missing(now) > 0
    assert Goal(0.5, 0.5, 0.1).missing(now) > 0, "of two goals one is not reached yet"


@pytest.mark.parametrize("budget", [0.0, 0.01])
def test_the_budget_holds_whatever_ends_the_run(model, trainer_of, problem, budget):
    """Also where the run is ended by another limit, in the middle of an expensive stretch."""
    trainer = by_goal(trainer_of, model, problem, 1e6, budget, max_steps=30, per_device_train_batch_size=64,
                      max_retain_loss=trainer_of(model).evaluate()["eval_retain_loss"] * 1.02)  # fmt: skip
    start, now = trainer.steering._start, trainer.steering._measure()
    assert now.retain_loss <= start.retain_loss + budget + 1e-9
    assert "not reached" in trainer.steering.goal_sentence


def test_without_the_curvature_there_is_no_learning_rate(model, problem):
    found = assess(model, problem.retain, problem.forget, collate=collate, method=HamuQ(0.5, "relative"),
                   most_batches=1, curvature_samples=0)  # fmt: skip
    with pytest.raises(HamuError, match="auto needs the curvature for the learning rate; assess with"):
        apply_assessment(UnlearnConfig(output_dir="unused"), found)


def test_the_command(saved_model, tmp_path, capsys):
    flags = ["--recipe", "digits", "--model", str(saved_model), "--auto", "--target_forget_accuracy", "0.6",
             "--max_retain_increase", "0.1", "--learning_rate", "5", "--stopping", "any",
             "--output_dir", str(tmp_path / "out")]  # fmt: skip
    assert main(["unlearn", *flags]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "the goal is reached" in screen
    assert "--stopping" in screen.partition("itself; what flags, --config or recipe say")[0]
    assert "starting with learning rate" in screen
    report = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert report["after"]["forget"]["accuracy"] <= 0.6
    assert report["steering"][-1]["forget_accuracy"] <= 0.6
    assert report["promise"]["checked"] > 0
    record = json.loads((tmp_path / "out/record.json").read_text())
    assert record["hardness"]["measured_at"] == "assessment"
    assert record["goal"].startswith("the goal is reached")
    assert main(["verify", str(tmp_path / "out")]) == 0
