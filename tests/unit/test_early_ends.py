"""Ends of a run that its losses call for."""

import pytest
import torch
from torch.nn import functional as F

from hamu.core.objectives import Scored
from hamu.unlearning.stop_reason import StopReason
from hamu.unlearning.trainer.sides import EarlyEnds


def test_early_ends_are_judged_by_each_side_alone_where_a_process_has_seen_one(monkeypatch):
    """Split pairing: the other process's sums come by the exchange, each in its own place."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(6) % 3
    scored = {side: Scored.of(torch.randn(6, 3, generator=draw) * scale, labels)
              for side, scale in (("retain", 0.1), ("forget", 9.0))}  # fmt: skip
    loss = {side: F.cross_entropy(one.logits, one.labels).item() for side, one in scored.items()}
    sent = {}
    for side in scored:
        monkeypatch.setattr(
            "hamu.unlearning.trainer.sides.all_reduced",
            lambda values, side=side: sent.setdefault(side, values),
        )
        alone = EarlyEnds(max_retain_loss=9.0)
        alone.add(side, scored[side])
        alone.end()
    monkeypatch.setattr(
        "hamu.unlearning.trainer.sides.all_reduced",
        lambda values: sent["retain"] + sent["forget"],
    )
    for side in scored:
        ends = EarlyEnds(max_forget_loss=loss["forget"] - 0.01)
        ends.add(side, scored[side])
        reached = f"{loss['forget']:.4g}, has reached {loss['forget'] - 0.01:g}"
        assert ends.end().text == f"the forget loss of a step, {reached}"
        ends = EarlyEnds(
            max_retain_loss=loss["retain"] + 0.01, min_forget_loss=loss["forget"] - 0.01
        )
        ends.add(side, scored[side])
        assert ends.end() is None


def test_a_record_that_is_read_for_its_shape_alone_counts_for_nothing():
    """A process without a share of a last batch has one, of weight 0."""
    scored = Scored.of(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    ends = EarlyEnds(max_retain_loss=1.0, max_forget_loss=0.6)
    ends.add("retain", Scored.of(scored.logits[1:], scored.labels[1:]), 0.0)
    ends.add("forget", Scored.of(scored.logits[:1], scored.labels[:1]))
    ends.add("forget", Scored.of(scored.logits[1:], scored.labels[1:]), 0.0)
    assert ends.end() == StopReason("target", "the forget loss of a step, 0.6931, has reached 0.6")


@pytest.mark.parametrize(
    ("logit", "limits", "kind"),
    [
        (0.0, {"max_forget_loss": 0.5}, "target"),
        (9.0, {"min_forget_loss": 0.1}, "no forgetting"),
        (-9.0, {"max_retain_loss": 0.4}, "retain loss"),
    ],
)
def test_each_limit_has_its_kind_of_end(logit, limits, kind):
    ends = EarlyEnds(**limits)
    for side in ("retain", "forget"):
        ends.add(side, Scored.of(torch.tensor([[logit, 0.0]]), torch.tensor([0])))
    assert ends.end().kind == kind


@pytest.mark.parametrize(
    ("limits", "kind"),
    [({"max_forget_loss": 0.5}, None), ({"max_retain_loss": 0.5}, "retain loss")],
)
def test_one_record_without_any_probability_reaches_no_target_but_diverges(limits, kind):
    ends = EarlyEnds(**limits)
    for side in ("retain", "forget"):
        ends.add(
            side, Scored.of(torch.tensor([[0.0, -torch.inf], [9.0, -9.0]]), torch.tensor([1, 0]))
        )
    end = ends.end()
    assert kind == (end and end.kind)
