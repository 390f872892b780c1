"""Where a classifier puts images before it decides: the input of its last layer, and two axes to look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hamu.core.forward import evaluating, predict_logits
from hamu.errors import HamuError


@torch.no_grad()
def embed(
    model: nn.Module,
    data: Dataset[Any],
    batch_size: int,
    collate: Callable[[Any], Mapping[str, Tensor]],
) -> Tensor:
    """What goes into the classifier's last linear layer, [N, D] float32 on the CPU, in evaluation mode.

    Args:
        model: a classifier; see `predict_logits`.
        data: images.
        batch_size: images per forward pass.
        collate: makes a batch from what the data set gives.

    Raises:
        HamuError: if the model has no linear layer, or the last one is given more than a vector per image, or one
            that is not finite.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise HamuError("the model has no linear layer whose input could be shown")
    device = next(model.parameters()).device
    found: list[Tensor] = []
    handle = layers[-1].register_forward_pre_hook(
        lambda _, given: found.append(given[0].float().cpu())
    )
    try:
        with evaluating(model):
            for batch in DataLoader(data, batch_size=batch_size, collate_fn=collate):
                predict_logits(model, {key: value.to(device) for key, value in batch.items()})
    finally:
        handle.remove()
    vectors = torch.cat(found)
    if vectors.ndim != 2 or len(vectors) != len(data):  # type: ignore[arg-type]
        raise HamuError("the model's last linear layer takes more than one vector per image")
    if not vectors.isfinite().all():
        raise HamuError("what goes into the model's last linear layer is not finite")
    return vectors


def principal_axes(vectors: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Principal component analysis of all vectors together, to two dimensions.

    Args:
        vectors: groups of them, [N_i, D] each.

    Returns:
        Each group on the two common axes along which all of them vary most, [N_i, 2], and the share of the variance
        that these two have. An axis that there is not (one vector, one dimension) is 0.
    """
    both = torch.cat(list(vectors)).double()
    centred = both - both.mean(0)
    _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
    share = float(spread[:2].square().sum() / spread.square().sum().clamp(min=1e-300))
    shown = centred @ axes[:2].T
    shown = torch.nn.functional.pad(shown, (0, 2 - shown.shape[1]))
    return list(shown.split([len(group) for group in vectors])), share
