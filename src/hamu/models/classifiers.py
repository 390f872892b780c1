"""Image classifiers, new or saved, their image processors, and checks that they fit the data."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.hub import cached_file

from hamu.core.forward import evaluating, predict_logits
from hamu.core.gram import trainable_parameters
from hamu.data import ImageData
from hamu.errors import HamuError, reading
from hamu.files import HUB, is_of_hub
from hamu.models.storage import CONFIG, check_is_saved, check_undamaged, config_of, from_pretrained

NEW_CLASSIFIER = r"resnet(\d+)"
_NUMBER = re.compile(r"(LABEL_)?\d+")  # transformers' name of a class that has none
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE = 64  # of the images that are tried: whatever their size becomes, they are of one colour
_CLOSE = 1e-4
_ROUNDED = 1e-3  # of normalised pixels; far below one of 255 steps


class SmallResNetConfig(PretrainedConfig):
    """Configuration of a `SmallResNet` (He et al. 2016, Sec. 4.2), the paper's for CIFAR-10.

    Args:
        depth: number of weighted layers, 6n+2 (20 in the paper).
        width: channels of the first stage; the next two have twice and four times as many.
        image_mean, image_std: per-channel normalisation for pixels in [0, 1].
    """

    model_type = "small_resnet"

    def __init__(
        self,
        depth: int = 20,
        width: int = 16,
        num_channels: int = 3,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise HamuError(f"a small ResNet has depth 6n+2 (8, 14, 20, 32, ...); got {depth}")
        self.depth, self.width, self.num_channels = depth, width, num_channels
        self.image_mean, self.image_std = image_mean, image_std
        super().__init__(**kwargs)


class _Block(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A: subsample, pad channels)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            x = nn.functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return torch.relu(out + x)


class SmallResNet(PreTrainedModel):
    """The classifier. Input: normalised pixels [B, C, H, W]; output: logits [B, num_labels]."""

    config_class = SmallResNetConfig
    main_input_name = "pixel_values"

    def __init__(self, config: SmallResNetConfig) -> None:
        super().__init__(config)
        width, blocks = config.width, (config.depth - 2) // 6
        self.conv = nn.Conv2d(config.num_channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width] + [width * 2**stage for stage in range(3) for _ in range(blocks)]
        # a stage that widens begins with half the resolution
        layers = [_Block(n, wider, stride=wider // n) for n, wider in pairwise(widths)]
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], config.num_labels or 0)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits, and the mean cross-entropy where labels [B] are given."""
        features = self.blocks(torch.relu(self.norm(self.conv(pixel_values))))
        logits = self.classifier(features.mean(dim=(2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(SmallResNetConfig.model_type, SmallResNetConfig)
AutoModelForImageClassification.register(SmallResNetConfig, SmallResNet)


def new_classifier(
    name: str,
    data: ImageData,
    mean: list[float],
    std: list[float],
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make a classifier with random weights for this data, or load the one to start from.

    `name` is "resnetN" with N = 6n+2, or a folder or hub id whose weights are the start. `mean` and
    `std`, the normalisation of each channel, are saved with the model.
    """
    match = re.fullmatch(NEW_CLASSIFIER, name)
    if match is None:
        model = load_classifier(name, trust_remote_code=trust_remote_code)
        if model.config.image_mean is None:
            model.config.image_mean, model.config.image_std = mean, std
        return model
    config = SmallResNetConfig(int(match[1]), 16, data.pixels.shape[1], mean, std)
    _name_classes(config, dict(enumerate(data.classes)))
    return SmallResNet(config)


def load_classifier(source: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a saved classifier, with the normalisation that its config or image processor states.

    Args:
        source: a folder with config.json and safetensors, or "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with it; that can do anything.

    Raises:
        HamuError: if its image processor does more than a shift and a scale of each channel.
    """
    check_is_saved(source, [CONFIG])
    model: PreTrainedModel = from_pretrained(
        AutoModelForImageClassification,
        source,
        dtype=torch.float32,  # "auto" would train a half-precision copy in half precision
        trust_remote_code=trust_remote_code,
    )
    check_undamaged(model, source)
    config = model.config
    if None in (getattr(config, "image_mean", None), getattr(config, "image_std", None)):
        processor = load_image_processor(source, trust_remote_code=trust_remote_code)
        config.image_mean = config.image_std = None
        if processor is not None:
            channels = getattr(config, "num_channels", 3)
            config.image_mean, config.image_std = _statistics(processor, channels, source)
    return model


def load_image_processor(source: str, *, trust_remote_code: bool = False) -> Any:
    """Load the image processor that comes with a saved classifier, None where there is none."""
    where, local = source.removeprefix(HUB), not is_of_hub(source)
    settings = {"local_files_only": local, "_raise_exceptions_for_missing_entries": False}
    remedy = (
        "; repair its preprocessor_config.json, or take it away: then pixels are normalised by "
        "config.json, or by the data"
    )
    with reading(f"the image processor of {source} cannot be loaded", remedy):
        if not any(cached_file(where, name, **settings) for name in _PROCESSOR_FILES):
            return None
        return AutoImageProcessor.from_pretrained(
            where, local_files_only=local, trust_remote_code=trust_remote_code
        )


def _statistics(processor: Any, channels: int, source: str) -> tuple[list[float], list[float]]:
    """Mean and deviation by channel that do to pixels in [0, 1] what a processor does.

    A black and a white image show shift and scale, one of mixed colour whether there is more.
    """

    def seen(colour: tuple[int, ...]) -> np.ndarray:  # in the middle of an image
        values = _processed(processor, np.full((_SIDE, _SIDE, channels), colour, dtype=np.uint8))
        return values[:, values.shape[1] // 2, values.shape[2] // 2].astype(np.float64)

    mixed = tuple(51 * (channel + 1) for channel in range(channels))
    with reading(f"the image processor of {source} cannot take {channels} channels"):
        black, white, found = seen((0,) * channels), seen((255,) * channels), seen(mixed)
    scale = white - black
    expected = black + scale * np.resize(mixed, black.shape) / 255
    fits = np.allclose(found, expected, rtol=0, atol=_CLOSE * np.abs(scale).max())
    if black.shape != (channels,) or not fits or not (scale > 0).all():
        raise HamuError(
            f"the image processor of {source} does more than shift and scale each channel (or "
            f"swaps them: do_flip_channel_order); build that into the model instead"
        )
    return (0.0 - black / scale).tolist(), (1 / scale).tolist()


def _processed(processor: Any, pixels: np.ndarray) -> np.ndarray:
    """Output of an image processor for an image, [H, W, C] uint8."""
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])


def prepares_as(processor: Any, data: ImageData, source: str) -> bool:
    """True if a processor makes the same of the first image; a HamuError for another size."""
    ours = data[0]["pixel_values"].numpy()
    with reading(f"the image processor of {source} cannot take the images of {data.source}"):
        theirs = _processed(processor, data.pixels[0].permute(1, 2, 0).numpy())
    if theirs.shape != ours.shape:
        made, given = ("x".join(map(str, values.shape[1:])) for values in (theirs, ours))
        raise HamuError(
            f"the image processor of {source} makes images of {made} of those of {data.source}, "
            f"{given}; give --image_size {theirs.shape[-1]}, or take away its "
            f"preprocessor_config.json if the model was trained on such images"
        )
    return np.allclose(theirs, ours, rtol=0, atol=_ROUNDED)


def class_names(source: str) -> tuple[str, ...] | None:
    """Read the class names of a saved model, by number; None if it has none, or is not there."""
    names = _saved_names(source)
    ordered = tuple(names.get(number, "") for number in range(len(names)))
    return ordered if ordered and "" not in ordered and len({*ordered}) == len(ordered) else None


def _saved_names(source: str, *, local: bool = False) -> dict[int, str]:
    try:
        return _by_number(config_of(source, local=local)["id2label"])
    except Exception:  # loading the model reports any damage
        return {}


def _by_number(names: Mapping[Any, Any] | None) -> dict[int, str]:
    """Class names by number, their letters in the form of those of data."""
    return {int(n): normalize("NFC", str(name)) for n, name in (names or {}).items()}


def named_as_in_training(model: Any, classes: Sequence[str]) -> bool:
    """Name the first outputs of a model to be trained after the classes of its data, if it has as
    many and names none of them, and they are no mere numbers.
    """
    names = _by_number(model.config.id2label)
    is_named = bool({*names.values()} & {*classes})
    if is_named or all(map(_NUMBER.fullmatch, classes)) or len(names) < len(classes):
        return False
    unnamed = {number: f"LABEL_{number}" for number in names}
    _name_classes(model.config, unnamed | dict(enumerate(classes)))
    return True


def _name_classes(config: Any, names: dict[int, str]) -> None:
    config.id2label, config.label2id = names, {name: number for number, name in names.items()}


def check_as_many_classes(source: str, other: str, role: str) -> None:
    """Check that two saved classifiers have as many classes, if their configurations are here."""
    ours, theirs = (len(_saved_names(name, local=True)) for name in (source, other))
    if ours and theirs and ours != theirs:
        counts = f"{ours} classes, the {role} model {other} {theirs}"
        raise HamuError(f"the model {source} has {counts}; both need as many")


def check_fits(model: nn.Module, data: ImageData) -> None:
    """Check that channels, classes and size of the images fit the model, and try one of them."""
    trainable_parameters(model)
    config = getattr(model, "config", None)
    channels, classes, size, names = (
        getattr(config, name, None)
        for name in ("num_channels", "num_labels", "image_size", "id2label")
    )
    if channels not in (None, data.pixels.shape[1]):
        raise HamuError(
            f"the model takes {channels} channels, those of {data.source} have "
            f"{data.pixels.shape[1]}; give --num_channels {channels} to convert them"
        )
    highest = int(data.labels.max())
    if classes is not None and highest >= classes:
        raise HamuError(
            f"label {highest} of {data.source} is out of range: the model has {classes} classes; "
            f"use the data it was trained on, or a model with at least {highest + 1} classes"
        )
    _check_names(_by_number(names), data.classes)
    device = next(model.parameters()).device
    shape = tuple(data.pixels.shape[1:])
    size = max(size) if isinstance(size, Sequence) else size
    remedy = f"; give --image_size {size if size and size != shape[-1] else 'N'} to resize them"
    with (
        reading(f"the model cannot take the images of {data.source}, {shape}", remedy),
        torch.no_grad(),
        evaluating(model),
    ):
        predict_logits(model, {"pixel_values": data[0]["pixel_values"][None].to(device)})


def _check_names(names: dict[int, str], theirs: Sequence[str]) -> None:
    """Reject class names in another order than in the data, or all others; numbers are no names."""
    ours = [*names.values()]
    shared = {*ours} & {*theirs}
    order = [names.get(number, "") for number in range(len(theirs))]
    unnamed = all(map(_NUMBER.fullmatch, ours)) or all(map(_NUMBER.fullmatch, theirs))
    if order != list(theirs) and (shared or not unnamed):
        raise HamuError(
            f"the model names its classes {', '.join(order[:4])}, ..., the data "
            f"{', '.join(theirs[:4])}, ...; name and order both alike (upper and lower case count)"
        )
    numbers = [*map(str, range(len(theirs)))]
    if unnamed and len(theirs) != len(ours) and list(theirs) != numbers:
        whose = "the model's" if all(map(_NUMBER.fullmatch, ours)) else "the data's"
        raise HamuError(
            f"the model has {len(ours)} classes, the data {len(theirs)}, and {whose} are numbers "
            f"without names; name both alike (the model's in id2label), or give data of all classes"
        )
