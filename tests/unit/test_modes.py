"""A model that was put into another mode for a while is as it was."""

import pytest
import torch
from torch import nn

from hamu.evaluation.predictions import predict
from hamu.forward import OriginalModel
from hamu.modes import evaluating, without_autocast


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def model_with_a_frozen_part():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model.train()
    model[2].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


def test_all_modules_evaluate_inside_and_each_has_its_own_mode_again_after():
    model = model_with_a_frozen_part()
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
    assert modes(model) == before
    assert True in before
    assert False in before


def test_modes_are_restored_after_an_error_too():
    model = model_with_a_frozen_part()
    before = modes(model)
    with pytest.raises(ZeroDivisionError), evaluating(model):
        1 / 0  # noqa: B018
    assert modes(model) == before


def test_predictions_and_the_original_model_leave_a_part_in_evaluation_mode():
    model = model_with_a_frozen_part()
    before = modes(model)
    images = [{"pixel_values": torch.ones(4), "labels": torch.tensor(1)} for _ in range(3)]
    predict(model, images, 2, torch.utils.data.default_collate)
    OriginalModel(model).logits({"pixel_values": torch.ones(2, 4)})
    assert modes(model) == before


def test_a_model_without_autocast_gets_no_attribute():
    model = Doubling()
    with without_autocast(model):
        assert model(torch.ones(())) == 2
    assert "forward" not in vars(model)


def test_the_forward_that_has_autocast_is_back_afterwards():
    model = Doubling()
    model._original_forward, wrapped = model.forward, lambda x: -model._original_forward(x)
    model.forward = wrapped
    with without_autocast(model):
        assert model(torch.ones(())) == 2
    assert model.forward is wrapped
    assert model(torch.ones(())) == -2


def test_an_evaluation_draws_nothing_from_the_random_state():
    """Else what is trained after it would depend on whether there was one: dropout draws from it."""
    model = model_with_a_frozen_part()
    images = [{"pixel_values": torch.ones(4), "labels": torch.tensor(1)} for _ in range(3)]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    predict(model, images, 2, torch.utils.data.default_collate)
    assert torch.equal(torch.rand(2), expected)
