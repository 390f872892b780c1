"""Reading images: every source gives the same pixels, and every damaged one a clear error."""

import os
import shutil
import zipfile
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from hamu import HamuError
from hamu.data import forget_rows, pixel_statistics, read_images, read_text
from hamu.data.image_files import has_test_split

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 5, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.fixture
def folder(tmp_path):
    for i, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        place = tmp_path / "images" / ("cat", "dog")[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def parquet(tmp_path):
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"img": [Image.fromarray(p) for p in PIXELS], "label": LABELS.tolist()}
    datasets.Dataset.from_dict(rows, features).to_parquet(str(tmp_path / "train.parquet"))
    return tmp_path / "train.parquet"


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def test_parquet_npz_and_folder_give_the_same_pixels(folder, parquet, tmp_path):
    by_class = np.argsort(LABELS, kind="stable")
    npz = read_images(save_npz(tmp_path / "a.npz", images=PIXELS, labels=LABELS))
    assert torch.equal(npz.pixels, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert torch.equal(read_images(str(parquet)).pixels, npz.pixels)
    assert torch.equal(read_images(str(folder)).pixels, npz.pixels[by_class])
    assert read_images(str(folder)).classes == read_images(str(parquet)).classes == ("cat", "dog")
    named = save_npz(
        tmp_path / "b.npz", images=PIXELS, labels=LABELS, classes=np.array(["cat", "dog"])
    )
    assert (npz.classes, read_images(named).classes) == (("0", "1"), ("cat", "dog"))


@pytest.mark.parametrize(
    ("shape", "wanted", "decodes"),
    [
        ((6, 5, 5, 3), {}, False),
        ((6, 5, 5, 3), {"image_size": 5, "num_channels": 3}, False),
        ((6, 5, 4, 3), {"num_channels": 3}, False),
        ((6, 5, 5), {}, False),
        ((6, 5, 5, 1), {"num_channels": 1}, False),
        ((6, 5, 4, 3), {"image_size": 5}, True),
        ((6, 5, 5, 3), {"num_channels": 1}, True),
        ((6, 5, 5), {"num_channels": 3}, True),
        ((6, 5, 5, 4), {}, True),
    ],
)
def test_an_npz_is_decoded_only_where_it_must_be_and_its_pixels_are_the_same(
    tmp_path, monkeypatch, shape, wanted, decodes
):
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = save_npz(tmp_path / "a.npz", images=images, labels=LABELS)
    made = []
    picture = Image.fromarray
    monkeypatch.setattr(Image, "fromarray", lambda array: made.append(array) or picture(array))
    found = read_images(path, **wanted)
    assert bool(made) is decodes
    assert found.pixels.is_contiguous()
    assert found.labels.tolist() == LABELS.tolist()
    if not decodes:
        expected = images if images.ndim == 4 else images[..., None]
        assert torch.equal(found.pixels, torch.from_numpy(expected).permute(0, 3, 1, 2))


def test_a_folder_with_train_and_test_has_both_splits(parquet):
    parquet.with_name("test.parquet").write_bytes(parquet.read_bytes())
    assert len(read_images(str(parquet.parent), "test")) == 6


def test_a_split_in_parts_is_one(parquet, tmp_path):
    whole = read_images(str(parquet))
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for number in range(2):
        shutil.copy(
            parquet, tmp_path / "repository" / "data" / f"train-0000{number}-of-00002.parquet"
        )
    found = read_images(str(tmp_path / "repository"))
    assert torch.equal(found.pixels, torch.cat([whole.pixels, whole.pixels]))
    assert found.classes == whole.classes
    assert not has_test_split(str(tmp_path / "repository"))
    shutil.copy(parquet, tmp_path / "repository" / "data" / "test-00000-of-00001.parquet")
    assert has_test_split(str(tmp_path / "repository"))
    assert len(read_images(str(tmp_path / "repository"), "test")) == 6
    parquet.rename(parquet.with_name("a.PARQUET"))
    assert len(read_images(str(parquet.with_name("a.PARQUET")))) == 6


def test_nothing_is_left_in_a_cache_folder(parquet, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    read_images(str(parquet))
    assert not cache.exists()


def test_the_bundled_digits_are_split_four_to_one_and_disjoint():
    train, test = read_images("digits"), read_images("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    both = zip(load_digits().images, load_digits().target, strict=True)
    source = Counter((image.astype(int).tobytes(), label) for image, label in both)
    read = Counter(
        ((image[0] * 16.0 / 255).round().int().numpy().astype(int).tobytes(), label)
        for data in (train, test)
        for image, label in zip(data.pixels, data.labels.tolist(), strict=True)
    )
    assert read == source
    assert train.pixels.dtype == torch.uint8
    assert train.pixels.max() == 255


def test_rows_are_counted_as_they_are_named(folder):
    """What --forget_rows takes is what is shown of a record."""
    for data in (read_images("digits"), read_images("digits", "test"), read_images(str(folder))):
        assert data.rows.tolist() == list(range(len(data)))
        assert forget_rows(data, None, [4]).forget.rows.tolist() == [4]
    assert read_images(str(folder)).labels.tolist() == [0, 0, 0, 1, 1, 1], (
        "by class, then by file name"
    )


def test_folders_named_by_numbers_are_in_the_order_of_the_numbers(tmp_path):
    for number in (0, 1, 2, 10):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        Image.new("L", (2, 2), number).save(tmp_path / "a" / str(number) / "1.png")
    data = read_images(str(tmp_path / "a"))
    assert data.classes == ("0", "1", "2", "10")
    assert data.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 10]
    (tmp_path / "a" / "x").mkdir()
    assert read_images(str(tmp_path / "a")).classes == ("0", "1", "10", "2", "x")


def test_train_and_test_are_splits_if_they_hold_folders_and_classes_if_they_hold_images(folder):
    for name in ("train", "test"):
        shutil.copytree(folder / "cat", folder / name)
        (folder / name / ".ipynb_checkpoints").mkdir()
    assert read_images(str(folder)).classes == ("cat", "dog", "test", "train")
    assert not has_test_split(str(folder))
    split = folder.parent / "split"
    shutil.copytree(folder, split / "train")
    (split / "train" / "dog").rename(split / "train" / "owl")
    assert read_images(str(split)).classes == ("cat", "owl", "test", "train")
    assert not has_test_split(str(split))
    shutil.copytree(folder / "cat", split / "test")
    assert has_test_split(str(split))
    both = folder.parent / "both"
    for name in ("train", "test"):
        shutil.copytree(folder / "cat", both / name / "cat")
        shutil.copy(next((folder / "cat").glob("*.png")), both / name / "preview.png")
    assert has_test_split(str(both)), "an image beside the classes is of none of them"
    assert read_images(str(both)).classes == ("cat",)
    with pytest.raises(HamuError, match="test holds no images; expected one subfolder per class"):
        read_images(str(split), "test")


def test_what_tools_leave_is_passed_over_at_every_depth(folder):
    for place in (
        ".ipynb_checkpoints",
        "__MACOSX",
        "cat/.ipynb_checkpoints",
        "dog/__MACOSX/cat",
        "dog/.a/b",
    ):
        shutil.copytree(folder / "cat", folder / place, ignore=shutil.ignore_patterns(".*", "_*"))
    (folder / "cat" / "._0.png").write_bytes(b"what macOS knows of it")
    data = read_images(str(folder))
    assert (data.classes, len(data)) == (("cat", "dog"), 6)


def test_what_a_folder_leaves_out_is_said(folder):
    assert read_images(str(folder)).left_out == ()
    shutil.copy(folder / "cat" / "0.png", folder / "loose.PNG")
    for name in ("notes.txt", "7.heic", "Thumbs.db", ".DS_Store"):
        (folder / "dog" / name).write_bytes(b"no image that can be read")
    (folder / "README.md").write_text("what this is")
    data = read_images(str(folder))
    assert data.left_out == tuple(
        str(folder / name) for name in ("dog/7.heic", "dog/notes.txt", "loose.PNG")
    )
    assert len(data) == 6


@pytest.mark.parametrize("ending", [".jfif", ".jpe", ".JPG"])
def test_jpeg_has_several_endings(folder, ending):
    Image.fromarray(PIXELS[0]).save(folder / "cat" / f"9{ending}", format="JPEG")
    assert len(read_images(str(folder))) == 7


def test_normalised_batches_have_mean_zero_and_deviation_one():
    train = read_images("digits")
    batch = train.normalized(*pixel_statistics(train)).__getitems__(range(len(train)))[
        "pixel_values"
    ]
    assert batch.mean().abs() < 1e-5
    assert (batch.std() - 1).abs() < 1e-3


def test_a_channel_that_is_the_same_everywhere_is_only_moved(folder):
    constant = read_images(str(folder))
    constant.pixels[:, 1] = 51
    mean, std = pixel_statistics(constant)
    assert (mean[1], std[1]) == (pytest.approx(0.2), 1.0)
    batch = constant.normalized(mean, std).__getitems__(range(len(constant)))["pixel_values"]
    assert batch[:, 1].abs().max() < 1e-6


def test_grey_images_fit_to_coloured_ones_and_folders_of_tools_are_no_class(folder, tmp_path):
    coloured = read_images(str(folder))
    grey = read_images(str(folder), num_channels=1)
    assert coloured.matched(grey).pixels.shape == coloured.pixels.shape
    with pytest.raises(HamuError, match="give --image_size, or --num_channels"):
        grey.matched(coloured)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (folder / name).mkdir()
    assert read_images(str(folder)).classes == ("cat", "dog")


@pytest.mark.parametrize(("values", "shown"), [
    ([[0, 100, 255], [0, 1, 2]], [[0, 100, 255], [0, 1, 2]]),
    ([[0, 100, 255], [0, 256 * 100, 256 * 255 + 7]], [[0, 0, 0], [0, 100, 255]]),
])  # fmt: skip
def test_how_many_of_32_bits_are_used_is_decided_for_all_images_together(values, shown, tmp_path):
    for name, row in zip("ab", values, strict=True):
        (tmp_path / name).mkdir()
        Image.fromarray(np.array([row] * 3, dtype=np.int32), mode="I").save(
            tmp_path / name / "0.tiff"
        )
    pixels = read_images(str(tmp_path), num_channels=1).pixels
    assert pixels[:, 0, 0].tolist() == shown


@pytest.mark.parametrize("ending", ["pgm", "png"])
def test_a_dark_image_of_16_bits_stays_dark(ending, tmp_path):
    for name, row in (("dark", [0, 100, 150, 200]), ("light", [0, 256 * 100, 256 * 200, 65535])):
        (tmp_path / name).mkdir()
        image = Image.frombytes("I;16", (4, 4), np.array([row] * 4, dtype="<u2").tobytes())
        (image if ending == "png" else image.convert("I")).save(tmp_path / name / f"0.{ending}")
    pixels = read_images(str(tmp_path), image_size=4, num_channels=1).pixels
    assert pixels[:, 0, 0].tolist() == [[0, 0, 0, 0], [0, 100, 200, 255]]


def test_images_of_16_bits_are_read_in_either_order_of_bytes(tmp_path):
    values = np.array([[0, 256 * 100, 256 * 255 + 7]] * 3)
    for name, kind in (("least", "<u2"), ("most", ">u2")):
        (tmp_path / name).mkdir()
        mode = {"<u2": "I;16", ">u2": "I;16B"}[kind]
        Image.frombytes(mode, (3, 3), values.astype(kind).tobytes()).save(
            tmp_path / name / "0.tiff"
        )
    pixels = read_images(str(tmp_path), num_channels=1).pixels
    assert pixels[:, 0, 0].tolist() == [[0, 100, 255]] * 2


def test_images_are_resized_and_converted_on_request(folder):
    data = read_images(str(folder), image_size=8, num_channels=1)
    assert data.pixels.shape == (6, 1, 8, 8)


def broken_image(folder):
    (folder / "cat" / "0.png").write_bytes(b"no image")
    return str(folder), {}


def odd_size(folder):
    Image.new("RGB", (9, 9)).save(folder / "cat" / "9.png")
    return str(folder), {}


def named_splits(folder):
    for name in ("training", "testing"):
        (folder / "mnist" / name).mkdir(parents=True)
        shutil.copytree(folder / "cat", folder / "mnist" / name / "0")
    return str(folder / "mnist"), {}


def fractions(folder):
    Image.fromarray(np.full((5, 5), 0.5, np.float32)).save(folder / "dog" / "9.tiff")
    return str(folder), {}


def single_array(folder):
    with open(folder / "a.npz", "wb") as file:
        np.save(file, PIXELS)
    return str(folder / "a.npz"), {}


def text_as_array(folder):
    with zipfile.ZipFile(folder / "a.npz", "w") as packed:
        packed.writestr("images.npy", "no array")
        packed.writestr("labels.npy", "no array")
    return str(folder / "a.npz"), {}


def texts_as_images(folder):
    datasets.Dataset.from_dict({"image": [1.5], "label": [0]}).to_parquet(str(folder / "a.parquet"))
    return str(folder / "a.parquet"), {}


def labelled_by(labels, feature=None):
    def prepare(folder):
        features = (
            datasets.Features({"image": datasets.Image(), "label": feature})
            if feature is not None
            else None
        )
        rows = {"image": [Image.fromarray(p) for p in PIXELS[:2]], "label": labels}
        datasets.Dataset.from_dict(rows, features).to_parquet(str(folder / "a.parquet"))
        return str(folder / "a.parquet"), {}

    return prepare


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            labelled_by([[0, 1], [1, 0]]),
            r"the labels of .*a\.parquet have type list<.*int64>; expected one number per",
        ),
        (
            labelled_by([[0], [1, 0]]),
            r"the labels of .*a\.parquet have type list<.*int64>; expected one number per",
        ),
        (
            labelled_by([{"id": 0}, {"id": 1}]),
            r"the labels of .*a\.parquet have type struct<.*>; expected one number",
        ),
        (
            labelled_by([[[0]], [[1]]], datasets.Array2D((1, 1), "int64")),
            "have type .*; expected one number per image",
        ),
        (lambda f: (str(f / "nowhere"), {}), "is neither a file nor a folder"),
        (broken_image, r"0\.png of .* is not a readable image"),
        (
            fractions,
            r"9\.tiff of .*images holds fractions, .*; save it with whole numbers, 0 to 255",
        ),
        (
            named_splits,
            r"mnist/testing has folders with images, first .*testing/0/0\.png, where a class has images alone; if it "
            "is a split, name it with --data or --test_data",
        ),
        (odd_size, "differ in size .*; give --image_size"),
        (
            lambda f: (str(f / "cat" / "0.png"), {}),
            "is not a data set that can be read; give images as .*, texts as",
        ),
        (lambda f: (str(f / "cat"), {}), "holds no images"),
        (
            lambda f: (save_npz(f / "a.npz", images=PIXELS, labels=LABELS[:3]), {}),
            r"labels in .* have shape \(3,\); expected one number for each of 6 images",
        ),
        (lambda f: (save_npz(f / "a.npz", images=PIXELS / 255, labels=LABELS), {}), "type float64"),
        (
            lambda f: (save_npz(f / "a.npz", images=PIXELS, labels=LABELS - 1), {}),
            "label -1 of .* is out of range",
        ),
        (
            lambda f: (save_npz(f / "a.npz", images=PIXELS, labels=LABELS / 2), {}),
            "expected whole numbers",
        ),
        (
            lambda f: (
                save_npz(f / "a.npz", images=PIXELS, labels=LABELS),
                {"label_column": "kind"},
            ),
            "no label column 'kind'",
        ),
        (lambda f: (save_npz(f / "a.npz", pictures=PIXELS), {}), "has no image column"),
        (
            lambda f: (save_npz(f / "a.npz", images=PIXELS, labels=PIXELS), {}),
            r"the labels in .* have shape \(6, 5, 5, 3\); expected one number for each",
        ),
        (
            lambda f: (
                save_npz(
                    f / "a.npz", images=PIXELS, labels=LABELS, classes=np.array(["cat", "cat"])
                ),
                {},
            ),
            "the classes in .* are not names; expected a text for each label from 0, no two alike",
        ),
        (
            lambda f: (save_npz(f / "a.npz", images=PIXELS[:0], labels=LABELS[:0]), {}),
            "is empty: it has no images",
        ),
        (single_array, r"a\.npz holds a single array; expected an npz with images and labels"),
        (text_as_array, r"a\.npz holds something else than arrays as images and labels"),
        (texts_as_images, r"the column image of .*a\.parquet holds no images: "),
        (lambda f: (str(f), {"image_size": 5000}), "image_size 5000 must be 1 to 4096 pixels"),
        (
            lambda f: (str(f), {"num_channels": 2}),
            r"num_channels 2 must be 1 \(grey\) or 3 \(RGB\)",
        ),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_that_names_it(folder, prepare, message):
    source, options = prepare(folder)
    with pytest.raises(HamuError, match=message):
        read_images(source, **options)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    path.write_bytes(b"PAR1 damaged")
    with pytest.raises(HamuError, match=f"train\\{suffix} cannot be read"):
        read_images(str(path))


def test_a_file_that_would_fill_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    path = save_npz(tmp_path / "a.npz", images=PIXELS, labels=LABELS)
    monkeypatch.setattr(os, "sysconf", lambda name: 30)  # pages, and bytes of one
    with pytest.raises(
        HamuError, match=r"a\.npz takes 0\.0 GB unpacked, too much for a machine with 0\.0 GB"
    ):
        read_images(path)


def test_a_data_set_of_the_hub_that_is_out_of_reach_is_named(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for read in (read_images, read_text):
        with pytest.raises(
            HamuError,
            match=r"hub:a/b \(train\) cannot be loaded: no network; without network, name",
        ):
            read("hub:a/b")


@pytest.mark.parametrize(("source", "asked"), [
    ("hub:o/n", ("o/n", None, "test")),
    ("hub:o/n:c", ("o/n", "c", "test")),
    ("hub:o/n@s", ("o/n", None, "s")),
    ("hub:o/n:c@s", ("o/n", "c", "s")),
])  # fmt: skip
def test_a_text_of_the_hub_is_of_the_configuration_and_split_that_its_name_says(
    source, asked, monkeypatch
):
    found = []

    def load_dataset(name, config=None, *, split):
        found.append((name, config, split))
        return [{"question": "Who?", "answer": "Ada."}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_text(source, "test").records[0].answer == " Ada."
    assert found == [asked]


def test_test_data_of_another_shape_or_with_another_class_do_not_match(folder):
    train = read_images(str(folder))
    with pytest.raises(
        HamuError,
        match=r"have shape \(3, 8, 8\), those of .* \(3, 5, 5\); give --image_size, or --num_channels",
    ):
        train.matched(read_images(str(folder), image_size=8))
    (folder / "dog").rename(folder / "owl")
    with pytest.raises(
        HamuError,
        match=r"class owl of .* is not among the classes cat, dog; name the classes of both",
    ):
        train.matched(read_images(str(folder)))
