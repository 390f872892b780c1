"""What goes into a classifier's last linear layer, and its two main axes."""

import pytest
import torch
from torch import nn

from hamu import HamuError
from hamu.data import ImageData
from hamu.data.images import collate
from hamu.evaluation.predictions import embed, principal_axes


@pytest.fixture
def data():
    pixels = torch.arange(6 * 16, dtype=torch.uint8).reshape(6, 1, 4, 4)
    made = ImageData(pixels, torch.tensor([0, 1] * 3), ("a", "b"), "made here", torch.arange(6))
    return made.normalized([0.0], [1.0])


def test_vectors_are_what_the_last_linear_layer_is_given(data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2))
    images = torch.stack([data[i]["pixel_values"] for i in range(6)])
    expected = model[:3](images)
    torch.testing.assert_close(embed(model, data, batch_size=4, collate=collate), expected.detach())


def test_a_model_without_a_vector_per_image_is_named(data):
    convolution = nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten())
    with pytest.raises(HamuError, match="the model has no linear layer whose input could be shown"):
        embed(convolution, data, batch_size=4, collate=collate)
    of_rows = nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, 2), nn.Flatten(), nn.AvgPool1d(4))
    with pytest.raises(
        HamuError, match="the model's last linear layer takes more than one vector per image"
    ):
        embed(of_rows, data, batch_size=4, collate=collate)


def test_a_model_that_has_diverged_is_not_drawn(data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 2))
    model[1].bias.data[0] = float("nan")
    with pytest.raises(
        HamuError, match="what goes into the model's last linear layer is not finite"
    ):
        embed(model, data, batch_size=4, collate=collate)


def test_axes_are_those_of_the_largest_variance():
    draw = torch.Generator().manual_seed(0)
    flat = torch.randn(50, 4, generator=draw) * torch.tensor([5.0, 0.1, 2.0, 0.1])
    (first, second), share = principal_axes([flat[:20], flat[20:]])
    assert (first.shape, second.shape) == ((20, 2), (30, 2))
    assert share > 0.99
    both = torch.cat([first, second]).abs()
    correlation = torch.corrcoef(torch.stack([both[:, 0], flat[:, 0].double().abs()]))[0, 1]
    assert correlation > 0.9


def test_an_axis_that_there_is_not_is_zero():
    (one,), _ = principal_axes([torch.tensor([[3.0, 4.0]])])
    assert one.tolist() == [[0.0, 0.0]]
    (line,), share = principal_axes([torch.tensor([[0.0], [2.0]])])
    assert (line.shape, share) == ((2, 2), 1.0)
    assert not line[:, 1].any()
