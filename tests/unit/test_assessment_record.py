"""What an assessment puts on record, key by key, of gradients of unequal length of which one is clipped."""

import re
from dataclasses import asdict

import pytest
import torch
from helpers import hamu_q_update
from torch import nn

from hamu import HamuQ, HamuU
from hamu.assess import assess_model

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(60, 4, generator=GENERATOR, dtype=torch.float64)
SIDES = {
    "retain": list(zip(X[:40], torch.randint(3, (40,), generator=GENERATOR), strict=True)),
    "forget": list(zip(X[40:], torch.zeros(20, dtype=torch.long), strict=True)),
}


def collate(items):
    x, labels = zip(*items, strict=True)
    return {"pixel_values": torch.stack(x), "labels": torch.stack(labels)}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def mean_loss(model, side):
    batch = collate(SIDES[side])
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def gradient(model, side):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(mean_loss(model, side), list(model.parameters()))]
    )


def assessed(model, method, max_grad_norm=0.5, **settings):
    return assess_model(
        model,
        SIDES["retain"],
        SIDES["forget"],
        collate=collate,
        method=method,
        max_grad_norm=max_grad_norm,
        **settings,
    )


@pytest.fixture(scope="module")
def found():
    return assessed(network(), HamuU(0.01, radius=0.05), learning_rate=0.02)


def test_each_side_has_its_own_norm_and_its_own_clip_factor(found):
    norms = {side: gradient(network(), side).norm().item() for side in SIDES}
    assert norms["forget"] > 0.5 > norms["retain"]
    record = found.record()
    assert record["gradient_norms"] == pytest.approx(norms)
    assert record["clip_factors"] == pytest.approx(
        {"retain": 1.0, "forget": 0.5 / norms["forget"]}, rel=1e-5
    )
    assert record["records"] == {"retain": 40, "forget": 20}


def test_the_hardness_of_both_variants_is_there_and_that_of_the_run_is_its_methods(found):
    record = found.record()
    assert (record["method"], record["constraint"], record["constraint_mode"]) == (
        "hamu-u",
        0.01,
        "absolute",
    )
    assert record["hamu-q"] == asdict(found.hamu_q)
    assert record["hamu-u"] == asdict(found.hamu_u)
    assert found.hardness == found.hamu_u
    assert found.hamu_u.stop_threshold != pytest.approx(found.hamu_q.stop_threshold)


def test_the_curvature_is_that_of_the_mean_loss():
    """Of all records in several batches, against the dense Hessian; a sum's would be off by their number."""
    model = network()
    names, values = zip(*model.named_parameters(), strict=True)
    start = torch.cat([v.detach().flatten() for v in values])

    def loss(flat):
        parts = flat.split([v.numel() for v in values])
        shaped = {
            name: part.view(v.shape) for name, v, part in zip(names, values, parts, strict=True)
        }
        return mean_loss(lambda x: torch.func.functional_call(model, shaped, (x,)), "retain")

    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, start))
    found = assessed(
        model, None, batch_size=15, curvature_samples=40, conflicts=False, bootstrap_memory=0
    )
    assert found.curvature.largest == pytest.approx(exact[-1].item(), rel=0.02)


def test_what_a_step_is_said_to_do_is_done_to_the_losses_as_they_are():
    """Clipping shortens the forget gradient; the changes are those of the losses all the same."""
    model = network()
    gradients = [gradient(model, side) for side in SIDES]
    short = [g * min(1.0, 0.5 / (g.norm().item() + 1e-6)) for g in gradients]
    norms = [g.norm() for g in short]
    step, is_direct = hamu_q_update(*short, 0.5 * norms[0] * norms[1], norms[0])
    retain, forget = (g.dot(step).item() for g in gradients)
    settings = {"learning_rate": 0.02, "blocks": "model", "conflicts": False, "bootstrap_memory": 0}
    found = assessed(model, HamuQ(0.5, "relative"), **settings)
    said = re.findall(r"the (\w+) loss by ([+-][\d.e-]+)·η", found.verdict.reason)
    assert {side: float(change) for side, change in said} == pytest.approx(
        {"retain": retain, "forget": forget}, rel=2e-3
    )
    assert not is_direct
    assert found.second_order.demand == pytest.approx(0.02 * forget), "Q in loss"
