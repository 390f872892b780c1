"""The bounded objective: each record is raised to its limit, with the same weight wherever it starts."""

import math

import pytest
import torch
from torch.nn import functional as F

from hamu.core.objectives import Scored, build_objective, log_odds, loss_at

FREE = math.inf


def total(logits, labels, limits):
    return build_objective("bounded").total(Scored.of(logits, labels, torch.tensor(limits)), None)


def gradient(logits, labels, limits):
    logits = torch.as_tensor(logits).clone().requires_grad_()
    total(logits, labels, limits).backward()
    return logits.grad


def two_classes(odds):
    """Logits of records with these log-odds against their label, 0."""
    labels = torch.zeros(len(odds), dtype=torch.int64)
    return torch.stack([torch.zeros(len(odds)), torch.tensor(odds)], 1), labels


def test_log_odds_and_loss_are_inverse_to_each_other():
    losses = torch.logspace(-9, 2.5, 200, dtype=torch.float64)
    assert torch.allclose(loss_at(log_odds(losses)), losses, rtol=1e-12)
    odds = torch.linspace(-20, 300, 200, dtype=torch.float64)
    assert torch.allclose(log_odds(loss_at(odds)), odds, rtol=1e-9, atol=1e-9)
    assert log_odds(torch.tensor([0.0, math.inf])).tolist() == [-math.inf, math.inf]
    assert loss_at(torch.tensor([-math.inf, math.inf])).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("dim", [1, 2])
def test_a_record_at_its_limit_gives_no_gradient_and_one_below_does(dim):
    logits, labels = two_classes([1.0, -2.0])
    if dim == 2:  # texts: a token that is predicted after one that is not scored
        logits, labels = logits[:, None].repeat(1, 3, 1), torch.tensor([[-100, 0, 0]] * 2)
    found = gradient(logits, labels, [[1.0, FREE]] * 2)
    assert not found[0].any()
    assert found[1].any()


def test_a_masked_record_takes_no_token_of_another():
    logits, labels = two_classes([1.0, -2.0])
    logits, labels = logits[:, None].repeat(1, 3, 1), torch.tensor([[-100] * 3, [-100, 0, 0]])
    found = gradient(logits, labels, [[0.1, FREE], [1.0, FREE]])
    alone = gradient(logits[1:], labels[1:], [[1.0, FREE]])
    assert not found[0].any()
    assert torch.equal(found[1:], alone)


def test_a_record_that_the_model_is_sure_of_weighs_as_much_as_another():
    """Its cross-entropy in float32 is exactly 0, and so is the gradient of that."""
    found = gradient(*two_classes([-40.0, -1.0]), [[3.0, FREE]] * 2)
    assert torch.allclose(found, torch.tensor([-1.0, 1.0]))


def test_a_record_above_what_is_enough_is_lowered_again():
    logits, labels = two_classes([5.0, 2.0])
    found = gradient(logits, labels, [[1.0, 3.0], [1.0, 3.0]])
    assert torch.allclose(found[0], torch.tensor([1.0, -1.0])), "raising the total lowers it"
    assert not found[1].any(), "between aim and most a record is left alone"
    aim, most = log_odds(torch.tensor([1.0, 3.0]))
    found = total(*two_classes([5.0, -2.0]), [[1.0, 3.0], [1.0, 3.0]])
    torch.testing.assert_close(found, aim - (5.0 - most) - 2.0)


def test_a_record_whose_loss_is_infinite_is_far_enough():
    logits, labels = two_classes([0.0, -1.0])
    logits[0, 0] = -math.inf  # a class that the model rules out
    limits = [[1.0, FREE]] * 2
    assert total(logits, labels, limits).isfinite()
    assert gradient(logits, labels, limits).tolist() == [[0.0, 0.0], [-1.0, 1.0]]


def test_a_text_of_which_the_model_is_sure_has_a_gradient():
    logits = torch.tensor([[[0.0, 0.0], [20.0, 0.0], [20.0, 0.0]]])
    found = gradient(logits, torch.tensor([[-100, 0, 0]]), [[1.0, FREE]])
    assert found[0, :2, 1].min() > 0


def test_a_text_counts_by_the_mean_over_its_scored_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 8, generator=generator)
    labels = torch.randint(8, (3, 6), generator=generator)
    labels[1, 3:] = -100
    texts = zip(logits, labels, strict=True)
    losses = torch.stack([F.cross_entropy(one[:-1], y[1:], ignore_index=-100) for one, y in texts])
    found = total(logits, labels, [[100.0, FREE]] * 3)
    assert found.item() == pytest.approx(log_odds(losses).sum().item(), rel=1e-5)
    middle = losses.sort().values[1].item()
    grad = gradient(logits, labels, [[middle + 1e-4, FREE]] * 3)
    assert [bool(one.any()) for one in grad] == (losses < middle + 1e-4).tolist()
