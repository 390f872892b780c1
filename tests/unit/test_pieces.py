"""Where tensors are gone through a piece at a time, every piece counts."""

import pytest
import torch
from helpers import Holder, collect, combine

from hamu import HamuQ, PairedGradients, StepGuard
from hamu.core import combine as combining
from hamu.core import guard

SHAPES = [
    (40, 7),
    (3, 200),
    (130,),
    (),
    (2, 5),
]  # several rows in a piece, rows longer than one, one piece in all
METHOD = HamuQ(0.5, "relative", stopping="off")


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(2)
    ]


@pytest.mark.parametrize("offload_grads", ["cpu", "bf16"])
def test_a_gradient_comes_back_from_its_stash_in_pieces_as_at_once(monkeypatch, offload_grads):
    _, at_once = combine(METHOD, *gradients(), offload_grads=offload_grads)
    monkeypatch.setattr(combining, "widened_at_once", lambda device: 50)
    _, in_pieces = combine(METHOD, *gradients(), offload_grads=offload_grads)
    assert all(torch.equal(a, b) for a, b in zip(in_pieces, at_once, strict=True))


def test_a_step_is_measured_over_all_pieces_of_a_parameter(monkeypatch):
    monkeypatch.setattr(guard, "WIDENED", 50)
    retain, forget = gradients()
    pair = PairedGradients(Holder(retain), METHOD, max_grad_norm=None)
    optimizer = torch.optim.SGD(pair.parameters, lr=0.1)
    watching = StepGuard(pair, optimizer, correct_steps=False, keep=("retain", "forget"))
    collect(pair, "retain", retain)
    collect(pair, "forget", forget)
    with watching.around(pair.combine(keep=watching.keep)):
        optimizer.step()
    moved = [p.detach() for p in pair.parameters]  # from zero
    taken = watching.taken
    for change, side in ((taken.retain_change, retain), (taken.forget_change, forget)):
        assert change.item() == pytest.approx(
            sum((g * m).sum().item() for g, m in zip(side, moved, strict=True))
        )
    assert taken.lengths.tolist() == pytest.approx([m.norm().item() for m in moved])
