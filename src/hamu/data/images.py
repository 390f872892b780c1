"""Labelled images: decoded once, kept as uint8, normalised a batch at a time."""

import io
import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self
from zipfile import is_zipfile

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from hamu.errors import HamuError, reading
from hamu.files import DIGITS, csv_rows, files_of, is_of_hub, load_from_hub, parquet_table

CLASSES = "classes"  # the array of class names that an npz may hold
_SUFFIXES = {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
_SUFFIXES |= {".ppm", ".pgm"}
_NOT_READ = {".avif", ".heic", ".heif", ".jp2", ".jxl", ".tga", ".dng"}
_NO_CLASSES = ("test", "val", "valid", "validation")  # names of splits; a train may be a class
_OF_SPLITS = (".parquet", ".npz", ".csv")
_MOST_CLASSES = 100_000
_OF_EACH = ("pixels", "labels", "rows")  # tensors with a row for each image
_Raw = tuple[Iterable[Any], np.ndarray, tuple[str, ...]]  # arrays, or what `Image.open` takes
IMAGE_COLUMNS = ("image", "img", "images", "pixel_values", "x", "file_name")
_COLUMNS = {"image": IMAGE_COLUMNS, "label": ("label", "labels", "fine_label", "y")}


@dataclass(frozen=True, eq=False)
class ImageData(Dataset[dict[str, Tensor]]):
    """Labelled images of one size.

    Attributes:
        pixels: [N, C, H, W], uint8.
        labels: [N], int64, in 0..K-1.
        classes: the K class names; their numbers where the source names none.
        source: where they come from, for messages.
        rows: [N], int64, the row of each image in the split that was read.
        mean, std: of each channel of pixels in [0, 1], [C], for normalisation; see `normalized`.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    source: str
    rows: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

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

    def normalized(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Return the same images, normalised by these statistics when they are fetched."""
        return replace(self, mean=tuple(mean), std=tuple(std))

    def select(self, positions: Tensor | Sequence[int]) -> Self:
        """Return the images at these positions, in this order."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return replace(self, **{name: getattr(self, name)[index] for name in _OF_EACH})

    def joined(self, other: Self) -> Self:
        """Return these images and then those of a second data set of the same form."""
        both = {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in _OF_EACH}
        return replace(self, **both)  # type: ignore[arg-type]

    def matched(self, other: Self) -> Self:
        """Return a second data set in the form of this one: RGB if this is, its label numbers."""
        if other.pixels.shape[1] == 1 and self.pixels.shape[1] == 3:  # as within one source
            other = replace(other, pixels=other.pixels.repeat(1, 3, 1, 1))
        ours, theirs = (tuple(data.pixels.shape[1:]) for data in (self, other))
        if ours != theirs:
            raise HamuError(
                f"images of {other.source} have shape {theirs}, those of {self.source} {ours}; "
                f"give --image_size, or --num_channels"
            )
        return other.with_classes(self.classes)

    def with_classes(self, classes: tuple[str, ...]) -> Self:
        """Return the same images, their labels numbered as in these classes."""
        place = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in self.classes if name not in place]
        if unknown:
            listed = ", ".join(classes[:8])
            raise HamuError(f"class {unknown[0]} of {self.source} is not among {listed}")
        numbers = torch.tensor([place[name] for name in self.classes])
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
    return mean.tolist(), torch.where(std > 0, std, 1.0).tolist()


def read_images(
    source: str,
    split: str = "train",
    *,
    image_size: int | None = None,
    num_channels: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageData:
    """Read one split of a data set of labelled images; only a source of the hub uses the network.

    Args:
        source: "digits" (bundled with scikit-learn), a .parquet, .npz or .csv file (of paths from
            its folder), a folder with one subfolder of images per class, a folder that holds
            "train" and "test" as such files, folders or parts, or "hub:OWNER/NAME". Classes of a
            folder are in the order of their names, or of their numbers if all are numbers; its
            rows by class, then by file name.
        split: "train" or "test", for sources that have both.
        image_size: resize to this many pixels squared (bilinear).
        num_channels: convert to 1 (grey) or 3 (RGB) channels; by default RGB, unless all are grey.
        image_column, label_column: names of the columns or arrays, if they are not the usual.
    """
    if image_size is not None and image_size < 1:
        raise HamuError(f"image_size {image_size} must be at least 1")
    if num_channels not in (None, 1, 3):
        raise HamuError(f"num_channels {num_channels} must be 1 (grey) or 3 (RGB)")
    columns = {"image": image_column, "label": label_column}
    pictures, labels, classes = _raw(source, split, columns)
    pixels = _decoded(pictures, source, image_size, num_channels)
    if labels.dtype.kind == "U" and labels.ndim == 1:
        names = [normal(name) for name in labels.tolist()]
        classes = _in_order([*map(normal, classes), *names])
        number = {name: n for n, name in enumerate(classes)}
        labels = np.array([number[name] for name in names])
    if labels.shape != pixels.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise HamuError(
            f"the labels of {source} have type {labels.dtype} and shape {labels.shape}; expected "
            f"a whole number for each of {len(pixels)} images"
        )
    least, highest = int(labels.min()), int(labels.max())  # one more may not fit their type
    most = len(classes) or _MOST_CLASSES
    if least < 0 or highest >= most:
        wrong = least if least < 0 else highest
        raise HamuError(f"label {wrong} of {source} is out of range; expected 0 to {most - 1}")
    return ImageData(
        torch.from_numpy(pixels),
        torch.from_numpy(labels.astype(np.int64)),
        tuple(normal(str(name)) for name in classes or range(highest + 1)),
        source,
        torch.arange(len(labels)),
    )


def has_test_split(source: str) -> bool:
    """Return True if `read_images(source, "test")` reads other than the training data."""
    path = Path(source)
    if not path.is_dir():
        return source == DIGITS
    return bool(_files(source, "test") or _pictures(path / "test"))


def _raw(source: str, split: str, columns: Mapping[str, str | None]) -> _Raw:
    """Pictures, labels, and names of classes, none where the source names none."""
    if source == DIGITS:
        return _digits(split)
    if is_of_hub(source):
        return _of_table(load_from_hub(source, split), source, columns)
    files = _files(source, split)
    if not files:
        return _of_folder(Path(source), split)
    if files[0].suffix.lower() == ".npz":
        return _of_npz(files[0], columns)
    import datasets

    with reading(f"{files[0]} cannot be read as {files[0].suffix[1:].lower()}"):
        if files[0].suffix.lower() == ".csv":
            rows = csv_rows(files[0])
            if not rows:
                raise HamuError(f"{files[0]} is empty: it has no images")
            table = datasets.Dataset.from_list(rows)
        else:  # not from_parquet: that would leave a copy of the user's data in a cache folder
            table = datasets.Dataset(datasets.table.InMemoryTable(parquet_table(files)))
    return _of_table(table, str(files[0]), columns)


def _files(source: str, split: str) -> list[Path]:
    """Files of tables; a CSV beside folders of classes counts only where they are not of splits."""
    found = files_of(source, split, _OF_SPLITS)
    is_beside = Path(source).is_dir() and bool(found) and found[0].suffix == ".csv"
    return [] if is_beside and _pictures(Path(source) / split) else found


def _digits(split: str) -> _Raw:
    """scikit-learn's 1,797 digits of 8x8 pixels; every fifth record is test data."""
    from sklearn.datasets import load_digits

    images, labels = load_digits().images, load_digits().target
    mine = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    pixels = np.rint(images[mine] * (255 / 16)).astype(np.uint8)
    return pixels, labels[mine], tuple("0123456789")


def _of_npz(path: Path, columns: Mapping[str, str | None]) -> _Raw:
    with reading(f"{path} cannot be read as npz"), path.open("rb") as file:
        if not is_zipfile(file):  # numpy would advise to load it as a pickle
            raise ValueError("it is none, or cut short; save one with numpy.savez")
    with reading(f"{path} cannot be read as npz"), np.load(path, allow_pickle=False) as arrays:
        images, labels = (arrays[_column(arrays.files, role, columns, path)] for role in _COLUMNS)
        given = arrays[CLASSES].tolist() if CLASSES in arrays.files else ()
        classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in given)
    if len({*classes}) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise HamuError(f"{path} names two classes {twice}; give each a name of its own")
    has_channels = images.shape[3:] in ((), (1,), (2,), (3,), (4,))
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not has_channels:
        raise HamuError(
            f"the images in {path} have type {images.dtype} and shape {images.shape}; expected "
            f"uint8 [N, H, W], or [N, H, W, C] with 1 to 4 channels"
        )
    return images.squeeze(3) if images.shape[3:] == (1,) else images, labels, classes


def _of_table(table: Any, source: str, columns: Mapping[str, str | None]) -> _Raw:
    import datasets

    image, label = (_column(table.column_names, role, columns, source) for role in _COLUMNS)
    classes = tuple(getattr(table.features[label], "names", ()))
    with reading(f"the column {image} of {source} holds no images"):
        cells = table.cast_column(image, datasets.Image(decode=False)).with_format(None)[image]
    with reading(f"the labels of {source} are not numbers"):
        labels = np.asarray(table[label])
    for row, one in enumerate(labels if labels.dtype.kind in "OU" else ()):
        if one is None or (isinstance(one, str) and not one.strip()):
            raise HamuError(f"row {row} of {source} has no label; remove or label it")
    folder = Path(source).parent

    def opened(cell: dict[str, Any]) -> io.BytesIO | Path | None:
        if cell["bytes"]:
            return io.BytesIO(cell["bytes"])
        return folder / cell["path"] if cell["path"] else None

    return (cell and opened(cell) for cell in cells), labels, classes


def _column(
    names: Sequence[str], role: str, columns: Mapping[str, str | None], source: object
) -> str:
    own = columns[role]
    candidates = (own,) if own else _COLUMNS[role]
    found = next((name for name in candidates if name in names), None)
    if found is None:
        looked = repr(own) if own else " or ".join(candidates)
        way = f"give --{role}_column" + ", or --task text" * (role == "image" and own is None)
        there = ", ".join(names) or "nothing"
        raise HamuError(f"{source} has no {role} column {looked}, but {there}; {way}")
    return found


def _of_folder(path: Path, split: str) -> _Raw:
    pictures = _pictures(path / split) or _pictures(path)
    folder = pictures[0].parents[1] if pictures else path
    classes = _in_order(normal(picture.parent.name) for picture in pictures)
    splits = [name for name in classes if name in _NO_CLASSES or classes == ("train",)]
    if folder == path and splits:
        raise HamuError(
            f"{path / splits[0]} has images in no folder of a class; put those of each class into "
            f"one, {splits[0]}/CLASS, or move it away"
        )
    for one in _named_as_images(folder, "*/*"):
        if not one.exists():
            raise HamuError(f"{one} is a link to what is not there; mend or remove it")
        if one.suffix.lower() in _NOT_READ and one.is_file():
            raise HamuError(f"{one} is of a kind that is not read; convert it, or move it away")
    if not pictures:
        raise HamuError(
            f"{path} holds no images; expected one subfolder of images per class, or texts as "
            f"train.jsonl, .json, .csv or .parquet"
        )
    for one in _named_as_images(folder, "*/*/**/*"):
        raise HamuError(f"{one} lies in a folder within its class; put it beside the others of it")
    for below in _shown(folder, "*") if split == "train" else ():
        if below.is_dir() and normal(below.name) not in classes:
            raise HamuError(
                f"{below} holds no images, though each folder in {folder} is a class; add some, or "
                f"move it away"
            )
    numbers = {picture: classes.index(normal(picture.parent.name)) for picture in pictures}
    pictures.sort(key=lambda picture: (numbers[picture], picture))
    return pictures, np.array([numbers[picture] for picture in pictures]), classes


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes, each once, by name, or by number if all are numbers."""
    found = sorted(set(names))
    return tuple(sorted(found, key=int) if all(map(str.isdecimal, found)) else found)


def normal(text: str) -> str:
    """Text in Unicode's normal form C, without spaces around it."""
    return unicodedata.normalize("NFC", text).strip()


def _pictures(folder: Path) -> list[Path]:
    found = _named_as_images(folder, "*/*")
    return [one for one in found if one.suffix.lower() not in _NOT_READ and one.is_file()]


def _named_as_images(folder: Path, pattern: str) -> list[Path]:
    kinds = _SUFFIXES | _NOT_READ
    return [one for one in _shown(folder, pattern) if one.suffix.lower() in kinds]


def _shown(folder: Path, pattern: str) -> list[Path]:
    """List what a folder holds, without what tools hide there."""
    found = {path: path.relative_to(folder).parts for path in folder.glob(pattern)}
    hidden = (".", "__MACOSX", "lost+found")
    return [path for path, of in found.items() if not any(part.startswith(hidden) for part in of)]


def _decoded(
    pictures: Iterable[Any], source: str, size: int | None, channels: int | None
) -> np.ndarray:
    """Decode pictures into one array [N, C, H, W]; Pillow's own limit guards against bombs."""

    def decode(number: int, raw: Any) -> np.ndarray:
        name = raw if isinstance(raw, Path) else f"row {number}"
        if raw is None:
            raise HamuError(f"{name} of {source} has no image; remove it")
        with reading(f"{name} of {source} is not a readable image", "; remove or repair it"):
            picture = Image.fromarray(raw) if isinstance(raw, np.ndarray) else Image.open(raw)
            if picture.mode[0] in "IF":
                raise HamuError(
                    f"{name} of {source} has more than 8 bits a channel; save it with 0 to 255"
                )
            picture = ImageOps.exif_transpose(picture)  # a photograph as it is seen
            is_grey = channels == 1 or (channels is None and picture.mode in ("1", "L", "LA"))
            picture = picture.convert("L" if is_grey else "RGB")
            if size is not None:
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)
            return np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(decode, itertools.count(), pictures))
    if not arrays:
        raise HamuError(f"{source} is empty: it has no images")
    most = max(len(array) for array in arrays)  # grey and coloured together: all become RGB
    arrays = [np.broadcast_to(array, (most, *array.shape[1:])) for array in arrays]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        listed = ", ".join("x".join(map(str, shape[1:])) for shape in shapes[:3])
        raise HamuError(f"the images of {source} differ in size ({listed}, ...); give --image_size")
    return np.ascontiguousarray(np.stack(arrays))
