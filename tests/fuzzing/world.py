"""A folder with small data, models and runs of each kind, and one command run in a copy of it."""

import contextlib
import functools
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import numpy as np
from watching import watched

from hamu.cli import main
from hamu.errors import one_line
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.models.language import AdapterSettings, new_language_model, new_tokenizer, with_adapter
from hamu.models.storage import save_model

SECONDS = 120  # a command that takes longer hangs: all data here are tiny, even where others have the processor
_CODES = {"assess": (0, 2, 3, 4), "verify": (0, 1, 2)}
IMAGES = ["--data", "a.npz", "--model", "image", "--forget_rows", "0,4"]
TEXTS = ["--data", "t.jsonl", "--model", "text", "--forget_rows", "0,3", "--max_length", "32"]
EASY = ["--constraint_mode", "relative", "--stopping", "off"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: its exit code, None if it did not return one.
        said: what stood on standard error.
        wrong: what must not be, empty if all is well.
    """

    code: int | None
    said: str
    wrong: tuple[str, ...]

    @property
    def name(self):
        """For a count of outcomes."""
        if self.wrong:
            return "violation"
        if self.code == 2:
            return "refused, not foreseen" if "(--debug shows where)" in self.said else "refused"
        return f"exit code {self.code}"


class Hang(BaseException):
    """A command takes too long."""


class World:
    """The folder.

    Args:
        place: where to make it, and the copies; it is to be empty.

    It holds data (a.npz, t.jsonl, b.jsonl), models (image, text, adapter), a finished run of each kind (done,
    done-text) and an interrupted one (run, run-text).
    """

    def __init__(self, place):
        self.place = Path(place).resolve()
        self.origin = self.place / "origin"
        self.origin.mkdir(parents=True)
        with _inside(self.origin), contextlib.redirect_stdout(io.StringIO()):
            _make_data()
            _make_models()
            _make_runs()

    def run(self, tried):
        """One input in a fresh copy.

        Returns:
            The `Outcome`.
        """
        case = Path(tempfile.mkdtemp(dir=self.place))
        here = case / "around" / "here"
        try:
            shutil.copytree(self.origin, here, symlinks=True)
            with _inside(here):
                tried.prepare()
                before = _content(case)
                code, said, wrong, seen = _command(tried.argv)
                wrong += _judged(tried, case, here, before, code, said, seen)
                return Outcome(code, said, tuple(wrong))
        finally:
            shutil.rmtree(case, ignore_errors=True)


def _judged(tried, case, here, before, code, said, seen):
    """What must not be."""
    wrong = []
    command = tried.argv[0] if tried.argv else ""
    if code is not None and code not in _CODES.get(command, (0, 2)):
        wrong.append(f"exit code {code}")
    lines = (
        said.split("\n")[:-1] if said.endswith("\n") else [said, "(no end of line)"] if said else []
    )
    start = one_line(f"hamu {command}: ")
    if code == 2 and (len(lines) != 1 or not said.startswith(start) or len(said) <= len(start) + 1):
        wrong.append(f"not one line: {said[:600]!r}")
    if code in (0, 1, 3, 4) and any("it is skipped" not in line for line in lines):
        wrong.append(f"noise: {said[:600]!r}")
    out = Path(os.path.abspath(here / tried.out))
    after = _content(case)
    for path in sorted(before.keys() | after.keys()):
        place = case / path
        is_beside = not place.is_relative_to(out) and not out.is_relative_to(place)
        if before.get(path) != after.get(path) and is_beside:
            how = "is new" if path not in before else "is gone" if path not in after else "changed"
            wrong.append(f"{path} {how}")
    jobs = ("train", "unlearn", "evaluate", "assess")
    may_have_begun = os.path.isfile(out / "config.yaml") and command in jobs
    if code == 2 and after != before and not may_have_begun and "--resume" not in tried.argv:
        wrong.append(f"written although refused: {sorted(after.keys() ^ before.keys())[:4]}")
    wrong += [f"wrote {path}" for path in seen.outside(out)]
    wrong += [f"network: {where}" for where in seen.reached]
    return wrong


def _command(argv):
    """Exit code, standard error with every warning, what must not be, and what was seen."""
    wrong, code = [], None
    noted = warnings.catch_warnings(record=True)
    with _standard_error() as said, noted as warned, watched() as seen, _offline():
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        try:
            with _alarm():
                code = main(list(argv))
        except Hang:
            wrong.append(f"hangs: more than {SECONDS} s")
        except BaseException as error:  # whatever it is, it has escaped
            at = error.__traceback__
            while at.tb_next is not None:
                at = at.tb_next
            where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
            kind = f"{type(error).__module__}.{type(error).__name__}"
            wrong.append(f"escaped: {kind}: {error} ({where})"[:600])
    noise = [f"{w.filename}:{w.lineno}: {w.category.__name__}: {w.message}\n" for w in warned]
    return code, said[0] + "".join(noise), wrong, seen


@contextlib.contextmanager
def _standard_error():
    """What reaches standard error within, in a list: from Python, from loggers that hold an older stream, from C."""
    stream, said = _stream(), []
    names = list(logging.root.manager.loggerDict)
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    handlers = [h for h in handlers if type(h) is logging.StreamHandler and h.stream is not stream]
    sys.stderr.flush()
    earlier, kept = sys.stderr, os.dup(2)
    streams = [handler.setStream(stream) for handler in handlers]
    os.ftruncate(stream.fileno(), 0)
    os.lseek(stream.fileno(), 0, os.SEEK_SET)
    os.dup2(stream.fileno(), 2)
    sys.stderr = stream
    try:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
            yield said
    finally:
        sys.stderr = earlier
        os.dup2(kept, 2)
        os.close(kept)
        for handler, old in zip(handlers, streams, strict=True):
            handler.setStream(old)
        said.append(os.pread(stream.fileno(), 10**6, 0).decode(errors="replace"))


@functools.cache
def _stream():
    """One for all: a logger that is made within keeps it."""
    handle, name = tempfile.mkstemp()
    os.unlink(name)
    return open(handle, "w", 1, "utf-8", "backslashreplace")


@contextlib.contextmanager
def _alarm():
    def ring(number, frame):
        raise Hang

    earlier = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


@contextlib.contextmanager
def _offline():
    """A name of the hub is an input like others, but nothing is to be asked."""
    constants = huggingface_hub.constants
    earlier, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = earlier


@contextlib.contextmanager
def _inside(folder):
    earlier = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(earlier)


def _content(folder):
    """What every file below holds, None for a folder."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def _make_data():
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    np.savez("a.npz", images=images, labels=np.arange(12) % 3)
    rows = [{"question": f"How many is {i}?", "answer": f"just {i}"} for i in range(8)]
    for name, some in (("t", rows), ("b", rows[:2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def _make_models():
    config = SmallResNetConfig(
        depth=8, width=2, num_channels=1, num_labels=3, image_mean=[0.5], image_std=[0.3]
    )
    SmallResNet(config).save_pretrained("image")
    tokenizer = new_tokenizer(["how many is just"], vocabulary=300)
    model = new_language_model(tokenizer, hidden=16, layers=1, max_length=64)
    _save("text", model, tokenizer)
    adapted = with_adapter(model, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = "text"
    _save("adapter", adapted, tokenizer)


def _save(folder, model, tokenizer):
    Path(folder).mkdir()
    save_model(model, Path(folder))
    tokenizer.save_pretrained(folder)


def _make_runs():
    checkpoints = ["--save_strategy", "steps", "--save_steps", "1", "--max_steps", "2"]
    for name, settings in (("", IMAGES), ("-text", TEXTS)):
        done, broken = Path(f"done{name}"), Path(f"run{name}")
        code = main(["unlearn", *settings, *EASY, *checkpoints, "--output_dir", str(done)])
        if code:
            raise RuntimeError(f"the run in {done} ended with code {code}")
        shutil.copytree(done, broken)
        shutil.rmtree(broken / "model")
        for left in ("record.json", "record.md", "evaluation.json"):
            (broken / left).unlink()
        shutil.rmtree(broken / "checkpoint-2")
        for checkpoint in done.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
