"""Norms over lists of tensors."""

import math

import pytest
import torch

from hamu.assess import vectors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 999])
def test_one_entry_that_is_not_finite_shows_in_the_largest(dtype, bad, place):
    torch.manual_seed(0)
    tensors = [torch.ones(3, dtype=dtype), torch.randn(1000).to(dtype), torch.ones(0, dtype=dtype)]
    assert vectors.largest(tensors) == tensors[1].abs().max().clamp(min=1).item()
    tensors[1][place] = bad
    assert not math.isfinite(vectors.largest(tensors))


def test_only_nothing_but_zeros_has_a_largest_entry_of_zero():
    least = torch.finfo(torch.float64).tiny
    assert (
        vectors.largest([torch.zeros(3), torch.tensor([0.0, -least], dtype=torch.float64)]) == least
    )
    assert (
        vectors.largest([torch.zeros(3)])
        == vectors.largest([torch.zeros(0)])
        == vectors.largest([])
        == 0
    )


def test_the_length_is_that_of_one_vector_in_float64(monkeypatch):
    monkeypatch.setattr(vectors, "WIDENED", 100)
    torch.manual_seed(0)
    tensors = [
        torch.randn(7, 40).T,
        torch.full((3,), 1e30),
        torch.randn(11, dtype=torch.float64),
        torch.ones(0),
    ]
    expected = torch.cat([t.double().flatten() for t in tensors]).norm().item()
    assert vectors.length(tensors) == pytest.approx(expected, rel=1e-14)
    assert vectors.length([]) == 0
