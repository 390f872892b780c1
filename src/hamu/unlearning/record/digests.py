"""SHA-256 digests of weights, data sets and texts, defined so that anybody can recompute them (docs/record.md).

None but `order_digest` depends on how things happen to be laid out: weights may be in one file or many, records in any
order.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hamu.data import ImageData, TextData, TextRecords
from hamu.errors import HamuError
from hamu.models.loading import weight_files


def text_digest(text: str) -> str:
    """Of a text in normal form, UTF-8."""
    return _sha256(_normal(text).encode())


def tensors_digest(names: Iterable[str], tensor: Callable[[str], Tensor]) -> str:
    r"""Of named tensors: in the order of their names, a line of JSON `[name, dtype, shape]`, then the values' bytes.

    The line is compact ASCII and ends with "\n"; dtype is torch's name of it; the bytes are little-endian, row by row.

    Args:
        names: of all tensors, in any order.
        tensor: gives a tensor by its name, one at a time.
    """
    found = hashlib.sha256()
    for name in sorted(names):
        values = tensor(name).detach().cpu().contiguous()
        head = [name, str(values.dtype).removeprefix("torch."), list(values.shape)]
        found.update(json.dumps(head, separators=(",", ":")).encode() + b"\n")
        found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def weights_digest(folder: Path) -> str | None:
    """Of the weights that `save_pretrained` put into a folder, whether whole, in parts, or those of an adapter.

    Returns:
        See `tensors_digest`; None if there are no safetensors in the folder.

    Raises:
        HamuError: if a file is missing or damaged.
    """
    try:
        files = weight_files(folder)
        if not files:
            return None
        with ExitStack() as opened:
            parts = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
            holder = {name: part for part in parts for name in part.keys()}  # noqa: SIM118  # it is no mapping
            return tensors_digest(holder, lambda name: holder[name].get_tensor(name))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise HamuError(f"the weights in {folder} cannot be read: {error}") from error


def set_digest(rows: Iterable[str]) -> str:
    """Of a set of records, in any order: SHA-256 of the sorted row digests in hexadecimal, one a line."""
    return order_digest(sorted(rows))


def order_digest(rows: Iterable[str]) -> str:
    """Of a set of records in its order: SHA-256 of the row digests in hexadecimal, one a line."""
    return _sha256("".join(f"{row}\n" for row in rows).encode())


def row_digests(data: ImageData | TextRecords | TextData) -> list[str]:
    r"""Of each record, in normal form.

    A text is the JSON of all its fields: keys sorted, compact, UTF-8, every string in Unicode NFC and without white
    space at its ends. An image is a line of JSON like `{"dtype":"uint8","label":"cat","shape":[3,32,32]}`, which ends
    with "\n", and the pixels' bytes, channel by channel, row by row; the label is the name of its class, in normal form
    too.
    """
    if isinstance(data, ImageData):
        shape, names = list(data.pixels.shape[1:]), [_normal(name) for name in data.classes]
        pixels = data.pixels.numpy()
        heads = [
            _json({"dtype": str(pixels.dtype), "label": name, "shape": shape}) + b"\n"
            for name in names
        ]
        return [
            _sha256(heads[k] + p.tobytes())
            for k, p in zip(data.labels.tolist(), pixels, strict=True)
        ]
    texts = data.texts if isinstance(data, TextData) else data
    return [_sha256(_json(_normal(record.fields))) for record in texts.records]


def _normal(value: Any) -> Any:
    """What is not JSON becomes text: dates as ISO 8601, bytes in hexadecimal, everything else as Python prints it."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(key)): _normal(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
