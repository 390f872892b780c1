"""Figures of a classifier, attacks on it and intervals, against slow, obvious twins and known answers."""

import math
from statistics import fmean

import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from small_models import token_predictions
from torch import nn

from hamu import HamuError
from hamu.data import ImageData
from hamu.evaluation import (
    Predictions,
    classifier_report,
    membership_inference,
    predict,
    predict_tokens,
)
from hamu.evaluation.membership import (
    AttackScores,
    ShadowPredictions,
    auc_of,
    confidences,
    loss_attack,
    matched_by_class,
    rmia_scores,
    shadow_figures,
    ulira_scores,
)
from hamu.evaluation.predictions import embed, principal_axes
from hamu.evaluation.reports import intervals
from hamu.unlearning.record import changes, figures

CLASSES = ("a", "b", "c")


def random_predictions(n, seed, classes=3):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g) * 2
    return Predictions(logits, torch.randint(0, classes, (n,), generator=g))


def sets_of_both(retain, forget, test):
    sizes = {"retain": retain, "forget": forget, "test": test}
    sets = {name: random_predictions(n, seed) for seed, (name, n) in enumerate(sizes.items())}
    others = {n: Predictions(random_predictions(sizes[n], 7).logits, sets[n].labels) for n in sets}
    return sets, others


def slow_figures(predictions, other, chosen):
    """Loss, accuracy, KL and agreement of the chosen samples, one after the other."""
    rows = []
    for i in chosen:
        label = int(predictions.labels[i])
        p, q = (one.logits[i].double().softmax(-1).tolist() for one in (predictions, other))
        ours, theirs = (-math.log(p[label]), -math.log(q[label]))
        best, other_best = p.index(max(p)), q.index(max(q))
        hit, their_hit = best == label, other_best == label
        kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        rows.append((ours, hit, ours - theirs, hit - their_hit, kl, best == other_best))
    loss, accuracy, *against = (fmean(column) for column in zip(*rows, strict=True))
    keys = ("loss_difference", "accuracy_difference", "kl", "agreement")
    return loss, accuracy, dict(zip(keys, against, strict=True))


def test_the_report_matches_a_loop_over_samples():
    sets, others = sets_of_both(50, 20, 40)
    report = classifier_report(sets, CLASSES, target_class=1, reference=others)
    cases = {name: (name, range(len(one.labels))) for name, one in sets.items()}
    rest = (sets["test"].labels != 1).nonzero().flatten().tolist()
    cases["test_without_class"] = ("test", rest)
    for name, (source, samples) in cases.items():
        labels = sets[source].labels
        loss, accuracy, against = slow_figures(sets[source], others[source], samples)
        found = report[name]
        assert (found["loss"], found["accuracy"]) == pytest.approx((loss, accuracy), rel=1e-12)
        assert found["samples"] == len(samples)
        assert report["against_retain_model"][name] == pytest.approx(against, rel=1e-9)
        by_class = report["against_retain_model_per_class"][name]
        assert list(by_class) == [key for n, key in enumerate(CLASSES) if n in labels[samples]]
        for key, row in by_class.items():
            chosen = [i for i in samples if labels[i] == CLASSES.index(key)]
            loss, accuracy, against = slow_figures(sets[source], others[source], chosen)
            assert found["per_class_loss"][key] == pytest.approx(loss, rel=1e-12)
            assert found["per_class_accuracy"][key] == pytest.approx(accuracy)
            assert row == pytest.approx(against, rel=1e-9)


def test_membership_inference_is_compared_with_that_of_the_retain_model():
    sets, others = sets_of_both(30, 40, 60)
    report = classifier_report(sets, CLASSES, reference=others, seed=3)
    ours, theirs = (membership_inference(one["forget"], one["test"], 3) for one in (sets, others))
    difference = {key: ours[key] - theirs[key] for key in ("accuracy", "auc")}
    assert ours["auc"] != theirs["auc"]
    assert report["membership_inference"] == ours
    assert report["retain_model"] == {
        "membership_inference": theirs,
        "membership_inference_difference": difference,
    }
    forget = others["forget"]
    broken = others | {"forget": Predictions(forget.logits * math.nan, forget.labels)}
    report = classifier_report(sets, CLASSES, reference=broken)
    assert set(report["retain_model"].values()) == {None}
    assert report["against_retain_model"]["forget"]["agreement"] == 0.0, "NaN agrees with nothing"


def test_differences_of_texts_to_the_retain_model_are_ours_less_its_own():
    ours = {"records": 4, "loss": 3.0, "probability": 0.1}
    theirs = {"records": 4, "loss": 1.0, "probability": 0.4}
    report = {"forget": ours, "membership_inference": None, "retain_model": {"forget": theirs}}
    against = figures(report)["against_retain_model"]["forget"]
    assert against == pytest.approx({"loss_difference": 2.0, "probability_difference": -0.3})


def test_a_retain_model_with_other_classes_and_an_empty_set_are_refused():
    ours, theirs = ({"retain": random_predictions(5, 0, classes)} for classes in (3, 5))
    with pytest.raises(HamuError, match="the model has 3 classes, the retain model 5; both need"):
        classifier_report(ours, CLASSES, reference=theirs)
    for function in (predict, predict_tokens):
        with pytest.raises(HamuError, match="the data set is empty: it has no record to predict"):
            function(nn.Linear(2, 2), [], 4, None)


def with_losses(losses, labels):
    p = torch.exp(-torch.as_tensor(losses, dtype=torch.float64))
    logits = torch.zeros(len(p), 2, dtype=torch.float64)
    labels = torch.as_tensor(labels)
    logits[torch.arange(len(p)), labels] = torch.log(p / (1 - p))
    return Predictions(logits, labels)


def test_membership_inference_is_chance_for_equal_losses_and_sure_for_separate_ones():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    same = [with_losses(torch.rand(400, generator=g) + 0.1, labels) for _ in range(2)]
    low = with_losses(torch.rand(400, generator=g) * 0.02 + 0.01, labels)
    for pair, accuracy, auc in (
        (same, pytest.approx(0.5, abs=0.06), pytest.approx(0.5, abs=0.06)),
        ((low, same[0]), pytest.approx(1.0, abs=0.05), pytest.approx(1.0, abs=0.01)),
        # below one half where forgotten too well, and found all the same
        ((same[0], low), pytest.approx(1.0, abs=0.05), pytest.approx(0.0, abs=0.01)),
    ):
        found = membership_inference(*pair)
        assert (found["accuracy"], found["auc"]) == (accuracy, auc)
        both = -torch.cat([one.losses for one in pair])
        direct = roc_auc_score([1] * 400 + [0] * 400, both)
        assert loss_attack(*pair).auc == found["auc"] == pytest.approx(direct)
    report = {"retain": low, "forget": low, "test": with_losses([0.5] * 4, [1] * 4)}
    assert auc_of(classifier_report(report, ("a", "b"))) is None, "too few match by class"
    assert auc_of({"membership_inference": {"loss": 0.5, "min_k": 0.25}}) == 0.25
    for count in (5, 7, 14):  # however the folds come out
        even = with_losses([0.5] * count, [0] * count)
        found = membership_inference(even, even)
        assert (found["auc"], found["accuracy"]) == (0.5, 0.5)
    # losses so large that all their probabilities are 0
    logits = [torch.tensor([[0.0, -x - n] for n in range(9)]) for x in (1000, 800)]
    lost = (Predictions(one, torch.ones(9).long()) for one in logits)
    assert membership_inference(*lost)["auc"] == 0.0


def test_classes_are_matched_and_the_larger_group_is_drawn_from_all_of_it():
    """Unmatched, classes of different losses would give the attack away."""
    forget = with_losses([0.1] * 30 + [2.0] * 5, [0] * 30 + [1] * 5)
    test = with_losses([0.1] * 10 + [2.0] * 20, [0] * 10 + [1] * 20)
    scores = loss_attack(forget, test)
    assert sorted(scores.members.tolist()) == sorted(scores.nonmembers.tolist())
    assert len(scores.members) == 15
    few = with_losses([0.5] * 5, [0] * 5)
    many = with_losses([0.1 * i for i in range(1, 13)], [0] * 12)
    draws = [loss_attack(few, many, seed).nonmembers.tolist() for seed in range(20)]
    assert all(len(set(draw)) == 5 for draw in draws)
    assert len({score for draw in draws for score in draw}) == 12


def test_a_model_without_numbers_is_never_right():
    logits = torch.tensor([[math.nan] * 3] * 4 + [[1.0, -math.inf, 0.0]])
    found = Predictions(logits, torch.tensor([0, 0, 1, 2, 0]))
    assert found.correct.tolist() == [False] * 4 + [True]


def test_embeddings_are_what_the_last_linear_layer_is_given():
    pixels = torch.arange(6 * 16, dtype=torch.uint8).reshape(6, 1, 4, 4)
    pictures = ImageData(pixels, torch.tensor([0, 1] * 3), ("a", "b"), "made", torch.arange(6))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2))
    expected = model[:3](torch.stack([pictures[i]["pixel_values"] for i in range(6)]))
    found = embed(model, pictures, batch_size=4)
    torch.testing.assert_close(found, expected.detach())
    with torch.no_grad():
        model[1].bias[0] = math.nan
    convolution = nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten())
    of_rows = nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, 2), nn.Flatten(), nn.AvgPool1d(4))
    for refused, message in (
        (model, "what goes into the model's last linear layer is not finite"),
        (convolution, "the model has no linear layer whose input could be shown"),
        (of_rows, "the model's last linear layer takes more than one vector per image"),
    ):
        with pytest.raises(HamuError, match=message):
            embed(refused, pictures, batch_size=4)


def test_axes_are_those_of_the_largest_variance_and_a_missing_one_is_zero():
    draw = torch.Generator().manual_seed(0)
    flat = torch.randn(50, 4, generator=draw) * torch.tensor([5.0, 0.1, 2.0, 0.1])
    (first, second), share = principal_axes([flat[:20], flat[20:]])
    assert (first.shape, second.shape) == ((20, 2), (30, 2))
    assert share > 0.99
    both = torch.stack([torch.cat([first, second])[:, 0], flat[:, 0].double()])
    assert torch.corrcoef(both)[0, 1].abs() > 0.99
    (line,), share = principal_axes([torch.tensor([[0.0], [2.0]])])
    assert (line.shape, share) == ((2, 2), 1.0)
    assert not line[:, 1].any()


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [50, 100, 250])
def test_the_rate_of_true_positives_is_the_best_at_one_percent_of_false_ones(count):
    members, others = draws(80, seed=1) + 1, draws(count)
    slow = max(
        (members >= t).double().mean().item()
        for t in torch.cat([members, others, torch.tensor([math.inf])])
        if (others >= t).sum().item() <= 0.01 * count
    )
    assert AttackScores(members, others).tpr == slow
    assert AttackScores(torch.ones(9), torch.ones(9)).tpr == 0.0, "equal scores tell nothing"
    assert AttackScores(torch.ones(9), torch.zeros(9)).tpr == 1.0


def slow_rmia(log_p, shadows, population):
    prior = [sum(math.exp(one[i]) for one in shadows) / len(shadows) for i in range(len(log_p))]
    ratio = [math.exp(log_p[i]) / prior[i] for i in range(len(log_p))]
    return [sum(r / ratio[z] >= 2 for z in population) / len(population) for r in ratio]


def test_rmia_matches_its_definition():
    log_p, shadows = -draws(30).abs() * 3, -draws(4, 30, seed=1).abs() * 3
    population = torch.arange(20, 30)
    slow = slow_rmia(log_p.tolist(), shadows.tolist(), population.tolist())
    assert rmia_scores(log_p, shadows, population).tolist() == slow
    assert 0 < sum(slow) < 30
    equal = rmia_scores(torch.zeros(3), torch.zeros(4, 3), torch.arange(3))
    assert equal.tolist() == [0.0] * 3, "no ratio is twice another"
    far = rmia_scores(torch.tensor([0.0, -2000.0]), torch.full((4, 2), -2000.0), torch.tensor([1]))
    assert far.tolist() == [1.0, 0.0], "probabilities that are 0 in float64"


def test_log_odds_are_those_of_the_probabilities():
    logits = draws(2, 5, 3) * 2
    labels = torch.tensor([0, 1, 2, 1, 0])
    p = logits.softmax(-1).gather(-1, labels.expand(2, 5)[..., None])[..., 0]
    torch.testing.assert_close(confidences(logits, labels), torch.log(p / (1 - p)))
    sure = confidences(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]))
    assert sure.tolist() == [1000.0], "where p is 1 in float64"


def test_shadow_figures_compare_as_many_members_of_each_class_as_others():
    """RMIA asks the shadow models as trained, U-LiRA those that have unlearned."""
    forget, test = random_predictions(60, 0), random_predictions(30, 1)
    first, second = matched_by_class(forget.labels, test.labels, 42)
    labels = torch.cat([forget.labels, test.labels[second]])
    trained, unlearned = (
        torch.stack([random_predictions(len(labels), seed).logits for seed in seeds])
        for seeds in (range(2, 6), range(6, 10))
    )
    holds = torch.stack([torch.arange(len(labels)) % 2 == n % 2 for n in range(4)])
    logits = torch.cat([forget.logits, test.logits[second]])
    log_p = [one.log_softmax(-1).gather(-1, labels[:, None])[:, 0] for one in (logits, *trained)]
    others = torch.arange(60, len(labels))
    sure = (confidences(one, labels) for one in (logits, unlearned))
    scores = {"rmia": rmia_scores(log_p[0], torch.stack(log_p[1:]), others)}
    scores["ulira"] = ulira_scores(*sure, holds)
    expected = {}
    for name, values in scores.items():
        one = AttackScores(values[first], values[others])
        expected |= {f"{name}_auc": one.auc, f"{name}_tpr_at_1_fpr": one.tpr}
    assert shadow_figures(forget, test, ShadowPredictions(trained, unlearned, holds)) == expected
    found = shadow_figures(forget, test, ShadowPredictions(trained, None, holds))
    assert found == {name: value for name, value in expected.items() if "rmia" in name}


def test_ulira_is_the_ratio_of_two_normal_densities():
    found, shadows = draws(12), draws(6, 12, seed=1)
    half = torch.rand(12, generator=torch.Generator().manual_seed(2)).argsort() < 6
    holds = torch.stack([~half, half] * 3)
    holds[0, 0], holds[1, 0] = holds[1, 0].clone(), holds[0, 0].clone()
    shadows = shadows + holds * 2.0
    slow = torch.zeros(12)
    for sign, chosen in ((1, holds), (-1, ~holds)):
        groups = [shadows[chosen[:, i], i].numpy() for i in range(12)]
        squares = sum(((g - g.mean()) ** 2).sum() for g in groups)
        deviation = math.sqrt(squares / sum(len(g) - 1 for g in groups))
        for i, group in enumerate(groups):
            slow[i] += sign * norm.logpdf(float(found[i]), group.mean(), deviation)
    assert ulira_scores(found, shadows, holds).tolist() == pytest.approx(slow.tolist(), rel=1e-5)
    constant = ulira_scores(torch.zeros(12), torch.zeros(6, 12), holds)
    assert constant.tolist() == [0.0] * 12, "no variance, and no difference"


def of_accuracy(right, count=20, seed=0):
    labels = torch.arange(count) % 2
    shown = torch.where(torch.arange(count) < right, labels, 1 - labels)
    logits = 3.0 * torch.nn.functional.one_hot(shown, 2).float()
    return Predictions(logits + 0.1 * draws(count, 2, seed=seed).float(), labels)


def test_tug_of_war_and_average_gap_follow_their_formulas():
    ours = {"retain": of_accuracy(19), "forget": of_accuracy(10), "test": of_accuracy(16)}
    theirs = {n: of_accuracy(k, seed=1) for n, k in (("retain", 20), ("forget", 14), ("test", 15))}
    report = classifier_report(ours, ("a", "b"), reference=theirs)
    gaps = (0.05, 0.2, 0.05)
    attack = report["retain_model"]["membership_inference_difference"]["accuracy"]
    assert report["metrics"]["tug_of_war"] == pytest.approx(0.95 * 0.8 * 0.95)
    assert report["metrics"]["average_gap"] == pytest.approx((sum(gaps) + abs(attack)) / 4)
    same = classifier_report(ours, ("a", "b"), reference=ours)["metrics"]
    assert (same["tug_of_war"], same["average_gap"]) == (1.0, 0.0)
    of_class = classifier_report(ours, ("a", "b"), target_class=1, reference=theirs)
    test = of_class["against_retain_model"]["test_without_class"]["accuracy_difference"]
    assert test != pytest.approx(0.05)
    assert of_class["metrics"]["tug_of_war"] == pytest.approx(0.95 * 0.8 * (1 - abs(test)))
    only = [
        sets | {"test": Predictions(torch.randn(9, 2), torch.ones(9).long())}
        for sets in (ours, theirs)
    ]
    of_class = classifier_report(only[0], ("a", "b"), target_class=1, reference=only[1])
    assert of_class["metrics"]["tug_of_war"] is None  # no test image of another class


def interval_of(values):
    """The 95% interval of a mean, and a tolerance for it."""
    error = values.std() / math.sqrt(len(values))
    ends = values.mean() - 1.96 * error, values.mean() + 1.96 * error
    return pytest.approx(ends, abs=0.2 * error)


def test_tokens_of_one_text_are_drawn_together():
    """A hundred tokens of two texts are two observations: the ends are the texts' losses."""
    before = token_predictions([[0.5] * 50, [2.0] * 50])
    found = intervals(before)
    assert found["loss"] == (0.5, 2.0)
    assert found["accuracy"] == (0.0, 1.0)
    assert found["probability"] == pytest.approx((math.exp(-2.0), math.exp(-0.5)))
    after = token_predictions([[1.5] * 50, [1.8] * 50])
    assert intervals(after, before)["loss"] == pytest.approx((-0.2, 1.0))


def test_the_change_of_the_same_records_is_known_better_than_either_figure():
    before = random_predictions(2000, 0, 4)
    after = Predictions(before.logits + 0.02 * random_predictions(2000, 1, 4).logits, before.labels)
    low, high = intervals(after, before)["loss"]
    assert (low, high) == interval_of((after.losses - before.losses).numpy())
    alone = intervals(after)["loss"]
    assert 10 * (high - low) < alone[1] - alone[0]
    assert intervals(before, before) == {}  # no spread tells nothing of other records


def test_what_has_no_interval():
    infinite = token_predictions([[math.inf], [1.0]])
    assert intervals(random_predictions(1, 0, 4)) == {}
    assert set(intervals(infinite)) == {"probability"}  # none of the tokens is right
    assert "loss" not in intervals(infinite, infinite)


def test_a_recorded_change_is_after_less_before_and_its_interval_is_around_it():
    def surer(of, by):
        own = torch.nn.functional.one_hot(of.labels, of.logits.shape[1])
        return Predictions(of.logits + by * own, of.labels)

    sets = enumerate(("retain", "forget"))
    before = {name: surer(random_predictions(80, seed, 4), 1.0) for seed, name in sets}
    after = {"retain": surer(before["retain"], 0.5), "forget": surer(before["forget"], -2.0)}
    was, now = (figures(classifier_report(one, [*"abcd"]), one) for one in (before, after))
    found = changes(was, now, (before, after), seed=0)
    assert found["forget"]["loss"] > 1.0 > -0.1 > found["retain"]["loss"]
    assert found["forget"]["accuracy"] < -0.2
    for name, change in found.items():
        for key in ("loss", "accuracy"):
            assert change[key] == pytest.approx(now["sets"][name][key] - was["sets"][name][key])
            low, high = change[f"{key}_interval"]
            assert low <= change[key] <= high
