"""A fraction of the data, drawn once and written where all runs of the experiments read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hamu.data import (
    ImageData,
    TextRecord,
    TextRecords,
    forget_class,
    forget_data,
    read_images,
    read_text,
)
from hamu.data.forget_sets import draw_positions
from hamu.data.images import CLASSES
from hamu.data.text import has_test_split
from hamu.errors import HamuError
from hamu.files import DIGITS, file_digest, located, read_json
from hamu.unlearning.record.inputs import text_digest
from hamu.unlearning.run_folder import RunFolder

_IMAGE_OPTIONS = ("image_size", "num_channels", "image_column", "label_column")
_SOURCES = ("data", "forget_data", "test_data", "similar_data")
_TEXT_OPTIONS = ("question_template", "answer_prefix", "prompt_column", "answer_column")
# What a sample has of its own, or no more
OF_SOURCES = (
    *_SOURCES,
    "data_dir",
    "expected_retain",
    "expected_forget",
    "prompt_column",
    "answer_column",
    "allow_missing",
)


@dataclass(frozen=True)
class Sample:
    """Data that runs read.

    Attributes:
        settings: of `hamu unlearn` and `hamu train`, which say where the data are.
        retain: how many records stay.
    """

    settings: Mapping[str, Any]
    retain: int


def sample_images(base: Mapping[str, Any], fraction: float, seed: int, folder: RunFolder) -> Sample:
    """A fraction of the images of each class, as an npz with the names of the source's own columns.

    All of the bundled digits stay where they are.

    There are no test images: no figure of the paper looks at them.

    Raises:
        HamuError: if the data cannot be read, or another sample has this one's place.
    """
    source = place_of(base, "data")
    options = {name: base[name] for name in _IMAGE_OPTIONS if name in base}
    target = str(base["forget_class"])
    name = f"images-{fraction:g}-s{seed}.npz"
    if source == DIGITS and fraction == 1:
        data = read_images(source, **options)
        return Sample({"data": source}, len(forget_class(data, None, target).retain))
    _check_origin(folder, name, base, ("data", *_IMAGE_OPTIONS))
    if not folder.has(name):
        data = _share_of_classes(read_images(source, **options), fraction, seed)
        path = folder.prepare() / f".{name}.tmp"
        path.touch()
        path.chmod(0o600)  # it has what is to be forgotten
        with path.open("wb") as file:
            image, label = (base.get(f"{kind}_column") or kind for kind in ("image", "label"))
            arrays: dict[str, Any] = {
                image: data.pixels.permute(0, 2, 3, 1).numpy(),
                label: data.labels.numpy(),
            }
            arrays[CLASSES] = np.array(data.classes)
            np.savez(file, **arrays)
        path.replace(folder.path / name)
    path = folder.path / name
    data = read_images(str(path), **options)
    return Sample({"data": str(path)}, len(forget_class(data, None, target).retain))


def _share_of_classes(data: ImageData, fraction: float, seed: int) -> ImageData:
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for number in range(len(data.classes)):
        members = (data.labels == number).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        count = round(fraction * len(members))
        if len(members) and not count:
            raise HamuError(
                f"fraction {fraction:g} of {data.source} leaves no image of class {data.classes[number]}, which has "
                f"{len(members)}; choose a larger one"
            )
        chosen.append(members[order[:count]])
    return data.select(torch.cat(chosen).sort().values)


def sample_texts(
    base: Mapping[str, Any],
    fraction: float,
    seed: int,
    folder: RunFolder,
    paraphrases: str | None = None,
) -> Sample:
    """A fraction of the records to retain, to forget and to test on, each as JSON lines.

    Args:
        base: settings that say where the data are.
        fraction: of each set.
        seed: of the draw.
        folder: to write to.
        paraphrases: records with `paraphrased_answer`, those of the forget set: added to what is retained.

    Raises:
        HamuError: if the data cannot be read, or another sample has this one's place.
    """
    options = {name: base[name] for name in _TEXT_OPTIONS if name in base}

    def read(source: str, split: str = "train") -> TextRecords:
        return read_text(source, split, **options)

    source = place_of(base, "data")
    train, forget = read(source), read(place_of(base, "forget_data"))
    test = None
    if base.get("test_data"):
        test = read(place_of(base, "test_data"), "test")
    elif has_test_split(source):
        test = read(source, "test")
    problem = forget_data(train, test, forget, str(base.get("allow_missing")).lower() == "true")
    drawn = {name: _share(data, fraction, seed) for name, data in problem.sets().items()}
    retain = list(drawn["retain"].records)
    if paraphrases is not None:
        kept = {record.prompt for record in drawn["forget"].records}
        more = read(paraphrases)
        retain += [r for r in more.answering("paraphrased_answer").records if r.prompt in kept]
    sets = {"train": [*retain, *drawn["forget"].records]}
    sets |= {name: list(data.records) for name, data in drawn.items() if name != "retain"}
    kind = f"{fraction:g}-s{seed}" + ("-similar" if paraphrases is not None else "")
    # as the user typed it, not relative to data_dir
    said_again = {} if paraphrases is None else {"similar_data": resolved(paraphrases)}
    keys = ("data", "forget_data", "test_data", "similar_data", *_TEXT_OPTIONS)
    _check_origin(folder, f"texts-{kind}", {**base, **said_again}, keys)
    settings: dict[str, str | None] = {"forget_data": None, "test_data": None}
    for name, records in sets.items():
        lines = (json.dumps(_as_row(record), ensure_ascii=False) for record in records)
        path = folder.write_text(
            f"texts-{kind}-{name}.jsonl", "".join(line + "\n" for line in lines), private=True
        )
        settings["data" if name == "train" else f"{name}_data"] = str(path)
    return Sample({key: value for key, value in settings.items() if value}, len(retain))


def _as_row(record: TextRecord) -> dict[str, Any]:
    """A record in the shape in which it is read again as what it is."""
    if record.messages:
        return {"messages": list(record.messages)}
    return {"prompt": record.prompt, "completion": record.answer}


def _check_origin(
    folder: RunFolder, name: str, base: Mapping[str, Any], keys: Sequence[str]
) -> None:
    """A sample is known by its name; it must not be one of other data. What it is of stands beside it."""
    origin = {key: base[key] for key in keys if key in base}
    for key in _SOURCES:
        if key in origin and Path(place_of(base, key)).exists():
            path = Path(place_of(base, key)).resolve()
            origin |= {key: str(path), f"{key} sha256": _digest(path)}
    file = f"{name}.origin.json"
    if not folder.has(file):
        folder.write_json(file, origin)
        return
    was = read_json(folder.path / file, remove=folder.path)
    if was != origin:
        raise HamuError(
            f"{folder.path} holds a sample of {was['data']}, not of {origin['data']} as it is now, read the same way; "
            f"choose another --work_dir"
        )


def resolved(source: str) -> str:
    """A path in the form that does not depend on how it was typed; what is no path stays as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def _digest(source: Path) -> str:
    """The digest of a file, or of all files of a folder."""
    if source.is_file():
        return file_digest(source)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return text_digest(
        "".join(f"{path.relative_to(source)} {file_digest(path)}\n" for path in files)
    )


def _share(data: TextRecords, fraction: float, seed: int) -> TextRecords:
    """A share of the records, at least one, drawn at random and in their order."""
    drawn = draw_positions(len(data), max(1, round(fraction * len(data))), seed)
    return data if drawn is None else data.select(sorted(drawn))


def place_of(base: Mapping[str, Any], key: str) -> str:
    """Place of a data set that settings name; see `located`."""
    return located(str(base[key]), base.get("data_dir"))
