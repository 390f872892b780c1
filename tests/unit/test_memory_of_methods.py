"""Methods that remember: a dual variable (pdu), a running mean of the retain gradient (gru-ema)."""

import copy
import math

import pytest
import torch
from helpers import Holder, collect, flat
from torch import nn

from hamu import HamuError, PairedGradients, UnlearnConfig, build_method

STEPS = 8


def gradients():
    """Per step both gradients, on two tensors, and both losses."""
    g = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        draws = torch.randn(2, 8, generator=g, dtype=torch.float64)
        yield (
            *(list(side.split((5, 3))) for side in draws),
            1.0 + torch.rand(2, generator=g, dtype=torch.float64),
        )


def collect_both(pair, retain, forget, _):
    collect(pair, "retain", retain)
    collect(pair, "forget", forget)


def steps(pair, given):
    for one in given:
        collect_both(pair, *one)
        assert pair.combine(losses=one[2]).decision == "step"
        yield flat(p.grad for p in pair.parameters)


def pair_of(name):
    like = [torch.zeros(n, dtype=torch.float64) for n in (5, 3)]
    return PairedGradients(Holder(like), build_method(name), max_grad_norm=None)


def transcribed_pdu(given):
    """Primal descent on L_flat + λ(L_r - ε), then dual ascent, projected (Entesari et al. 2025)."""
    multiplier, limit = 1.0, None
    for retain, forget, losses in given:
        limit = 1.1 * float(losses[0]) if limit is None else limit
        yield multiplier * flat(retain) - flat(forget)
        multiplier = max(0.0, multiplier + 1.0 * (float(losses[0]) - limit))


def transcribed_gru(given):
    """Ascent projected off the mean of the retain gradients, from a mean of 0 (Wang et al. 2025)."""
    mean = 0.0
    for retain, forget, _ in given:
        mean = 0.8 * flat(retain) + 0.2 * mean
        ascent = -flat(forget)
        if ascent @ mean < 0:
            ascent = ascent - (ascent @ mean) / (mean @ mean) * mean
        yield ascent


RULES = {"pdu": transcribed_pdu, "gru-ema": transcribed_gru}


@pytest.mark.parametrize("name", RULES)
def test_a_run_is_the_published_rule_step_by_step(name):
    given = list(gradients())
    for found, expected in zip(steps(pair_of(name), given), RULES[name](given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", RULES)
def test_a_saved_pair_goes_on_bit_by_bit_also_after_a_step_that_is_not_taken(name):
    given, first = list(gradients()), pair_of(name)
    list(steps(first, given[:4]))
    second = pair_of(name)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    collect_both(second, [g * math.nan for g in given[4][0]], *given[4][1:])
    assert second.combine(losses=given[4][2]).decision == "skip"
    rest, again, fresh = (list(steps(one, given[4:])) for one in (first, second, pair_of(name)))
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(rest, fresh, strict=True)), "memory matters"


def test_the_dual_variable_falls_to_0_and_rises_above_the_limit():
    pair, retain = pair_of("pdu"), [torch.ones(5).double(), torch.ones(3).double()]
    losses = [torch.tensor([value, 0.0]) for value in (2.0, 1.0, 0.5, 2.5)]
    given = [(retain, [0 * g for g in retain], one) for one in losses]
    weights = [float(step[0]) for step in steps(pair, given)]
    assert weights == pytest.approx([1.0, 0.8, 0.0, 0.0])
    assert pair.state_dict()["memory"] == pytest.approx([0.3, 2.2])


def test_the_retain_gradient_of_a_step_is_kept_beside_the_mean():
    pairs = pair_of("gru-ema"), pair_of("gru-ema")
    for retain, forget, losses in gradients():
        for pair in pairs:
            collect_both(pair, retain, forget, losses)
        step = pairs[0].combine(keep=("retain", "forget"))
        pairs[1].combine()
        assert torch.equal(flat(step.kept["retain"]), flat(retain))
        assert torch.equal(flat(step.kept["forget"]), flat(forget))
        both = ([p.grad for p in pair.parameters] for pair in pairs)
        assert torch.equal(*map(flat, both))


def test_pdu_without_losses_and_gru_ema_with_parts_or_a_scaler_are_refused(tmp_path):
    first, (pdu, gru_ema) = next(gradients()), map(pair_of, RULES)
    collect_both(pdu, *first)
    with pytest.raises(HamuError, match=r"pdu needs the losses of the step; give combine\(losses="):
        pdu.combine()
    collect_both(gru_ema, *first)
    with pytest.raises(HamuError, match="gru-ema averages gradients, which a GradScaler rescales"):
        gru_ema.combine(torch.amp.GradScaler("cpu"))
    keeps = "gru-ema keeps a third gradient and needs both others whole in each process; leave"
    with pytest.raises(HamuError, match=keeps):
        PairedGradients(nn.Linear(2, 2), gru_ema.method, offload_grads="bf16")
    with pytest.raises(HamuError, match=keeps):
        UnlearnConfig(output_dir=str(tmp_path), method="gru-ema", offload_grads="cpu")
