"""The size of a model and of a run with it; of a language model from its configuration alone, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from hamu.core.forward import evaluating, predict_logits
from hamu.data.sources import HUB, is_of_hub
from hamu.errors import HamuError
from hamu.models.language import AdapterSettings, base_of, longest_text, with_adapter
from hamu.models.loading import reading, refuse_encoder

# Published shapes of models that recipes name, so that a plan can be made without reaching for the hub.
KNOWN = {
    "hub:meta-llama/Llama-2-7b-chat-hf": lambda: LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
    ),
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Parameters and dimensions of a model.

    Attributes:
        parameters: all of them.
        trainable: those that would be trained.
        layers, hidden, vocabulary: dimensions.
        longest: the most tokens that the model can read at once, None if it does not say.
        bytes_per_parameter: of the frozen ones; what is trained is float32 if it is an adapter.
    """

    parameters: int
    trainable: int
    layers: int
    hidden: int
    vocabulary: int
    longest: int | None
    bytes_per_parameter: int


def model_shape(
    source: str,
    adapter: AdapterSettings | None,
    dtype: str,
    *,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """The shape of a model that need not be there.

    Args:
        source: a folder with config.json or adapter_config.json, or a hub name (looked up only if its shape is not
            known here).
        adapter: a new adapter to count, or None to train everything. A saved adapter stays the only one.
        dtype: "float32", "bfloat16", "float16", or "auto" for that of the configuration.
        base_model: where a saved adapter's base model lies, if not where the adapter says.
        trust_remote_code: run the code that comes with the model; that can do anything.

    Raises:
        HamuError: if the configuration cannot be read, or is of another kind of model.
    """
    base_of_adapter = None if source in KNOWN else base_of(source, base_model)
    whole = base_of_adapter or source
    config = _configuration(whole, trust_remote_code)
    refuse_encoder(config, whole)
    with reading(f"a language model after the configuration of {whole}"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        if base_of_adapter is not None:
            model = _like_saved(model, source)
        elif adapter is not None:
            model = with_adapter(model, adapter)
    return shape_of(model, dtype)


def shape_of(model: Any, dtype: str = "float32") -> ModelShape:
    """The shape of a language model that is there, if only without memory.

    Args:
        model: the adapter, if it is to have one, included.
        dtype: see `model_shape`.

    Raises:
        HamuError: if the dtype is unknown.
    """
    name = (
        str(model.config.dtype or torch.float32).removeprefix("torch.")
        if dtype == "auto"
        else dtype
    )
    if name not in _BYTES:
        raise HamuError(
            f"model_dtype {name!r} is unknown; choose one of {', '.join((*_BYTES, 'auto'))}"
        )
    text = model.config.get_text_config()  # a model for images and text has one inside
    return ModelShape(
        parameters=_count(model),
        trainable=_count(model, only_trainable=True),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        longest=longest_text(model),
        bytes_per_parameter=_BYTES[name],
    )


def estimate_memory(
    shape: ModelShape,
    *,
    tokens: int,
    optimizer: str,
    sides: int,
    keeps_original: bool,
    checkpointing: bool,
) -> dict[str, float]:
    """Where the memory of a run goes, in GB (1e9 bytes); what cannot be known beforehand is an upper estimate.

    Args:
        shape: the model.
        tokens: tokens in one forward pass: records times their length.
        optimizer: transformers' name of it.
        sides: 2 for a method that needs both gradients.
        keeps_original: whether a method compares with the original model, which costs a copy of what is trained.
        checkpointing: whether activations are recomputed.

    Returns:
        weights, gradients, optimizer state, original model, activations, logits; activations after Korthikanti
        et al. 2022 (34 bytes per token, layer and unit of width in half precision, without attention scores).
    """
    per_layer = 34 * tokens * shape.hidden
    activations = (
        2 * tokens * shape.hidden * shape.layers + per_layer
        if checkpointing
        else per_layer * shape.layers
    )
    frozen = (shape.parameters - shape.trainable) * shape.bytes_per_parameter
    return memory_of_weights(
        4 * shape.trainable, frozen, optimizer=optimizer, sides=sides, keeps_original=keeps_original
    ) | {"activations": activations / 1e9, "logits": 10 * tokens * shape.vocabulary / 1e9}


def memory_of_weights(
    trained: int, frozen: int, *, optimizer: str, sides: int, keeps_original: bool
) -> dict[str, float]:
    """What the weights of a run take, in GB (1e9 bytes), whatever its batches: the first four of `estimate_memory`.

    Args:
        trained, frozen: bytes of the weights that are trained, and of the others.
        optimizer, sides, keeps_original: see `estimate_memory`.
    """
    found = {
        "weights": frozen + trained,
        "gradients": sides * trained,
        "optimizer state": (2 if "adam" in optimizer else 0) * trained,
        "original model": trained if keeps_original else 0,
    }
    return {name: value / 1e9 for name, value in found.items()}


def kept_for_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, beside the weights: its activations."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with evaluating(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = predict_logits(
            model, batch
        )  # held until all is counted, or memory would be used twice
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    del logits
    return sum(size for place, size in kept.items() if place not in weights)


def _like_saved(model: nn.Module, source: str) -> Any:
    """The model with an adapter of the form of a saved one, to be trained."""
    from peft import PeftConfig, get_peft_model

    where = source.removeprefix(HUB) if is_of_hub(source) else str(Path(source).resolve())
    with reading(f"the adapter {source}"):
        config: Any = PeftConfig.from_pretrained(where)
        config.inference_mode = False
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # other ways need the weights
        return get_peft_model(model, config)


def _configuration(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    if source in KNOWN:
        return KNOWN[source]()
    with reading(f"the configuration of {source}"):
        return AutoConfig.from_pretrained(
            source.removeprefix(HUB),
            local_files_only=not is_of_hub(source),
            trust_remote_code=trust_remote_code,
        )


def _count(model: nn.Module, only_trainable: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trainable)
