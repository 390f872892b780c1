"""Saved models of any kind: where they lie, how they are loaded, what is checked of each.

A model is a folder written by `save_pretrained`, or "hub:OWNER/NAME". Only the latter may use the
network. Code that comes with a model runs only where `trust_remote_code` is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from hamu.data.sources import HUB, is_of_hub, reading
from hamu.errors import HamuError
from hamu.files import CHECKPOINT, MODEL

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
CONFIGS = (CONFIG, ADAPTER_CONFIG)  # a saved model has one of them
_COMPUTED = re.compile(  # tensors of older versions that are no weights: masks, positions, angles
    r"(^|\.)((attn|attn\.attention)\.(masked_)?bias|causal_mask|position_ids|inv_freq"
    r"|(cos|sin)_cached|embed_positions\.weights)$"
)


def check_is_saved(source: str, configs: Sequence[str] = CONFIGS) -> None:
    """Check that a folder has one of the configs of a model; those of the hub are not looked for.

    For the folder of a run the error names its model or newest checkpoint.
    """
    folder = Path(source)
    if is_of_hub(source) or any((folder / name).is_file() for name in configs):
        return
    if any((folder / MODEL / name).is_file() for name in CONFIGS):
        raise HamuError(f"{source} is the folder of a run; its model is {folder / MODEL}")
    steps = [path.name.removeprefix(CHECKPOINT) for path in folder.glob(f"{CHECKPOINT}*")]
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    if newest is not None:
        raise HamuError(
            f"{source} is the folder of a run that has no model yet: resume it, or give its "
            f"newest checkpoint, {folder / CHECKPOINT}{newest}"
        )
    raise HamuError(
        f"{source} is not a saved model: it has no {' or '.join(configs)}; give a folder written "
        f"by save_pretrained (or by `hamu train`), or hub:OWNER/NAME"
    )


class NeedsCode(HamuError):
    """A model is defined by code that comes with it."""


def from_pretrained(
    kind: Any, source: str, *, dtype: Any, trust_remote_code: bool = False, all_of_it: bool = False
) -> Any:
    """Load a whole saved model of one of transformers' Auto classes, from safetensors alone.

    `all_of_it` refuses weights for which this kind has no place, such as an encoder or the head of
    another task. It is an error if a weight is missing, which would be drawn at random, or has
    another shape than config.json says.
    """
    is_local, where = not is_of_hub(source), source.removeprefix(HUB)
    settings = {"local_files_only": is_local, "trust_remote_code": trust_remote_code}
    with reading(f"the model {source} cannot be loaded"):
        if is_local and not weight_files(Path(source)):
            raise HamuError(
                f"the model {source} has no weights in safetensors, and a pickle, which can run "
                f"code, is not read; save it again with save_pretrained"
            )
        config = _config(where, source, settings)
        attention = str(getattr(config, "_attn_implementation", None))
        if "/" in attention:  # kernels that transformers would fetch without being asked
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
            ignore_mismatched_sizes=True,  # else transformers names them in its log alone
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
    lost = [name for name in found["unexpected_keys"] if not _COMPUTED.search(name)]
    if all_of_it and lost:
        raise HamuError(
            f"the model {source} has {min(lost)}, for which a {type(model).__name__} has no "
            f"place, and which would be lost; it is of another kind than its config.json says"
        )
    return model


def refuse_encoder(config: Any, source: str) -> None:
    """Refuse the configuration of a decoder with an encoder, which would be lost."""
    if getattr(config, "is_encoder_decoder", False):
        raise HamuError(
            f"the model {source} is of type {config.model_type}, a decoder with an encoder, which "
            f"would be lost; give a causal language model"
        )


def _config(where: str, source: str, settings: dict[str, bool]) -> Any:
    try:
        return AutoConfig.from_pretrained(where, **settings)
    except ValueError as error:
        raw = config_of(source)
        if settings["trust_remote_code"] or "auto_map" not in raw:
            raise
        raise NeedsCode(
            f"the model {source} is defined by code that comes with it, which is not run; if you "
            f"trust it, give --trust_remote_code"
        ) from error


def config_of(source: str, *, local: bool = False) -> dict[str, Any]:
    """Read config.json as it is, which runs no code; `local` keeps to the cache of the hub."""
    raw, _ = PreTrainedConfig.get_config_dict(
        source.removeprefix(HUB), local_files_only=local or not is_of_hub(source)
    )
    return raw


def folder_of(source: str) -> Path:
    """Return the folder of a saved model; one of the hub must be in the hub's cache."""
    if not is_of_hub(source):
        return Path(source)
    settings = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    found = (cached_file(source.removeprefix(HUB), name, **settings) for name in CONFIGS)
    path = next(filter(None, found), None)
    if path is None:
        raise HamuError(f"the model {source} is not in the hub's cache; load it once first")
    return Path(path).parent


def is_adapter(folder: str | Path) -> bool:
    """Return True if a folder holds a saved adapter, not a whole model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors of a saved model: of its adapter, one file, or an index's parts."""
    for name in (ADAPTER_WEIGHTS, "model.safetensors"):
        if (folder / name).is_file():
            return [folder / name]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(parts))]


def first_not_finite(model: nn.Module) -> str | None:
    """Name the first parameter or BatchNorm statistic that is not finite; None if all are."""
    statistics = (item for item in model.named_buffers() if "running_" in item[0])
    values = chain(model.named_parameters(), statistics)
    return next((name for name, value in values if not torch.isfinite(value).all()), None)


def check_undamaged(model: nn.Module, source: str) -> None:
    """Check that every weight of a saved model is finite."""
    name = first_not_finite(model)
    if name is not None:
        raise HamuError(
            f"the model {source} has weights that are not finite, first in {name}; it is damaged"
        )
