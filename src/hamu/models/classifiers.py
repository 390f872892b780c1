"""Image classifiers, new or saved, and whether they fit the data before anything runs.

A classifier is a built-in name ("resnet20", "resnet8", ...), or a saved model; see
`hamu.models.loading`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel

from hamu.core.forward import evaluating, predict_logits
from hamu.core.gram import trainable_parameters
from hamu.data import ImageData
from hamu.data.sources import HUB, is_of_hub
from hamu.errors import HamuError, first_line
from hamu.models.loading import CONFIG, check_is_saved, check_undamaged, from_pretrained
from hamu.models.processors import load_processor, statistics_of
from hamu.models.resnet import SmallResNet, SmallResNetConfig

NEW_CLASSIFIER = r"resnet(\d+)"
CLASSIFIER_CONFIGS = (CONFIG,)  # an adapter is for language models
_NUMBER = re.compile(r"(LABEL_)?\d+")  # as a name: what transformers calls a class that has none


def new_classifier(
    name: str,
    data: ImageData,
    mean: list[float],
    std: list[float],
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A classifier with random weights for this data.

    Args:
        name: "resnetN" with N = 6n+2, or a folder or hub id whose weights are the start.
        data: the training data; its classes and channels shape the model.
        mean, std: per-channel normalisation, saved with the model.
        trust_remote_code: see `load_classifier`.

    Raises:
        HamuError: if the name is unknown.
    """
    match = re.fullmatch(NEW_CLASSIFIER, name)
    if match is None:
        model = load_classifier(name, trust_remote_code=trust_remote_code)
        if model.config.image_mean is None:
            model.config.image_mean, model.config.image_std = mean, std
        return model
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


def load_classifier(source: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A saved classifier.

    Args:
        source: a folder with config.json and safetensors, or "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with it; that can do anything.

    Raises:
        HamuError: if it is not there, cannot be loaded, has weights that are not finite, or its
            image processor does what is not done here.
    """
    check_is_saved(source, CLASSIFIER_CONFIGS)
    # dtype "auto" would train a half-precision copy in half precision
    kind = AutoModelForImageClassification
    model: PreTrainedModel = from_pretrained(
        kind, source, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    check_undamaged(model, source)
    if (
        getattr(model.config, "image_mean", None) is None
        or getattr(model.config, "image_std", None) is None
    ):
        processor = load_image_processor(source, trust_remote_code=trust_remote_code)
        channels = getattr(model.config, "num_channels", 3)
        found = (None, None) if processor is None else statistics_of(processor, channels, source)
        model.config.image_mean, model.config.image_std = found
    return model


def load_image_processor(source: str, *, trust_remote_code: bool = False) -> Any:
    """What prepares images for a saved classifier; see `load_processor`.

    Args:
        source: a folder, or "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with it; that can do anything.
    """
    local = not is_of_hub(source)
    return load_processor(
        source.removeprefix(HUB), local=local, trust_remote_code=trust_remote_code
    )


def class_names(source: str) -> tuple[str, ...] | None:
    """Read the class names of a saved model, by number; None if it has none, or is not there."""
    hub = is_of_hub(source)
    if not hub and not (Path(source) / CONFIG).is_file():
        return None
    try:
        raw, _ = PreTrainedConfig.get_config_dict(
            source.removeprefix(HUB), local_files_only=not hub
        )
        names = {int(number): str(name) for number, name in raw["id2label"].items()}
    except Exception:  # whatever is wrong with it is said when it is loaded
        return None
    ordered = tuple(names.get(number, "") for number in range(len(names)))
    return ordered if "" not in ordered and len(set(ordered)) == len(ordered) else None


def named_as_in_training(model: Any, classes: Sequence[str]) -> bool:
    """Give a model that is to be trained the classes of its data, where it names none of them;
    whether it did not.

    Its first outputs are then theirs, whatever they were before. Classes that are called by numbers
    name nothing.
    """
    names = {
        int(number): str(name)
        for number, name in (getattr(model.config, "id2label", None) or {}).items()
    }
    says_nothing = all(_NUMBER.fullmatch(name) for name in classes)
    if says_nothing or len(names) < len(classes) or set(names.values()) & set(classes):
        return False
    model.config.id2label = {number: f"LABEL_{number}" for number in names} | dict(
        enumerate(classes)
    )
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    return True


def check_as_many_classes(source: str, other: str, role: str = "retain") -> None:
    """Check that two saved classifiers can be compared, by their configurations; none is fetched
    from the hub for it.

    Raises:
        HamuError: if one has more classes than the other.
    """
    ours, theirs = map(_number_of_classes, (source, other))
    if ours is not None and theirs is not None and ours != theirs:
        raise HamuError(
            f"the model {source} has {ours} classes, the {role} model {other} {theirs}; both need "
            f"the same"
        )


def _number_of_classes(source: str) -> int | None:
    """None if the configuration is not here, or cannot be read."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(
            source.removeprefix(HUB), local_files_only=True
        )  # runs no code
        return len(raw["id2label"])
    except Exception:  # whatever is wrong with it is said when it is loaded
        return None


def check_fits(model: nn.Module, data: ImageData) -> None:
    """Check that the model can classify this data, in the end by trying one image.

    Raises:
        HamuError: if the model has no trainable parameter, channels, classes or image size do not
            fit.
    """
    trainable_parameters(model)
    config = getattr(model, "config", None)
    channels = getattr(config, "num_channels", None)
    if channels is not None and channels != data.pixels.shape[1]:
        raise HamuError(
            f"the model takes images with {channels} channels, those of {data.source} have "
            f"{data.pixels.shape[1]}; give --num_channels {channels} to convert them"
        )
    for name in ("image_mean", "image_std"):
        values = getattr(config, name, None)
        if values is not None and not _are_numbers(
            values, data.pixels.shape[1], above=0 if name == "image_std" else None
        ):
            raise HamuError(
                f"the model has {name} {values!r}; expected a number for each of "
                f"{data.pixels.shape[1]} channels"
            )
    classes = getattr(config, "num_labels", None)
    highest = int(data.labels.max())
    if classes is not None and highest >= classes:
        raise HamuError(
            f"label {highest} of {data.source} is out of range: the model has {classes} classes "
            f"(0 to {classes - 1}); use the data it was trained on, or a model with at least "
            f"{highest + 1} classes"
        )
    names = getattr(config, "id2label", None) or {}
    order = [str(names.get(number, "")) for number in range(len(data.classes))]
    if order != list(data.classes) and {str(name) for name in names.values()} & set(data.classes):
        raise HamuError(
            f"the model numbers the classes {', '.join(order[:4])}, ..., the data "
            f"{', '.join(data.classes[:4])}, ...; both need the same classes in the same order"
        )
    _check_same_names([str(name) for name in names.values()], data.classes)
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), evaluating(model):
            predict_logits(model, {"pixel_values": data[0]["pixel_values"][None].to(device)})
    except (ValueError, RuntimeError) as error:
        size = getattr(config, "image_size", None) or "N"
        raise HamuError(
            f"the model cannot take the images of {data.source}, {tuple(data.pixels.shape[1:])}: "
            f"{first_line(error)}; give --image_size {size} to resize them"
        ) from error


def _check_same_names(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Reject class names that are all others than those of the data; numbers are no names."""
    if set(ours) & set(theirs) or not all(
        any(not _NUMBER.fullmatch(name) for name in one) for one in (ours, theirs)
    ):
        return
    if {name.casefold() for name in ours} & {name.casefold() for name in theirs}:
        raise HamuError(
            f"the model writes its classes {', '.join(ours[:4])}, ..., the data "
            f"{', '.join(theirs[:4])}, ...; they differ in upper and lower case: write them alike"
        )
    raise HamuError(
        f"the model has the classes {', '.join(ours[:4])}, ..., the data {', '.join(theirs[:4])}, "
        f"..., and no name is the same, so that it is not known which is which; name them alike"
    )


def _are_numbers(values: Any, many: int, above: float | None) -> bool:
    """True if there are so many, finite and above a limit."""
    return (
        isinstance(values, list | tuple)
        and len(values) == many
        and all(
            isinstance(one, int | float) and math.isfinite(one) and (above is None or one > above)
            for one in values
        )
    )
