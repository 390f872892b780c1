"""Goals by record: the count of forgotten records, where no record pays for another."""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import betabinom

from hamu import HamuError
from hamu.core.objectives import log_odds, loss_at
from hamu.data import ImageData, TextRecord, TextRecords
from hamu.evaluation import Predictions, TokenPredictions
from hamu.unlearning.goals import (
    Goal,
    Standing,
    Targets,
    _bands,
    choose_goal,
    doubts,
    forgotten_words,
    goal_lines,
    goal_report,
    has_share,
)
from hamu.unlearning.record import goal_figures


def images(losses, labels=None, classes=2):
    """Predictions of images with these losses; of class 0 without labels, all others alike."""
    losses = torch.as_tensor(losses, dtype=torch.float64)
    labels = [0] * len(losses) if labels is None else labels
    labels = torch.as_tensor(labels)
    logits = (log_odds(losses.clamp(min=1e-9)) - math.log(classes - 1))[:, None].repeat(1, classes)
    return Predictions(logits.scatter(1, labels[:, None], 0.0), labels)


def texts(losses, tokens=3):
    """Predictions of texts with these mean losses; the tokens of a text differ in theirs."""
    losses = torch.as_tensor(losses, dtype=torch.float64)
    each = (losses[:, None] * torch.linspace(0.5, 1.5, tokens, dtype=torch.float64)).flatten()
    record = torch.arange(len(losses)).repeat_interleave(tokens)
    return TokenPredictions(each, each < 0.5, -each, each, record, len(losses))


def unseen(losses, labels=None):
    return Goal("unseen", reference=texts(losses) if labels is None else images(losses, labels, 3))


def drawn(number, generator):
    return torch.empty(number, dtype=torch.float64).exponential_(generator=generator)


@pytest.mark.parametrize(("number", "among"), [(5, 5000), (100, 100), (400, 50), (40, 40)])
def test_records_drawn_as_the_unseen_ones_reach_their_targets_as_often_as_wanted(number, among):
    generator = torch.Generator().manual_seed(number)
    draw = lambda count: drawn(count, generator)  # noqa: E731
    found = [unseen(draw(among)).standing(texts(draw(number))) for _ in range(150)]
    for name, share in (("forgotten", 0.95), ("too_high", 0.05)):
        records = torch.cat([getattr(one, name) for one in found]).double()
        assert records.mean().item() == pytest.approx(share, abs=0.02)
    reached = sum(one.share >= 0.95 for one in found) / len(found)
    assert 0.65 < reached < 0.9, "misses go together"


@pytest.mark.parametrize(("number", "among"), [(1, 1), (1, 40), (40, 1), (23, 24), (7, 3000)])
def test_the_bands_are_quantiles_of_the_beta_binomial(number, among):
    ranks = torch.arange(1, number + 1)
    lacking = betabinom(among, ranks.numpy(), (number + 1 - ranks).numpy())
    least, aim, most = _bands(number, among)
    for bound, chance in ((least, 0.05), (aim, 0.5)):
        assert (lacking.cdf(bound.numpy() + 1) >= chance - 1e-8).all()
        has_lower = bound.numpy() > 0
        assert (lacking.cdf(bound.numpy()) < chance)[has_lower].all()
    assert torch.equal(most, among - 1 - least.flip(0))


def test_no_record_is_forgotten_below_all_unseen_losses_however_few_there_are():
    for among in (1, 3, 20):
        found = unseen(torch.linspace(1, 2, among)).standing(texts([0.9] * 20))
        assert (found.count, found.targets.least.min().item()) == (0, 1.0)
        assert found.targets.most.max().item() == (1.0 if among == 1 else 2.0)


def test_the_targets_of_unseen_follow_the_order_of_the_records_not_their_places():
    targets = unseen(torch.linspace(0, 4, 101)).standing(texts([0.3, 0.1, 0.2])).targets
    columns = torch.stack([targets.least, targets.aim, targets.most], 1)
    assert columns.argsort(0).tolist() == [[1] * 3, [2] * 3, [0] * 3]
    assert bool((columns.diff(dim=1) > 0).all())
    assert targets.limits.equal(columns[:, 1:])


def test_images_are_compared_class_by_class_and_with_all_where_a_class_has_no_unseen_ones():
    goal = unseen([0.01] * 50 + [5.0] * 50, [0] * 50 + [1] * 50)
    found = goal.standing(images([0.1, 0.1], [0, 1]))
    assert found.forgotten.tolist() == [True, False]
    assert found.too_high.tolist() == [True, False]
    found = unseen([2.0] * 50, [0] * 50).standing(images([1.0, 3.0], [1, 1], classes=3))
    assert found.targets.aim.tolist() == [2.0, 2.0]
    assert found.forgotten.tolist() == [False, True]


def test_one_record_that_is_far_off_does_not_count_for_others():
    for goal in (unseen([1.0] * 100), Goal("loss", loss=1.0), Goal("erased")):
        found = goal.standing(images([20.0] + [0.0] * 19))
        assert (found.count, found.share) == (1, 0.05), goal.kind
        assert found.missing > 1


def test_retrained_is_within_a_tenth_in_log_odds_of_the_retain_model():
    aim = torch.tensor([0.01, 0.5, 3.0], dtype=torch.float64)
    goal = Goal("retrained").against(None, {"forget": texts(aim)})
    for by, forgotten, too_high in ((-0.11, 0, 0), (-0.09, 3, 0), (0.5, 3, 0), (1.1, 3, 3)):
        found = goal.standing(texts(loss_at(log_odds(aim) + by)))
        assert (found.count, int(found.too_high.sum())) == (forgotten, too_high)
    sure = Predictions(torch.tensor([[40.0, 0.0, 0.0]] * 2).double(), torch.zeros(2).long())
    assert Goal("retrained", reference=sure).standing(sure).count == 2
    with pytest.raises(HamuError, match="the retain model predicts 3 forget records, the model 2"):
        goal.standing(texts([1.0, 1.0]))


def test_erased_means_that_no_record_is_recognised():
    logits = torch.tensor([[1.0, 0, 0], [0, 0.1, 0], [0, 0, 5.0], [math.nan, 0, 0]])
    found = Goal("erased").standing(Predictions(logits, torch.zeros(4, dtype=torch.int64)))
    assert found.forgotten.tolist() == [False, True, True, False], "NaN predicts nothing"
    assert found.targets.most.isinf().all(), "nothing is too much"
    rest = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).double()
    own = rest.logsumexp(1) - log_odds(found.targets.aim[0])  # the class's logit at the aim
    assert bool((rest.max(1).values > own).all()), "at the aim another class is always more likely"
    with pytest.raises(HamuError, match="the goal erased is for classifiers"):
        Goal("erased").standing(texts([1.0]))


def test_a_loss_is_reached_by_each_record_and_aimed_at_a_little_beyond():
    found = Goal("loss", loss=2.0).standing(texts([1.99, 2.01, 50.0]))
    assert found.forgotten.tolist() == [False, True, True]
    assert bool((found.targets.aim > 2.0).all())
    assert not found.too_high.any()
    missing = [Goal("loss", loss=2.0).standing(texts([one, 9.0])).missing for one in (0, 0.5, 2)]
    assert math.inf > missing[0] > missing[1] > missing[2] == 0


def labelled(*labels):
    pixels = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    rows = torch.arange(len(labels))
    return ImageData(pixels, torch.tensor(labels), ("a", "b", "c"), "here", rows)


TEXTS = TextRecords((TextRecord("q", "a", {}),) * 4, "here", torch.arange(4))
SOME = {"retain": labelled(0, 1), "forget": labelled(0)}
CLASS = {"retain": labelled(0, 1), "forget": labelled(2), "test": labelled(2, 0, 2)}
OF_TEXTS = {"retain": TEXTS, "forget": TEXTS}
TOKENS = [{"input_ids": torch.ones(3), "labels": torch.ones(3)}]
LISTED = {name: [{"pixel_values": torch.zeros(1), "labels": 0}] for name in ("retain", "forget")}


def asked(kind, loss=None):
    return SimpleNamespace(goal=kind, target_forget_loss=loss, target_share=0.9)


@pytest.mark.parametrize(("sets", "kind", "loss", "has_retain_model", "chosen"), [
    (SOME | {"test": labelled(0)}, None, None, True, "unseen"),
    (SOME, None, None, True, "retrained"),
    (CLASS, None, None, True, "erased"),
    (CLASS, "unseen", None, True, "unseen"),
    (LISTED | {"retain": [{"pixel_values": torch.zeros(1), "labels": 1}]}, None, None, True, "erased"),
    (LISTED, None, None, True, "retrained"),
    (CLASS, None, 2.0, True, "loss"),
    (OF_TEXTS | {"test": TEXTS}, None, None, False, "unseen"),
    (OF_TEXTS, None, 2.0, False, "loss"),
    (LISTED, "erased", None, False, "erased"),
])  # fmt: skip
def test_the_goal_is_the_one_named_or_follows_from_the_data(sets, kind, loss, has_retain_model, chosen):  # fmt: skip
    goal = choose_goal(sets, asked(kind, loss), has_retain_model=has_retain_model, is_needed=True)
    assert (goal.kind, goal.share, goal.loss) == (chosen, 0.9, loss)


@pytest.mark.parametrize(("sets", "kind", "message"), [
    (SOME, "unseen", "the goal unseen compares with records that were never trained on; give --tes"),
    (SOME, "retrained", "the goal retrained compares with a retain model; give --retain_model"),
    (OF_TEXTS, "erased", "the goal erased is for classifiers"),
    ({"retain": TOKENS, "forget": TOKENS}, "erased", "the goal erased is for classifiers"),
])  # fmt: skip
def test_a_goal_that_lacks_what_it_compares_with_names_it(sets, kind, message):
    with pytest.raises(HamuError, match="^" + message):
        choose_goal(sets, asked(kind), has_retain_model=False)
    assert choose_goal(sets, asked(None), has_retain_model=False) is None


@pytest.mark.parametrize(("losses", "quarters"), [
    ([0, 1, 2, 3, math.inf], [0, 1, 2, 3, math.inf]), ([1, 1, *[math.inf] * 3], [1, 1, *[math.inf] * 3]),
])  # fmt: skip
def test_quantiles_of_losses_that_are_infinite_are_no_nan(losses, quarters):
    losses = torch.tensor(losses, dtype=torch.float64)
    found = Standing(losses, Targets(losses, losses, losses), losses >= 0).figures()
    assert [*found["loss_quantiles"].values()] == quarters


def test_figures_show_quantiles_and_the_ten_worst_of_those_that_are_not_forgotten():
    losses = torch.arange(20, dtype=torch.float64).flip(0) / 10
    target = torch.full_like(losses, 1.45)
    figures = Standing(losses, Targets(target, target, target + 9), losses >= 1.45).figures()
    assert (figures["records"], figures["forgotten"], figures["too_high"]) == (20, 5, 0)
    quantiles = [figures["loss_quantiles"][name] for name in ("min", "median", "max")]
    assert quantiles == pytest.approx([0, 0.95, 1.9])
    assert [one["row"] for one in figures["worst"]] == list(range(19, 9, -1))
    assert figures["worst"][0] == {"row": 19, "loss": 0.0, "target": 1.45}


@pytest.mark.parametrize(("losses", "retain_loss", "finite"), [
    ([1.0, 2.0], 0.1, True),
    ([1.0, math.inf], 0.1, True),
    ([math.nan, 2.0], 0.1, False),
    ([1.0, 2.0], math.nan, False),
])  # fmt: skip
def test_an_infinite_loss_has_a_standing_and_a_nan_has_none(losses, retain_loss, finite):
    found = Goal("loss", loss=1.0).standing(texts(losses, tokens=1), retain_loss=retain_loss)
    assert found.is_finite is finite


def test_unseen_compares_with_the_original_model_where_there_is_one():
    own = {"forget": images([0.5, 0.5]), "test": images([0.1] * 9)}
    for original, by, forgotten in (
        (None, "its own losses on the test data (--original_model", 2),
        ({"test": images([0.9] * 9)}, "the original model's losses on the test data", 0),
    ):
        found = goal_report(Goal("unseen"), own, original=original, retain_model=None)
        assert (found["after"]["forgotten"], found["reached"]) == (forgotten, forgotten == 2)
        assert f"compared with {by}" in goal_lines(found)[0]


def test_records_that_stand_out_above_the_unseen_ones_are_named_if_chance_does_not_explain_them():
    unseen_ones = {"test": images(torch.linspace(1, 2, 100)), "forget": images([1.5] * 20)}
    losses = torch.linspace(1, 2, 20).tolist()
    for high, words in ((1, "goal unseen"), (2, "goal unseen, 2 of them with losses that stand")):
        own = unseen_ones | {"forget": images([*losses[:-high], *[9.0] * high])}
        found = goal_report(Goal("unseen"), own, original=unseen_ones, retain_model=None)
        assert found["after"]["too_high"] == high
        assert words in forgotten_words(found)
        assert ("stand out" in forgotten_words(found)) == (high == 2)


def test_a_goal_that_compares_with_few_unseen_records_says_so():
    def said(forget, *unseen, kept=(0, 1, 2)):
        test, found = (
            Predictions(torch.zeros(len(one), 3), torch.tensor(one)) for one in (unseen, forget)
        )
        sets = {"retain": labelled(*kept), "forget": labelled(*forget), "test": test}
        goal = choose_goal(sets, asked("unseen"), has_retain_model=False)
        return doubts(goal.against({"test": test}, None), found)

    (line,) = said([0] * 9, *[0] * 19)
    few = "the goal unseen compares with 19 unseen records of a class, which can hardly tell"
    assert line.startswith(few)
    assert said([0] * 9, *[0] * 20) == []
    assert "with 3 unseen records of a class" in said([0, 1, 1], *[0] * 40, *[1] * 3)[0]
    assert said([0, 2], *[0] * 40) == [], "a class without unseen ones has all of them"
    (line,) = said([0, 1, 1], *[0, 1] * 40, kept=(0, 2))
    assert line.startswith("no retain record has the class of 2 of them, ")
    one = labelled(0)
    for goal in (Goal("erased"), Goal("retrained", reference=one)):
        assert doubts(goal, one) == [], "compares with no unseen records"


def test_a_count_by_losses_that_rose_for_unseen_records_too_says_so():
    """A model may lose what it knows of a class, and the records still stand out among it."""
    start = {"test": images([0.1] * 40), "forget": images([0.01] * 9)}
    for own, words in ((0.2, ""), (4.0, "by this model's own losses on the test data, which rose")):
        after = {"test": images([own] * 40), "forget": images([0.5] * 9)}
        found = goal_report(Goal("unseen"), after, original=start, retain_model=None)
        assert found["after"]["forgotten"] == 9
        said = [f"{words} too, 0 are"] if words else []
        assert found["doubts"] == said


def test_a_count_that_can_hardly_be_told_says_so_wherever_it_stands():
    few = {"test": images([1.0]), "forget": images([1.0] * 9)}
    found = goal_report(Goal("unseen"), few, original=few, retain_model=None)
    (doubt,) = found["doubts"]
    assert f"9 of 9 records are forgotten by the goal unseen ({doubt})" == forgotten_words(found)
    assert doubt.startswith("the goal unseen compares with 1 unseen record of a class")
    assert goal_figures(found | {"before": found["after"]})["doubts"] == [doubt]


def test_losses_of_other_tokens_do_not_compare_and_the_remedy_is_named():
    def said(kind, tokens):
        goal = Goal(kind, reference=texts([2.0] * 30, tokens))
        return doubts(goal, texts([1.0] * 30, 3))

    (line,) = said("retrained", 4)
    assert "do not compare; train it with this model as its --tokenizer, or" in line
    assert said("retrained", 3) == said("unseen", 4) == []


def test_a_report_counts_records_and_the_record_of_a_run_leaves_out_their_places():
    forget = {"forget": images([0.01] * 18 + [17.0, 22.0])}
    found = goal_report(Goal("loss", loss=1.0), forget, original=None, retain_model=None)
    assert (found["after"]["forgotten"], found["reached"], has_share(found)) == (2, False, False)
    just = {"after": {"forgotten": 55, "records": 100}, "share": 0.55}
    assert has_share(just), "0.55 * 100 is above 55"
    count, quantiles, worst = goal_lines(found)
    assert count.startswith("2 of 20 records are forgotten")
    assert count.endswith("by the goal a loss of 1; 95% wanted: not reached")
    assert quantiles.endswith("lowest 0.01, 25 % 0.01, median 0.01, 75 % 0.01, highest 22")
    assert worst.count("0.01 of 1") == 10
    recorded = goal_figures(found | {"before": found["after"]})
    assert recorded["after"]["worst"][0] == {"loss": pytest.approx(0.01), "target": 1.0}
    assert "row" not in str(recorded)
    assert goal_figures(None) is None
