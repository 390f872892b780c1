"""Evaluation mode and precision: a model and torch's settings are as before afterwards."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hamu.core.forward import (
    rounds_to_tf32,
    seeded,
    without_autocast,
    without_tf32,
)


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_seed_leaves_the_random_state_of_the_host_and_of_the_models_gpus(monkeypatch):
    states, seeds, before = {"cuda:1": "kept", "cuda:2": "too"}, [], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state})
    )
    of_gpus = [SimpleNamespace(is_cuda=True, device=torch.device(name)) for name in states]
    model = SimpleNamespace(parameters=lambda: [*of_gpus, torch.ones(1)])
    with seeded(model, 3):
        seeds.append(torch.initial_seed())
        states.update(dict.fromkeys(states, "drawn from"))
    with seeded(model, None):
        seeds.append(torch.initial_seed())
    assert (seeds[0], seeds[1] == 3) == (3, False)
    assert states == {"cuda:1": "kept", "cuda:2": "too"}
    assert torch.equal(torch.get_rng_state(), before)


def test_the_forward_that_has_autocast_is_back_afterwards():
    model = Doubling()
    model._original_forward, wrapped = model.forward, lambda x: -model._original_forward(x)
    model.forward = wrapped
    with without_autocast(model):
        assert model(torch.ones(())) == 2
    assert model.forward is wrapped
    assert model(torch.ones(())) == -2


class OnGPU(nn.Module):
    """Looks as if its parameters were on a GPU."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer = layer.to(dtype)

    def parameters(self, recurse=True):
        return [SimpleNamespace(is_cuda=True, dtype=p.dtype) for p in super().parameters(recurse)]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as these functions ask; torch's settings are restored."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cudnn.allow_tf32 = True  # torch's default
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = False, True
    torch.backends.fp32_precision = matmul.fp32_precision = "none"
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    cudnn.allow_tf32 = before


def all_products(precision="tf32"):
    torch.backends.fp32_precision = precision  # as transformers' --tf32 does


def matrix_products():
    torch.backends.cuda.matmul.allow_tf32 = True  # as accelerate does for a compiled model


def mixed():
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def precisions():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found = [one.fp32_precision for one in (matmul, cudnn.conv, cudnn.rnn)]
    for backend in (matmul, cudnn):
        try:
            found.append(backend.allow_tf32)
        except RuntimeError:
            found.append("mixed")
    return found


@pytest.mark.parametrize("change", [lambda: None, all_products, matrix_products, mixed])
def test_without_tf32_all_interfaces_say_so_and_then_what_they_said_before(gpu, change):
    change()
    before = precisions()
    assert "tf32" in before
    with without_tf32():
        assert precisions() == ["ieee"] * 3 + [False] * 2
    assert precisions() == before
    with pytest.raises(ZeroDivisionError), without_tf32():
        1 / 0  # noqa: B018
    assert precisions() == before


@pytest.mark.parametrize(
    ("change", "layer", "dtype", "rounds"),
    [
        (None, nn.Conv2d(1, 1, 1), torch.float32, True),  # torch's default
        (None, nn.LSTM(1, 1), torch.float32, True),
        (None, nn.Linear(1, 1), torch.float32, False),
        (None, nn.Conv2d(1, 1, 1), torch.bfloat16, False),
        (all_products, nn.Linear(1, 1), torch.float32, True),
        (all_products, nn.Linear(1, 1), torch.float64, False),
        (matrix_products, nn.Linear(1, 1), torch.float32, True),
    ],
)
def test_which_models_are_rounded_to_tf32(gpu, change, layer, dtype, rounds):
    if change is not None:
        change()
    assert rounds_to_tf32(OnGPU(layer, dtype)) is rounds
    assert not rounds_to_tf32(layer), "it is on a CPU"
