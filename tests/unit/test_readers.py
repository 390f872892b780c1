"""Reading images: every source gives the same pixels, and every damaged one a clear error."""

import shutil
import unicodedata
from dataclasses import replace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import default_data_collator

from hamu import HamuError
from hamu.data import batch_of, collate, forget_rows, pixel_statistics, read_images, read_text
from hamu.data.images import has_test_split
from hamu.models import load_classifier
from hamu.models.language import load_language_model

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 5, 3), dtype=np.uint8)
PICTURES = [Image.fromarray(one) for one in PIXELS]
LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.fixture
def folder(tmp_path):
    for i, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        place = tmp_path / "images" / ("cat", "dog")[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "images"


def to_parquet(path, image, labels, kind=None):
    rows = {"img": image, "label": labels}
    features = None if kind is None else datasets.Features({"img": datasets.Image(), "label": kind})
    datasets.Dataset.from_dict(rows, features).to_parquet(str(path))
    return str(path)


@pytest.fixture
def parquet(tmp_path):
    kind = datasets.ClassLabel(names=["cat", "dog"])
    to_parquet(tmp_path / "train.parquet", PICTURES, LABELS.tolist(), kind)
    return tmp_path / "train.parquet"


def to_npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def test_parquet_npz_and_folder_give_the_same_pixels(folder, parquet, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    by_class = np.argsort(LABELS, kind="stable")
    npz = read_images(to_npz(tmp_path / "a.npz", images=PIXELS, labels=LABELS))
    assert npz.pixels.is_contiguous()
    assert torch.equal(npz.pixels, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert torch.equal(read_images(str(parquet)).pixels, npz.pixels)
    assert torch.equal(read_images(str(folder)).pixels, npz.pixels[by_class])
    assert read_images(str(folder)).classes == read_images(str(parquet)).classes == ("cat", "dog")
    paths = sorted(folder.glob("*/*.png"), key=lambda path: int(path.stem))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in paths]
    (tmp_path / "a.csv").write_text("\n".join(["\ufefffile_name,label", *rows]), encoding="utf-8")
    csv = read_images(str(tmp_path / "a.csv"))
    assert torch.equal(csv.pixels, npz.pixels)
    assert [csv.classes[label] for label in csv.labels] == [path.parent.name for path in paths]
    names = np.array(["cat", "dog"])
    named = to_npz(tmp_path / "b.npz", images=PIXELS, labels=LABELS, classes=names)
    assert (npz.classes, read_images(named).classes) == (("0", "1"), ("cat", "dog"))
    for given in (np.array([3, 7]), np.array([b"3", b"7"]), np.array(["e\u0301", "7"])):
        numbers = to_npz(tmp_path / "c.npz", images=PIXELS, labels=LABELS, classes=given)
        assert read_images(numbers).classes in (("3", "7"), ("\u00e9", "7"))
    twice = to_npz(tmp_path / "d.npz", images=PIXELS, labels=LABELS, classes=["crane", "crane"])
    with pytest.raises(HamuError, match="names two classes crane; give each a name of its own"):
        read_images(twice)
    assert not cache.exists(), "no copy of the data is left in a cache"


def test_a_photograph_is_read_as_it_is_seen(tmp_path):
    pixels = np.zeros((8, 8), np.uint8)
    pixels[:4] = 255
    upright, turned = (tmp_path / "photos" / name for name in ("a", "b"))
    for place, orientation in ((upright, 1), (turned, 3)):
        place.mkdir(parents=True)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(place / "one.png", exif=exif)
    found = read_images(str(tmp_path / "photos")).pixels
    assert torch.equal(found[0, 0], torch.from_numpy(pixels))
    assert torch.equal(found[1, 0], torch.from_numpy(pixels).flip(0))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cat/one.heic", r"one\.heic is of a kind that is not read; convert it, or move it away"),
        ("cat/gone.png", r"gone\.png is a link to what is not there; mend or remove it"),
        ("cat/young/one.png", r"one\.png lies in a folder within its class"),
        ("cat/young/one.avif", r"one\.avif lies in a folder within its class"),
    ],
)
def test_an_image_that_would_be_left_out_is_named(folder, place, message):
    (folder / "cat/young").mkdir()
    (folder / place).symlink_to("gone" if "gone" in place else next(folder.glob("cat/*.png")))
    (folder / "cat/notes.txt").write_text("of no interest")
    with pytest.raises(HamuError, match=message):
        read_images(str(folder))


def test_a_class_is_the_same_in_each_form_of_its_letters(tmp_path):
    for split, form in (("train", "NFC"), ("test", "NFD")):
        for name in ("K\u00e4tze", "Hund"):
            place = tmp_path / split / unicodedata.normalize(form, name)
            place.mkdir(parents=True)
            Image.fromarray(PIXELS[0]).save(place / "one.png")
    train, test = (read_images(str(tmp_path), split) for split in ("train", "test"))
    assert train.classes == test.classes == ("Hund", "K\u00e4tze")


@pytest.mark.parametrize(("places", "split", "refused"), [
    (("dog", "test"), "train", "test"),  # it would be trained on as a class
    (("train",), "train", "train"),
    (("train/dog", "test"), "test", "test"),
])  # fmt: skip
def test_a_split_without_classes_is_no_class(folder, tmp_path, places, split, refused):
    for place in places:
        shutil.copytree(folder / "cat", tmp_path / "root" / place)
    with pytest.raises(HamuError, match=f"{refused} has images in no folder of a class; put those"):
        read_images(str(tmp_path / "root"), split)


@pytest.mark.parametrize(
    ("shape", "wanted", "expected"),
    [
        ((6, 5, 4, 1), {"image_size": 3}, (6, 1, 3, 3)),
        ((6, 5, 5, 3), {"num_channels": 1}, (6, 1, 5, 5)),
        ((6, 5, 5), {"num_channels": 3, "image_size": 8}, (6, 3, 8, 8)),
    ],
)
def test_images_are_resized_and_converted_on_request(tmp_path, shape, wanted, expected):
    path = to_npz(tmp_path / "a.npz", images=np.ones(shape, np.uint8), labels=LABELS)
    assert read_images(path, **wanted).pixels.shape == expected


def test_the_bundled_digits_are_split_four_to_one_and_disjoint():
    train, test = read_images("digits"), read_images("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    pixels = torch.cat([train.pixels, test.pixels]).flatten(1)
    read = np.column_stack([(pixels * 16.0 / 255).round(), torch.cat([train.labels, test.labels])])
    source = np.column_stack([load_digits().data, load_digits().target])
    assert sorted(read.tolist()) == sorted(source.tolist())
    assert (pixels.dtype, int(pixels.max())) == (torch.uint8, 255)


def test_rows_are_counted_as_they_are_named(folder):
    """--forget_rows takes the numbers that the report shows."""
    for data in (read_images("digits"), read_images("digits", "test"), read_images(str(folder))):
        assert data.rows.tolist() == list(range(len(data)))
        assert forget_rows(data, None, [4]).forget.rows.tolist() == [4]
    data = read_images(str(folder))
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1], "by class, then by file"
    data.pixels[:, 1] = 51  # a channel that is the same everywhere is only moved
    mean, std = pixel_statistics(data)
    assert (mean[1], std[1]) == (pytest.approx(0.2), 1.0)
    assert data.normalized(mean, std)[0]["pixel_values"][1].abs().max() < 1e-6


def test_folders_named_by_numbers_are_in_the_order_of_the_numbers(tmp_path):
    for number in (0, 1, 2, 10):
        (tmp_path / str(number)).mkdir()
        Image.new("LA", (2, 2), (number, 9)).save(tmp_path / str(number) / "1.png")
    data = read_images(str(tmp_path))
    assert data.pixels.shape == (4, 1, 2, 2), "grey, without its transparency"
    assert data.classes == ("0", "1", "2", "10")
    assert data.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 10]
    (tmp_path / "2").rename(tmp_path / "x")
    assert read_images(str(tmp_path)).classes == ("0", "1", "10", "x")


def test_train_and_test_are_splits_if_they_hold_folders_of_classes(folder):
    shutil.copytree(folder / "cat", folder / "train")
    (folder / "train/.ipynb_checkpoints").mkdir()
    assert read_images(str(folder)).classes == ("cat", "dog", "train"), "beside trams, say"
    assert not has_test_split(str(folder))
    split = folder.parent / "split"
    for name in ("train", "test"):
        shutil.copytree(folder / "cat", split / name / "cat")
        shutil.copy(next((folder / "cat").glob("*.png")), split / name / "preview.png")
    assert has_test_split(str(split)), "an image beside the classes is of none of them"
    assert read_images(str(split)).classes == ("cat",)
    (split / "test.csv").write_text("id\n1")
    assert read_images(str(split), "test").classes == ("cat",), "a list beside the images"


def test_what_tools_leave_is_passed_over(folder):
    for place in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints", "dog/__MACOSX/cat"):
        shutil.copytree(folder / "cat", folder / place, ignore=shutil.ignore_patterns(".*", "_*"))
    for name in ("cat/._0.png", "dog/Thumbs.db", "dog/.DS_Store", "loose.PNG"):
        (folder / name).write_bytes(b"of no class")
    shutil.copy(folder / "cat" / "0.png", folder / "dog" / "9.PNG")
    data = read_images(str(folder))
    assert (data.classes, len(data)) == (("cat", "dog"), 7)


def test_a_second_data_set_takes_the_form_of_the_first_or_does_not_match(folder):
    train = read_images(str(folder))
    grey = read_images(str(folder), num_channels=1)
    assert train.matched(grey).pixels.shape == train.pixels.shape
    with pytest.raises(HamuError, match=r"shape \(3, 5, 5\), .* \(1, 5, 5\); give --image_size"):
        grey.matched(train)
    (folder / "dog").rename(folder / "owl")
    with pytest.raises(HamuError, match=r"class owl of .* is not among cat, dog"):
        train.matched(read_images(str(folder)))


def test_thousands_of_classes_are_not_each_compared_with_all(folder):
    """A hundred thousand would take minutes, without a word."""
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str(self) == str(other)

    data = read_images(str(folder))
    ours, theirs = (tuple(map(Name, ("cat", "dog", *range(500)))) for _ in range(2))
    assert torch.equal(replace(data, classes=ours).with_classes(theirs).labels, data.labels)
    assert len(compared) < 5 * len(ours)


def with_picture(name, picture):
    def prepare(folder):
        picture.save(folder / "cat" / name)
        return str(folder)

    return prepare


def with_arrays(**arrays):
    return lambda folder: to_npz(folder / "a.npz", **{"images": PIXELS, "labels": LABELS} | arrays)


def in_parquet(images, labels):
    return lambda folder: to_parquet(folder / "a.parquet", images, labels)


def saved_to_disk(folder):
    datasets.Dataset.from_dict({"label": [0]}).save_to_disk(folder / "saved")
    return str(folder / "saved")


def damaged(name, content=b"PAR1 damaged"):
    def prepare(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return str(folder if path.parent != folder else path)

    return prepare


DEEP = Image.fromarray(np.full((5, 5), 300, np.int32))


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (in_parquet(PICTURES[:2], [[0, 1], [1, 0]]), {}, "labels .* a whole number for each of 2"),
        (lambda f: str(f / "nowhere"), {}, "is neither a file nor a folder"),
        (damaged("cat/0.png"), {}, r"0\.png of .* is not a readable image: .*; remove or repair"),
        (with_picture("9.tiff", DEEP), {}, r"9\.tiff of .* has more than 8 bits a channel; save"),
        (with_picture("9.png", Image.new("L", (9, 9))), {}, "differ in size .*; give --image_size"),
        (lambda f: str(f / "cat"), {}, r"no images; .* per class, or texts as train\.json"),
        (with_arrays(labels=LABELS - 1), {}, "label -1 of .* is out of range; expected 0 to"),
        (with_arrays(classes=np.array(["cat"])), {}, "label 1 of .* out of range; expected 0 to 0"),
        (with_arrays(images=PIXELS / 255), {}, "have type float64"),
        (with_arrays(images=PIXELS[:0], labels=LABELS[:0]), {}, "is empty: it has no images"),
        (with_arrays(), {"label_column": "kind"}, "no label column 'kind', but images, labels; gi"),
        (with_arrays(images=np.array([None] * 6)), {}, "as npz: Object arrays cannot be loaded"),
        (damaged("a.npz", b"PK\5\6" + bytes(18)), {}, r"a\.npz has no image column"),
        (
            damaged("a.csv", b"q,a\n?,!"),
            {},
            "no image column .*, but q, a; give --image_column, or --task text",
        ),
        (damaged("b.npz", b"junk"), {}, r"b\.npz cannot be read as npz: it is none, or cut short"),
        (with_arrays(images=PIXELS.transpose(0, 3, 1, 2)), {}, "with 1 to 4 channels"),
        (with_arrays(), {"image_size": 0}, "image_size 0 must be at least 1"),
        (in_parquet([1.5], [0]), {}, "column img of .* holds no images"),
        (in_parquet([PICTURES[0], None], [0, 1]), {}, "row 1 of .* has no image; remove it"),
        (in_parquet(PICTURES[:2], [0, None]), {}, "row 1 of .* has no label; remove or label it"),
        (damaged("a.csv", b"image,label\ncat/9.png,cat"), {}, r"9\.png of .* is not a readable"),
        (damaged("a.csv", b"image,label\n,cat"), {}, "row 0 of .* has no image; remove it"),
        (damaged("a.csv", b"image,label\ncat/0.png,"), {}, "row 0 of .* has no label; remove or"),
        (damaged("a.csv", b"image,label\n\xff.png,cat"), {}, r"a\.csv cannot be read as csv: "),
        (damaged("a.csv", b""), {}, r"a\.csv is empty: it has no images"),
        (saved_to_disk, {}, "saved was written by save_to_disk, .*; write .* with its to_parquet"),
        (damaged("owl/1.txt"), {}, "owl holds no images, though each folder in .* is a class"),
        (str, {"num_channels": 2}, r"num_channels 2 must be 1 \(grey\) or 3 \(RGB\)"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_that_names_it(folder, prepare, options, message):
    with pytest.raises(HamuError, match=message):
        read_images(prepare(folder), **options)


def test_a_data_set_of_the_hub_that_is_out_of_reach_is_named(monkeypatch):
    offline = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr(datasets, "load_dataset", offline)
    for read in (read_images, read_text):
        with pytest.raises(HamuError, match=r"hub:a/b \(train\) cannot be loaded: no network; wit"):
            read("hub:a/b")


@pytest.mark.parametrize("name", ["people/2024", "../.."])
def test_a_folder_here_is_not_read_in_place_of_the_hubs(name, tmp_path, monkeypatch):
    """The library would copy it into its cache."""
    (tmp_path / "here/people/2024").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here/people" if name == "../.." else tmp_path / "here")
    message = f"hub:{name}.* names {name}, which is here too and would be read"
    for read in (read_images, read_text, load_classifier, load_language_model):
        with pytest.raises(HamuError, match=message):
            read(f"hub:{name}")


@pytest.mark.parametrize(
    ("source", "asked"),
    [("hub:o/n:c", ("o/n", "c", "test")), ("hub:o/n@s", ("o/n", None, "s"))],
)
def test_a_name_of_the_hub_has_configuration_and_split(source, asked, monkeypatch, parquet):
    load = Mock(return_value=[{"question": "Who?", "answer": "Ada."}])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_text(source, "test").records[0].answer == " Ada."
    assert [(*call.args, call.kwargs["split"]) for call in load.call_args_list] == [asked]
    cache = str(parquet.parent / "cache")
    load.return_value = datasets.Dataset.from_parquet(str(parquet), cache_dir=cache)
    assert torch.equal(read_images(source).pixels, read_images(str(parquet)).pixels)


def test_a_record_that_is_no_mapping_is_named():
    with pytest.raises(HamuError, match="a record is a tuple; make it a mapping with labels"):
        collate([(torch.zeros(1, 2, 2), 0)])


def test_a_batch_is_fetched_whole_but_for_a_collator_of_ones_own(parquet):
    data, own = read_images(str(parquet)), Mock(side_effect=default_data_collator)
    fetched, found = (batch_of(data, [2, 0], by) for by in (collate, own))
    assert len(own.call_args.args[0]) == 2
    assert all(torch.equal(fetched[name], found[name]) for name in fetched)
    assert batch_of("abc", [2, 0], list) == ["c", "a"]


@pytest.mark.parametrize(
    ("texts", "classes", "labels"),
    [
        (np.array([255, 0], np.uint8), tuple(map(str, range(256))), [255, 0]),  # fill their type
        (["owl", "cat"], ("cat", "owl"), [1, 0]),
        (["10", "2"], ("2", "10"), [1, 0]),
        ([" e\u0301", "\u00e9"], ("\u00e9",), [0, 0]),
    ],
)
def test_labels_may_be_names_or_small_numbers(folder, texts, classes, labels):
    data = read_images(with_arrays(images=PIXELS[:2], labels=np.array(texts))(folder))
    assert data.classes == classes
    assert data.labels.tolist() == labels


def test_statistics_are_those_of_all_pixels_of_all_sets(folder):
    data = read_images(str(folder))
    values = data.pixels.double() / 255
    mean, std = pixel_statistics(data.select([0, 1]), data.select([2, 3, 4, 5]))
    assert mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(values.std((0, 2, 3), correction=0).tolist())


def test_resized_pixels_are_bilinear(tmp_path):
    board = np.tile(np.array([[0, 255], [255, 0]], np.uint8), (6, 2, 2))
    path = to_npz(tmp_path / "a.npz", images=board, labels=LABELS)
    found = read_images(path, image_size=2).pixels
    assert ((found > 100) & (found < 155)).all(), "a mean of the pixels around, not one of them"
