"""Random inputs end in a result or in one line and touch nothing else; FUZZ_INPUTS is the number that is tried."""

import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import warnings
from contextlib import chdir, suppress
from dataclasses import fields
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 makes folders of its own, once
import numpy as np
import pandas
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from run_files import POISON, contents, run, write_rows
from small_models import save_small_world
from watching import watched

from hamu.cli import main
from hamu.errors import one_line
from hamu.files import remove_whole
from hamu.unlearning.jobs.options import TYPES
from hamu.unlearning.trainer.resumable import seal

JOBS = ("train", "unlearn", "assess", "evaluate")
CODES = {"assess": (0, 2, 3, 4), "verify": (0, 1, 2)}
HARMLESS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
EASY = "--constraint_mode relative --stopping off"
IMAGES = "a.npz --model image --forget_rows 0"
TEXTS = "t.jsonl --max_length 32 --model text --forget_rows 0"
OF_IMAGES, OF_TEXTS = ([f"{job} --data {data}" for job in JOBS] for data in (IMAGES, TEXTS))
VALID = OF_IMAGES + OF_TEXTS
READ = {  # commands, and the files that they read
    **dict.fromkeys(OF_IMAGES, "image/* a.npz"),
    **dict.fromkeys(OF_TEXTS, "text/* t.jsonl"),
    **{line.replace("text", "adapter"): "adapter/*" for line in OF_TEXTS},
    "unlearn --resume --output_dir run": "run/checkpoint-1/* run/*.*",
    "unlearn --resume --output_dir run-text": "run-text/checkpoint-1/* run-text/*.*",
    "verify done": "done/* done/model/*",
    "verify done-text --no_models": "done-text/*",
}
OPTIONS = {job: {one.name: one for cls in TYPES[job] for one in fields(cls)} for job in JOBS}


def some(text):
    return st.sampled_from(text.split())


def mostly(usual, odd):
    return st.integers(0, 9).flatmap(lambda number: usual if number < 9 else odd)


TEXT = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.sampled_from(["", " ", "a\nb", "[bold]x", "x" * 300, "9" * 5000, "\u202e", "\x1b[31m"]),
    some("[/] %s {} {question} .. / /dev/null ~/x null 1e400 --seed - = a=b 1,2 0,0 1,,2 3-5 ² {}"),
    some("a.npz t.jsonl b.jsonl image text adapter done nowhere hub:a/b digits resnet9"),
)
NUMBERS = some(f"-1 0 1 2 3 7 0.1 0.5 1e-30 1e30 nan -inf {2**63} {10**30} 0x10 1_000 True ९")
CELLS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, TEXT, NUMBERS)
VALUES = CELLS | st.lists(CELLS, max_size=3) | st.dictionaries(TEXT, CELLS, max_size=3)
VALUES |= st.dictionaries(TEXT, VALUES, max_size=2)
CONTENT = st.one_of(
    st.binary(max_size=60),
    some('{} null NaN {"step":"x"} seed: !!python/object/apply:os.mkdir').map(str.encode),
    st.sampled_from([b"", b"\t", b"\xff\xfes", b"[" * 100_000, b"1" * 5000, b"a: *b", POISON]),
    st.sampled_from([b"- 1\n- 2", b"seed: 1\nseed: 2", b"\xef\xbb\xbfseed: 1", b"? [1]\n: 2"]),
)


def damage(draw, path):
    """Cut something out of a file, and put something in."""
    content = path.read_bytes()
    at, cut = draw(st.integers(0, len(content))), draw(st.sampled_from([0, 1, 4, 100, 10**9]))
    path.write_bytes(content[:at] + draw(st.binary(max_size=8)) + content[at + cut :])


def change_keys(draw, path):
    there = json.loads(path.read_bytes())
    keys = some("auto_map quantization_config dtype num_labels peft_type")
    keys |= st.sampled_from(sorted(there)) if there else keys
    values = VALUES | some("llama bert LORA IA3 bitsandbytes gptq hub:a/b x--y.Z [/] float16 ..")
    changed = draw(st.dictionaries(keys, values, min_size=1, max_size=3))
    path.write_text(json.dumps(there | changed))


def spoil(draw, path):
    """Change, exchange or remove a file."""
    is_keyed = path.suffix == ".json" and path.read_bytes().startswith(b"{")
    way = draw(some("damage remove content folder link pickle" + " keys" * 4 * is_keyed))
    if way == "keys":
        return change_keys(draw, path)
    if way == "damage":
        return damage(draw, path)
    remove_whole(path)
    if way == "content":
        path.write_bytes(draw(CONTENT))
    elif way == "folder":
        path.mkdir()
    elif way == "link":
        path.symlink_to(draw(some("nowhere .. ../a.npz")))
    elif way == "pickle":
        prefix = "pytorch_" * path.name.startswith("model.")
        path.with_name(prefix + path.name.replace(".safetensors", ".bin")).write_bytes(POISON)
    return None


def a_spoiled_file(draw):
    """A valid command, and one of the files that it reads; its checkpoint may be sealed again."""
    line = draw(st.sampled_from(sorted(READ)))
    found = sorted(one for pattern in READ[line].split() for one in Path().glob(pattern))
    path = draw(st.sampled_from([one for one in found if one.is_file()]))
    spoil(draw, path)
    unread = ("manifest.json", "trainer_state.json")  # before the seal is looked at
    if "checkpoint" in path.parent.name and path.name not in unread and draw(st.booleans()):
        (path.parent / "manifest.json").unlink()
        seal(path.parent)
    return shlex.split(line)


def a_value_of(draw, field):
    """More often right than wrong: of a choice, a word of its help."""
    words = re.findall(r"[\w.-]*\w", field.metadata.get("help", ""))
    usual = {"bool": some("true false"), "int": some("1 2 3 0"), "float": some("1 0 0.5 0.1")}
    kinds = [values for kind, values in usual.items() if kind in str(field.type)]
    right = kinds[0] if kinds else st.sampled_from([*words, str(field.default)])
    return draw(mostly(right, NUMBERS | TEXT))


def a_command(draw, lines=VALID):
    return shlex.split(draw(st.sampled_from(lines)))


def keys_of(command):
    """Options but those that take long, show where, or are given in any case."""
    out = re.compile("torch_compile|workers|output_dir|max_steps|debug")
    return st.sampled_from([key for key in OPTIONS[command] if not out.search(key)])


def options(draw):
    """Known and unknown, with and without values, once and twice."""
    argv = a_command(draw)
    for key in draw(st.lists(keys_of(argv[0]), min_size=1, max_size=3)):
        flag, value = f"--{key}", a_value_of(draw, OPTIONS[argv[0]][key])
        odd = ([f"{flag}={value}"], [flag], [f"--no_{key}"], [value])
        argv += draw(mostly(st.just([flag, value]), st.sampled_from(odd)))
    return argv


def a_settings_file(draw):
    """YAML of any content."""
    argv, content = a_command(draw), draw(CONTENT)
    if draw(st.integers(0, 3)):
        keys = keys_of(argv[0])
        wanted = draw(st.dictionaries(mostly(keys, TEXT), VALUES, max_size=2))
        wanted = {argv[0]: wanted, "seed": 1} if draw(st.booleans()) else wanted
        content = yaml.safe_dump(wanted).encode()
    Path("run.yaml").write_bytes(content)
    return [*argv, "--config", "run.yaml"]


def what_to_forget(draw):
    """Lists, files and filters."""
    lines = st.lists(st.one_of(st.integers(-1, 12), TEXT, NUMBERS), max_size=4)
    lines = lines.map(lambda few: "\n".join(map(str, few)))
    Path("rows.txt").write_bytes(draw(CONTENT | lines.map(str.encode)))
    argv = a_command(draw)[:-2]
    flag = draw(some("--forget_rows --forget_filter --forget_class --forget_data"))
    values = TEXT | some("rows.txt b.jsonl") | TEXT.map("question~{}".format)
    return [*argv, flag, draw(values | lines.map(lambda text: text.replace("\n", ",")))]


def texts(draw):
    """Good and bad rows in every format, as training, test or forget data."""
    good = st.fixed_dictionaries({"question": some("a? b?"), "answer": TEXT})
    column = some("question answer prompt completion text label [/]") | TEXT
    turn = st.fixed_dictionaries({"role": some("user assistant system"), "content": CELLS})
    talk = st.fixed_dictionaries({"messages": st.lists(turn | CELLS, max_size=3)})
    bad = VALUES | st.dictionaries(column, CELLS, max_size=3) | talk
    rows = draw(st.lists(mostly(good, bad), min_size=2, max_size=6))
    kind = draw(some("jsonl json csv parquet"))
    path = Path(f"x.{kind}")
    write_rows(path, rows)
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind != "jsonl":
        with suppress(Exception):  # no such table
            getattr(pandas.DataFrame(rows), f"to_{kind}")(path, index=False)
    if not draw(st.integers(0, 5)):
        damage(draw, path)
    argv = a_command(draw, OF_TEXTS)
    flag = draw(some("--data --data --test_data --forget_data"))
    if flag == "--data":
        return [*argv[:2], str(path), *argv[3:]]
    return [*(argv[:-2] if flag == "--forget_data" else argv), flag, str(path)]


SHAPES = ((6, 8, 8), (6, 8, 8, 1), (6, 8, 8, 3), (6, 8, 8, 2), (0, 8, 8), (6, 0, 0), (2, 8, 8))
ARRAYS = [np.zeros(shape, np.uint8) for shape in SHAPES]
ARRAYS += [np.full((6, 8, 8), np.nan), np.arange(6) % 3, np.arange(6) % 3 - 1, np.arange(6) / 2]
ARRAYS += [np.full(6, 2**62), np.zeros((6, 1), int), np.array(["a", "b"] * 3), np.array([None] * 6)]


def arrays(draw):
    images, labels = (mostly(st.just(ARRAYS[n]), st.sampled_from(ARRAYS)) for n in (0, 8))
    np.savez_compressed("x.npz", images=draw(images), labels=draw(labels))
    if not draw(st.integers(0, 3)):
        damage(draw, Path("x.npz"))
    return a_command(draw, [line.replace("a.npz", "x.npz") for line in OF_IMAGES])


def pictures(draw):
    """A folder of classes, with pictures of any kind and links that lead nowhere, round or out."""
    classes = st.lists(some("cat dog [red] \u202e"), min_size=2, max_size=3, unique=True)
    for label in draw(classes):
        path = Path("x", label)
        path.mkdir(parents=True)
        for name in draw(st.lists(some("1.png 2.PNG [red].png"), min_size=2, unique=True)):
            kind = draw(mostly(st.just("L"), some("RGB P 1 I;16 LA")))
            size = draw(mostly(st.just((8, 8)), st.sampled_from([(9, 8), (1, 1), (8, 3000)])))
            Image.new(kind, size).save(path / name, draw(some("png tiff")))
            if not draw(st.integers(0, 19)):
                damage(draw, path / name)
        if not draw(st.integers(0, 7)):
            (path / "link.png").symlink_to(draw(some("nowhere link.png ../../a.npz .. .")))
    more = draw(st.sampled_from([[], ["--image_size", "8"], ["--num_channels", "1"]]))
    return a_command(draw, [line.replace("a.npz", "x") for line in OF_IMAGES]) + more


def words(draw):
    """In place of a command, or after one that takes none."""
    return draw(st.sampled_from([[], ["methods"]])) + draw(st.lists(TEXT, min_size=1, max_size=3))


ENDS_OTHERWISE = ("-h", "--help", "--help-all", "--version", "demo")  # or takes long
SOON = {"unlearn": f"{EASY} --max_steps 1", "assess": EASY, "train": "--max_steps 1"}
KINDS = [options, a_settings_file, what_to_forget, texts, arrays, pictures, a_spoiled_file]
KINDS += [a_spoiled_file, words]
ODD_OUTS = some(". a.npz image/x ../beside ünï /dev/null/x t.jsonl/x done deep/er/out")


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Data, models, a finished run of each kind (done, done-text) and an interrupted one (run, run-text)."""
    folder = tmp_path_factory.mktemp("origin")
    rows = [{"question": f"How many is {i}?", "answer": f"just {i}"} for i in range(8)]
    with chdir(folder):
        save_small_world(rows)
        write_rows("b.jsonl", rows[:2])
        for line, kind in ((IMAGES, ""), (TEXTS, "-text")):
            steps = f"{EASY} --save_strategy steps --save_steps 1 --max_steps 2"
            assert run(f"unlearn --data {line} {steps} --output_dir done{kind}") == 0
            done, broken = Path(f"done{kind}"), Path(f"run{kind}")
            shutil.copytree(done, broken)
            for name in ("model", "record.json", "record.md", "evaluation.json", "checkpoint-2"):
                remove_whole(broken / name)
            for checkpoint in done.glob("checkpoint-*"):
                remove_whole(checkpoint)
    return folder


@pytest.fixture
def ended(capfd, monkeypatch):
    """Runs a command; returns its exit code, and all that was said on standard error."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for handler in [reference() for reference in logging._handlerList]:
        if type(handler) is logging.StreamHandler:  # some hold an older stream
            monkeypatch.setattr(handler, "stream", sys.stderr)

    def call(argv):
        capfd.readouterr()
        with warnings.catch_warnings(record=True, action="always") as warned:
            for kind in HARMLESS:
                warnings.simplefilter("ignore", kind)
            code = main(argv)
        return code, capfd.readouterr().err + "".join(f"{one.message}\n" for one in warned)

    return call


@settings(
    max_examples=int(os.environ.get("FUZZ_INPUTS", "60")),
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_whatever_the_input_is_it_ends_in_a_result_or_in_one_line_and_nothing_else_is_touched(
    data, origin, ended, tmp_path_factory
):
    case = tmp_path_factory.mktemp("case")
    with chdir(shutil.copytree(origin, case / "around/here", symlinks=True)):
        kind = data.draw(st.sampled_from(KINDS))
        argv = [word for word in kind(data.draw) if word not in ENDS_OTHERWISE]
        out = argv[-1] if "--resume" in argv else data.draw(mostly(st.just("out"), ODD_OUTS))
        command = argv[0] if argv else ""
        if command in JOBS and "--resume" not in argv:
            argv += [*SOON.get(command, "").split(), "--output_dir", out]
        out = Path(os.path.abspath(out))
        before = contents(case)
        with watched() as seen:
            code, said = ended(argv)
        said_is_right(command, code, said)
        after = contents(case)
        changed = {one for one in before.keys() | after.keys() if before.get(one) != after.get(one)}
        beside = {one for one in changed if not one.is_relative_to(out)} - {*out.parents}
        assert (beside, seen.outside(out), seen.reached) == (set(), [], [])
        has_begun = command in JOBS and os.path.isfile(out / "config.yaml")
        assert code != 2 or has_begun or not changed, "refused too late"
    shutil.rmtree(case)


def said_is_right(command, code, said):
    """Nobody but the command speaks, and a refusal is one line that was foreseen."""
    assert code in CODES.get(command, (0, 2)), said
    if code == 2:
        start = one_line(f"hamu {command}: ")
        assert (said.startswith(start), said.count("\n"), said[-1:]) == (True, 1, "\n"), said
        assert "(--debug shows where)" not in said
    else:
        foreseen = re.compile("; it is (skipped|removed)$|: the run begins anew$")
        assert all(foreseen.search(line) for line in said.splitlines()), said


def test_what_is_written_for_a_moment_and_what_is_reached_is_seen(tmp_path):
    """Else the tests that nothing is could not fail."""
    with watched() as seen, suppress(OSError), socket.socket() as made:
        Path(tmp_path, "beside").touch()
        os.remove(tmp_path / "beside")
        made.settimeout(0.01)
        made.connect(("127.0.0.1", 9))
    assert seen.outside(tmp_path / "out") == [str(tmp_path / "beside")]
    assert len(seen.reached) == 1
