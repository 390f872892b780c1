"""The promise on the tensors themselves: g_c·Δw >= Q_i and ‖Δw‖ <= R_i for what `.grad` holds."""

import math
import random

import pytest
import torch
from helpers import combine, flat, pair_at_angle

from hamu import HamuQ, HamuU

NEAR = [10.0**-k for k in range(1, 9)]
SOME = [0.0, 2e-3, 1e-3 * 0.98, 0.5, math.pi / 2, 2.5, math.pi]
ANGLES = [*NEAR, *SOME, *(math.pi - a for a in NEAR)]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-4}
LARGEST_SCALE = {torch.float32: 12, torch.bfloat16: 6, torch.float64: 12}
SHARES = (0.01, 0.3, 0.9, 1.0)


def check(retain, forget, method, max_grad_norm, blocks, dtype):
    """Combine, verify every block in float64 from the stored gradients, return their number."""
    step, grads = combine(method, retain, forget, blocks=blocks, max_grad_norm=max_grad_norm)

    groups = [range(len(retain))] if blocks == "model" else [[i] for i in range(len(retain))]
    clipped = []
    for side in (retain, forget):
        norm = flat(side).norm()
        factor = 1.0 if max_grad_norm is None else (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped.append([factor * flat([side[i] for i in group]) for group in groups])
    sides = zip(*clipped, strict=True)
    sides = [(r, f) if isinstance(method, HamuQ) else (-f, -r) for r, f in sides]
    reach = [g_o.norm() * g_c.norm() for g_o, g_c in sides]
    total = method.constraint * (sum(reach) if method.constraint_mode == "relative" else 1.0)
    if total > sum(reach) * (1 + 1e-12):
        assert step.decision == "stop"
        assert grads == [None] * len(retain)
        return 0
    assert step.decision == "step"

    tolerance = TOLERANCE[dtype]
    for (g_o, g_c), most, group in zip(sides, reach, groups, strict=True):
        R, dw = g_o.norm(), -flat([grads[i] for i in group])
        demand = total * most / sum(reach)
        assert torch.isfinite(dw).all()
        assert g_c.dot(dw) >= demand - tolerance * most, (
            f"short by {(demand - g_c.dot(dw)) / most:.2g} of the reach"
        )
        assert dw.norm() <= R * (1 + tolerance), f"too long by {dw.norm() / R - 1:.2g}"
        # Near collinearity the perpendicular gain is given up; it is below the angle's tolerance.
        cos = (g_o.dot(g_c) / most).clamp(-1, 1) if most > 0 else torch.zeros(())
        share = min(demand / most, 1.0) if most > 0 else 0.0
        best = -1.0 if cos <= -share else share * cos - ((1 - cos**2) * (1 - share**2)).sqrt()
        assert g_o.dot(dw) <= (best + 2 * tolerance) * R * g_o.norm()
    return len(groups)


def scaled_pair(size, angle, dtype, draw, generator):
    exponents = [draw.uniform(-1, 1) * LARGEST_SCALE[dtype] for _ in range(2)]
    if draw.random() < 0.3:
        exponents = [draw.choice([-1, 1]) * LARGEST_SCALE[dtype]] * 2
    sides = pair_at_angle(size, angle, generator, *(10**e for e in exponents))
    return [side.to(dtype) for side in sides]


def random_method(retain, forget, max_grad_norm, draw):
    variant = draw.choice([HamuQ, HamuU])
    if draw.random() < 0.7:
        return variant(draw.choice(SHARES), constraint_mode="relative", stopping="off")
    norms = [flat(side).norm().item() for side in (retain, forget)]
    norms = [min(n, max_grad_norm or n) for n in norms]
    return variant(draw.choice([0.05, 0.5, 0.95, 2.0]) * norms[0] * norms[1], stopping="off")


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 3 * 10**5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_promise_holds_at_every_angle_scale_and_size(dtype, size):
    draw, generator = random.Random(size), torch.Generator().manual_seed(size)
    angles = [*ANGLES, *(draw.uniform(0, math.pi) for _ in range(4))] * (1 if size > 10**5 else 8)
    checked = 0
    for angle in [0.0, math.pi] * 20 if size == 1 else angles:
        r, f = scaled_pair(size, angle, dtype, draw, generator)
        clip, blocks = draw.choice([None, 1.0]), draw.choice(["tensor", "model"])
        checked += check([r], [f], random_method([r], [f], clip, draw), clip, blocks, dtype)
    assert checked >= (10 if size in (1, 3 * 10**5) else 100)


@pytest.mark.parametrize("blocks", ["tensor", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_promise_holds_for_several_tensors_at_once(dtype, blocks):
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    checked = 0
    for _ in range(150):
        pairs = [
            scaled_pair(n, draw.choice(ANGLES), dtype, draw, generator)
            for n in draw.sample([2, 3, 10, 70, 1000], 3)
        ]
        retain, forget = [list(side) for side in zip(*pairs, strict=True)]
        clip = draw.choice([None, 1.0])
        method = random_method(retain, forget, clip, draw)
        checked += check(retain, forget, method, clip, blocks, dtype)
    assert checked > 100
