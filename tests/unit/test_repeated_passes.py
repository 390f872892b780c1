"""A step's passes made again: by the masks that they were made with, and without a trace."""

import torch
from torch import nn

from hamu.training.repeated_passes import RepeatedPasses


def test_passes_are_repeated_by_their_own_masks_and_leave_the_random_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 3)).train()

    def total(side, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    passes = RepeatedPasses(model, total, torch.device("cpu"))
    losses = {}
    for side in ("retain", "forget"):
        batch = {"x": torch.randn(6, 20), "y": torch.arange(6) % 3}
        passes.remember(side, batch, 1.0, 6)
        losses[side] = total(side, batch).detach() / 6
        assert total(side, batch) / 6 != losses[side], "another mask, another loss"
    state = torch.get_rng_state()
    assert passes.losses() == losses
    assert torch.equal(torch.get_rng_state(), state)
