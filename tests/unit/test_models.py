"""The ResNet of the paper, saved classifiers and their image processors, and whether they fit."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small_models import small_vision_transformer
from transformers import AutoImageProcessor, AutoModelForCausalLM
from transformers.utils import logging

from hamu import HamuError
from hamu.data import read_images
from hamu.models import (
    SmallResNet,
    SmallResNetConfig,
    check_fits,
    class_names,
    load_classifier,
    load_image_processor,
    new_classifier,
)
from hamu.models.classifiers import named_as_in_training
from hamu.models.storage import from_pretrained

logging.set_verbosity_error()
DIGITS = read_images("digits")


def resnet(path, **config):
    settings = {"depth": 8, "width": 2, "num_labels": 10, "num_channels": 1} | config
    SmallResNet(SmallResNetConfig(**settings)).save_pretrained(path)
    return load_classifier(str(path))


def test_resnet20_has_the_parameters_and_shortcuts_of_he_et_al():
    model = SmallResNet(SmallResNetConfig(depth=20, num_labels=10))
    assert sum(p.numel() for p in model.parameters()) == 269_722
    assert model(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 10)
    block = model.eval().blocks[3]  # its shortcut subsamples and pads
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.rand(1, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not torch.cat([out[:, :8], out[:, 24:]]).any()


def test_a_missing_or_damaged_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(HamuError, match=r"nowhere is not a saved model: it has no config\.json; g"):
        load_classifier("nowhere")
    resnet(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    first = tensors.pop("conv.weight")
    for message, change in (
        (r"that are not finite, first in conv\.weight", {"conv.weight": first * torch.nan}),
        (r"the model .* lacks conv\.weight: .* start from a whole copy", {}),
    ):
        save_file(tensors | change, weights, {"format": "pt"})
        with pytest.raises(HamuError, match=message):
            load_classifier(str(tmp_path))
    with pytest.raises(HamuError, match="type small_resnet, which is no CausalLM: texts need a"):
        from_pretrained(AutoModelForCausalLM, str(tmp_path), dtype=None)
    weights.write_bytes(b"damaged")
    with pytest.raises(HamuError, match="cannot be loaded"):
        load_classifier(str(tmp_path))


def names(*classes, width=2):
    return {"id2label": dict(enumerate(classes)), "num_labels": len(classes), "width": width}


@pytest.mark.parametrize(
    ("config", "classes", "message"),
    [
        ({}, None, None),  # LABEL_0 and the like are no names
        (names("ant", "bee", "cat"), ("0", "1", "2"), None),
        ({"num_labels": 5}, None, "label 9 of digits is out of range: the model has 5 classes"),
        ({"num_channels": 3}, None, "3 channels, those of digits have 1; give --num_channels 3"),
        (names("b", "a"), ("a", "b"), r"names its classes b, a, \.\.\., the data a, b, \.\.\."),
        (names("0", "3", "7"), ("3", "7"), "names its classes 0, 3, .* data 3, 7"),
        ({}, ("bee", "cow"), "has 10 classes, the data 2, and the model's are numbers without"),
        (names("ant", "bee", "cow"), ("2", "3"), "3 classes, the data 2, and the data's are"),
        (names("ant", "bee"), ("ANT", "BEE"), "names its classes ant, bee, .* data ANT, BEE"),
        (names("e\u0301"), ("\u00e9",), None),
    ],
)
def test_data_fit_the_model_or_an_error_names_both(tmp_path, config, classes, message):
    data = DIGITS
    if classes is not None:
        data = replace(data, classes=classes, labels=data.labels % len(classes))
    refused = pytest.raises(HamuError, match=message) if message else nullcontext()
    with refused:
        check_fits(resnet(tmp_path, **config), data)


def test_a_model_that_cannot_be_trained_or_take_the_images_is_an_error(tmp_path):
    model = small_vision_transformer(image_size=16, num_channels=1, num_labels=10)
    for said, remedy in ((16, 16), ([16, 16], 16), (8, "N")):  # the images have 8 x 8 pixels
        model.config.image_size = said
        message = rf"images of digits, \(1, 8, 8\): .*; give --image_size {remedy} to"
        with pytest.raises(HamuError, match=message):
            check_fits(model, DIGITS)
    with pytest.raises(HamuError, match="no trainable parameter"):
        check_fits(resnet(tmp_path).requires_grad_(False), DIGITS)
    with pytest.raises(HamuError, match=r"depth 6n\+2 .*; got 9"):
        new_classifier("resnet9", DIGITS, [0.5], [0.5])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"1": "dog", "0": "e\u0301"}, ("\u00e9", "dog")),
        ({"0": "cat", "1": "cat"}, None),
        (3, None),
    ],
)
def test_the_names_of_a_models_classes_are_read_from_its_config(tmp_path, written, expected):
    assert class_names(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "id2label": written}))
    assert class_names(str(tmp_path)) == expected


def test_a_model_that_is_trained_further_has_the_names_of_its_new_classes():
    config = SimpleNamespace(id2label={0: "tench", 1: "goldfish", 2: "shark"})
    model = SimpleNamespace(config=config)
    assert named_as_in_training(model, ("cat", "dog"))
    assert config.id2label == {0: "cat", 1: "dog", 2: "LABEL_2"}
    assert config.label2id["dog"] == 1
    assert not named_as_in_training(model, ("dog", "bird")), "it names one of them"
    config.id2label[1] = "e\u0301"
    assert not named_as_in_training(model, ("\u00e9", "bird")), "in another form of its letters"
    assert not named_as_in_training(model, ("0", "1")), "numbers are no names"
    assert not named_as_in_training(model, ("a", "b", "c", "d")), "it has too few"


@pytest.fixture
def with_processor(tmp_path):
    def save(settings, channels=3):
        model = small_vision_transformer(num_channels=channels, num_labels=10)
        model.save_pretrained(tmp_path / "model")
        (tmp_path / "model/preprocessor_config.json").write_text(json.dumps(settings))
        return str(tmp_path / "model")

    return save


SIZE = {"size": {"height": 8, "width": 8}, "do_center_crop": False}
PLAIN = {"image_processor_type": "ViTImageProcessor", **SIZE}
EFFICIENT_NET = {"image_processor_type": "EfficientNetImageProcessor", **SIZE}
OWN = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "code.Own"}}
MOBILE_VIT = {"image_processor_type": "MobileViTImageProcessor", **SIZE}


@pytest.mark.parametrize(
    ("settings", "channels"),
    [
        (PLAIN, 3),  # the mean and deviation of the class
        (PLAIN | {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.2, 0.3, 0.4]}, 3),
        (PLAIN | {"image_mean": 0.25, "image_std": 0.5}, 1),
        (PLAIN | {"do_rescale": False, "image_mean": [120.0] * 3, "image_std": [60.0] * 3}, 3),
        (EFFICIENT_NET | {"rescale_offset": True}, 3),
        (MOBILE_VIT | {"do_flip_channel_order": False}, 3),
    ],
)
def test_pixels_are_normalised_as_by_transformers(with_processor, tmp_path, settings, channels):
    folder = with_processor(settings, channels)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, channels), dtype=np.uint8)
    theirs = AutoImageProcessor.from_pretrained(folder)
    pictures = [Image.fromarray(one.squeeze()) for one in pixels]
    expected = theirs(pictures, return_tensors="pt")["pixel_values"].float()
    model = load_classifier(folder)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.arange(4) % 2)
    data = read_images(str(tmp_path / "data.npz"))
    check_fits(model, data)
    normalized = data.normalized(model.config.image_mean, model.config.image_std)
    ours = normalized.__getitems__(range(4))["pixel_values"]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert type(load_image_processor(folder)) is type(theirs)


@pytest.mark.parametrize(
    ("settings", "channels", "message"),
    [
        (MOBILE_VIT, 3, "does more than shift and scale each channel"),
        (PLAIN, 1, "cannot take 1 channels: "),
        (OWN, 3, "cannot be loaded: The repo"),
    ],
)
def test_a_processor_that_does_more_is_refused(with_processor, settings, channels, message):
    with pytest.raises(HamuError, match=f"the image processor of .*{message}"):
        load_classifier(with_processor(settings, channels))
