"""Attacks by shadow models, and distances to the retain model, against slow twins."""

import math

import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from hamu.evaluation import Predictions, classifier_report
from hamu.evaluation.membership import (
    AttackScores,
    ShadowPredictions,
    confidences,
    matched_by_class,
    rmia_scores,
    shadow_figures,
    ulira_scores,
)


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


def of_confidence(values, labels):
    """Predictions of two classes whose log odds of the right class are these."""
    logits = torch.zeros(*values.shape, 2)
    logits.scatter_(-1, labels.expand(values.shape)[..., None], values.float()[..., None])
    return logits


def test_attacks_by_shadow_models_find_members_and_no_others():
    """Members are more sure by 3 where a model was trained on them; drawn test records match by class."""
    forget, test = torch.arange(60) % 2, torch.arange(90) % 2
    _, second = matched_by_class(forget, test, 42)
    assert len(second) == 60
    labels = torch.cat([forget, test[second]])
    order = torch.rand(120, generator=torch.Generator().manual_seed(3)).argsort() < 60
    holds = torch.stack([order, ~order] * 4)
    hard = draws(120, seed=5) * 3  # of records, which shadow models take out
    shadows = of_confidence(draws(8, 120, seed=4) * 0.3 + hard + 3.0 * holds, labels)
    for gain, rmia, ulira in ((3.0, 0.9, 0.99), (0.0, 0.5, 0.5)):
        seen = of_confidence(draws(60, seed=6) * 0.3 + hard[:60] + gain, forget)
        unseen = torch.zeros(90)
        unseen[second] = (draws(60, seed=7) * 0.3 + hard[60:]).float()
        pair = Predictions(seen, forget), Predictions(of_confidence(unseen, test), test)
        found = shadow_figures(*pair, ShadowPredictions(shadows, shadows, holds))
        assert list(found) == [
            f"{n}_{f}" for n in ("rmia", "ulira") for f in ("auc", "tpr_at_1_fpr")
        ]
        if gain:
            plain = -torch.cat([pair[0].losses, pair[1].losses[second]])
            assert found["rmia_auc"] > rmia
            assert found["ulira_auc"] > ulira > 0.9 > roc_auc_score([1] * 60 + [0] * 60, plain)
        else:
            assert (found["rmia_auc"], found["ulira_auc"]) == pytest.approx((rmia, ulira), abs=0.12)
    alone = shadow_figures(*pair, ShadowPredictions(shadows, None, holds))
    assert alone == {name: value for name, value in found.items() if "rmia" in name}
    broken = Predictions(seen * math.nan, forget), pair[1]
    assert set(shadow_figures(*broken, ShadowPredictions(shadows, None, holds)).values()) == {None}


def of_accuracy(right, count=20, seed=0):
    """Predictions of two classes of which so many are right."""
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
    untested = {name: ours[name] for name in ("retain", "forget")}
    found = classifier_report(untested, ("a", "b"), reference=untested)["metrics"]
    assert found == {"tpr_at_1_fpr": None, "tug_of_war": None, "average_gap": None}
