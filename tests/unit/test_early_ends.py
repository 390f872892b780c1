"""Ends of a run that its losses call for."""

import pytest
import torch
from torch.nn import functional as F

from hamu.core.objectives import Scored
from hamu.unlearning.stop_reason import StopReason
from hamu.unlearning.trainer import sides
from hamu.unlearning.trainer.sides import EarlyEnds


def scored(logits, labels):
    return Scored.of(torch.tensor(logits), torch.tensor(labels))


def test_each_side_is_judged_alone_where_a_process_has_one(monkeypatch):
    """Split pairing: the other process's sums come by the exchange, each in its own place."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(6) % 3
    batches = {
        side: Scored.of(torch.randn(6, 3, generator=draw) * scale, labels)
        for side, scale in (("retain", 0.1), ("forget", 9.0))
    }
    loss = {side: F.cross_entropy(one.logits, one.labels).item() for side, one in batches.items()}
    sent = []
    monkeypatch.setattr(sides, "all_reduced", lambda values: sent.append(values) or values)
    for side, batch in batches.items():
        alone = EarlyEnds()
        alone.add(side, batch)
        alone.end()
    both = sum(sent)
    monkeypatch.setattr(sides, "all_reduced", lambda values: both)
    for side, batch in batches.items():
        ends = EarlyEnds(max_forget_loss=loss["forget"] - 0.01)
        ends.add(side, batch)
        reached = f"{loss['forget']:.4g}, has reached {loss['forget'] - 0.01:g}"
        assert ends.end().text == f"the forget loss of a step, {reached}"
        limits = {"retain": loss["retain"] + 0.01, "forget": loss["forget"] - 0.01}
        ends = EarlyEnds(max_retain_loss=limits["retain"], min_forget_loss=limits["forget"])
        ends.add(side, batch)
        assert ends.end() is None


def test_a_record_that_is_read_for_its_shape_alone_counts_for_nothing():
    """A process without a share of a last batch has one, of weight 0."""
    ends = EarlyEnds(max_retain_loss=1.0, max_forget_loss=0.6)
    ends.add("retain", scored([[9.0, 0.0]], [1]), 0.0)
    ends.add("forget", scored([[0.0, 0.0]], [0]))
    ends.add("forget", scored([[9.0, 0.0]], [1]), 0.0)
    assert ends.end() == StopReason("target", "the forget loss of a step, 0.6931, has reached 0.6")


@pytest.mark.parametrize(
    ("logits", "limits", "kind"),
    [
        ([0.0, 0.0], {"max_forget_loss": 0.3}, "target"),
        ([9.0, 0.0], {"min_forget_loss": 0.1}, "no forgetting"),
        ([-9.0, 0.0], {"max_retain_loss": 0.4}, "retain loss"),
        # a record without any probability reaches no target, but diverges
        ([-torch.inf, 0.0], {"max_forget_loss": 0.5}, None),
        ([-torch.inf, 0.0], {"max_retain_loss": 0.5}, "retain loss"),
    ],
)
def test_each_limit_has_its_stop_reason(logits, limits, kind):
    ends = EarlyEnds(**limits)
    for side in ("retain", "forget"):
        ends.add(side, scored([logits, [-9.0, 9.0]], [0, 1]))
    stop = ends.end()
    assert kind == (stop and stop.kind)
