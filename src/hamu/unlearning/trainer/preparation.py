"""What is done to a model before it trains: moved or sharded, put in the memory order that suits, made to recompute."""

from __future__ import annotations

import torch
from torch import nn

from hamu.core.distributed import DataParallelLayout, SplitPairing, world_size
from hamu.core.methods import Method
from hamu.core.pair import PairedGradients
from hamu.errors import HamuError
from hamu.unlearning.trainer.config import UnlearnConfig, checkpoints_activations


def prepare_model(model: nn.Module, args: UnlearnConfig) -> None:
    """Bring a model to where it will be unlearned, before anything is made that lives where its parameters do.

    Raises:
        HamuError: if activations are to be recomputed, and the model cannot.
    """
    if args.shard:
        from hamu.core.distributed.sharded import shard  # loads what only sharded models need

        shard(model, args.device.type)
    elif not hasattr(model, "hf_device_map"):
        model.to(args.device)
    if args.channels_last and not args.shard:  # shards have the usual order
        to_channels_last(model)
    if checkpoints_activations(args):
        let_gradients_through(model)


def new_pair(model: nn.Module, method: Method, args: UnlearnConfig) -> PairedGradients:
    """The two gradients of a model that has been prepared."""
    pair = PairedGradients(
        model,
        method,
        blocks=args.blocks,
        max_grad_norm=args.clip_norm,
        offload_grads=args.offload_grads,
    )
    if args.pairing == "split":
        pair.use(SplitPairing(pair.parameters, pair.block_of))
    elif world_size() > 1 and not args.shard:
        pair.use(DataParallelLayout(pair.parameters, pair.block_of))
    return pair


def to_channels_last(model: nn.Module) -> None:
    """Put two-dimensional convolutions in channels-last order; a model with higher dimensions stays as it is."""
    if all(p.dim() <= 4 for p in model.parameters()):
        model.to(memory_format=torch.channels_last)


def let_gradients_through(model: nn.Module) -> None:
    """With an adapter, let gradients pass checkpointed layers: else they end at the frozen embeddings, silently.

    Raises:
        HamuError: if the model has no layers that can be checkpointed.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise HamuError(
            f"{type(model).__name__} cannot recompute activations; leave out --gradient_checkpointing"
        )
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
