"""The figures of a classifier against a slow, obvious twin; membership inference where the answer is known."""

import math
from dataclasses import asdict

import pytest
import torch
from sklearn.metrics import roc_auc_score

from hamu import HamuError
from hamu.evaluation import (
    Predictions,
    classifier_report,
    loss_attack,
    membership_inference,
    predict,
    predict_tokens,
)
from hamu.evaluation.membership import _matched, auc_of
from hamu.report.tables import membership_line


def random_predictions(n, seed, classes=3):
    g = torch.Generator().manual_seed(seed)
    return Predictions(
        torch.randn(n, classes, generator=g) * 2, torch.randint(0, classes, (n,), generator=g)
    )


def test_the_report_matches_a_loop_over_samples():
    sets = {
        "retain": random_predictions(50, 0),
        "forget": random_predictions(20, 1),
        "test": random_predictions(40, 2),
    }
    others = {name: random_predictions(len(p.labels), 9) for name, p in sets.items()}
    others = {n: Predictions(o.logits, sets[n].labels) for n, o in others.items()}
    report = classifier_report(sets, ("a", "b", "c"), target_class=1, reference=others)
    for name, predictions in sets.items():
        losses, hits, per_class, kls, agree = [], [], {}, [], []
        class_losses, class_kls = {}, {}
        rows = zip(
            predictions.logits.double(),
            predictions.labels.tolist(),
            others[name].logits.double(),
            strict=True,
        )
        for logits, label, other in rows:
            p, q = logits.exp() / logits.exp().sum(), other.exp() / other.exp().sum()
            losses.append(-math.log(p[label]))
            hits.append(float(p.argmax() == label))
            per_class.setdefault("abc"[label], []).append(hits[-1])
            kls.append(sum(q[k] * math.log(q[k] / p[k]) for k in range(3)))
            class_losses.setdefault("abc"[label], []).append(losses[-1])
            class_kls.setdefault("abc"[label], []).append(float(kls[-1]))
            agree.append(float(p.argmax() == q.argmax()))
        n = len(losses)
        assert report[name]["loss"] == pytest.approx(sum(losses) / n, rel=1e-12)
        assert report[name]["accuracy"] == pytest.approx(sum(hits) / n)
        assert report[name]["per_class_accuracy"] == pytest.approx(
            {k: sum(v) / len(v) for k, v in per_class.items()}
        )
        means = {k: sum(v) / len(v) for k, v in class_losses.items()}
        assert report[name]["per_class_loss"] == pytest.approx(means, rel=1e-12)
        by_class = report["against_retain_model_per_class"][name]
        assert {k: row["kl"] for k, row in by_class.items()} == pytest.approx(
            {k: sum(v) / len(v) for k, v in class_kls.items()}, rel=1e-9
        )
        for number, key in enumerate("abc"):
            among = predictions.labels == number
            theirs = (
                others[name].losses[among].mean().item(),
                others[name].correct[among].double().mean().item(),
            )
            assert by_class[key]["loss_difference"] == pytest.approx(
                means[key] - theirs[0], rel=1e-9
            )
            of_class = report[name]["per_class_accuracy"][key]
            assert by_class[key]["accuracy_difference"] == pytest.approx(of_class - theirs[1])
        against = report["against_retain_model"][name]
        assert against["kl"] == pytest.approx(float(sum(kls)) / n, rel=1e-9)
        assert against["agreement"] == pytest.approx(sum(agree) / n)
        assert against["loss_difference"] == pytest.approx(
            report[name]["loss"] - others[name].losses.mean().item(), rel=1e-9
        )
    rest = sets["test"].labels != 1
    assert (
        report["test_without_class"]["accuracy"]
        == sets["test"].correct[rest].double().mean().item()
    )
    assert report["test_without_class"]["samples"] == rest.sum()
    differs = report["test_without_class"]["loss"] - others["test"].losses[rest].mean().item()
    assert report["against_retain_model"]["test_without_class"]["loss_difference"] == pytest.approx(
        differs
    )
    assert report["against_retain_model_per_class"]["test_without_class"].keys() == {"a", "c"}


def test_membership_inference_is_compared_with_that_of_the_retain_model():
    sets = {
        "retain": random_predictions(30, 0),
        "forget": random_predictions(40, 1),
        "test": random_predictions(60, 2),
    }
    others = {
        name: Predictions(random_predictions(len(p.labels), 7).logits, p.labels)
        for name, p in sets.items()
    }
    report = classifier_report(sets, ("a", "b", "c"), reference=others, seed=3)
    ours, theirs = (membership_inference(one["forget"], one["test"], 3) for one in (sets, others))
    assert report["membership_inference"] == asdict(ours)
    assert report["retain_model"]["membership_inference"] == asdict(theirs)
    assert report["retain_model"]["membership_inference_difference"] == {
        "accuracy": ours.accuracy - theirs.accuracy, "auc": ours.auc - theirs.auc
    }  # fmt: skip
    assert ours.auc != theirs.auc
    assert f"AUC {ours.auc:.3f} [retain model {theirs.auc:.3f}]" in membership_line(report)
    broken = others | {
        "forget": Predictions(others["forget"].logits * math.nan, others["forget"].labels)
    }
    report = classifier_report(sets, ("a", "b", "c"), reference=broken)
    assert report["retain_model"] == {
        "membership_inference": None,
        "membership_inference_difference": None,
    }
    assert "retain model" not in membership_line(report)
    report = classifier_report(broken, ("a", "b", "c"))
    assert membership_line(report).endswith("of the classes that are forgotten, and finite losses)")
    assert "retain_model" not in classifier_report(sets, ("a", "b", "c"))


def test_a_set_without_records_is_compared_with_nothing():
    sets = {
        "retain": random_predictions(30, 0),
        "forget": random_predictions(4, 1),
        "test": random_predictions(9, 2),
    }
    sets["test"] = Predictions(sets["test"].logits, torch.ones(9, dtype=torch.long))
    report = classifier_report(sets, ("a", "b", "c"), target_class=1, reference=sets)
    assert "test_without_class" not in report
    assert set(report["against_retain_model"]) == {"retain", "forget", "test"}


def test_a_retain_model_with_other_classes_is_refused():
    ours, theirs = ({"retain": random_predictions(5, 0, classes)} for classes in (3, 5))
    with pytest.raises(
        HamuError, match="the model has 3 classes, the retain model 5; both need the same"
    ):
        classifier_report(ours, ("a", "b", "c"), reference=theirs)


@pytest.mark.parametrize("function", [predict, predict_tokens])
def test_nothing_is_predicted_of_an_empty_set(function):
    with pytest.raises(HamuError, match="the data set is empty: it has no record to predict"):
        function(torch.nn.Linear(2, 2), [], 4, None)


def with_losses(losses, labels):
    """Predictions of two classes that have exactly these losses."""
    p = torch.exp(-torch.as_tensor(losses, dtype=torch.float64))
    logits = torch.zeros(len(p), 2, dtype=torch.float64)
    labels = torch.as_tensor(labels)
    logits[torch.arange(len(p)), labels] = torch.log(p / (1 - p))
    return Predictions(logits, labels)


def test_membership_inference_is_chance_for_equal_losses_and_sure_for_separate_ones():
    g = torch.Generator().manual_seed(0)
    same = [
        with_losses(torch.rand(400, generator=g) + 0.1, torch.arange(400) % 2) for _ in range(2)
    ]
    assert membership_inference(*same).accuracy == pytest.approx(0.5, abs=0.06)
    assert membership_inference(*same).auc == pytest.approx(0.5, abs=0.06)
    low = with_losses(torch.rand(400, generator=g) * 0.02 + 0.01, torch.arange(400) % 2)
    found = membership_inference(low, same[0])
    assert found.accuracy > 0.95
    assert found.auc > 0.99


def test_the_auc_is_that_of_the_loss_itself():
    g = torch.Generator().manual_seed(1)
    forget, test = (
        with_losses(torch.rand(300, generator=g) * s + 0.1, torch.zeros(300, dtype=torch.long))
        for s in (1, 2)
    )
    losses = torch.cat([forget.losses, test.losses])
    direct = roc_auc_score([1] * 300 + [0] * 300, -losses)
    assert membership_inference(forget, test).auc == pytest.approx(direct)
    assert loss_attack(forget, test).auc == membership_inference(forget, test).auc


def test_a_set_that_was_forgotten_too_well_is_below_one_half_and_found_all_the_same():
    test = with_losses(torch.linspace(0.1, 0.2, 50), torch.zeros(50, dtype=torch.long))
    forgotten = with_losses(torch.linspace(4.0, 5.0, 50), torch.zeros(50, dtype=torch.long))
    found = membership_inference(forgotten, test)
    assert found.auc == 0
    assert found.accuracy > 0.95


def test_a_model_that_was_destroyed_is_below_one_half_too():
    """Its losses are so large that all their probabilities are 0."""
    labels = torch.arange(40) % 2

    def at(loss):
        logits = torch.zeros(40, 2, dtype=torch.float64)
        logits[torch.arange(40), 1 - labels] = loss + torch.linspace(
            0.0, 1.0, 40, dtype=torch.float64
        )
        return Predictions(logits, labels)

    forget, test = at(1000.0), at(800.0)
    assert forget.losses.min() > 745 < test.losses.min()
    assert membership_inference(forget, test).auc == loss_attack(forget, test).auc == 0.0


@pytest.mark.parametrize("count", [5, 7, 9, 14, 50])
def test_what_is_the_same_is_not_told_apart_however_the_folds_come_out(count):
    same = with_losses([0.5] * count, [0] * count)
    found = membership_inference(same, same)
    assert (found.auc, found.accuracy) == (0.5, 0.5)


def test_classes_are_matched_so_that_they_cannot_give_the_attack_away():
    forget, test = torch.tensor([0] * 30 + [1] * 5), torch.tensor([0] * 10 + [1] * 20 + [2] * 9)
    members, nonmembers = _matched(forget, test, torch.Generator().manual_seed(0))
    assert forget[members].bincount().tolist() == test[nonmembers].bincount().tolist() == [10, 5]


def test_the_records_of_the_larger_group_are_drawn_from_all_of_it():
    few, many = torch.zeros(3, dtype=torch.long), torch.zeros(12, dtype=torch.long)
    draws = [
        _matched(few, many, torch.Generator().manual_seed(seed))[1].tolist() for seed in range(20)
    ]
    assert all(len(set(draw)) == 3 for draw in draws)
    assert {place for draw in draws for place in draw} == set(range(12))


def test_too_few_records_to_match_give_no_figure():
    forget = with_losses([0.5] * 20, [0] * 20)
    assert membership_inference(forget, with_losses([0.5] * 20, [1] * 20)) is None
    assert (
        membership_inference(
            Predictions(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)), forget
        )
        is None
    )
    report = classifier_report({"retain": forget, "forget": forget}, ("a", "b"))
    assert report["membership_inference"] is None


@pytest.mark.parametrize(
    ("inference", "auc"),
    [
        ({"accuracy": 0.5, "auc": 0.75}, 0.75),
        ({"loss": 0.5, "min_k": 0.25}, 0.25),
        (None, None),
        ({}, None),
    ],
)
def test_one_auc_stands_for_the_inference_of_a_report(inference, auc):
    assert auc_of({"membership_inference": inference}) == auc
    assert auc_of({}) is None


def test_predictions_do_not_depend_on_the_batch_size_and_leave_the_mode_alone():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
    ).train()
    model.append(torch.nn.Linear(4, 2))
    data = [{"pixel_values": torch.randn(1, 2, 2), "labels": torch.tensor(i % 2)} for i in range(7)]
    collate = torch.utils.data.default_collate
    one, all_at_once = predict(model, data, 1, collate), predict(model, data, 7, collate)
    torch.testing.assert_close(one.logits, all_at_once.logits)
    assert all(module.training for module in model.modules())


def test_a_model_without_numbers_is_never_right():
    logits = torch.tensor([[float("nan")] * 3] * 4 + [[1.0, -float("inf"), 0.0]])
    assert Predictions(logits, torch.tensor([0, 0, 1, 2, 0])).correct.tolist() == [False] * 4 + [
        True
    ]
