"""Causal mask check: no prediction may depend on later tokens, for labels are shifted by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hamu.core.forward import evaluating, predict_logits, without_autocast
from hamu.errors import HamuError


def check_causal_mask(model: nn.Module, inputs: Mapping[str, Tensor], place: int) -> None:
    """Check that the predictions before a token do not depend on it.

    Args:
        model: its own mode and precision are left as they are.
        inputs: two records, [2, T], which differ only in the token at `place`.
        place: counted from 0.

    Raises:
        HamuError: if they do.
    """
    with torch.no_grad(), evaluating(model), without_autocast(model):
        before = predict_logits(model, inputs)[:, :place].float()
    if _differ(
        *before, precision=next(p.dtype for p in model.parameters() if p.is_floating_point())
    ):
        raise HamuError(
            f"a model of type {model_type(model)} is not a causal language model: its predictions "
            f"change with tokens that come later; give one that was trained to predict the next "
            f"token"
        )


def check_causal_mask_of_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """The same with a record of a batch. Of a sharded model all processes must call it, as they run
    it together.

    Args:
        model: see `check_causal_mask`.
        batch: input_ids and labels, [B, T], and whatever else the model takes; other batches are
            not tried.

    Raises:
        HamuError: if the predictions depend on later tokens, or the model writes another text than
            it reads.
    """
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2 or batch["labels"].shape != ids.shape:
        return
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise HamuError(
            f"a model of type {model_type(model)} has an encoder, and its labels are not the next "
            f"tokens of what it reads; give a causal language model"
        )
    real = batch.get("attention_mask")
    if real is None or real.shape != ids.shape:
        real = torch.ones_like(ids)
    last = (real != 0).long().mul(torch.arange(ids.shape[1], device=ids.device)).amax(1)
    row = int(last.argmax())
    place = int(last[row])
    two = {
        name: value[[row, row]]  # copied
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == len(ids) and name != "labels"
    }
    two["input_ids"][1, place] = int(ids[row, place] == 0)  # another token that any vocabulary has
    check_causal_mask(model, two, place)


def model_type(model: nn.Module) -> str:
    """What transformers calls its architecture; the name of its class if it has none."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _differ(one: Tensor, other: Tensor, *, precision: torch.dtype) -> bool:
    """True if logits differ by more than rounding does."""
    share = min(100 * torch.finfo(precision).eps, 0.05)
    return bool(((one - other).abs() > share * one.abs().max()).any()) if one.numel() else False
