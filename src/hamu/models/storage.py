"""Saved models: folders written by `save_pretrained`, or "hub:OWNER/NAME", which alone may use the
network. Code that comes with a model runs only where `trust_remote_code` is given.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from hamu.core.distributed import is_main, is_sharded
from hamu.errors import HamuError, reading
from hamu.files import HUB, MODEL, check_is_not_here, is_of_hub, parse_json

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
CONFIGS = (CONFIG, ADAPTER_CONFIG)  # a saved model has one of them
# of a model: True if its adapter's file had them; and its own setting, off while it is here
SAVES_EMBEDDINGS, USED_CACHE = "_hamu_saves_embeddings", "_hamu_used_cache"
NO_SAFETENSORS = (
    "has no weights in safetensors, and no other file is read, for a pickle can run code; save it "
    "again with save_pretrained"
)
_COMPUTED = re.compile(  # tensors of older versions that are no weights: masks, positions, angles
    r"(^|\.)((attn|attn\.attention)\.(masked_)?bias|causal_mask|position_ids|inv_freq"
    r"|(cos|sin)_cached|embed_positions\.weights)$"
)
_REST, _WEIGHTS = "rest.safetensors", "*.safetensors"


class NeedsCode(HamuError):
    """A model is defined by code that comes with it."""


def check_is_saved(source: str, configs: Sequence[str] = CONFIGS) -> None:
    """Check that a local folder has one of the configs of a model, and that a hub's is not here."""
    if is_of_hub(source):
        check_is_not_here(source.removeprefix(HUB), source)
    elif not any((Path(source) / name).is_file() for name in configs):
        raise HamuError(
            f"{source} is not a saved model: it has no {' or '.join(configs)}; give a folder "
            f"written by save_pretrained (or {MODEL} in the folder of a run), or hub:OWNER/NAME; a "
            f"run is resumed where it was started"
        )


def from_pretrained(
    kind: Any,
    source: str,
    *,
    dtype: Any,
    trust_remote_code: bool = False,
    all_of_it: bool = False,
    **more: Any,
) -> Any:
    """Load a whole saved model of one of transformers' Auto classes, from safetensors alone.

    No weight may be missing, or have another shape than config.json says. `all_of_it` refuses
    weights for which this kind has no place. `more` goes to transformers.
    """
    is_local, where = not is_of_hub(source), source.removeprefix(HUB)
    settings = {"local_files_only": is_local, "trust_remote_code": trust_remote_code}
    with reading(f"the model {source} cannot be loaded"):
        if is_local and not weight_files(Path(source)):
            raise HamuError(f"the model {source} {NO_SAFETENSORS}")
        config = _config(where, source, settings)
        attention = str(getattr(config, "_attn_implementation", None))
        if "/" in attention:  # kernels that transformers would fetch without being asked
            raise HamuError(
                f"the model {source} asks for code of the hub, {attention}, which is not run; "
                f"take attn_implementation out of its config.json"
            )
        if all_of_it:
            refuse_encoder(config, source)
        if type(config) not in kind._model_mapping and not trust_remote_code:
            raise HamuError(
                f"the model {source} is of type {config.model_type}, which is no "
                f"{kind.__name__.removeprefix('AutoModelFor')}: texts need a causal language "
                f"model, images an image classifier"
            )
        model, found = kind.from_pretrained(
            where,
            config=config,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else transformers names them in its log alone
            **settings,
            **more,
        )
    lost = [name for name in found["unexpected_keys"] if all_of_it and not _COMPUTED.search(name)]
    for fault, names in (
        ("has another shape of", [name for name, *_ in found["mismatched_keys"]]),
        ("lacks", found["missing_keys"]),
        (f"has, though a {type(model).__name__} has no place for it,", lost),
    ):
        if names:
            raise HamuError(
                f"the model {source} {fault} {min(names)}: its weights and its config.json do not "
                f"belong together; start from a whole copy"
            )
    return model


def refuse_encoder(config: Any, source: str) -> None:
    """Refuse the configuration of a decoder with an encoder, which would be lost."""
    if getattr(config, "is_encoder_decoder", False):
        raise HamuError(
            f"the model {source} is of type {getattr(config, 'model_type', type(config).__name__)} "
            f"and would lose its encoder; give a causal language model"
        )


def _config(where: str, source: str, settings: dict[str, bool]) -> Any:
    try:
        return AutoConfig.from_pretrained(where, **settings)
    except ValueError as error:
        if settings["trust_remote_code"] or "auto_map" not in config_of(source):
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
    with reading(f"the model {source} is not in the hub's cache; load it once first"):
        return Path(snapshot_download(source.removeprefix(HUB), local_files_only=True))


def is_adapter(folder: str | Path) -> bool:
    """Return True if a folder holds a saved adapter, not a whole model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors of a saved model: of its adapter, one file, or an index's parts."""
    one = folder / (ADAPTER_WEIGHTS if is_adapter(folder) else "model.safetensors")
    if one.is_file():
        return [one]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    parts = parse_json(index)["weight_map"].values()
    return [folder / name for name in sorted(set(parts))]


def first_not_finite(model: nn.Module) -> str | None:
    """Name the first parameter or BatchNorm statistic that is not finite; None if all are."""
    statistics = (item for item in model.named_buffers() if "running_" in item[0])
    values = chain(model.named_parameters(), statistics)
    return next((name for name, value in values if not torch.isfinite(value).all()), None)


def check_undamaged(model: nn.Module, source: str) -> None:
    """Check that every weight of a loaded model is finite."""
    name = first_not_finite(model)
    if name is not None:
        raise HamuError(
            f"the model {source} has weights that are not finite, first in {name}; it is damaged"
        )


def save_model(model: Any, folder: Path) -> None:
    """Write a model so that `from_pretrained` reads it; all processes must call it."""
    is_adapted, embeddings = hasattr(model, "peft_config"), getattr(model, SAVES_EMBEDDINGS, False)
    state = _whole_state(model, _names_of_adapter(model, embeddings) if is_adapted else None)
    if not is_main():
        return
    if not hasattr(model, "save_pretrained"):
        _save(state or model.state_dict(), folder / "model.safetensors")
        return
    # not "auto": PEFT would ask the hub whether the base model's embeddings have changed
    more = {"save_embedding_layers": embeddings} if is_adapted else {}
    has_own = getattr(model, USED_CACHE, None) is not None
    if has_own:
        model.config.use_cache = getattr(model, USED_CACHE)
    model.save_pretrained(folder, safe_serialization=True, state_dict=state, **more)
    if has_own:
        model.config.use_cache = False
    for path in folder.glob(_WEIGHTS):
        _open_as_folder(path)


def save_rest(model: Any, folder: Path) -> None:
    """Write what a run changes and `save_model` left out or renamed; all processes must call it."""
    own = _own(model)
    state = _whole_state(model, own) or own
    if is_main():
        saved = open_tensors(folder.glob(_WEIGHTS))
        rest = {name: state[name] for name in own.keys() - saved.keys()}
        if rest:
            _save(rest, folder / _REST)


@torch.no_grad()
def load_tensors(model: Any, folder: Path) -> None:
    """Put what `save_model` and `save_rest` wrote into a model, whole or sharded, bit by bit."""
    saved = open_tensors(folder.glob(_WEIGHTS))
    for name, own in _own(model).items():
        value = saved[name].get_tensor(name) if name in saved else None
        if value is None or value.shape != own.shape:
            raise HamuError(
                f"{folder} has no {name} of the shape {tuple(own.shape)}; resume with the model "
                f"that the run was started with"
            )
        if hasattr(own, "device_mesh"):
            from hamu.core.distributed.sharded import shard_like

            value = shard_like(value, own)
        own.copy_(value)


def open_tensors(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the open file of each tensor in safetensors, by its name."""
    opened = [safe_open(path, framework="pt") for path in paths]
    return {name: file for file in opened for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Return what a run changes: trainable parameters, and the buffers that a model saves."""
    saved = model.state_dict(keep_vars=True)  # of a sharded model: its shards
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in saved.items() if name in trainable | buffers}


def _names_of_adapter(model: Any, embeddings: bool) -> set[str]:
    names = {*_own(model)}
    if embeddings:
        ends = _ends(model)
        inside = tuple(f"{name}." for name, one in model.named_modules() if one in ends)
        names |= {name for name in model.state_dict() if name.startswith(inside)}
    return names


def _whole_state(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor] | None:
    """Gather a sharded model's tensors; None for other models."""
    if not is_sharded(model):
        return None
    from hamu.core.distributed.sharded import whole_state  # loads what only sharded models need

    return whole_state(model, names)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors; safetensors refuses those that share memory."""
    apart = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(apart, path)
    _open_as_folder(path)


def _open_as_folder(path: Path) -> None:
    """Let those read weights who may read their folder; safetensors writes for the owner alone."""
    mode, meant = (one.stat().st_mode & 0o666 for one in (path, path.parent))
    if meant & ~mode:
        path.chmod(mode | meant)


def merged(model: Any) -> Any:
    """Merge a PeftModel's adapter into its model, which it uses up.

    In float32, as half precision would round small updates away; of 4 bits the weights that they
    stand for. A HamuError is raised for other kinds of adapters, or if the memory fails.
    """
    remedy = "; what else the run leaves is complete"
    with reading("the adapter cannot be merged into its model", remedy):
        model = _dequantized(model).float()
        ends = _ends(model)
        first, last = map(_inner, ends)
        shared = None not in (first, last) and first.weight is last.weight
        if shared and (first, last) != ends:  # what is put into the one would be in the other too
            last.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=False)
        whole = model.merge_and_unload()
        if shared:
            first, last = _ends(whole)
            whole.config.tie_word_embeddings = first.weight is last.weight  # loading goes by it
        with torch.device("meta"):
            loaded = type(whole)(whole.config)
        made, meant = ({(n, t.shape) for n, t in m.state_dict().items()} for m in (whole, loaded))
        if made != meant:
            name, shape = min(made ^ meant)
            raise ValueError(f"{name} {tuple(shape)} does not fit the model's configuration")
    return whole


def _dequantized(model: Any) -> Any:
    """Put the adapter of a PeftModel in 4 bits on the weights that these stand for."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return model
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    state, config = get_peft_model_state_dict(model), model.peft_config["default"]
    packed = model.unload()
    kinds = {name: getattr(layer, "source_cls", None) for name, layer in packed.named_modules()}
    plain = packed.dequantize()
    plain._weight_conversions = None  # of a base saved in 4 bits: how to unpack, with no way back
    for name in [name for name, kind in kinds.items() if kind is Conv1D]:  # packed transposed
        linear = plain.get_submodule(name)
        layer = Conv1D(linear.out_features, linear.in_features)
        layer.weight, layer.bias = nn.Parameter(linear.weight.T.contiguous()), linear.bias
        plain.set_submodule(name, layer)
    # PEFT warns of another name, and of layers that are no Linear
    plain.name_or_path = config.base_model_name_or_path
    config.fan_in_fan_out = Conv1D in kinds.values()
    whole = get_peft_model(plain, config)
    set_peft_model_state_dict(whole, state)
    return whole


def _ends(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _inner(module: Any) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return module.get_base_layer()
    return module.original_module if isinstance(module, ModulesToSaveWrapper) else module
