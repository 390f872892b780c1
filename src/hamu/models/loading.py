"""Loading image classifiers, new or saved, and checking that they fit the data before anything runs.

A model is a built-in name ("resnet20", "resnet8", ...), a folder written by `save_pretrained`, or "hub:OWNER/NAME".
Only the last may use the network. Code that comes with a model runs only where `trust_remote_code` is given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from hamu.data import ImageData
from hamu.errors import HamuError, first_line
from hamu.models.processors import load_processor, statistics_of
from hamu.models.resnet import SmallResNet, SmallResNetConfig
from hamu.modes import evaluating
from hamu.objectives import predict_logits
from hamu.run_files import MODEL
from hamu.sources import HUB, is_of_hub

NEW_CLASSIFIER = r"resnet(\d+)"
_COMPUTED = re.compile(  # tensors of older versions that are no weights: masks, positions, angles
    r"(^|\.)((attn|attn\.attention)\.(masked_)?bias|causal_mask|position_ids|inv_freq|(cos|sin)_cached"
    r"|embed_positions\.weights)$"
)
_NUMBER = re.compile(r"(LABEL_)?\d+")  # as a name: what transformers calls a class that has none


def new_classifier(
    name: str, data: ImageData, mean: list[float], std: list[float], *, trust_remote_code: bool = False
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


def check_no_run(source: str) -> None:
    """Check that a folder without a model is not that of a run, which has its model in a folder below.

    Raises:
        HamuError: if it is; the message says where that is.
    """
    model = Path(source) / MODEL
    if any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise HamuError(f"{source} is the folder of a run; its model is {model}")


def check_is_classifier(source: str) -> None:
    """Check that a model is where it is said to be; those of the hub are not looked for.

    Raises:
        HamuError: if it is not.
    """
    if not is_of_hub(source) and not (Path(source) / "config.json").is_file():
        check_no_run(source)
        raise HamuError(
            f"{source} is not a saved model: it has no config.json; give a folder written by save_pretrained (or by "
            f"`hamu train`), or write hub:OWNER/NAME for a model of the Hugging Face hub"
        )


def load_classifier(source: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A saved classifier.

    Args:
        source: a folder with config.json and safetensors, or "hub:OWNER/NAME".
        trust_remote_code: run the code that comes with it; that can do anything.

    Raises:
        HamuError: if it is not there, cannot be loaded, has weights that are not finite, or its image processor does
            what is not done here.
    """
    check_is_classifier(source)
    # dtype "auto" would train a half-precision copy in half precision
    kind = AutoModelForImageClassification
    model = from_pretrained(kind, source, dtype=torch.float32, trust_remote_code=trust_remote_code)
    check_undamaged(model, source)
    if getattr(model.config, "image_mean", None) is None or getattr(model.config, "image_std", None) is None:
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
    return load_processor(source.removeprefix(HUB), local=local, trust_remote_code=trust_remote_code)


def from_pretrained(
    kind: Any, source: str, *, dtype: Any, trust_remote_code: bool = False, all_of_it: bool = False
) -> Any:
    """A whole saved model of a kind, from safetensors alone.

    Args:
        kind: one of transformers' Auto classes.
        source: a folder, or "hub:OWNER/NAME".
        dtype: of its weights.
        trust_remote_code: run the code that comes with it; that can do anything.
        all_of_it: refuse what this kind has no place for, such as an encoder or the head of another task.

    Raises:
        HamuError: if it cannot be loaded, lacks a weight, which would be drawn at random, or has one of another shape
            than its config.json says.
    """
    is_local = not is_of_hub(source)
    with readable(f"the model {source}"):
        if is_local and not weight_files(Path(source)):
            raise HamuError(
                f"the model {source} has no weights in safetensors, and no other file is read, for a pickle can run "
                f"code; save it again with save_pretrained"
            )
        where = source.removeprefix(HUB)
        settings = {"local_files_only": is_local, "trust_remote_code": trust_remote_code}
        config = _config(where, source, settings)
        attention = str(getattr(config, "_attn_implementation", None))
        if "/" in attention:  # kernels that transformers would fetch whatever was asked of it
            raise HamuError(
                f"the model {source} asks for code of the hub, {attention}, which is not run; take attn_implementation "
                f"out of its config.json"
            )
        if all_of_it and getattr(config, "is_encoder_decoder", False):
            raise HamuError(
                f"the model {source} is of type {config.model_type}, a decoder with an encoder, which would be lost; "
                f"give a causal language model"
            )
        model, found = kind.from_pretrained(
            where,
            config=config,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else transformers says which in its log alone
            **settings,
        )
    if found["mismatched_keys"]:
        name, saved, wanted = min(found["mismatched_keys"])
        raise HamuError(
            f"the model {source} has {name} as {tuple(saved)}, by its config.json it is {tuple(wanted)}; put back the "
            f"config.json that the weights were saved with"
        )
    if found["missing_keys"]:
        raise HamuError(f"the model {source} lacks {min(found['missing_keys'])}; start from a whole copy")
    lost = _without_place(model, source, found["unexpected_keys"]) if all_of_it else set()
    if lost:
        raise HamuError(
            f"the model {source} has {min(lost)}, for which a {type(model).__name__} has no place, and which would be "
            f"lost; it is of another kind, or its config.json is of another model"
        )
    return model


def _without_place(model: Any, source: str, unexpected: Collection[str]) -> set[str]:
    """Names of weights that a saved model has and the loaded one has not.

    Args:
        model: as loaded.
        source: a folder, or "hub:OWNER/NAME".
        unexpected: what transformers says that it had no place for.
    """
    lost = {name for name in unexpected if not _COMPUTED.search(name)}
    if getattr(model.config, "quantization_config", None) is not None:  # scales beside weights that are there
        modules = {name for name, _ in model.named_modules()}
        lost = {name for name in lost if name.rpartition(".")[0] not in modules}
    # of what a class leaves out unsaid, layers that predict further tokens (mtp) may go; what sees may not
    unsaid = [pattern for pattern in model._keys_to_ignore_on_load_unexpected or () if "visual" in pattern]
    if unsaid:
        for path in weight_files(folder_of(source)):
            with safe_open(path, framework="pt") as file:
                lost |= {name for name in set(file.keys()) if any(re.search(pattern, name) for pattern in unsaid)}
    return lost


def class_names(source: str) -> tuple[str, ...] | None:
    """What a saved model calls its classes, by their numbers; None if it does not say, or there is no such model."""
    hub = is_of_hub(source)
    if not hub and not (Path(source) / "config.json").is_file():
        return None
    try:
        raw, _ = PreTrainedConfig.get_config_dict(source.removeprefix(HUB), local_files_only=not hub)
        names = {int(number): str(name) for number, name in raw["id2label"].items()}
    except Exception:  # whatever is wrong with it is said when it is loaded
        return None
    ordered = tuple(names.get(number, "") for number in range(len(names)))
    return ordered if "" not in ordered and len(set(ordered)) == len(ordered) else None


def named_as_in_training(model: Any, classes: Sequence[str]) -> bool:
    """Give a model that is to be trained the classes of its data, where it names none of them; whether it did not.

    Its first outputs are then theirs, whatever they were before. Classes that are called by numbers name nothing.
    """
    names = {int(number): str(name) for number, name in (getattr(model.config, "id2label", None) or {}).items()}
    says_nothing = all(_NUMBER.fullmatch(name) for name in classes)
    if says_nothing or len(names) < len(classes) or set(names.values()) & set(classes):
        return False
    model.config.id2label = {number: f"LABEL_{number}" for number in names} | dict(enumerate(classes))
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    return True


def check_as_many_classes(source: str, retain_source: str) -> None:
    """Check that two saved classifiers can be compared, by their configurations; none is fetched from the hub for it.

    Raises:
        HamuError: if one has more classes than the other.
    """
    ours, theirs = map(_number_of_classes, (source, retain_source))
    if ours is not None and theirs is not None and ours != theirs:
        raise HamuError(
            f"the model {source} has {ours} classes, the retain model {retain_source} {theirs}; both need the same"
        )


def _number_of_classes(source: str) -> int | None:
    """None if the configuration is not here, or cannot be read."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(source.removeprefix(HUB), local_files_only=True)  # runs no code
        return len(raw["id2label"])
    except Exception:  # whatever is wrong with it is said when it is loaded
        return None


class NeedsCode(HamuError):
    """A model is defined by code that comes with it."""


def _config(where: str, source: str, settings: dict[str, bool]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(where, **settings)
    except ValueError as error:
        raw, _ = PreTrainedConfig.get_config_dict(where, local_files_only=settings["local_files_only"])
        if settings["trust_remote_code"] or "auto_map" not in raw:
            raise
        raise NeedsCode(
            f"the model {source} is defined by code that comes with it, which is not run; if you trust it, give "
            f"--trust_remote_code"
        ) from error


@contextmanager
def readable(what: str) -> Iterator[None]:
    """For whatever reads a model.

    Raises:
        HamuError: if that fails; it names what was to be loaded.
    """
    try:
        yield
    except HamuError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged or foreign model; the cause is kept
        raise HamuError(f"{what} cannot be loaded: {first_line(error)}") from error


def folder_of(source: str) -> Path:
    """Where a saved model lies; one of the hub that was loaded before lies in the hub's cache.

    Raises:
        HamuError: if it is of the hub and not in the cache.
    """
    if not is_of_hub(source):
        return Path(source)
    names = ("config.json", "adapter_config.json")
    settings = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    found = next(filter(None, (cached_file(source.removeprefix(HUB), name, **settings) for name in names)), None)
    if found is None:
        raise HamuError(f"the model {source} is not in the hub's cache; load it once first")
    return Path(found).parent


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a saved model: those of its adapter if it is one, one file, or the parts that an index names.

    Empty if there are none.
    """
    for name in ("adapter_model.safetensors", "model.safetensors"):
        if (folder / name).is_file():
            return [folder / name]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(parts))]


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter with a value that is not finite, None if there is none."""
    return next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)


def check_undamaged(model: nn.Module, source: str) -> None:
    """Check that every weight of a saved model is finite.

    Raises:
        HamuError: if one is not; the message names its parameter.
    """
    name = first_not_finite(model)
    if name is not None:
        raise HamuError(
            f"the model {source} has weights that are not finite, first in {name}; start from an undamaged copy"
        )


def check_fits(model: nn.Module, data: ImageData) -> None:
    """Check that the model can classify this data, in the end by trying one image.

    Raises:
        HamuError: if the model has no trainable parameter, channels, classes or image size do not fit.
    """
    trainable_parameters(model)
    config = getattr(model, "config", None)
    channels = getattr(config, "num_channels", None)
    if channels is not None and channels != data.pixels.shape[1]:
        raise HamuError(
            f"the model takes images with {channels} channels, those of {data.source} have {data.pixels.shape[1]}; "
            f"give --num_channels {channels} to convert them"
        )
    for name in ("image_mean", "image_std"):
        values = getattr(config, name, None)
        if values is not None and not _are_numbers(
            values, data.pixels.shape[1], above=0 if name == "image_std" else None
        ):
            raise HamuError(
                f"the model has {name} {values!r}; expected a number for each of {data.pixels.shape[1]} channels"
            )
    classes = getattr(config, "num_labels", None)
    highest = int(data.labels.max())
    if classes is not None and highest >= classes:
        raise HamuError(
            f"label {highest} of {data.source} is out of range: the model has {classes} classes (0 to {classes - 1}); "
            f"use the data it was trained on, or a model with at least {highest + 1} classes"
        )
    names = getattr(config, "id2label", None) or {}
    order = [str(names.get(number, "")) for number in range(len(data.classes))]
    if order != list(data.classes) and {str(name) for name in names.values()} & set(data.classes):
        raise HamuError(
            f"the model numbers the classes {', '.join(order[:4])}, ..., the data {', '.join(data.classes[:4])}, ...; "
            f"both need the same classes in the same order"
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
    """Check that the names of a model's classes are not all others than those of the data; numbers are no names."""
    if set(ours) & set(theirs) or not all(any(not _NUMBER.fullmatch(name) for name in one) for one in (ours, theirs)):
        return
    if {name.casefold() for name in ours} & {name.casefold() for name in theirs}:
        raise HamuError(
            f"the model writes its classes {', '.join(ours[:4])}, ..., the data {', '.join(theirs[:4])}, ...; they "
            f"differ in upper and lower case: write them alike"
        )
    raise HamuError(
        f"the model has the classes {', '.join(ours[:4])}, ..., the data {', '.join(theirs[:4])}, ..., and no name is "
        f"the same, so that it is not known which is which; name them alike"
    )


def _are_numbers(values: Any, many: int, above: float | None) -> bool:
    """Whether there are so many, finite and above a limit."""
    return (
        isinstance(values, list | tuple)
        and len(values) == many
        and all(
            isinstance(one, int | float) and math.isfinite(one) and (above is None or one > above) for one in values
        )
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
