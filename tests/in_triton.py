"""The GPU's kernels against plain sums: interpreted by Triton on the host, or on the GPU that is there.

Run by tests/unit/test_kernels.py in a process of its own, as Triton decides once whether it interprets.
"""

import os

import pytest
import torch
from helpers import Holder, step_of

from hamu import HamuQ, PairedGradients
from hamu.core import combine, gram_meter, kernels

ON_GPU = torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
if not ON_GPU:  # an interpreter is slow
    kernels._CHUNK, kernels._BLOCK = 1 << 10, 1 << 8
CHUNK = kernels._CHUNK
SHAPES = [(3,), (5, 7), (4, 3, 3, 3), (CHUNK,), (CHUNK + 1,), (3 * CHUNK - 7,), (1,), (0,)]
BLOCK_OF = [0, 1, 1, 0, 2, 2, 4, 4]  # none in block 3
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def drawn(dtype, shapes=SHAPES):
    found = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return [g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g for g in found]


def sums_of(retain, forget):
    total = torch.zeros(5, 3, dtype=torch.float64, device=DEVICE)
    for r, f, block in zip(retain, forget, BLOCK_OF, strict=True):
        there = [g.double() for g in (r, f) if g is not None]
        if there:
            r, f = (there[0] * 0 if g is None else g.double() for g in (r, f))
            total[block] += torch.stack([(r * r).sum(), (f * f).sum(), (r * f).sum()])
    return total


def measured(retain, forget):
    tables = of_all(retain, forget, drawn(torch.float32), BLOCK_OF, 5)
    return kernels.grams(tables, 5, DEVICE)


def of_all(retain, forget, parts, block_of=None, blocks=1):
    """Tables of gradients that all fit."""
    tables = kernels.tables(retain, forget, parts, block_of or [0] * len(parts), blocks, DEVICE)
    assert sorted(n for table in tables for n in table.numbers) == list(range(len(parts)))
    return tables


def fit(r, f, part):
    """True if a table has both."""
    return bool(kernels.tables([r], [f], [part], [0], 1, DEVICE))


@pytest.mark.parametrize("dtypes", [*((one, one) for one in DTYPES), (DTYPES[2], DTYPES[1])])
def test_the_sums_of_all_blocks_are_exact(dtypes):
    torch.manual_seed(0)
    retain, forget = (drawn(dtype) for dtype in dtypes)
    retain[1] = forget[6] = retain[7] = forget[7] = None
    torch.testing.assert_close(
        measured(retain, forget), sums_of(retain, forget), rtol=1e-14, atol=0
    )


def test_tensors_that_begin_anywhere_are_read_and_written_whole():
    memory = drawn(torch.float32, [(2, 3 * CHUNK)])[0]
    retain, forget = ([row[1 : CHUNK + 6]] for row in memory.clone())
    assert retain[0].data_ptr() % 16
    sums = kernels.grams(of_all(retain, forget, retain), 1, DEVICE)
    assert sums[0, 2].item() == pytest.approx(
        (retain[0].double() * forget[0].double()).sum().item()
    )
    around = memory.clone()
    sides = [[row[1 : CHUNK + 6]] for row in around]
    assert kernels.combine(of_all(*sides, retain), [2.0], [-1.0]) == [0]
    torch.testing.assert_close(around[0, 1 : CHUNK + 6], 2 * retain[0] - forget[0])
    assert torch.equal(around[0, CHUNK + 6 :], memory[0, CHUNK + 6 :])
    assert torch.equal(around[0, :1], memory[0, :1])
    assert torch.equal(around[1], memory[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_combination_is_that_of_torch_and_rounds_once(dtype):
    torch.manual_seed(0)
    retain, forget = drawn(dtype), drawn(dtype)
    a, b = ([factor + n for n in range(len(retain))] for factor in (0.3, -2.5))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [
        (x * r.to(wide) + y * f.to(wide)).to(dtype)
        for x, y, r, f in zip(a, b, retain, forget, strict=True)
    ]
    before = [g.clone() for g in forget]
    alone = drawn(dtype, [(5,), (7,)])
    tables = of_all([*retain, None, alone[0]], [*forget, alone[1], None], [*retain, *alone])
    written = kernels.combine(tables, [*a, 1, 1], [*b, 1, 1])
    assert written == [n for n, g in enumerate(retain) if g.numel()]
    # interpreted, bfloat16 is cut off and not rounded
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-3 if dtype.itemsize == 2 else 1e-5}
    for got, want in zip(retain, expected, strict=True):
        torch.testing.assert_close(got, want, **rounding)
    assert all(map(torch.equal, forget, before))


def test_a_default_device_of_torch_changes_nothing():
    retain, forget = drawn(torch.float32), drawn(torch.float32)
    expected = measured(retain, forget)
    with torch.device("cuda" if ON_GPU else "meta"):
        assert torch.equal(measured(retain, forget), expected)
        tables = of_all(retain, forget, retain)
        assert len(kernels.combine(tables, *[[1.0] * len(retain)] * 2)) == len(retain) - 1


def test_empty_tensors_have_no_chunks():
    nothing = [torch.empty(0, 3, device=DEVICE)]
    tables = of_all(nothing, nothing, nothing)
    assert kernels.grams(tables, 1, DEVICE).tolist() == [[0.0, 0.0, 0.0]]
    assert kernels.combine(tables, [1.0], [1.0]) == []


def test_what_lies_otherwise_is_left_to_torch():
    retain, forget = drawn(torch.float32), drawn(torch.float32)
    plain = [g.contiguous() for g in forget]
    assert fit(retain[2], forget[2], retain[2])
    assert fit(None, forget[0], forget[0])
    assert not fit(retain[2], plain[2], retain[2]), "other strides"
    gap = torch.randn(4, 6, device=DEVICE)[:, ::2]
    assert not fit(gap, gap, gap)
    away = torch.empty(3, device="meta")
    assert not fit(away, away, retain[0])
    assert not fit(retain[0], away, retain[0])
    of_two_types = of_all([retain[0].half()], forget[:1], retain[:1])
    assert kernels.combine(of_two_types, [1.0], [1.0]) == []


@pytest.mark.parametrize(
    ("dtype", "keep"), zip(DTYPES, [(), ("retain",), ("retain", "forget")], strict=False)
)
def test_a_step_by_kernels_is_that_of_torch(monkeypatch, dtype, keep):
    """Of tensors with both gradients, one and none."""
    torch.manual_seed(0)
    values = drawn(dtype)
    sides = {"retain": drawn(dtype), "forget": drawn(dtype)}
    sides["retain"][1] = sides["forget"][3] = sides["retain"][5] = sides["forget"][5] = None
    found = []
    for on in (lambda device: kernels, lambda device: None):
        for module in (combine, gram_meter):
            monkeypatch.setattr(module, "kernels_on", on)
        pair = PairedGradients(
            Holder(values), HamuQ(0.5, constraint_mode="relative", stopping="off")
        )
        step = step_of(pair, **sides, keep=keep)
        kept = [step.kept[side][0] for side in keep]
        found.append((step.gram, [p.grad for p in pair.parameters], kept))
    by_kernels, by_torch = found
    for name, sums in by_torch[0].sums().items():
        torch.testing.assert_close(by_kernels[0].sums()[name], sums, rtol=1e-5, atol=1e-12)
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.02 if dtype.itemsize == 2 else 1e-5}
    for one, other in zip(by_kernels[1], by_torch[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **rounding)
    for one, side in zip(by_kernels[2], keep, strict=True):
        assert torch.equal(one, sides[side][0])
