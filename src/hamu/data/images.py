"""Images in memory: decoded once, kept as uint8, normalised a batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
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
        rows: [N], int64, the row of each image in its source, or in the split that was read.
        mean: channel means of pixels in [0, 1], [C], for normalisation; see `normalized`.
        std: their standard deviations, [C].
        named: False if the source names no classes; their numbers are then their names.
        left_out: files of the source that were not read: images of no class, other files.
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
            mean, std = (torch.tensor(of).view(1, -1, 1, 1) for of in (self.mean, self.std))
            values.sub_(mean).div_(std)
        return {"pixel_values": values, "labels": self.labels[index]}

    def normalized(self, mean: Sequence[float], std: Sequence[float]) -> ImageData:
        """Return the same images, normalised by these statistics when they are fetched."""
        return replace(self, mean=tuple(mean), std=tuple(std))

    def select(self, positions: Tensor | Sequence[int]) -> ImageData:
        """Return the images at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long)
        chosen = {name: getattr(self, name)[index] for name in ("pixels", "labels", "rows")}
        return replace(self, **chosen)

    def matched(self, other: ImageData) -> ImageData:
        """Return a second data set in the form of this one: RGB if this is, its label numbers.

        Raises:
            HamuError: if the shapes differ, or it has a class that does not occur here.
        """
        if other.pixels.shape[1] == 1 and self.pixels.shape[1] == 3:  # as within one source
            other = replace(other, pixels=other.pixels.repeat(1, 3, 1, 1))
        ours, theirs = (tuple(data.pixels.shape[1:]) for data in (self, other))
        if ours != theirs:
            raise HamuError(
                f"images of {other.source} have shape {theirs}, those of {self.source} {ours}; "
                f"give --image_size, or --num_channels"
            )
        return other.with_classes(self.classes)

    def with_classes(self, classes: tuple[str, ...]) -> ImageData:
        """Return the same images, their labels numbered as in these classes.

        Raises:
            HamuError: if one of the own classes is not among them.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise HamuError(
                f"class {unknown[0]} of {self.source} is not among the classes "
                f"{', '.join(classes[:8])}; name the classes of both alike"
            )
        numbers = torch.tensor([classes.index(name) for name in self.classes])
        return replace(self, labels=numbers[self.labels], classes=classes)

    def digests(self) -> list[bytes]:
        """Digest each image's pixels and label; equal records have equal digests."""
        return [
            blake2b(row.tobytes(), digest_size=16, salt=label.to_bytes(8, "little")).digest()
            for row, label in zip(self.pixels.numpy(), self.labels.tolist(), strict=True)
        ]


def pixel_statistics(*sets: ImageData) -> tuple[list[float], list[float]]:
    """Channel means and deviations of pixels in [0, 1]; a constant channel has deviation 1.

    They come from exact counts, so the division of the images into sets changes nothing.
    """
    counts = torch.zeros(sets[0].pixels.shape[1], 256, dtype=torch.long)
    for data in sets:
        for count, channel in zip(counts, data.pixels.transpose(0, 1).flatten(1), strict=True):
            count += torch.bincount(channel, minlength=256)
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255.0
    mean = share @ values
    std = (share @ values**2 - mean**2).clamp(min=0).sqrt()
    return mean.tolist(), torch.where(std > 0, std, torch.ones_like(std)).tolist()


def collate(items: Any) -> Mapping[str, Tensor]:
    """Make a batch of images: one that was fetched whole stays as it is, items are stacked."""
    from transformers import default_data_collator  # loads what reading images does not need

    return items if isinstance(items, Mapping) else default_data_collator(items)
