"""Predictions of the start model come back from a checkpoint, in the order of the sets."""

import torch

from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.unlearning.trainer.evaluations import load_start_predictions, save_start_predictions


def test_they_come_back_in_the_order_of_the_sets(tmp_path):
    images = Predictions(torch.arange(6.0).view(2, 3).T, torch.tensor([1, 0, 1]))
    tokens = TokenPredictions(
        losses=torch.tensor([0.5, 0.25], dtype=torch.float64),
        correct=torch.tensor([True, False]),
        expected=torch.tensor([-1.0, -2.0], dtype=torch.float64),
        spread=torch.tensor([1.0, 2.0], dtype=torch.float64),
        record=torch.tensor([0, 2]),
        records=3,
    )
    save_start_predictions(tmp_path, {"retain": images, "forget": tokens})
    found = load_start_predictions(tmp_path, ["forget", "retain", "test"])
    assert list(found) == ["forget", "retain"]
    for name, saved in (("retain", images), ("forget", tokens)):
        assert type(found[name]) is type(saved)
        for field in saved.__dataclass_fields__:
            one, other = (getattr(predictions, field) for predictions in (found[name], saved))
            assert torch.equal(*map(torch.as_tensor, (one, other))), field


def test_a_run_that_was_not_evaluated_has_no_file_of_them(tmp_path):
    save_start_predictions(tmp_path, {})
    assert not list(tmp_path.iterdir())
    assert load_start_predictions(tmp_path, ["retain"]) == {}
