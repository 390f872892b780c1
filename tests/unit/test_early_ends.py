"""Ends of a run that its losses call for."""

import torch
from torch.nn import functional as F

from hamu.objectives import Scored
from hamu.training.early_ends import EarlyEnds


def test_early_ends_are_judged_by_each_side_alone_where_a_process_has_seen_one(monkeypatch):
    """Split pairing: the other process's sums come by the exchange, each in its own place."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(6) % 3
    scored = {side: Scored.of(torch.randn(6, 3, generator=draw) * scale, labels)
              for side, scale in (("retain", 0.1), ("forget", 9.0))}  # fmt: skip
    loss = {side: F.cross_entropy(one.logits, one.labels).item() for side, one in scored.items()}
    sent = {}
    for side in scored:
        monkeypatch.setattr("hamu.training.early_ends.summed", lambda values, side=side: sent.setdefault(side, values))
        alone = EarlyEnds(max_retain_loss=9.0)
        alone.add(side, scored[side])
        alone.reason()
    monkeypatch.setattr("hamu.training.early_ends.summed", lambda values: sent["retain"] + sent["forget"])
    for side in scored:
        ends = EarlyEnds(target_forget_loss=loss["forget"] - 0.01)
        ends.add(side, scored[side])
        assert ends.reason().startswith(f"the forget loss of a step, {loss['forget']:.4g}, has reached the target")
        ends = EarlyEnds(max_retain_loss=loss["retain"] + 0.01, min_forget_loss=loss["forget"] - 0.01)
        ends.add(side, scored[side])
        assert ends.reason() == ""


def test_a_record_that_is_read_for_its_shape_alone_counts_for_nothing():
    """A process without a share of a last batch has one, of weight 0."""
    scored = Scored.of(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    ends = EarlyEnds(max_retain_loss=1.0, target_forget_loss=0.6)
    ends.add("retain", Scored.of(scored.logits[1:], scored.labels[1:]), 0.0)
    ends.add("forget", Scored.of(scored.logits[:1], scored.labels[:1]))
    ends.add("forget", Scored.of(scored.logits[1:], scored.labels[1:]), 0.0)
    assert ends.reason() == "the forget loss of a step, 0.6931, has reached the target 0.6"
