"""Reading labelled images: the bundled digits, parquet, an image folder, npz, or a data set of the hub.

Every reader returns `ImageData`: one array, decoded once. Only a source that starts with "hub:" may use the network.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hamu.data.hub import loading
from hamu.data.images import ImageData
from hamu.data.packed import check_unpacked, parquet_table
from hamu.data.parts import parts_of
from hamu.data.sources import DIGITS, HUB, existing, is_of_hub
from hamu.errors import HamuError, first_line

CLASSES = "classes"  # an npz may hold their names
_IMAGE_SUFFIXES = {
    *(
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".webp",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
    )
}
_OF_WINDOWS = {"thumbs.db", "desktop.ini"}
_OF_16_BITS = ("PPM", "PNG")  # formats of which Pillow's mode "I" is 16 bits a pixel
_LARGEST = 4096  # pixels of a side
_MOST_CLASSES = 100_000
_ALIASES = {
    "image": ("image", "img", "images", "pixel_values", "x"),
    "label": ("label", "labels", "fine_label", "y"),
}


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
        source: "digits" (bundled with scikit-learn), a .parquet or .npz file, a folder with one subfolder of images
            per class, a folder that holds "train" and "test" as such files or folders, or in parts (see `parts_of`), or
            "hub:OWNER/NAME". Classes of a folder are in the order of their names, or of their numbers if all names are
            numbers; its rows by class, then by file name.
        split: "train" or "test", for sources that have both.
        image_size: resize to this many pixels squared (bilinear); without it all images must have one size.
        num_channels: convert to 1 (grey) or 3 (RGB) channels; by default RGB, unless every image is grey.
        image_column, label_column: names of the columns (parquet, hub) or arrays (npz), if they are not the usual.

    Raises:
        HamuError: if the source is missing or empty, an image cannot be read (it is named), or the sizes differ.
    """
    columns = {"image": image_column, "label": label_column}
    if image_size is not None and not 1 <= image_size <= _LARGEST:
        raise HamuError(f"image_size {image_size} must be 1 to {_LARGEST} pixels")
    if num_channels not in (None, 1, 3):
        raise HamuError(f"num_channels {num_channels} must be 1 (grey) or 3 (RGB)")
    if source == DIGITS:
        return _digits(split, image_size, num_channels)
    if is_of_hub(source):
        return _hub(source, split, columns, image_size, num_channels)
    path = existing(source)
    if path.is_dir():
        path = _inner(path, split) or path
        parts = parts_of(path, split) if path.is_dir() else []
        if parts:
            return _parquet(parts, path, columns, image_size, num_channels)
        if path.is_dir():
            return _folder(path, image_size, num_channels)
    if path.suffix.lower() == ".npz":
        return _npz(path, columns, image_size, num_channels)
    if path.suffix.lower() == ".parquet":
        return _parquet([path], path, columns, image_size, num_channels)
    raise HamuError(
        f"{path} is not a data set that can be read; give images as .parquet, .npz or a folder per class, texts as "
        f".jsonl, .json, .csv or .parquet"
    )


def has_test_split(source: str) -> bool:
    """Whether `read_images(source, "test")` reads something other than the training data."""
    path = Path(source)
    return source == DIGITS or (
        path.is_dir() and bool(_inner(path, "test") or parts_of(path, "test"))
    )


def _inner(folder: Path, split: str) -> Path | None:
    """Where a split is, if the folder has splits: one with images directly in it is a class, whatever its name."""
    for name in (f"{split}.parquet", f"{split}.npz"):
        if (folder / name).exists():
            return folder / name
    has_splits = any(_holds_folders(folder / name) for name in ("train", "test"))
    return folder / split if has_splits and (folder / split).exists() else None


def _holds_folders(folder: Path) -> bool:
    """Whether there are folders in it that may be classes: with images, or with nothing beside them."""
    inside = (
        [child for child in folder.iterdir() if not _is_of_tools(child.name)]
        if folder.is_dir()
        else []
    )
    folders = [child for child in inside if child.is_dir()]
    return any(_is_image(file) for child in folders for file in child.iterdir()) or (
        bool(folders) and not any(map(_is_image, inside))
    )


def _is_of_tools(name: str) -> bool:
    """Such as .ipynb_checkpoints and __MACOSX."""
    return name.startswith((".", "__"))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file()


def _digits(split: str, size: int | None, channels: int | None) -> ImageData:
    """scikit-learn's 1,797 digits of 8x8 pixels: every fifth record is test data. Rows are counted in each split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = np.arange(len(digits.target))
    rows = rows[rows % 5 == 4] if split == "test" else rows[rows % 5 != 4]
    pixels = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
    pictures = (
        (f"digit {row}", Image.fromarray(image)) for row, image in zip(rows, pixels, strict=True)
    )
    return _decoded(pictures, digits.target[rows], tuple("0123456789"), DIGITS, size, channels)


def _npz(
    path: Path, columns: dict[str, str | None], size: int | None, channels: int | None
) -> ImageData:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise HamuError(f"{path} holds a single array; expected an npz with images and labels")
        with loaded as arrays:
            names = {role: _column(arrays.files, role, columns[role], path) for role in columns}
            check_unpacked(path, sum(member.file_size for member in arrays.zip.infolist()))
            images, labels = arrays[names["image"]], arrays[names["label"]]
            if not (isinstance(images, np.ndarray) and isinstance(labels, np.ndarray)):
                raise HamuError(
                    f"{path} holds something else than arrays as {' and '.join(names.values())}"
                )
            classes = _class_names(arrays[CLASSES], path) if CLASSES in arrays.files else None
    except HamuError:
        raise
    except Exception as error:  # numpy raises many kinds for a damaged archive; the cause is kept
        raise HamuError(f"{path} cannot be read as npz: {first_line(error)}") from error
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or (images.ndim == 4 and images.shape[3] not in (1, 3, 4))
    ):
        raise HamuError(
            f"the images in {path} have type {images.dtype} and shape {images.shape}; expected uint8 [N, H, W] or "
            f"[N, H, W, C] with 1, 3 or 4 channels last"
        )
    if labels.ndim != 1:
        raise HamuError(
            f"the labels in {path} have shape {labels.shape}; expected one number per image, [N]"
        )
    if len(images) != len(labels):
        raise HamuError(
            f"{path} has {len(images)} images but {len(labels)} labels; they must be as many"
        )
    if _are_as_wanted(images, size, channels):
        pixels = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        return _image_data(pixels, labels, classes, str(path), np.arange(len(images)))
    pictures = (
        Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[-1] == 1 else image)
        for image in images
    )
    return _decoded(
        ((f"image {i}", picture) for i, picture in enumerate(pictures)),
        labels,
        classes,
        str(path),
        size,
        channels,
    )


def _are_as_wanted(images: np.ndarray, size: int | None, channels: int | None) -> bool:
    """Whether these images, uint8 [N, H, W] or [N, H, W, C], need no picture made of each: `_decoded` gives the same.

    False if there are none.
    """
    has = 1 if images.ndim == 3 else images.shape[3]
    return (
        images.size > 0
        and has in (1, 3)
        and channels in (None, has)
        and (size is None or images.shape[1:3] == (size, size))
    )


def _class_names(names: Any, path: Path) -> tuple[str, ...]:
    if (
        not isinstance(names, np.ndarray)
        or names.ndim != 1
        or names.dtype.kind != "U"
        or len({*names}) < len(names)
    ):
        raise HamuError(
            f"the classes in {path} are not names; expected a text for each label from 0, no two alike"
        )
    return tuple(names.tolist())


def _folder(path: Path, size: int | None, channels: int | None) -> ImageData:
    classes = _in_order(
        [child.name for child in path.iterdir() if child.is_dir() and not _is_of_tools(child.name)]
    )
    files = [
        (file, number)
        for number, name in enumerate(classes)
        for file in _images_of_class(path / name)
    ]
    if not files:
        raise HamuError(
            f"{path} holds no images; expected one subfolder per class with image files in it, or for texts a "
            f"train.jsonl, .json, .csv or .parquet"
        )
    labels = np.array([number for _, number in files])
    data = _decoded(
        ((str(file), file) for file, _ in files), labels, classes, str(path), size, channels
    )
    return replace(data, left_out=_left_out(path, classes))


def _left_out(path: Path, classes: Iterable[str]) -> tuple[str, ...]:
    """The images beside the folders of the classes, and the files in these that are no images by their names."""
    others = (
        file for name in classes for file in path.joinpath(name).iterdir() if not _is_image(file)
    )
    found = [*filter(_is_image, path.iterdir()), *(file for file in others if file.is_file())]
    return tuple(
        sorted(
            str(f) for f in found if not _is_of_tools(f.name) and f.name.lower() not in _OF_WINDOWS
        )
    )


def _in_order(names: list[str]) -> tuple[str, ...]:
    """Numbers by their size, as other kinds of data and models count them: 2 before 10."""
    if all(name.isascii() and name.isdigit() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _images_of_class(folder: Path) -> list[Path]:
    """Its images, by name.

    Raises:
        HamuError: if there are some in a folder below it, which may be a class or a split of its own.
    """
    found = []
    for file in sorted(folder.rglob("*")):
        below = file.relative_to(folder).parts
        if not _is_image(file) or any(map(_is_of_tools, below[:-1])) or file.name.startswith("."):
            continue
        if len(below) > 1:
            raise HamuError(
                f"{folder} has folders with images, first {file}, where a class has images alone; if it is a split, "
                f"name it with --data or --test_data, else put its images into one folder"
            )
        found.append(file)
    return found


def _parquet(
    files: Sequence[Path],
    path: Path,
    columns: dict[str, str | None],
    size: int | None,
    channels: int | None,
) -> ImageData:
    import datasets

    try:
        # Not Dataset.from_parquet: that would leave a copy of the user's data in a cache folder.
        table = datasets.Dataset(datasets.table.InMemoryTable(parquet_table(files)))
    except HamuError:
        raise
    except (
        Exception
    ) as error:  # the file itself, or what it says about its columns; the cause is kept
        raise HamuError(f"{path} cannot be read as parquet: {first_line(error)}") from error
    return _table(table, str(path), columns, size, channels)


def _hub(
    source: str, split: str, columns: dict[str, str | None], size: int | None, channels: int | None
) -> ImageData:
    import datasets

    with loading(source, split):
        table = datasets.load_dataset(source.removeprefix(HUB), split=split)
    return _table(table, source, columns, size, channels)


def _table(
    table: Any, source: str, columns: dict[str, str | None], size: int | None, channels: int | None
) -> ImageData:
    import datasets
    import pyarrow

    image = _column(table.column_names, "image", columns["image"], source)
    label = _column(table.column_names, "label", columns["label"], source)
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
    items = ((f"row {i}", _encoded(value)) for i, value in enumerate(raw))
    return _decoded(items, np.asarray(table[label]), classes, source, size, channels)


def _encoded(value: Any) -> Any:
    """The bytes or the path of an image cell; whatever else stands there, decoding will name."""
    if isinstance(value, dict):
        return io.BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    return value


def _column(names: Iterable[str], role: str, wanted: str | None, source: object) -> str:
    names = list(names)
    for candidate in (wanted,) if wanted else _ALIASES[role]:
        if candidate in names:
            return candidate
    looked = repr(wanted) if wanted else " or ".join(_ALIASES[role])
    raise HamuError(
        f"{source} has no {role} column {looked}; it has {', '.join(names)}; name it with --{role}_column"
    )


def _decoded(
    items: Iterator[tuple[str, Any]],
    labels: np.ndarray,
    classes: tuple[str, ...] | None,
    source: str,
    size: int | None,
    channels: int | None,
) -> ImageData:
    """Decode named pictures (an image, a path or bytes each) into one array.

    Grey ones of 16 bits keep the upper 8. Those said to have 32 do not tell how many are used: 8 if no picture needs
    more, else 16 in all of them.
    """

    def decode(item: tuple[str, Any]) -> np.ndarray | Image.Image:
        name, raw = item
        try:
            picture = raw if isinstance(raw, Image.Image) else Image.open(raw)
            if picture.mode == "F":
                raise HamuError(
                    f"{name} of {source} holds fractions, of which it is not known what is black and what is white; "
                    f"save it with whole numbers, 0 to 255"
                )
            if picture.mode == "I" and picture.format not in _OF_16_BITS:
                picture.load()
                return picture
            return shaped(_upper_8_bits(picture) if picture.mode.startswith("I") else picture)
        except HamuError:
            raise
        except (
            Exception
        ) as error:  # a damaged picture can raise anything in its decoder; the cause is kept
            raise HamuError(
                f"{name} of {source} is not a readable image: {first_line(error)}; remove or repair it"
            ) from None

    def shaped(picture: Image.Image) -> np.ndarray:
        grey = picture.mode in ("1", "L")
        picture = picture.convert("L" if channels == 1 or (channels is None and grey) else "RGB")
        if size is not None and picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BILINEAR)
        array = np.asarray(picture)
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(decode, items))
    of_32_bits = [one for one in found if isinstance(one, Image.Image)]
    to_8_bits = _upper_8_bits if any(_most(one) > 255 for one in of_32_bits) else _lower_8_bits
    arrays = [shaped(to_8_bits(one)) if isinstance(one, Image.Image) else one for one in found]
    if not arrays:
        raise HamuError(f"{source} is empty: it has no images")
    if len({array.shape[0] for array in arrays}) > 1:  # grey and coloured together: all become RGB
        arrays = [np.repeat(array, 3, axis=0) if array.shape[0] == 1 else array for array in arrays]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        listed = ", ".join("x".join(map(str, shape[1:])) for shape in shapes[:3])
        raise HamuError(
            f"the images of {source} differ in size ({listed}, ...); give --image_size to resize them"
        )
    return _image_data(np.stack(arrays), labels, classes, source, np.arange(len(arrays)))


def _most(picture: Image.Image) -> int:
    return int(np.asarray(picture).max(initial=0))


def _upper_8_bits(picture: Image.Image) -> Image.Image:
    """Of 16 bits a pixel."""
    return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))


def _lower_8_bits(picture: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(picture).clip(0, 255).astype(np.uint8))


def _image_data(
    pixels: np.ndarray,
    labels: np.ndarray,
    classes: tuple[str, ...] | None,
    source: str,
    rows: np.ndarray,
) -> ImageData:
    if not np.issubdtype(labels.dtype, np.integer):
        raise HamuError(
            f"the labels of {source} have type {labels.dtype}; expected whole numbers from 0"
        )
    most = _MOST_CLASSES if classes is None else len(classes)
    if labels.min() < 0 or labels.max() >= most:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise HamuError(f"label {wrong} of {source} is out of range; expected 0 to {most - 1}")
    named = classes is not None
    if classes is None:
        classes = tuple(str(number) for number in range(int(labels.max()) + 1))
    return ImageData(
        torch.from_numpy(np.ascontiguousarray(pixels)),
        torch.from_numpy(labels.astype(np.int64)),
        classes,
        source,
        torch.from_numpy(rows.astype(np.int64)),
        named=named,
    )
