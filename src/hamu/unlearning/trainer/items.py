"""Checks that what a data set returns is what a run can train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hamu.data.images import collate
from hamu.errors import HamuError

_INPUTS = ("pixel_values", "input_ids")


def check_items(model: nn.Module, data_collator: Callable[[list[Any]], Any], **data: Any) -> None:
    """Look at the first item of each data set, or at the batch that one's own collator makes of it.

    Args:
        model: a Hugging Face model may have a main input of another name.
        data_collator: makes a batch from a list of items.
        data: by name, the data sets; None and empty ones are passed over.

    Raises:
        HamuError: if it is not a mapping with labels and inputs.
    """
    inputs = {*_INPUTS, getattr(model, "main_input_name", _INPUTS[0])}
    for name, one in data.items():
        if one is None or not len(one):
            continue
        item = one[0]
        if not _is_usable(item, inputs) and data_collator is not collate:
            item = data_collator([item])
        if not _is_usable(item, inputs):
            raise HamuError(
                f"an item of the {name} set is {_describe(item)}; expected a mapping with pixel_values and labels "
                f"(images) or input_ids and labels (texts): return one from the data set, or give a data_collator that "
                f"makes one"
            )


def _is_usable(item: Any, inputs: set[str]) -> bool:
    return isinstance(item, Mapping) and "labels" in item and bool(inputs & item.keys())


def _describe(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a mapping with the keys {', '.join(map(str, item)) or 'none'}"
    if isinstance(item, tuple | list):
        return f"a {type(item).__name__} of {len(item)} ({', '.join(type(part).__name__ for part in item[:4])})"
    return f"of type {type(item).__name__}"
