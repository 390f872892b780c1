"""Strategies for data sets: texts and images in every format, good, bad and broken."""

import contextlib
import csv
import io
import json
import zipfile
from functools import partial

import numpy as np
import pyarrow
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from fuzzing.inputs import CONTENT, POISON, TEXT, Input, link, maybe_damaged, words
from fuzzing.settings import COMMANDS, command

_ODD = [10**400, "\ud800", "\0", " ", "\ufeff", "x " * 400, [], {}, ["a"], {"role": "user"}]
_CELLS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, TEXT, TEXT, st.sampled_from(_ODD))
)
_COLUMNS = st.one_of(words("question answer prompt completion text messages label image [/]"), TEXT)
_TURN = st.fixed_dictionaries({"role": words("user assistant system"), "content": _CELLS})
_GOOD = st.fixed_dictionaries({"question": words("a? b?"), "answer": TEXT})
_BAD = st.one_of(
    st.dictionaries(_COLUMNS, _CELLS, max_size=3),
    st.fixed_dictionaries({"messages": st.lists(st.one_of(_CELLS, _TURN), max_size=3)}),
    _CELLS,
)
_ROWS = st.lists(st.one_of(_GOOD, _GOOD, _GOOD, _BAD), max_size=6)
_NO_ROWS = st.sampled_from([b"[" * 100_000, b"1" * 5000, b"{}", b"[]", b"null", b"NaN"])


def _written(kind, rows):
    """The bytes of rows in a format, of parquet what of them fits into columns."""
    if kind == "jsonl":
        return "\n".join(map(json.dumps, rows)).encode()
    if kind == "json":
        return json.dumps(rows).encode()
    if kind == "csv":
        cells = [list(row.values()) if isinstance(row, dict) else [row] for row in rows]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([["question", "answer"], *cells])
        return text.getvalue().encode("utf-8", "surrogatepass")
    stream = io.BytesIO()
    with contextlib.suppress(pyarrow.ArrowException, ValueError, TypeError, AttributeError):
        table = pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)])
        parquet.write_table(table, stream)
    return stream.getvalue()


@st.composite
def _text_file(draw):
    """Name and bytes of a data set of texts."""
    kind = draw(words("jsonl jsonl json csv parquet"))
    is_none = not draw(st.integers(0, 5))
    content = draw(st.one_of(CONTENT, _NO_ROWS)) if is_none else _written(kind, draw(_ROWS))
    return f"x.{kind}", draw(maybe_damaged(content))


_SIZES = st.sampled_from([(8, 8), (8, 8), (8, 8), (9, 8), (1, 1), (8, 3000)])


@st.composite
def _picture(draw):
    """An encoded picture of some mode, size and format."""
    mode, size = draw(words("L L L RGB RGBA P 1 I;16 CMYK LA F I")), draw(_SIZES)
    stream = io.BytesIO()
    try:
        Image.new(mode, size).save(stream, draw(words("png png gif tiff jpeg")))
    except (OSError, KeyError, ValueError):  # the format has no such mode
        Image.new("L", size).save(stream, "png")
    return draw(maybe_damaged(stream.getvalue()))


_SHAPES = ((6, 8, 8), (6, 8, 8, 1), (6, 8, 8, 3), (6, 8, 8, 2), (0, 8, 8), (6, 0, 0), (2, 8, 8))
_ARRAYS = st.sampled_from(
    [np.zeros(shape, np.uint8) for shape in _SHAPES]
    + [np.zeros((6, 8, 8)), np.full((6, 8, 8), np.nan), np.arange(6) % 3, np.arange(6) % 3 - 1]
    + [np.arange(6) / 2, np.full(6, 2**62), np.zeros((6, 1), int), np.array(["a", "b"] * 3)]
    + [np.array([None] * 6), np.array(3), np.zeros(6, bool), np.full(6, "2020", "datetime64[D]")]
)
_ARRAY_NAMES = st.sampled_from(
    [("images", "labels"), ("images", "labels"), ("x", "y"), ("image", "[/]")]
)
_HUGE = ["(1099511627776, 8, 8)", "(6, 1048576, 1048576)", "(-1, 8, 8)", "(1e3,)"]


@st.composite
def _array_file(draw):
    """An npz of some arrays, or what is not one."""
    kind = draw(words("npz npz npz bomb none"))
    stream = io.BytesIO()
    if kind == "npz":
        images = np.zeros((6, 8, 8), np.uint8) if draw(st.booleans()) else draw(_ARRAYS)
        first, second = draw(_ARRAY_NAMES)
        np.savez_compressed(stream, **{first: images, second: draw(_ARRAYS)})
    elif kind == "bomb":
        stream.write(bomb(draw(st.sampled_from(_HUGE))))
    else:
        stream.write(draw(st.one_of(CONTENT, st.just(POISON))))
    return draw(maybe_damaged(stream.getvalue()))


def bomb(shape):
    """An npz whose arrays say that they have this shape, which no machine could hold."""
    about = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(about).to_bytes(2, "little") + about.encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("images.npy", head + bytes(10_000))
        file.writestr("labels.npy", head)
    return stream.getvalue()


@st.composite
def _image_parquet(draw):
    """Pictures, some of them none, and labels as parquet."""
    encoded = _picture().map(lambda raw: {"bytes": raw, "path": None})
    nothing = st.sampled_from([None, {"bytes": None, "path": "/dev/null"}])
    pictures = draw(st.lists(st.one_of(encoded, encoded, nothing), min_size=1, max_size=4))
    odd = st.sampled_from(["a", 0.5, [1], b"x", -(2**62)]).map(lambda one: [one] * len(pictures))
    labels = draw(st.one_of(st.just([n % 2 for n in range(len(pictures))]), odd))
    first, second = draw(st.sampled_from([("image", "label"), ("img", "labels"), ("x", "z")]))
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({first: pictures, second: labels}), stream)
    return draw(maybe_damaged(stream.getvalue()))


_CLASSES = st.sampled_from(["cat", "dog", "[/]", "a b", "\u202e", "train", "test"])
_FILES = st.sampled_from(["1.png", "x.PNG", "deep/1.png", "a.txt", "[red].png", "a\nb.png"])


@st.composite
def _image_folder(draw):
    """A folder of classes: good and bad files, links that lead nowhere, round or out."""
    found = {"x/file.txt": b""}
    for label in draw(st.lists(_CLASSES, max_size=3, unique=True)):
        names = draw(st.lists(_FILES, max_size=3, unique=True))
        found |= {f"x/{label}/{name}": draw(_picture()) for name in names}
        if not draw(st.integers(0, 3)):
            to = draw(words("nowhere link.png ../../a.npz .. /dev/null"))
            found[f"x/{label}/link.png"] = partial(link, to=to)
    if not draw(st.integers(0, 3)):
        found["x/round"] = partial(link, to=".")
    return tuple(found.items())


_IMAGES = st.one_of(
    _array_file().map(lambda content: ("x.npz", (("x.npz", content),))),
    _image_parquet().map(lambda content: ("x.parquet", (("x.parquet", content),))),
    _image_folder().map(lambda files: ("x", files)),
)


@st.composite
def with_data(draw):
    """Data sets of any content, as training, test or forget data."""
    role = draw(words("data data test_data forget_data"))
    if draw(st.booleans()):
        source, changes = draw(_IMAGES)
        argv, valid, way = ["--model", "image"], "a.npz", ["--forget_class", "0"]
        argv += ["--image_size", "8"] if draw(st.booleans()) else []
        argv += ["--num_channels", "1"] if draw(st.booleans()) else []
    else:
        source, content = draw(_text_file())
        changes = ((source, content),)
        argv, valid = ["--model", "text", "--task", "text"], "t.jsonl"
        way = ["--forget_filter", "question=a?"]
    argv += ["--data", source] if role == "data" else ["--data", valid, f"--{role}", source]
    if role != "forget_data":
        argv += draw(st.sampled_from([["--forget_rows", "0"], ["--forget_rows", "0,1"], way]))
    return Input("data", command([draw(COMMANDS), *argv]), changes)
