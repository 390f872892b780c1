"""Image processors as a shift and a scale for each channel, measured on images of one colour."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils.hub import cached_file

from hamu.errors import HamuError, first_line

_FILES = ("preprocessor_config.json", "processor_config.json")
_SIDE = 64  # of the images it is asked about: whatever their size becomes, they are of one colour
_CLOSE = 1e-4
_FLIP = "do_flip_channel_order"
_logger = logging.getLogger(__name__)


def load_processor(where: str, *, local: bool, trust_remote_code: bool = False) -> Any:
    """The image processor that comes with a model, None where there is none.

    Args:
        where: a folder, or OWNER/NAME of the hub.
        local: whether the hub is out of bounds.
        trust_remote_code: run the code that comes with it; that can do anything.

    Raises:
        HamuError: if it cannot be loaded.
    """
    settings = {"local_files_only": local}
    try:
        if not any(
            cached_file(where, name, **settings, _raise_exceptions_for_missing_entries=False)
            for name in _FILES
        ):
            return None
        return AutoImageProcessor.from_pretrained(
            where, **settings, trust_remote_code=trust_remote_code
        )
    except (
        Exception
    ) as error:  # transformers raises many kinds for a damaged or foreign one; the cause is kept
        stated = _stated(where, settings)
        if stated is not None:
            _logger.warning(
                "the image processor of %s is of a kind that cannot be made here (%s); its "
                "image_mean and image_std "
                "are used as they are written", where, first_line(error).partition(". ")[0],
            )  # fmt: skip
            return stated
        raise HamuError(
            f"the image processor of {where} cannot be loaded: "
            f"{first_line(error).partition('. ')[0]}; repair its preprocessor_config.json, or "
            f"take it away: then pixels are normalised by config.json, or by the data"
        ) from error


@dataclass(frozen=True)
class Stated:
    """A processor that cannot be made here, but says in its file what it does to pixels.

    Attributes:
        settings: the file.
    """

    settings: dict[str, Any]

    def save_pretrained(self, folder: str | Path) -> None:
        """As it came."""
        Path(folder, _FILES[0]).write_text(
            json.dumps(self.settings, indent=2) + "\n", encoding="utf-8"
        )


def _stated(where: str, settings: dict[str, Any]) -> Stated | None:
    """What a file says by itself, None where its words would not be enough."""
    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(where, **settings)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    if not found.get("do_rescale", True) or found.get(_FLIP):
        return None
    if not found.get("do_normalize", True):
        found = {**found, "image_mean": 0.0, "image_std": 1.0}
    known = all(isinstance(found.get(name), list | float) for name in ("image_mean", "image_std"))
    return Stated(found) if known else None


def statistics_of(processor: Any, channels: int, source: str) -> tuple[list[float], list[float]]:
    """The mean and the deviation by channel, for pixels in [0, 1], that do what a processor does to
    pixels.

    It may rescale or not, normalise once, twice, or not at all: all that is a shift and a scale of
    each channel.

    Args:
        processor: of transformers.
        channels: of the model's images.
        source: whose it is, for messages.

    Raises:
        HamuError: if it does something else.
    """
    if isinstance(processor, Stated):
        mean, std = (processor.settings[name] for name in ("image_mean", "image_std"))
        return tuple([one] * channels if isinstance(one, float) else one for one in (mean, std))  # type: ignore[return-value]
    black = _seen(processor, (0,) * channels, source)
    if black.shape != (channels,):
        raise HamuError(
            f"the image processor of {source} makes {len(black)} channels of {channels}; the "
            f"model cannot be used here"
        )
    alone = [tuple(255 * (i == k) for i in range(channels)) for k in range(channels)]
    change = np.stack(
        [_seen(processor, colour, source) - black for colour in alone]
    )  # [given, made]
    scale = np.diagonal(change)
    mixed = tuple(51 * (k + 1) for k in range(channels))
    expected = black + scale * np.array(mixed) / 255
    off = max(
        np.abs(change - np.diag(scale)).max(),
        np.abs(_seen(processor, mixed, source) - expected).max(),
    )
    if not (scale > 0).all() or not off <= _CLOSE * scale.max():  # NaN is no good either
        raise HamuError(
            f"the image processor of {source} does more than shift and scale each channel (it may "
            f"swap them: do_flip_channel_order); build that into the model, and take it out of "
            f"preprocessor_config.json"
        )
    return (
        _as_said(getattr(processor, "image_mean", None), (0.0 - black / scale).tolist()),
        _as_said(getattr(processor, "image_std", None), (1 / scale).tolist()),
    )


def _as_said(said: Any, found: list[float]) -> list[float]:
    """What is found, as exactly as it is written, if that is what is done."""
    try:
        exact = np.broadcast_to(np.asarray(said, dtype=np.float64), len(found))
    except (ValueError, TypeError):
        return found
    return exact.tolist() if np.allclose(exact, found, _CLOSE, _CLOSE / 100) else found


def _seen(processor: Any, colour: tuple[int, ...], source: str) -> Any:
    """What becomes of the middle of an image of one colour, by channel."""
    try:
        pixels = np.full((_SIDE, _SIDE, len(colour)), colour, dtype=np.uint8)
        picture = Image.fromarray(pixels[:, :, 0] if len(colour) == 1 else pixels)
        values = processor(picture, return_tensors="np")["pixel_values"][0]
        return values[:, values.shape[1] // 2, values.shape[2] // 2].astype(np.float64)
    except Exception as error:  # as above
        raise HamuError(
            f"the image processor of {source} cannot take an image with {len(colour)} channels: "
            f"{first_line(error)}; image_mean and image_std of its preprocessor_config.json need "
            f"a number for each channel of the model"
        ) from error
