"""Which parameters take part, and what a block of them is: the group that one constraint is for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal

from torch import nn

from hamu.errors import HamuError

Blocks = Literal["tensor", "module", "model"] | Callable[[str], Hashable]


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that take part, with their names.

    Raises:
        HamuError: if there is none.
    """
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise HamuError(
            "the model has no trainable parameter; set requires_grad on those that may change"
        )
    return found


def group_blocks(names: list[str], blocks: Blocks) -> tuple[list[str], list[int]]:
    """Group parameters into blocks.

    Args:
        names: the parameters' names.
        blocks: "tensor" (each by itself), "module" (those of one module), "model" (all), or a function from a name to
            a key, equal keys making one block.

    Returns:
        The blocks' names, and the block number of each parameter.

    Raises:
        HamuError: if `blocks` is none of these.
    """
    keys: list[Hashable]
    if callable(blocks):
        keys = [blocks(name) for name in names]
    elif blocks == "tensor":
        keys = list(names)
    elif blocks == "module":
        keys = [name.rpartition(".")[0] for name in names]
    elif blocks == "model":
        keys = ["model"] * len(names)
    else:
        raise HamuError(
            f"blocks {blocks!r} is unknown; choose tensor, module, model, or give a function of the name"
        )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [str(key) for key in numbers], [numbers[key] for key in keys]
