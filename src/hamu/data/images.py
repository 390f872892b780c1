"""Images in memory: decoded once, kept as uint8, normalised a batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hamu.errors import HamuError


@dataclass(frozen=True, eq=False)
class ImageData(Dataset[dict[str, Tensor]]):
    """Labelled images of one size.

    Attributes:
        pixels: [N, C, H, W], uint8.
        labels: [N], int64, in 0..K-1.
        classes: the K class names.
        source: where they come from, for messages.
        rows: [N], int64, the row of each image in its source (or in the split of it that was read), from 0.
        mean: of the pixels in [0, 1] by channel, shape [C], for normalisation; see `normalized`.
        std: their standard deviation, [C].
        named: whether the source names its classes; else they are called by their numbers.
        left_out: files of the source that were not read: images of no class, files of a class that are no images.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    source: str
    rows: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    named: bool = True
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One image: pixel_values [C, H, W] float32 and labels [], as models expect them."""
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """A batch: pixel_values [B, C, H, W] float32 and labels [B]."""
        index = torch.as_tensor(indices)
        values = self.pixels[index].float().div_(255.0)
        if self.mean:
            shape = (1, len(self.mean), 1, 1)
            values.sub_(torch.tensor(self.mean).view(shape)).div_(
                torch.tensor(self.std).view(shape)
            )
        return {"pixel_values": values, "labels": self.labels[index]}

    def normalized(self, mean: Sequence[float], std: Sequence[float]) -> ImageData:
        """The same images, normalised by these statistics when they are fetched."""
        return replace(self, mean=tuple(mean), std=tuple(std))

    def select(self, positions: Tensor | Sequence[int]) -> ImageData:
        """The images at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return replace(
            self, pixels=self.pixels[index], labels=self.labels[index], rows=self.rows[index]
        )

    def matched(self, other: ImageData) -> ImageData:
        """A second data set in a form that fits this one: the same shape, labels numbered by these classes.

        Raises:
            HamuError: if the shapes differ, or it has a class that does not occur here.
        """
        if (
            other.pixels.shape[1] == 1 and self.pixels.shape[1] == 3
        ):  # as within one source: grey becomes RGB
            other = replace(other, pixels=other.pixels.repeat(1, 3, 1, 1))
        if other.pixels.shape[1:] != self.pixels.shape[1:]:
            raise HamuError(
                f"images of {other.source} have shape {tuple(other.pixels.shape[1:])}, those of {self.source} "
                f"{tuple(self.pixels.shape[1:])}; give --image_size, or --num_channels"
            )
        return other.with_classes(self.classes)

    def with_classes(self, classes: tuple[str, ...]) -> ImageData:
        """The same images, their labels numbered as in another data set's classes.

        Raises:
            HamuError: if one of the classes does not occur there.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise HamuError(
                f"class {unknown[0]} of {self.source} is not among the classes {', '.join(classes[:8])}; name the "
                f"classes of both alike"
            )
        numbers = torch.tensor([classes.index(name) for name in self.classes])
        return replace(self, labels=numbers[self.labels], classes=classes)

    def digests(self) -> list[bytes]:
        """A digest of each image's pixels and label, by which equal records are recognised."""
        labels = self.labels.tolist()
        flat = self.pixels.flatten(1).numpy()
        return [
            hashlib.blake2b(
                row.tobytes(), digest_size=16, salt=label.to_bytes(8, "little")
            ).digest()
            for row, label in zip(flat, labels, strict=True)
        ]


def pixel_statistics(*sets: ImageData) -> tuple[list[float], list[float]]:
    """Per-channel mean and standard deviation of pixels in [0, 1]; a constant channel gets deviation 1.

    They are counted: how the pixels are divided among sets changes nothing.
    """
    counts = torch.stack([
        torch.stack([torch.bincount(channel, minlength=256) for channel in data.pixels.transpose(0, 1).flatten(1)])
        for data in sets
    ]).sum(0)  # fmt: skip
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255.0
    mean = share @ values
    std = (share @ values**2 - mean**2).clamp(min=0).sqrt()
    return mean.tolist(), torch.where(std > 0, std, torch.ones_like(std)).tolist()


def collate(items: Any) -> Mapping[str, Tensor]:
    """A batch of images: one that was fetched whole stays as it is, a list of items is stacked."""
    from transformers import default_data_collator  # loads what reading images does not need

    return items if isinstance(items, Mapping) else default_data_collator(items)
