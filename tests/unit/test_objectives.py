"""Objectives against their formulas (the bounded one last), the original model against a true copy."""

import copy
import math

import pytest
import torch
from helpers import is_as, state_of
from torch import nn

from hamu import HamuError
from hamu.core.forward import OriginalModel, logits_of, predict_logits
from hamu.core.objectives import Scored, build_objective, log_odds, loss_at
from hamu.unlearning.trainer.sides import SideLosses

G = torch.Generator().manual_seed(0)
LOGITS, ORIGINAL = torch.randn(5, 4, generator=G).double(), torch.randn(5, 4, generator=G).double()
LABELS = torch.tensor([0, 3, 1, 1, 2])


def divergence(p, q):
    return sum(pi * (pi / qi).log() for pi, qi in zip(p.flatten(), q.flatten(), strict=True))


def published(name, logits):
    """The loss as its paper prints it, by probabilities alone."""
    p, o = logits.softmax(-1), ORIGINAL.softmax(-1)

    def distilled(q, i):
        return -sum(q[k] / sum(q) * p[i, k].log() for k in range(4) if q[k] > 0)

    def undial(i, y):  # a logit lowered by 10 is a probability divided by e^10, up to the norm
        return distilled([o[i, k] * (math.exp(-10) if k == y else 1) for k in range(4)], i)

    def scrub(i, y):
        return -0.99 * p[i, y].log() + 0.001 * divergence(o[i], p[i])

    held = p.detach()
    rule = {
        "cross_entropy": lambda i, y: -p[i, y].log(),
        "kl_to_original": lambda i, y: divergence(o[i], p[i]),
        "scrub_retain": scrub,
        "wga": lambda i, y: held[i, y] * p[i, y].log(),
        "satimp": lambda i, y: held[i, y] ** 5 * (1 - held[i, y]) * p[i, y].log(),
        "undial": undial,
        "ce-u": lambda i, y: distilled([held[i, k] * (k != y) for k in range(4)], i),
        "logit_margin": lambda i, y: (logits[i].max() - logits[i].sum() / 4) ** 2,
        "idk": lambda i, y: -p[i, y].log(),
    }[name]
    return sum(rule(i, int(y)) for i, y in enumerate(LABELS))


RETAINED = ("cross_entropy", "kl_to_original", "scrub_retain")
WEIGHED = ("wga", "satimp", "undial", "ce-u")


@pytest.mark.parametrize("name", [*RETAINED, *WEIGHED, "logit_margin", "idk"])
def test_an_objective_is_the_published_loss_negated_where_it_is_to_be_raised(name):
    """So are their gradients; where a weight is held constant, the gradients alone."""
    sign = 1 if name in RETAINED else -1
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    total = build_objective(name).total(Scored.of(ours, LABELS), ORIGINAL)
    loss = published(name, theirs)
    total.backward()
    loss.backward()
    torch.testing.assert_close(ours.grad, sign * theirs.grad)
    if name not in ("wga", "satimp", "ce-u"):
        torch.testing.assert_close(total, sign * loss)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_ruled_out_class_or_a_certain_label_gives_finite_gradients(name):
    logits, original = LOGITS.clone(), ORIGINAL.clone()
    logits[:, 0], original[:, 0] = -torch.inf, -torch.inf
    logits[1, 1] = 1e4
    logits.requires_grad_()
    labels = LABELS.clamp(min=1)
    total = build_objective(name).total(Scored.of(logits, labels), original)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("name", ["kl_to_original", "scrub_retain"])
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_what_the_original_rules_out_adds_nothing(name, value):
    """As of tokens that may not come, masked in both models or in the original alone."""
    some = [0, 2, 3, 4]
    labels, original = LABELS[some], ORIGINAL[some].index_fill(1, torch.tensor([3]), -torch.inf)
    logits = (ORIGINAL + LOGITS)[some]
    logits[:, 3] += value
    logits.requires_grad_()
    total = build_objective(name).total(Scored.of(logits, labels), original)
    expected = divergence(original.softmax(-1)[:, :3], logits.softmax(-1)[:, :3])
    if name == "scrub_retain":
        cross_entropy = nn.functional.cross_entropy(logits, labels, reduction="sum")
        expected = 0.99 * cross_entropy + 0.001 * expected
    torch.testing.assert_close(total, expected)
    total.backward()
    assert torch.isfinite(logits.grad).all()


def test_half_precision_logits_are_summed_in_float32():
    total = build_objective("cross_entropy").total(Scored.of(LOGITS.bfloat16(), LABELS), None)
    assert total.dtype == torch.float32


class Net(nn.Sequential):
    """With all that a pass in training mode moves: statistics, a spectral norm; and a dropout."""

    def __init__(self):
        instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))
        ends = (nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        super().__init__(nn.Conv2d(1, 4, 3), instance, spectral, *ends, nn.Linear(8, 4))
        self[5].bias.requires_grad_(False)


def test_the_original_predicts_as_a_copy_made_before_training_would():
    torch.manual_seed(0)
    model = Net().train()
    batch = {"pixel_values": torch.randn(6, 1, 6, 6), "labels": torch.zeros(6)}
    model(batch["pixel_values"])
    twin = copy.deepcopy(model).eval()
    original = OriginalModel(model)
    with torch.no_grad():
        for _ in range(3):
            model(batch["pixel_values"] + 1)
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.add_(0.1 * torch.randn_like(parameter))
    before = state_of(model)
    torch.testing.assert_close(original.logits(batch), twin(batch["pixel_values"]).detach())
    assert is_as(model, before)
    assert all(module.training for module in model.modules())
    assert "5.bias" not in original._original, "what is frozen is shared"


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.again = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.tied(self.again(self.first(x)))


def test_the_original_gives_back_what_stands_in_several_places():
    model = Shared()
    batch = {"pixel_values": torch.randn(3, 4)}
    original, before = OriginalModel(model), model(batch["pixel_values"]).detach()
    with torch.no_grad():
        model.first.weight.add_(1.0)
    after, parameters = model(batch["pixel_values"]).detach(), dict(model.named_parameters())
    torch.testing.assert_close(original.logits(batch), before)
    torch.testing.assert_close(model(batch["pixel_values"]).detach(), after)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.tied.weight is model.again.weight
    assert len({copy.data_ptr() for copy in original._original.values()}) == 2


NO_CLASS = r"do not fit logits of shape \(2, 7\); give a whole num"


@pytest.mark.parametrize(("logits", "labels", "message"), [
    *((torch.zeros(2, length, 7), torch.zeros(2, 4).long(), f"at {length} places of a text of 4 tokens; one")
      for length in (5, 3)),
    # labels of shape [2, 7] would pass for those of texts
    *((torch.zeros(2, 7), labels, NO_CLASS)
      for labels in (torch.rand(2, 7), torch.ones(2, 7).long(), torch.rand(2), torch.ones(1).long())),
])  # fmt: skip
def test_predictions_and_labels_that_do_not_fit_are_refused(logits, labels, message):
    with pytest.raises(HamuError, match=message):
        Scored.of(logits, labels)


@pytest.mark.parametrize("name", ["kl_to_original", "scrub_retain", "npo", "undial", "dpo"])
def test_what_an_objective_compares_with_and_lacks_is_named(name):
    lacks = "prefers another answer" if name == "dpo" else "compares with the original model; give"
    with pytest.raises(HamuError, match=lacks):
        build_objective(name).total(Scored.of(LOGITS, LABELS), None)


class PerRecord(type(build_objective("cross_entropy"))):
    name = "per_record"

    def total(self, scored, original):
        return scored.logits.sum(1)


def test_an_objective_that_adds_nothing_up_is_named(monkeypatch):
    losses = SideLosses(nn.Flatten(), {"retain": "cross_entropy", "forget": None})
    images = torch.ones(2, 1, 3, requires_grad=True)
    batch = {"pixel_values": images, "labels": torch.zeros(2, dtype=torch.long)}
    assert losses.total(nn.Flatten(), "retain", batch)[0].dim() == 0
    monkeypatch.setitem(losses._objectives, "retain", PerRecord())
    with pytest.raises(HamuError, match=r"per_record gave a total of shape \(2,\); add it up"):
        losses.total(nn.Flatten(), "retain", batch)
    monkeypatch.setattr(PerRecord, "total", lambda self, scored, original: 0.5)
    with pytest.raises(HamuError, match=r"per_record gave a total of 0\.5; add it up to a tensor"):
        losses.total(nn.Flatten(), "retain", batch)
    monkeypatch.setattr(PerRecord, "total", lambda self, scored, original: torch.tensor(0.5))
    with pytest.raises(HamuError, match="per_record gave a total without a gradient; compute it"):
        losses.total(nn.Flatten(), "retain", batch)
    with torch.no_grad():
        losses.total(nn.Flatten(), "retain", batch)
    monkeypatch.setattr(PerRecord, "total", lambda self, scored, original: {}["x"])
    with pytest.raises(KeyError) as raised:
        losses.total(nn.Flatten(), "retain", batch)
    assert raised.value.__notes__ == [f"in the objective per_record of {__name__}"]


def test_an_unknown_output_is_an_error():
    with pytest.raises(HamuError, match=r"the model returned dict; expected logits"):
        logits_of({})
    batch = {"pixel_values": torch.ones(2, 1, 2), "labels": LABELS, "place": torch.ones(2)}
    assert predict_logits(nn.Flatten(), batch).shape == (2, 2)


FREE = math.inf


def bounded(logits, labels, limits):
    return build_objective("bounded").total(Scored.of(logits, labels, torch.tensor(limits)), None)


def gradient(logits, labels, limits):
    logits = torch.as_tensor(logits).clone().requires_grad_()
    bounded(logits, labels, limits).backward()
    return logits.grad


def two_classes(odds):
    """Logits of records with these log-odds against their label, 0."""
    logits = torch.stack([-torch.tensor(odds), torch.zeros(len(odds))], 1)
    return logits, torch.zeros(len(odds), dtype=torch.int64)


def test_log_odds_and_loss_are_inverse_to_each_other():
    losses = torch.logspace(-9, 2.5, 200, dtype=torch.float64)
    assert torch.allclose(loss_at(log_odds(losses)), losses, rtol=1e-12)
    odds = torch.linspace(-20, 300, 200, dtype=torch.float64)
    assert torch.allclose(log_odds(loss_at(odds)), odds, rtol=1e-9, atol=1e-9)
    assert log_odds(torch.tensor([0.0, math.inf])).tolist() == [-math.inf, math.inf]
    assert loss_at(torch.tensor([-math.inf, math.inf])).tolist() == [0.0, math.inf]


@pytest.mark.parametrize(
    ("odds", "limits", "slopes"),
    [
        ([1.0, -2.0], [1.0, FREE], [0.0, 1.0]),  # at its limit, and below
        ([-40.0, -1.0], [3.0, FREE], [1.0, 1.0]),  # whose cross-entropy in float32 is exactly 0
        ([5.0, 2.0], [1.0, 3.0], [-1.0, 0.0]),  # above what is enough, and between aim and that
        ([math.inf, -1.0], [1.0, FREE], [0.0, 1.0]),  # a class that the model rules out
    ],
)
def test_a_record_is_raised_to_its_limit_with_one_weight_and_lowered_beyond(odds, limits, slopes):
    found = gradient(*two_classes(odds), [limits] * 2)
    assert torch.allclose(found, torch.tensor(slopes)[:, None] * torch.tensor([-1.0, 1.0]))
    assert bounded(*two_classes(odds), [limits] * 2).isfinite()


def test_the_total_of_records_is_that_of_their_log_odds_within_the_limits():
    aim, most = log_odds(torch.tensor([1.0, 3.0]))
    found = bounded(*two_classes([5.0, -2.0]), [[1.0, 3.0], [1.0, 3.0]])
    torch.testing.assert_close(found, aim - (5.0 - most) - 2.0)


def test_a_masked_record_takes_no_token_of_another():
    logits, labels = two_classes([1.0, -2.0])
    logits, labels = logits[:, None].repeat(1, 3, 1), torch.tensor([[-100] * 3, [-100, 0, 0]])
    found = gradient(logits, labels, [[0.1, FREE], [1.0, FREE]])
    alone = gradient(logits[1:], labels[1:], [[1.0, FREE]])
    assert not found[0].any()
    assert torch.equal(found[1:], alone)


def test_a_text_of_which_the_model_is_sure_has_a_gradient_and_one_at_its_limit_has_none():
    """Of both the first token is not scored."""
    logits = torch.tensor([[[0.0, 0.0], [20.0, 0.0], [20.0, 0.0]], [[0.0, 1.0]] * 3])
    found = gradient(logits, torch.tensor([[-100, 0, 0]] * 2), [[1.0, FREE]] * 2)
    assert found[0, :2, 1].min() > 0
    assert not found[1].any()


def test_a_text_counts_by_the_mean_over_its_scored_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 8, generator=generator)
    labels = torch.randint(8, (3, 6), generator=generator)
    labels[1, 3:] = -100
    texts = zip(logits, labels, strict=True)
    of = nn.functional.cross_entropy
    losses = torch.stack([of(one[:-1], y[1:], ignore_index=-100) for one, y in texts])
    found = bounded(logits, labels, [[100.0, FREE]] * 3)
    assert found.item() == pytest.approx(log_odds(losses).sum().item(), rel=1e-5)
    middle = losses.sort().values[1].item()
    grad = gradient(logits, labels, [[middle + 1e-4, FREE]] * 3)
    assert [bool(one.any()) for one in grad] == (losses < middle + 1e-4).tolist()


def test_a_record_with_an_infinite_loss_is_beyond_its_limits_and_gives_no_gradient():
    logits = torch.tensor([[0.0, -torch.inf], [1.0, 0.0]], requires_grad=True)
    bounded(logits, torch.tensor([1, 0]), [[1.0, 3.0], [1.0, 3.0]]).backward()
    assert logits.grad[0].tolist() == [0.0, 0.0]
    assert logits.grad[1].isfinite().all()
    assert logits.grad[1].any()
