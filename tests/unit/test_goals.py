"""Goals by record: who counts as forgotten, and that no record is counted for another."""

import math

import pytest
import torch

from hamu import HamuError
from hamu.core.objectives import log_odds, loss_at
from hamu.evaluation import Predictions, TokenPredictions
from hamu.unlearning.goals import Goal, Reference, Standing, Targets, default_kind, standing_line


def images(losses, labels=None, classes=2):
    """Predictions of images with these losses; the label is class 0 without labels, and all others are alike."""
    losses = torch.as_tensor(losses, dtype=torch.float64)
    labels = (
        torch.zeros(len(losses), dtype=torch.int64) if labels is None else torch.as_tensor(labels)
    )
    logits = (log_odds(losses.clamp(min=1e-9)) - math.log(classes - 1))[:, None].repeat(1, classes)
    return Predictions(logits.scatter(1, labels[:, None], 0.0), labels)


def texts(losses, tokens=3):
    """Predictions of texts whose mean losses these are; the tokens of a text differ in theirs."""
    losses = torch.as_tensor(losses, dtype=torch.float64)
    shares = torch.linspace(0.5, 1.5, tokens, dtype=torch.float64)
    each = (losses[:, None] * shares).flatten()
    record = torch.arange(len(losses)).repeat_interleave(tokens)
    return TokenPredictions(each, each < 0.5, -each, each, record, len(losses))


def unseen(losses, labels=None, share=0.95):
    labels = None if labels is None else torch.as_tensor(labels)
    return Goal(
        "unseen", share, reference=Reference(torch.as_tensor(losses, dtype=torch.float64), labels)
    )


def drawn(number, generator):
    return torch.empty(number, dtype=torch.float64).exponential_(generator=generator)


@pytest.mark.parametrize("number", [1, 5, 60])
def test_records_drawn_as_the_unseen_ones_reach_their_targets_as_often_as_the_level_says(number):
    generator = torch.Generator().manual_seed(number)
    goal = unseen(drawn(5000, generator))
    standings = [goal.standing(texts(drawn(number, generator))) for _ in range(600 // number + 60)]
    records = torch.cat([standing.forgotten for standing in standings]).double()
    assert records.mean().item() == pytest.approx(0.95, abs=0.03)
    too_high = torch.cat([standing.too_high for standing in standings]).double()
    assert too_high.mean().item() == pytest.approx(0.05, abs=0.03)


def test_the_targets_of_unseen_follow_the_order_of_the_records_not_their_places():
    goal = unseen(torch.linspace(0, 4, 101))
    losses = torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64)
    targets = goal.targets(texts(losses))
    for column in (targets.least, targets.aim, targets.most):
        assert column.argsort().tolist() == [1, 2, 0]
    assert bool((targets.least < targets.aim).all() & (targets.aim < targets.most).all())
    assert targets.limits.equal(torch.stack([targets.aim, targets.most], 1))


def test_images_are_compared_class_by_class():
    goal = unseen([0.01] * 50 + [5.0] * 50, [0] * 50 + [1] * 50)
    standing = goal.standing(images([0.1, 0.1], [0, 1]))
    assert standing.forgotten.tolist() == [True, False]
    assert standing.too_high.tolist() == [True, False]


def test_a_class_without_unseen_images_is_compared_with_all_of_them():
    goal = unseen([2.0] * 50, [0] * 50)
    standing = goal.standing(images([1.0, 3.0], [1, 1], classes=3))
    assert standing.targets.aim.tolist() == [2.0, 2.0]
    assert standing.forgotten.tolist() == [False, True]


def test_one_record_that_is_far_off_does_not_count_for_others():
    losses = [20.0] + [0.0] * 19
    for goal in (unseen([1.0] * 100), Goal("loss", loss=1.0), Goal("erased")):
        standing = goal.standing(images(losses))
        assert standing.count == 1, goal.kind
        assert standing.share == 0.05
        assert standing.missing > 1


def test_retrained_is_within_a_tenth_in_log_odds_of_the_retain_model():
    aim = torch.tensor([0.01, 0.5, 3.0], dtype=torch.float64)
    goal = Goal("retrained", reference=Reference(aim))
    for by, forgotten in ((-0.11, False), (-0.09, True), (0.5, True)):
        standing = goal.standing(texts(loss_at(log_odds(aim) + by)))
        assert standing.forgotten.tolist() == [forgotten] * 3
        assert not standing.too_high.any()
    assert goal.standing(texts(loss_at(log_odds(aim) + 1.1))).too_high.all()
    with pytest.raises(
        HamuError,
        match="the retain model predicts 3 forget records, the model 2; both need the same",
    ):
        goal.standing(texts([1.0, 1.0]))


def test_erased_means_that_no_record_is_recognised():
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 5.0]])
    standing = Goal("erased").standing(Predictions(logits, torch.zeros(3, dtype=torch.int64)))
    assert standing.forgotten.tolist() == [False, True, True]
    assert standing.targets.most.isinf().all(), "nothing is too much"
    rest = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).double()
    aimed = standing.targets.aim[0]
    own = rest.logsumexp(1) - log_odds(
        aimed
    )  # the class itself has exactly this loss, whatever the others have
    assert bool((rest.max(1).values > own).all()), "at the aim another class is always more likely"
    with pytest.raises(
        HamuError,
        match="the goal erased is for classifiers; of texts choose unseen, retrained or a",
    ):
        Goal("erased").standing(texts([1.0]))


def test_a_loss_is_reached_by_each_record_and_aimed_at_a_little_beyond():
    standing = Goal("loss", loss=2.0).standing(texts([1.99, 2.01, 50.0]))
    assert standing.forgotten.tolist() == [False, True, True]
    assert bool((standing.targets.aim > 2.0).all())
    assert not standing.too_high.any()


@pytest.mark.parametrize(("settings", "message"), [
    ({"kind": "gone"}, "goal 'gone' is unknown; choose one of unseen, retrained, erased, loss"),
    ({"kind": "erased", "share": 0.0}, r"target_share 0.0 must be a share in \(0, 1\]"),
    ({"kind": "loss"}, "target_forget_loss None must be a positive number: the loss of each record"),
    ({"kind": "loss", "loss": math.inf}, "target_forget_loss inf must be a positive number"),
    ({"kind": "loss", "loss": -1.0}, "target_forget_loss -1.0 must be a positive number"),
    ({"kind": "unseen"}, "the goal unseen compares with records that were never trained on; give --test_data"),
    ({"kind": "retrained"}, "the goal retrained compares with a retain model; give --retain_model, or another --goal"),
])  # fmt: skip
def test_a_goal_without_what_it_needs_is_refused(settings, message):
    with pytest.raises(HamuError, match="^" + message):
        Goal(**settings)


@pytest.mark.parametrize(("known", "kind"), [
    ({"loss": 2.0, "whole_classes": True}, "loss"),
    ({"whole_classes": True, "has_test": True}, "erased"),
    ({"has_test": True, "has_retain_model": True}, "unseen"),
    ({"has_retain_model": True}, "retrained"),
])  # fmt: skip
def test_the_default_goal_follows_from_what_is_known(known, kind):
    nothing = {"has_test": False, "has_retain_model": False, "loss": None, "whole_classes": False}
    assert default_kind(**nothing | known) == kind
    with pytest.raises(
        HamuError, match="nothing tells when a record is forgotten; give --test_data"
    ):
        default_kind(**nothing)


def test_a_standing_shows_quantiles_and_the_ten_worst_of_those_that_are_not_forgotten():
    losses = torch.arange(20, dtype=torch.float64) / 10
    target = torch.full_like(losses, 1.45)
    standing = Standing(losses.flip(0), Targets(target, target, target + 9), losses.flip(0) >= 1.45)
    figures = standing.figures()
    assert (figures["records"], figures["forgotten"], figures["too_high"]) == (20, 5, 0)
    assert figures["loss_quantiles"]["min"] == 0
    assert figures["loss_quantiles"]["median"] == pytest.approx(0.95)
    assert figures["loss_quantiles"]["max"] == pytest.approx(1.9)
    assert [one["position"] for one in figures["worst"]] == list(range(19, 9, -1))
    assert figures["worst"][0] == {"position": 19, "loss": 0.0, "target": 1.45}
    assert standing_line(figures) == "5 of 20 records are forgotten (losses 0 to 1.9, median 0.95)"
    few = Goal("loss", loss=1.0).standing(texts([2.0, 0.5, 3.0])).figures()
    assert [one["position"] for one in few["worst"]] == [1], (
        "no forgotten record is among the worst"
    )


def test_what_is_missing_is_a_distance_to_the_aims_and_nothing_once_all_are_forgotten():
    goal = Goal("loss", loss=1.0)
    missing = [goal.standing(texts([loss, 5.0])).missing for loss in (0.0, 0.1, 0.5, 1.0)]
    assert missing == sorted(missing, reverse=True)
    assert math.isfinite(missing[0])
    assert missing[-1] == 0


@pytest.mark.parametrize(("losses", "retain_loss", "finite"), [
    ([1.0, 2.0], 0.1, True), ([1.0, math.inf], 0.1, True), ([math.nan, 2.0], 0.1, False), ([1.0, 2.0], math.nan, False),
])  # fmt: skip
def test_a_record_that_is_ruled_out_is_a_standing_and_one_that_is_no_number_is_none(
    losses, retain_loss, finite
):
    losses = torch.tensor(losses, dtype=torch.float64)
    assert Goal("loss", loss=1.0).standing(texts(losses, tokens=1), retain_loss).is_finite is finite
