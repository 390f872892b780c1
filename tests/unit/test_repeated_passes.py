"""A step's passes made again: by the masks that they were made with, and without a trace."""

import torch
from torch import nn

from hamu.unlearning.trainer.watch import RepeatedPasses


def test_passes_are_repeated_by_their_own_masks_and_leave_the_random_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 3)).train()

    def total(side, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    passes = RepeatedPasses(model, torch.device("cpu"))
    losses = {}
    for side in ("retain", "forget"):
        batch = {"x": torch.randn(6, 20), "y": torch.arange(6) % 3}
        passes.remember(side, lambda side=side, batch=batch: total(side, batch) / 6, 6)
        losses[side] = total(side, batch).detach() / 6
        assert total(side, batch) / 6 != losses[side], "another mask, another loss"
    state = torch.get_rng_state()
    assert passes.losses() == losses
    assert torch.equal(torch.get_rng_state(), state)


def test_passes_are_repeated_without_tf32_where_there_is_some(monkeypatch):
    seen = []

    def loss():
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return torch.zeros(())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    passes = RepeatedPasses(nn.Conv2d(1, 1, 1), torch.device("cpu"))
    for rounds in (True, False):
        monkeypatch.setattr(
            "hamu.unlearning.trainer.watch.rounds_to_tf32",
            lambda model, rounds=rounds: rounds,
        )
        passes.remember("retain", loss, 1)
        assert passes.are_exacter is rounds
        passes.losses()
        passes.clear()
    assert seen == ["ieee", "tf32"]
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
