"""Loading saved models of any kind, and what is asked of every one.

A model is a folder written by `save_pretrained`, or "hub:OWNER/NAME". Only the latter may use the
network. Code that comes with a model runs only where `trust_remote_code` is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from hamu.data.sources import HUB, is_of_hub
from hamu.errors import HamuError, first_line

# beside the weights of a whole model, of an adapter
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_MODEL, _CHECKPOINT = "model", "checkpoint-"  # in the folder of a run
CONFIGS = (CONFIG, ADAPTER_CONFIG)  # a saved model has one of them
_STATISTICS = ("running_mean", "running_var")
_COMPUTED = re.compile(  # tensors of older versions that are no weights: masks, positions, angles
    r"(^|\.)((attn|attn\.attention)\.(masked_)?bias|causal_mask|position_ids|inv_freq|(cos|sin)_cached"
    r"|embed_positions\.weights)$"
)


def check_is_saved(source: str, configs: Sequence[str] = CONFIGS) -> None:
    """Check that a model is where it is said to be; those of the hub are not looked for.

    Args:
        source: a folder, or "hub:OWNER/NAME".
        configs: files of which the folder must have one.

    Raises:
        HamuError: if it is not there. For the folder of a run the message names the model's folder
            below it.
    """
    if is_of_hub(source) or any((Path(source) / name).is_file() for name in configs):
        return
    _check_no_run(source)
    raise HamuError(
        f"{source} is not a saved model: it has no {' or '.join(configs)}; give a folder written "
        f"by save_pretrained (or by `hamu train`), or write hub:OWNER/NAME for a model of the "
        f"Hugging Face hub"
    )


def _check_no_run(source: str) -> None:
    """Check that a folder without a model is not that of a run, which has its model in a folder
    below.

    Raises:
        HamuError: if it is; the message says where that is, or its newest checkpoint.
    """
    model = Path(source) / _MODEL
    if any((model / name).is_file() for name in CONFIGS):
        raise HamuError(f"{source} is the folder of a run; its model is {model}")
    checkpoints = [
        path
        for path in Path(source).glob(f"{_CHECKPOINT}*")
        if path.name[len(_CHECKPOINT) :].isdecimal()
    ]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: int(path.name[len(_CHECKPOINT) :]))
        raise HamuError(
            f"{source} is the folder of a run that has no model yet: resume it, or give its "
            f"newest checkpoint, {newest}"
        )


class NeedsCode(HamuError):
    """A model is defined by code that comes with it."""


def from_pretrained(
    kind: Any, source: str, *, dtype: Any, trust_remote_code: bool = False, all_of_it: bool = False
) -> Any:
    """A whole saved model of a kind, from safetensors alone.

    Args:
        kind: one of transformers' Auto classes.
        source: a folder, or "hub:OWNER/NAME".
        dtype: of its weights.
        trust_remote_code: run the code that comes with it; that can do anything.
        all_of_it: refuse what this kind has no place for, such as an encoder or the head of another
            task.

    Raises:
        HamuError: if it cannot be loaded, lacks a weight, which would be drawn at random, or has
            one of another shape than its config.json says.
    """
    is_local = not is_of_hub(source)
    with reading(f"the model {source}"):
        if is_local and not weight_files(Path(source)):
            raise HamuError(
                f"the model {source} has no weights in safetensors, and no other file is read, "
                f"for a pickle can run code; save it again with save_pretrained"
            )
        where = source.removeprefix(HUB)
        settings = {"local_files_only": is_local, "trust_remote_code": trust_remote_code}
        config = _config(where, source, settings)
        attention = str(getattr(config, "_attn_implementation", None))
        if "/" in attention:  # kernels that transformers would fetch whatever was asked of it
            raise HamuError(
                f"the model {source} asks for code of the hub, {attention}, which is not run; "
                f"take attn_implementation out of its config.json"
            )
        if all_of_it:
            refuse_encoder(config, source)
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
            f"the model {source} has {name} as {tuple(saved)}, by its config.json it is "
            f"{tuple(wanted)}; put back the config.json that the weights were saved with"
        )
    if found["missing_keys"]:
        raise HamuError(
            f"the model {source} lacks {min(found['missing_keys'])}; start from a whole copy"
        )
    lost = _without_place(model, source, found["unexpected_keys"]) if all_of_it else set()
    if lost:
        raise HamuError(
            f"the model {source} has {min(lost)}, for which a {type(model).__name__} has no "
            f"place, and which would be lost; it is of another kind, or its config.json is of "
            f"another model"
        )
    return model


def refuse_encoder(config: Any, source: str) -> None:
    """Refuse a model that would be a decoder without its encoder.

    Args:
        config: of the model.
        source: the name it was given by.

    Raises:
        HamuError: if it has an encoder beside its decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise HamuError(
            f"the model {source} is of type {config.model_type}, a decoder with an encoder, which "
            f"would be lost; give a causal language model"
        )


def _without_place(model: Any, source: str, unexpected: Collection[str]) -> set[str]:
    """Names of weights that a saved model has and the loaded one has not.

    Args:
        model: as loaded.
        source: a folder, or "hub:OWNER/NAME".
        unexpected: what transformers says that it had no place for.
    """
    lost = {name for name in unexpected if not _COMPUTED.search(name)}
    if (
        getattr(model.config, "quantization_config", None) is not None
    ):  # scales beside weights that are there
        modules = {name for name, _ in model.named_modules()}
        lost = {name for name in lost if name.rpartition(".")[0] not in modules}
    # layers that predict further tokens (mtp) may go; the part that sees may not, though some
    # classes leave it out unsaid
    text = model.config.get_text_config()
    further = range(getattr(text, "num_nextn_predict_layers", None) or 0)
    beyond = tuple(f"model.layers.{text.num_hidden_layers + i}." for i in further)
    lost = {name for name in lost if not name.startswith(beyond)} if beyond else lost
    unsaid = [
        pattern for pattern in model._keys_to_ignore_on_load_unexpected or () if "visual" in pattern
    ]
    if unsaid:
        for path in weight_files(folder_of(source)):
            with safe_open(path, framework="pt") as file:
                lost |= {
                    name
                    for name in set(file.keys())
                    if any(re.search(pattern, name) for pattern in unsaid)
                }
    return lost


def _config(where: str, source: str, settings: dict[str, bool]) -> Any:
    try:
        return AutoConfig.from_pretrained(where, **settings)
    except ValueError as error:
        raw, _ = PreTrainedConfig.get_config_dict(
            where, local_files_only=settings["local_files_only"]
        )
        if settings["trust_remote_code"] or "auto_map" not in raw:
            raise
        raise NeedsCode(
            f"the model {source} is defined by code that comes with it, which is not run; if you "
            f"trust it, give --trust_remote_code"
        ) from error


@contextmanager
def reading(what: str) -> Iterator[None]:
    """For whatever reads a model.

    Raises:
        HamuError: if that fails; it names what was to be loaded.
    """
    try:
        yield
    except HamuError:
        raise
    except (
        Exception
    ) as error:  # transformers raises many kinds for a damaged or foreign model; the cause is kept
        raise HamuError(f"{what} cannot be loaded: {first_line(error)}") from error


def folder_of(source: str) -> Path:
    """Where a saved model lies; one of the hub that was loaded before lies in the hub's cache.

    Raises:
        HamuError: if it is of the hub and not in the cache.
    """
    if not is_of_hub(source):
        return Path(source)
    settings = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    found = next(
        filter(None, (cached_file(source.removeprefix(HUB), name, **settings) for name in CONFIGS)),
        None,
    )
    if found is None:
        raise HamuError(f"the model {source} is not in the hub's cache; load it once first")
    return Path(found).parent


def is_adapter(folder: str | Path) -> bool:
    """True if a folder holds a saved adapter, not a whole model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a saved model: those of its adapter if it is one, one file, or the parts
    that an index names.

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
    """Name the first parameter or BatchNorm statistic that is not finite; None if all are."""
    statistics = ((name, b) for name, b in model.named_buffers() if name.endswith(_STATISTICS))
    values = chain(model.named_parameters(), statistics)
    return next((name for name, value in values if not torch.isfinite(value).all()), None)


def check_undamaged(model: nn.Module, source: str) -> None:
    """Check that every weight of a saved model is finite.

    Raises:
        HamuError: if one is not; the message names its parameter.
    """
    name = first_not_finite(model)
    if name is not None:
        raise HamuError(
            f"the model {source} has weights that are not finite, first in {name}; start from an "
            f"undamaged copy"
        )
