"""From options to an unlearning problem: the data read, divided, and checked against the model."""

from __future__ import annotations

from pathlib import Path

from hamu.cli.options import DataOptions
from hamu.data import ImageData, UnlearningData, forget_class, forget_data, forget_rows, parse_rows, read_images
from hamu.data.readers import DIGITS, HUB, has_test_split
from hamu.errors import HamuError


def read_problem(options: DataOptions) -> UnlearningData:
    """Read the training and test data and divide them as the options say.

    Raises:
        HamuError: if something is missing or does not fit; nothing has been written then.
    """
    chosen = [n for n in ("forget_class", "forget_rows", "forget_data") if getattr(options, n) is not None]
    if len(chosen) != 1:
        given = " and ".join(f"--{name}" for name in chosen) or "nothing"
        raise HamuError(f"say what to forget with one of --forget_class, --forget_rows, --forget_data; got {given}")
    train, test = read_train_and_test(options)
    if options.forget_class is not None:
        return forget_class(train, test, options.forget_class, options.rho, options.forget_seed)
    if options.forget_rows is not None:
        return forget_rows(train, test, parse_rows(options.forget_rows))
    return forget_data(train, test, _read(options, str(options.forget_data), "train"))


def read_train_and_test(options: DataOptions) -> tuple[ImageData, ImageData | None]:
    """The training data, and the test data if there are any."""
    if options.data is None:
        raise HamuError("name the training data with --data: digits, a file, a folder, or hub:OWNER/NAME")
    train = _read(options, options.data, "train")
    test = None
    if options.test_data is not None:
        test = _read(options, options.test_data, "test")
    elif has_test_split(_located(options, options.data)):
        test = _read(options, options.data, "test")
    return train, None if test is None else test.with_classes(train.classes)


def sources(options: DataOptions) -> tuple[str, ...]:
    """The local files and folders that are read."""
    named = (options.data, options.test_data, options.forget_data)
    return tuple(_located(options, n) for n in named if n is not None and n != DIGITS and not n.startswith(HUB))


def _read(options: DataOptions, source: str, split: str) -> ImageData:
    return read_images(
        _located(options, source),
        split,
        image_size=options.image_size,
        num_channels=options.num_channels,
        image_column=options.image_column,
        label_column=options.label_column,
    )


def _located(options: DataOptions, source: str) -> str:
    if source == DIGITS or source.startswith(HUB) or options.data_dir is None:
        return source
    return str(Path(options.data_dir) / source)
