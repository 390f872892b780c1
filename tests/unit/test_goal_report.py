"""The count of forgotten records: by which goal, compared with what, and in which words."""

import pytest
import torch

from hamu.data import ImageData, TextRecord, TextRecords, UnlearningData
from hamu.errors import HamuError
from hamu.evaluation import Predictions
from hamu.unlearning.goal_report import GoalSettings, goal_lines, goal_settings, has_share
from hamu.unlearning.record.figures import goal_figures


def images(*labels):
    pixels = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    return ImageData(
        pixels, torch.tensor(labels), ("a", "b", "c"), "here", torch.arange(len(labels))
    )


def texts(count=4):
    return TextRecords((TextRecord("q", "a", {}),) * count, "here", torch.arange(count))


def problem(retain, forget, test):
    return UnlearningData(retain, forget, test, "some")


def with_losses(*losses):
    """Predictions of two classes with these losses, all of the first class."""
    p = torch.exp(-torch.tensor(losses, dtype=torch.float64))
    return Predictions(
        torch.stack([p.log(), (1 - p).log()], 1), torch.zeros(len(losses), dtype=torch.long)
    )


@pytest.mark.parametrize(
    ("sets", "settings", "has_retain_model", "kind"),
    [
        (problem(images(0, 1), images(0), images(0)), {}, True, "unseen"),
        (problem(images(0, 1), images(0), None), {}, True, "retrained"),
        (problem(images(0, 1), images(2), images(0)), {}, True, "erased"),
        (problem(images(0, 1), images(2), images(0)), {"goal": "unseen"}, True, "unseen"),
        (problem(images(0, 1), images(2), images(0)), {"loss": 2.0}, True, "loss"),
        (problem(texts(), texts(), texts()), {}, False, "unseen"),
        (problem(texts(), texts(), None), {"loss": 2.0}, False, "loss"),
    ],
)
def test_the_goal_is_the_one_named_or_follows_from_what_there_is(
    sets, settings, has_retain_model, kind
):
    asked = {"goal": None, "loss": None, "share": 0.95} | settings
    assert goal_settings(sets, **asked, has_retain_model=has_retain_model).kind == kind


@pytest.mark.parametrize(
    ("sets", "goal", "says"),
    [
        (
            problem(images(0), images(0), None),
            None,
            "nothing tells when a record is forgotten; give --test_data",
        ),
        (problem(images(0), images(0), None), "unseen", "give --test_data"),
        (problem(images(0), images(0), images(0)), "retrained", "give --retain_model"),
        (problem(texts(), texts(), texts()), "erased", "the goal erased is for classifiers"),
    ],
)
def test_a_goal_that_lacks_what_it_needs_names_it(sets, goal, says):
    with pytest.raises(HamuError, match=says):
        goal_settings(sets, goal, None, 0.95, has_retain_model=False)


def test_unseen_compares_with_the_original_model_where_there_is_one():
    own = {"forget": with_losses(0.5, 0.5), "test": with_losses(*[0.1] * 9)}
    original = {"test": with_losses(*[0.9] * 9)}
    settings = GoalSettings("unseen")
    alone = settings.report(own, original=None, retain_model=None)
    beside = settings.report(own, original=original, retain_model=None)
    assert (alone["reference"], alone["after"]["forgotten"], alone["reached"]) == (
        "this model",
        2,
        True,
    )
    assert (beside["reference"], beside["after"]["forgotten"], beside["reached"]) == (
        "original model",
        0,
        False,
    )
    assert "compared with its own losses on the test data (--original_model" in goal_lines(alone)[0]
    assert "compared with the original model's losses on the test data" in goal_lines(beside)[0]


def test_one_record_of_a_high_loss_does_not_pay_for_the_others():
    found = GoalSettings("loss", loss=1.0).report(
        {"forget": with_losses(*[0.01] * 18, 17.0, 22.0)}, original=None, retain_model=None
    )
    assert (found["after"]["forgotten"], found["reached"], has_share(found)) == (2, False, False)
    count, quantiles, worst = goal_lines(found)
    assert count.startswith("2 of 20 records are forgotten")
    assert count.endswith("by the goal a loss of 1; 95% wanted: not reached")
    assert (
        quantiles
        == "losses of the forget records: lowest 0.01, 25 % 0.01, median 0.01, 75 % 0.01, highest 22"
    )
    assert worst.count("0.01 of 1") == 10


def test_the_record_has_the_worst_losses_without_their_places():
    found = GoalSettings("loss", loss=1.0).report(
        {"forget": with_losses(0.1, 2.0)}, original=None, retain_model=None
    )
    assert found["after"]["worst"] == [{"position": 0, "loss": pytest.approx(0.1), "target": 1.0}]
    recorded = goal_figures(found | {"before": found["after"]})
    assert recorded["after"]["worst"] == [{"loss": pytest.approx(0.1), "target": 1.0}]
    assert "position" not in str(recorded)
    assert goal_figures(None) is None
