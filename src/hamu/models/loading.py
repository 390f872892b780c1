"""Loading image classifiers, new or saved, and checking that they fit the data before anything runs.

A model is a built-in name ("resnet20", "resnet8", ...), a folder written by `save_pretrained`, or "hub:OWNER/NAME".
Only the last may use the network; code that comes with a model never runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForImageClassification, PreTrainedModel
from transformers.image_processing_base import ImageProcessingMixin

from hamu.data import ImageData
from hamu.errors import HamuError
from hamu.models.resnet import SmallResNet, SmallResNetConfig

HUB = "hub:"


def new_classifier(name: str, data: ImageData, mean: list[float], std: list[float]) -> PreTrainedModel:
    """A classifier with random weights for this data.

    Args:
        name: "resnetN" with N = 6n+2, or a folder or hub id whose weights are the start.
        data: the training data; its classes and channels shape the model.
        mean, std: per-channel normalisation, saved with the model.

    Raises:
        HamuError: if the name is unknown.
    """
    match = re.fullmatch(r"resnet(\d+)", name)
    if match is None:
        return load_classifier(name)
    return SmallResNet(
        SmallResNetConfig(
            depth=int(match[1]),
            num_channels=data.pixels.shape[1],
            image_mean=mean,
            image_std=std,
            id2label=dict(enumerate(data.classes)),
            label2id={name: number for number, name in enumerate(data.classes)},
        )
    )


def load_classifier(source: str) -> PreTrainedModel:
    """A saved classifier.

    Args:
        source: a folder with config.json and safetensors, or "hub:OWNER/NAME".

    Raises:
        HamuError: if it is not there, cannot be loaded, or has weights that are not finite.
    """
    hub = source.startswith(HUB)
    if not hub and not (Path(source) / "config.json").is_file():
        raise HamuError(
            f"{source} is not a saved model: it has no config.json; give a folder written by save_pretrained (or by "
            f"`hamu train`), or write hub:OWNER/NAME for a model of the Hugging Face hub"
        )
    try:
        model = AutoModelForImageClassification.from_pretrained(
            source.removeprefix(HUB), local_files_only=not hub, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HamuError(f"the model {source} cannot be loaded: {first}") from error
    if getattr(model.config, "image_mean", None) is None:
        model.config.image_mean, model.config.image_std = _processor_statistics(source)
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise HamuError(
            f"the model {source} has weights that are not finite, first in {broken[0]}; start from an undamaged copy"
        )
    return model


def check_fits(model: nn.Module, data: ImageData) -> None:
    """Check that the model can classify this data, on one image.

    Raises:
        HamuError: if the model has no trainable parameter, the channels do not fit, or a label is beyond its classes.
    """
    trainable_parameters(model)
    config = getattr(model, "config", None)
    channels = getattr(config, "num_channels", None)
    if channels is not None and channels != data.pixels.shape[1]:
        raise HamuError(
            f"the model takes images with {channels} channels, those of {data.source} have {data.pixels.shape[1]}; "
            f"give --num_channels {channels} to convert them"
        )
    classes = getattr(config, "num_labels", None)
    highest = int(data.labels.max())
    if classes is not None and highest >= classes:
        raise HamuError(
            f"label {highest} of {data.source} is out of range: the model has {classes} classes (0 to {classes - 1}); "
            f"use the data it was trained on, or a model with at least {highest + 1} classes"
        )


def trainable_parameters(model: nn.Module) -> int:
    """The number of trainable parameters.

    Raises:
        HamuError: if there is none.
    """
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not count:
        raise HamuError("the model has no trainable parameter; set requires_grad on those that may change")
    return count


def _processor_statistics(source: str) -> tuple[list[float] | None, list[float] | None]:
    """Mean and deviation from the model's preprocessor_config.json, None where it has none."""
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(
            source.removeprefix(HUB), local_files_only=not source.startswith(HUB)
        )
    except OSError:
        return None, None
    return settings.get("image_mean"), settings.get("image_std")
