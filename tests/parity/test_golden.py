"""The paper's algorithms against golden values: an independent float64 implementation, checked with SLSQP."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hamu import HamuQ, HamuU, PairedGradients
from hamu.core.gram_meter import GramMeter

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"the golden values are not at {GOLDEN}"
)
METHODS = {"layer_q": HamuQ, "layer_u": HamuU, "hamu-q": HamuQ, "hamu-u": HamuU}


@pytest.mark.parametrize("variant", ["layer_q", "layer_u"])
def test_twenty_layerwise_steps_match_to_1e_12(variant):
    golden = np.load(GOLDEN / "layerwise.npz")
    names = [str(name) for name in golden["names"]]
    lr, constraint = float(golden["lr"]), float(golden["Q"])
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    ).double()
    model.load_state_dict({name: torch.tensor(golden[f"init/{name}"]) for name in names})
    data = {
        side: (torch.tensor(golden[f"X{side}"]), torch.tensor(golden[f"Y{side}"])) for side in "rf"
    }
    # The paper's criterion is compared, not obeyed: the golden run takes all twenty steps.
    pair = PairedGradients(
        model, METHODS[variant](constraint / lr, stopping="off"), max_grad_norm=1.0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def loss(side):
        x, y = data[side]
        return nn.functional.cross_entropy(model(x), y, reduction="sum")

    for t in range(20):
        with pair.retain():
            retain_loss = loss("r")
            retain_loss.backward()
        with pair.forget():
            forget_loss = loss("f")
            forget_loss.backward()
        step = pair.combine()
        constraint_status = step.weights.constraint
        np.testing.assert_allclose(
            [retain_loss.item(), forget_loss.item()],
            golden[f"{variant}/loss/{t}"],
            rtol=0,
            atol=1e-12,
        )
        np.testing.assert_array_equal(
            (~constraint_status.direct).int().numpy(), golden[f"{variant}/branch/{t}"]
        )
        free_limit = constraint_status.free_limit.item() * lr
        np.testing.assert_allclose(
            free_limit, golden[f"{variant}/stopping_rhs/{t}"], rtol=0, atol=1e-12
        )
        assert (constraint > free_limit) == bool(golden[f"{variant}/stopping_met/{t}"])
        optimizer.step()
        for name, parameter in model.named_parameters():
            expected = golden[f"{variant}/w/{t + 1}/{name}"]
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-12)


def test_single_block_updates_match_to_1e_12():
    golden = np.load(GOLDEN / "single_block.npz")
    lr = 0.01
    for k in range(int(golden["count"])):
        retain, forget = torch.tensor(golden[f"{k}/gr"]), torch.tensor(golden[f"{k}/gf"])
        _angle, variant, branch, _share = golden[f"{k}/meta"]
        method = METHODS[str(variant)](float(golden[f"{k}/Q"]) / lr)
        weights = method.weigh(GramMeter([retain], [0]).measure([retain], [forget]))
        update = -lr * (weights.retain * retain + weights.forget * forget)
        np.testing.assert_allclose(update.numpy(), golden[f"{k}/update"], rtol=0, atol=1e-12)
        assert ("direct" if weights.constraint.direct.item() else "rectified") == str(branch)
