"""What the start model predicted, in a file of a checkpoint: a resumed run compares with it and cannot ask it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hamu.evaluation.predictions import Predictions, TokenPredictions

_FILE = "start.safetensors"
_AnyPredictions = Predictions | TokenPredictions


def save_start_predictions(folder: Path, start: Mapping[str, _AnyPredictions]) -> None:
    """Write them, by set, as tensors "SET/CLASS/FIELD"; no file if there are none."""
    found = {
        f"{kind}/{type(predictions).__name__}/{one.name}": torch.as_tensor(
            getattr(predictions, one.name)
        )
        for kind, predictions in start.items()
        for one in fields(predictions)
    }
    if found:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / _FILE)


def load_start_predictions(folder: Path, order: Sequence[str]) -> dict[str, _AnyPredictions]:
    """What was written, by set in this order; nothing if there is no file."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, tensor in load_file(folder / _FILE).items() if (folder / _FILE).is_file() else ():
        kind, cls, part = name.split("/")
        found.setdefault((kind, cls), {})[part] = tensor
    return {
        kind: _predictions(cls, values)
        for (kind, cls), values in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    }


def _predictions(cls: str, values: dict[str, Tensor]) -> _AnyPredictions:
    if cls == Predictions.__name__:
        return Predictions(**values)
    return TokenPredictions(**{**values, "records": int(values["records"])})
