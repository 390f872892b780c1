"""Image readers: the bundled digits, parquet, a folder per class, npz, or a data set of the hub.

Each returns `ImageData`, one array that is decoded once. Only a source that starts with "hub:" may
use the network.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hamu.data.images import ImageData
from hamu.data.sources import (
    DIGITS,
    check_unpacked,
    existing,
    is_of_hub,
    load_from_hub,
    parquet_table,
    parts_of,
)
from hamu.errors import HamuError, first_line

CLASSES = "classes"  # an npz may hold their names
_IMAGE_SUFFIXES = {
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm",
}  # fmt: skip
_OF_WINDOWS = {"thumbs.db", "desktop.ini"}
_OF_16_BITS = ("PPM", "PNG")  # formats of which Pillow's mode "I" is 16 bits a pixel
_LARGEST = 4096  # pixels of a side
_MOST_CLASSES = 100_000
_ALIASES = {
    "image": ("image", "img", "images", "pixel_values", "x"),
    "label": ("label", "labels", "fine_label", "y"),
}


@dataclass(frozen=True)
class _Wanted:
    """The form in which images are read, and the columns that the user names."""

    size: int | None
    channels: int | None
    columns: dict[str, str | None]


def read_images(
    source: str,
    split: str = "train",
    *,
    image_size: int | None = None,
    num_channels: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageData:
    """Read one split of a data set of labelled images.

    Args:
        source: "digits" (bundled with scikit-learn), a .parquet or .npz file, a folder with one
            subfolder of images per class, a folder that holds "train" and "test" as such files,
            folders or parts (see `parts_of`), or a data set of the hub (see `load_from_hub`).
            Classes of a folder are in the order of their names, or of their numbers if all names
            are numbers; its rows by class, then by file name.
        split: "train" or "test", for sources that have both.
        image_size: resize to this many pixels squared (bilinear); without it all images must have
            one size.
        num_channels: convert to 1 (grey) or 3 (RGB) channels; by default RGB, unless all are grey.
        image_column, label_column: names of the columns (parquet, hub) or arrays (npz), if they are
            not the usual.

    Raises:
        HamuError: if the source is missing or empty, an image cannot be read, or the sizes differ.
    """
    if image_size is not None and not 1 <= image_size <= _LARGEST:
        raise HamuError(f"image_size {image_size} must be 1 to {_LARGEST} pixels")
    if num_channels not in (None, 1, 3):
        raise HamuError(f"num_channels {num_channels} must be 1 (grey) or 3 (RGB)")
    columns = {"image": image_column, "label": label_column}
    wanted = _Wanted(image_size, num_channels, columns)
    if source == DIGITS:
        return _digits(split, wanted)
    if is_of_hub(source):
        return _table(load_from_hub(source, split), source, wanted)
    path = existing(source)
    if path.is_dir():
        path = _inner(path, split) or path
        parts = parts_of(path, split) if path.is_dir() else []
        if parts:
            return _parquet(parts, path, wanted)
    if path.is_dir():
        return _folder(path, wanted)
    if path.suffix.lower() == ".npz":
        return _npz(path, wanted)
    if path.suffix.lower() == ".parquet":
        return _parquet([path], path, wanted)
    raise HamuError(
        f"{path} is not a data set that can be read; give images as .parquet, .npz or a folder per "
        f"class, texts as .jsonl, .json, .csv or .parquet"
    )


def has_test_split(source: str) -> bool:
    """Return whether `read_images(source, "test")` reads other than the training data."""
    path = Path(source)
    return source == DIGITS or (
        path.is_dir() and bool(_inner(path, "test") or parts_of(path, "test"))
    )


def _inner(folder: Path, split: str) -> Path | None:
    """Find a split in a folder; a folder with images directly in it is a class, not a split."""
    for name in (f"{split}.parquet", f"{split}.npz"):
        if (folder / name).exists():
            return folder / name
    has_splits = any(_holds_classes(folder / name) for name in ("train", "test"))
    return folder / split if has_splits and (folder / split).exists() else None


def _holds_classes(folder: Path) -> bool:
    """Return whether it has folders with images, or folders and no image beside them."""
    if not folder.is_dir():
        return False
    inside = [child for child in folder.iterdir() if not _is_of_tools(child.name)]
    folders = [child for child in inside if child.is_dir()]
    return any(_is_image(file) for child in folders for file in child.iterdir()) or (
        bool(folders) and not any(map(_is_image, inside))
    )


def _is_of_tools(name: str) -> bool:
    """Such as .ipynb_checkpoints and __MACOSX."""
    return name.startswith((".", "__"))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file()


def _digits(split: str, wanted: _Wanted) -> ImageData:
    """scikit-learn's 1,797 digits of 8x8 pixels; every fifth record is test data."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    is_test = np.arange(len(digits.target)) % 5 == 4
    rows = np.flatnonzero(is_test if split == "test" else ~is_test)
    pixels = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
    items = ((f"digit {n}", Image.fromarray(one)) for n, one in zip(rows, pixels, strict=True))
    return _decoded(items, digits.target[rows], tuple("0123456789"), DIGITS, wanted)


def _npz(path: Path, wanted: _Wanted) -> ImageData:
    images, labels, classes = _arrays(path, wanted)
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or (images.ndim == 4 and images.shape[3] not in (1, 3, 4))
    ):
        raise HamuError(
            f"the images in {path} have type {images.dtype} and shape {images.shape}; expected "
            f"uint8 [N, H, W] or [N, H, W, C] with 1, 3 or 4 channels last"
        )
    if labels.shape != images.shape[:1]:
        raise HamuError(
            f"the labels in {path} have shape {labels.shape}; expected one number for each of "
            f"{len(images)} images"
        )
    if images.ndim == 3:
        images = images[..., None]
    channels = images.shape[3]
    if (
        images.size > 0
        and channels in (1, 3)
        and wanted.channels in (None, channels)
        and (wanted.size is None or images.shape[1:3] == (wanted.size, wanted.size))
    ):  # as they are wanted: no picture is made of each
        return _image_data(images.transpose(0, 3, 1, 2), labels, classes, str(path))
    pictures = (Image.fromarray(one.squeeze(-1) if channels == 1 else one) for one in images)
    items = ((f"image {number}", picture) for number, picture in enumerate(pictures))
    return _decoded(items, labels, classes, str(path), wanted)


def _arrays(path: Path, wanted: _Wanted) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Images, labels and, where it has them, names of classes of an npz."""
    names, classes = None, None
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise HamuError(f"{path} holds a single array; expected an npz with images and labels")
        with loaded as arrays:
            names = [_column(arrays.files, role, wanted, path) for role in _ALIASES]
            members = arrays.zip.infolist()  # type: ignore[union-attr]
            check_unpacked(path, sum(member.file_size for member in members))
            images, labels = (arrays[name] for name in names)
            if CLASSES in arrays.files:
                classes = arrays[CLASSES]
    except HamuError:
        raise
    except Exception as error:  # numpy raises many kinds for a damaged archive; the cause is kept
        raise HamuError(f"{path} cannot be read as npz: {first_line(error)}") from error
    if not (isinstance(images, np.ndarray) and isinstance(labels, np.ndarray)):
        raise HamuError(f"{path} holds something else than arrays as {' and '.join(names)}")
    if classes is None:
        return images, labels, None
    is_text = getattr(classes, "ndim", 0) == 1 and classes.dtype.kind == "U"
    if not is_text or len({*classes}) < len(classes):
        raise HamuError(
            f"the classes in {path} are not names; expected a text for each label from 0, no two "
            f"alike"
        )
    return images, labels, tuple(classes.tolist())


def _folder(path: Path, wanted: _Wanted) -> ImageData:
    names = [one.name for one in path.iterdir() if one.is_dir() and not _is_of_tools(one.name)]
    if all(name.isascii() and name.isdigit() for name in names):
        classes = sorted(names, key=lambda name: (int(name), name))  # 2 before 10
    else:
        classes = sorted(names)
    found = [_images_of_class(path / name) for name in classes]
    if not any(found):
        raise HamuError(
            f"{path} holds no images; expected one subfolder per class with image files in it, or "
            f"for texts a train.jsonl, .json, .csv or .parquet"
        )
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in found])
    items = ((str(file), file) for files in found for file in files)
    data = _decoded(items, labels, tuple(classes), str(path), wanted)
    others = [file for file in path.iterdir() if _is_image(file)]  # beside the folders
    for name in classes:
        others += [f for f in path.joinpath(name).iterdir() if f.is_file() and not _is_image(f)]
    left_out = sorted(
        str(f) for f in others if not _is_of_tools(f.name) and f.name.lower() not in _OF_WINDOWS
    )
    return replace(data, left_out=tuple(left_out))


def _images_of_class(folder: Path) -> list[Path]:
    """List its images by name; reject images in a folder below it, perhaps a class or a split."""
    found = []
    for file in sorted(folder.rglob("*")):
        *below, name = file.relative_to(folder).parts
        if not _is_image(file) or any(map(_is_of_tools, below)) or name.startswith("."):
            continue
        if below:
            raise HamuError(
                f"{folder} has folders with images, first {file}, where a class has images alone; "
                f"if it is a split, name it with --data or --test_data, else put its images into "
                f"one folder"
            )
        found.append(file)
    return found


def _parquet(files: Sequence[Path], path: Path, wanted: _Wanted) -> ImageData:
    import datasets

    try:
        # Not Dataset.from_parquet: that would leave a copy of the user's data in a cache folder.
        table = datasets.Dataset(datasets.table.InMemoryTable(parquet_table(files)))
    except HamuError:
        raise
    except Exception as error:  # the file, or what it says about its columns; the cause is kept
        raise HamuError(f"{path} cannot be read as parquet: {first_line(error)}") from error
    return _table(table, str(path), wanted)


def _table(table: Any, source: str, wanted: _Wanted) -> ImageData:
    import datasets
    import pyarrow

    image, label = (_column(table.column_names, role, wanted, source) for role in _ALIASES)
    kind = table.data.schema.field(label).type
    if pyarrow.types.is_nested(kind) or isinstance(kind, pyarrow.BaseExtensionType):
        raise HamuError(f"the labels of {source} have type {kind}; expected one number per image")
    feature = table.features[label]
    classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    try:
        raw = table.cast_column(image, datasets.Image(decode=False)).with_format(None)[image]
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise HamuError(
            f"the column {image} of {source} holds no images: {first_line(error)}"
        ) from error
    cells = (
        io.BytesIO(cell["bytes"]) if cell and cell["bytes"] else cell and cell["path"]
        for cell in raw
    )
    items = ((f"row {number}", cell) for number, cell in enumerate(cells))
    return _decoded(items, np.asarray(table[label]), classes, source, wanted)


def _column(names: Iterable[str], role: str, wanted: _Wanted, source: object) -> str:
    names, own = list(names), wanted.columns[role]
    candidates = (own,) if own else _ALIASES[role]
    found = next((name for name in candidates if name in names), None)
    if found is None:
        looked = repr(own) if own else " or ".join(candidates)
        raise HamuError(
            f"{source} has no {role} column {looked}; it has {', '.join(names)}; name it with "
            f"--{role}_column"
        )
    return found


def _decoded(
    items: Iterable[tuple[str, Any]],
    labels: np.ndarray,
    classes: tuple[str, ...] | None,
    source: str,
    wanted: _Wanted,
) -> ImageData:
    """Decode named pictures (an image, a path or bytes each) into one array.

    Grey images of 16 bits keep the upper 8. A mode of 32 bits does not say how many are used: 8 if
    no picture of the source needs more, else 16 in all of them.
    """
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda item: _decode(item[0], item[1], source, wanted), items))
    if not found:
        raise HamuError(f"{source} is empty: it has no images")
    deep = [np.asarray(one) for one in found if isinstance(one, Image.Image)]
    shift = 8 if any(one.max(initial=0) > 255 for one in deep) else 0
    arrays = [
        _shaped(_8_bits(one, shift), wanted) if isinstance(one, Image.Image) else one
        for one in found
    ]
    if len({array.shape[0] for array in arrays}) > 1:  # grey and coloured together: all become RGB
        arrays = [np.repeat(array, 3, axis=0) if array.shape[0] == 1 else array for array in arrays]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        listed = ", ".join("x".join(map(str, shape[1:])) for shape in shapes[:3])
        raise HamuError(
            f"the images of {source} differ in size ({listed}, ...); give --image_size to resize "
            f"them"
        )
    return _image_data(np.stack(arrays), labels, classes, source)


def _decode(name: str, raw: Any, source: str, wanted: _Wanted) -> np.ndarray | Image.Image:
    """Decode one picture; one in a mode of 32 bits stays as it is, to be judged with the others."""
    try:
        picture = raw if isinstance(raw, Image.Image) else Image.open(raw)
        if picture.mode != "F":
            if picture.mode == "I" and picture.format not in _OF_16_BITS:
                picture.load()
                return picture
            return _shaped(_8_bits(picture, 8) if picture.mode[0] == "I" else picture, wanted)
    except Exception as error:  # a damaged picture can raise anything in its decoder
        raise HamuError(
            f"{name} of {source} is not a readable image: {first_line(error)}; remove or repair it"
        ) from None
    raise HamuError(
        f"{name} of {source} holds fractions, of which it is not known what is black and what is "
        f"white; save it with whole numbers, 0 to 255"
    )


def _shaped(picture: Image.Image, wanted: _Wanted) -> np.ndarray:
    """A picture as uint8 [C, H, W], of the size and the channels that are wanted."""
    grey = wanted.channels == 1 or (wanted.channels is None and picture.mode in ("1", "L"))
    picture = picture.convert("L" if grey else "RGB")
    if wanted.size is not None and picture.size != (wanted.size, wanted.size):
        picture = picture.resize((wanted.size, wanted.size), Image.Resampling.BILINEAR)
    array = np.asarray(picture)
    return array[None] if grey else array.transpose(2, 0, 1)


def _8_bits(picture: Image.Image, shift: int) -> Image.Image:
    return Image.fromarray((np.asarray(picture) >> shift).clip(0, 255).astype(np.uint8))


def _image_data(
    pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...] | None, source: str
) -> ImageData:
    if not np.issubdtype(labels.dtype, np.integer):
        raise HamuError(
            f"the labels of {source} have type {labels.dtype}; expected whole numbers from 0"
        )
    most = _MOST_CLASSES if classes is None else len(classes)
    wrong = labels[(labels < 0) | (labels >= most)]
    if len(wrong):
        raise HamuError(f"label {wrong[0]} of {source} is out of range; expected 0 to {most - 1}")
    return ImageData(
        torch.from_numpy(np.ascontiguousarray(pixels)),
        torch.from_numpy(labels.astype(np.int64)),
        classes or tuple(map(str, range(int(labels.max()) + 1))),
        source,
        torch.arange(len(labels)),
        named=classes is not None,
    )
