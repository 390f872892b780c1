"""Sizes of models and of runs; of a language model from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hamu.core.forward import evaluating, predict_logits
from hamu.errors import reading
from hamu.files import is_of_hub
from hamu.models.language import (
    FOUR_BIT,
    AdapterSettings,
    base_of,
    check_dtype,
    longest_text,
    place_of,
    stored_in,
    with_adapter,
)
from hamu.models.storage import refuse_encoder

# Published shapes of models that recipes name: a plan needs no look at the hub.
KNOWN = {
    "hub:meta-llama/Llama-2-7b-chat-hf": lambda: LlamaConfig(
        max_position_embeddings=4096  # all else is the default of transformers
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters and dimensions of a model."""

    parameters: int
    trainable: int
    layers: int
    hidden: int
    vocabulary: int
    longest: int | None  # see `longest_text`
    frozen_bytes: int  # what is trained is float32 if it is an adapter


def model_shape(
    source: str,
    adapter: AdapterSettings | None,
    dtype: str,
    *,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Return the shape that `load_language_model` would load, from the configuration alone."""
    from peft import PeftConfig, get_peft_model

    base = None if source in KNOWN else base_of(source, base_model)
    whole, trusted = base or source, {"trust_remote_code": trust_remote_code}
    with (
        reading(f"a language model after the configuration of {whole} cannot be loaded"),
        torch.device("meta"),
    ):
        config: Any = KNOWN[whole]() if whole in KNOWN else None
        config = config or AutoConfig.from_pretrained(
            place_of(whole), local_files_only=not is_of_hub(whole), **trusted
        )
        refuse_encoder(config, whole)
        model: Any = AutoModelForCausalLM.from_config(config, **trusted)
        if base is not None:
            form: Any = PeftConfig.from_pretrained(place_of(source))
            form.inference_mode = False
            if hasattr(form, "init_lora_weights"):
                form.init_lora_weights = True  # other ways need the weights
            model = get_peft_model(model, form)
        elif adapter is not None:
            model = with_adapter(model, adapter)
    return shape_of(model, dtype)


def shape_of(model: Any, dtype: str = "float32") -> ModelShape:
    """Return the shape of a language model, with its adapter if it has one."""
    check_dtype(dtype)
    own = stored_in(dtype) if dtype != "auto" else model.config.dtype or torch.float32
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad) * own.itemsize
    if dtype == FOUR_BIT:  # half a byte, and a float32 scale for each 64 weights
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        packed = sum(m.weight.numel() for m in linear if not m.weight.requires_grad)
        frozen -= round(packed * (own.itemsize - 0.5 - 4 / 64))
    text = model.config.get_text_config()  # a model for images and text has one inside
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        longest=longest_text(model),
        frozen_bytes=frozen,
    )


def estimate_memory(
    shape: ModelShape, *, tokens: int, checkpointing: bool, **copies: Any
) -> dict[str, float]:
    """Estimate the memory of a run in GB (1e9 bytes), from above where it cannot be known.

    `tokens` are those of a forward pass, `copies` as in `memory_of_weights`. Activations after
    Korthikanti et al. 2022: 34 bytes per token, layer and unit of width in half precision.
    """
    per_layer = 34 * tokens * shape.hidden
    activations = per_layer * shape.layers
    if checkpointing:
        activations = 2 * tokens * shape.hidden * shape.layers + per_layer
    return memory_of_weights(4 * shape.trainable, shape.frozen_bytes, **copies) | {
        "activations": activations / 1e9,
        "logits": 10 * tokens * shape.vocabulary / 1e9,
    }


def memory_of_weights(
    trained: int, frozen: int, *, optimizer: str, sides: int, keeps_original: bool
) -> dict[str, float]:
    """Estimate the memory of all but activations in GB, from the bytes of the weights.

    `optimizer` is transformers' name of it, `sides` 2 for a method that needs both gradients.
    """
    found = {
        "weights": frozen + trained,
        "gradients": sides * trained,
        "optimizer state": (2 if "adam" in optimizer else 0) * trained,
        "original model": trained if keeps_original else 0,
    }
    return {name: value / 1e9 for name, value in found.items()}


def kept_for_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Count the bytes of activations that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with evaluating(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = predict_logits(model, batch)  # held until all is counted, or memory is reused
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    del logits
    return sum(size for place, size in kept.items() if place not in weights)
