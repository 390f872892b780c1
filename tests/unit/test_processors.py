"""What a model's image processor does to pixels is done here too, or refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from hamu import HamuError
from hamu.data import read_images
from hamu.models import check_fits, load_classifier, load_image_processor

logging.set_verbosity_error()
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def saved(tmp_path):
    """Saves a tiny model with a preprocessor_config.json; returns its folder."""

    def save(settings, channels=3):
        config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                           image_size=8, patch_size=4, num_channels=channels, num_labels=2)  # fmt: skip
        ViTForImageClassification(config).save_pretrained(tmp_path / "model")
        (tmp_path / "model/preprocessor_config.json").write_text(json.dumps(settings))
        return str(tmp_path / "model")

    return save


def as_here(model, pixels, folder):
    """The pixels as they go into the model here."""
    np.savez(folder / "data.npz", images=pixels, labels=np.arange(4) % 2)
    data = read_images(str(folder / "data.npz"))
    check_fits(model, data)
    return data.normalized(model.config.image_mean, model.config.image_std).__getitems__(range(4))[
        "pixel_values"
    ]


SIZE = {"size": {"height": 8, "width": 8}, "do_center_crop": False}
PLAIN = {"image_processor_type": "ViTImageProcessor", **SIZE}


@pytest.mark.parametrize(
    ("settings", "channels"),
    [
        (PLAIN, 3),  # the mean and deviation of the class
        (SIZE, 3),  # and its class, that of the model
        (PLAIN | {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.2, 0.3, 0.4]}, 3),
        (PLAIN | {"image_mean": 0.25, "image_std": 0.5}, 3),
        (PLAIN | {"image_mean": 0.25, "image_std": 0.5}, 1),
        (PLAIN | {"do_normalize": False}, 3),
        (PLAIN | {"do_normalize": False}, 1),
        (PLAIN | {"do_rescale": False, "image_mean": [120.0] * 3, "image_std": [60.0] * 3}, 3),
        (PLAIN | {"do_rescale": False, "do_normalize": False}, 3),
        (PLAIN | {"rescale_factor": 1 / 127.5}, 3),
        ({"image_processor_type": "EfficientNetImageProcessor", **SIZE}, 3),  # normalises twice
        ({"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True, **SIZE}, 3),
        (
            {
                "image_processor_type": "MobileViTImageProcessor",
                "do_flip_channel_order": False,
                **SIZE,
            },
            3,
        ),
    ],
)
def test_pixels_are_normalised_as_by_the_processor_of_transformers(
    saved, tmp_path, settings, channels
):
    folder = saved(settings, channels)
    pixels = PIXELS[..., :channels]
    theirs = AutoImageProcessor.from_pretrained(folder)
    pictures = [Image.fromarray(one.squeeze()) for one in pixels]
    expected = theirs(pictures, return_tensors="pt")["pixel_values"].float()
    ours = as_here(load_classifier(folder), pixels, tmp_path)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_what_a_processor_says_is_taken_to_the_last_digit(saved):
    said = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    config = load_classifier(saved(PLAIN | said)).config
    assert {"image_mean": config.image_mean, "image_std": config.image_std} == said


@pytest.mark.parametrize(
    ("settings", "channels", "message"),
    [
        (
            {"image_processor_type": "MobileViTImageProcessor", **SIZE},
            3,
            r"model does more than shift and scale each",
        ),
        (PLAIN | {"image_std": [-0.5] * 3}, 3, "does more than shift and scale each channel"),
        (
            PLAIN,
            1,
            "cannot take an image with 1 channels: .*; image_mean and image_std of its preprocessor_config",
        ),
        (
            {"image_processor_type": "CLIPImageProcessor", **SIZE},
            1,
            "makes 3 channels of 1; the model cannot be used",
        ),
        (
            {"image_processor_type": "NoneOfThem"},
            3,
            r"model cannot be loaded: Unrecognized .*; repair its preprocessor",
        ),
        (
            {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "code.Own"}},
            3,
            "cannot be loaded: The repo",
        ),
        ([], 3, "cannot be loaded: "),
    ],
)
def test_a_processor_that_does_something_else_is_refused(saved, settings, channels, message):
    with pytest.raises(HamuError, match=f"the image processor of .*{message}"):
        load_classifier(saved(settings, channels))


def test_a_model_without_a_processor_does_not_say_how_pixels_are_normalised(saved, tmp_path):
    folder = saved(PLAIN)
    (tmp_path / "model/preprocessor_config.json").unlink()
    assert load_classifier(folder).config.image_mean is None


@pytest.mark.parametrize("kind", ["OfOld", "TimmWrapperImageProcessor"])
def test_a_processor_that_cannot_be_made_is_taken_at_its_word_and_goes_along(
    saved, kind, caplog, tmp_path
):
    settings = {"image_processor_type": kind, "image_mean": [0.1, 0.2, 0.3], "image_std": 0.5}
    folder = saved(settings)
    model = load_classifier(folder)
    assert (model.config.image_mean, model.config.image_std) == ([0.1, 0.2, 0.3], [0.5] * 3)
    assert "is of a kind that cannot be made here" in caplog.text
    load_image_processor(folder).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == settings
    for more in ({"do_flip_channel_order": True}, {"do_rescale": False}, {"image_mean": None}):
        with pytest.raises(HamuError, match=r"^the image processor of .* cannot be loaded: "):
            load_classifier(saved(settings | more))
