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
from unittest import mock

from small_models import save_small_world
from watching import watched

from hamu.cli import main
from hamu.errors import one_line

SECONDS = 120  # a command that takes longer hangs: all data here are tiny
_CODES = {"assess": (0, 2, 3, 4), "verify": (0, 1, 2)}
IMAGES = ["--data", "a.npz", "--model", "image", "--forget_rows", "0,4"]
TEXTS = ["--data", "t.jsonl", "--model", "text", "--forget_rows", "0,3", "--max_length", "32"]
EASY = ["--constraint_mode", "relative", "--stopping", "off"]


@dataclass(frozen=True)
class Outcome:
    """End of a command: exit code (None if it returned none), standard error, and what is wrong."""

    code: int | None
    said: str
    wrong: tuple[str, ...]

    @property
    def name(self):
        """For a count of outcomes."""
        if self.code == 2 and not self.wrong:
            return "refused, not foreseen" if "(--debug shows where)" in self.said else "refused"
        return "violation" if self.wrong else f"exit code {self.code}"


class Hang(BaseException):
    """A command takes too long."""


class World:
    """The folder: data (a.npz, t.jsonl, b.jsonl), models (image, text, adapter), a finished run of
    each kind (done, done-text) and an interrupted one (run, run-text).

    Args:
        place: where to make it, and the copies; it is to be empty.
    """

    def __init__(self, place):
        self.place = Path(place).resolve()
        self.origin = self.place / "origin"
        self.origin.mkdir(parents=True)
        with contextlib.chdir(self.origin), contextlib.redirect_stdout(io.StringIO()):
            _make_data_and_models()
            _make_runs()

    def run(self, tried):
        """The `Outcome` of one input in a fresh copy."""
        case = Path(tempfile.mkdtemp(dir=self.place))
        here = case / "around" / "here"
        try:
            shutil.copytree(self.origin, here, symlinks=True)
            with contextlib.chdir(here):
                tried.prepare()
                before = _content(case)
                code, said, wrong, seen = _command(tried.argv)
                wrong += _wrong_words(tried.argv, code, said)
                wrong += _wrong_files(tried, case, here, before, code)
                out = Path(os.path.abspath(here / tried.out))
                wrong += [f"wrote {path}" for path in seen.outside(out)]
                wrong += [f"network: {where}" for where in seen.reached]
                return Outcome(code, said, tuple(wrong))
        finally:
            shutil.rmtree(case, ignore_errors=True)


def _wrong_words(argv, code, said):
    command = argv[0] if argv else ""
    start = one_line(f"hamu {command}: ")
    is_one_line = said.count("\n") == 1 and said.startswith(start) and len(said) > len(start) + 1
    if code is not None and code not in _CODES.get(command, (0, 2)):
        yield f"exit code {code}"
    if code == 2 and not (is_one_line and said.endswith("\n")):
        yield f"not one line: {said[:600]!r}"
    if code in (0, 1, 3, 4) and any("it is skipped" not in line for line in said.splitlines()):
        yield f"noise: {said[:600]!r}"


def _wrong_files(tried, case, here, before, code):
    out = Path(os.path.abspath(here / tried.out))
    after = _content(case)
    for path in sorted(before.keys() | after.keys()):
        place = case / path
        is_beside = not place.is_relative_to(out) and not out.is_relative_to(place)
        if before.get(path) != after.get(path) and is_beside:
            how = "is new" if path not in before else "is gone" if path not in after else "changed"
            yield f"{path} {how}"
    is_job = tried.argv[0] in ("train", "unlearn", "evaluate", "assess")
    may_have_begun = is_job and os.path.isfile(out / "config.yaml")
    if code == 2 and after != before and not may_have_begun and "--resume" not in tried.argv:
        yield f"written although refused: {sorted(after.keys() ^ before.keys())[:4]}"


def _command(argv):
    """Exit code, standard error with every warning, what must not be, and what was seen."""
    wrong, code = [], None
    noted = warnings.catch_warnings(record=True)
    offline = mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with _standard_error() as said, noted as warned, watched() as seen, offline:
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        try:
            with _alarm():
                code = main(list(argv))
        except Hang:
            wrong.append(f"hangs: more than {SECONDS} s")
        except BaseException as error:  # whatever it is, it has escaped
            kind = f"{type(error).__module__}.{type(error).__name__}"
            wrong.append(f"escaped: {kind}: {error}"[:600])
    noise = [f"{w.filename}:{w.lineno}: {w.category.__name__}: {w.message}\n" for w in warned]
    return code, said[0] + "".join(noise), wrong, seen


@contextlib.contextmanager
def _standard_error():
    """Standard error in a list: from Python, from loggers that hold an older stream, from C."""
    stream, said = _stream(), []
    names = list(logging.root.manager.loggerDict)
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    handlers = [h for h in handlers if type(h) is logging.StreamHandler and h.stream is not stream]
    sys.stderr.flush()
    kept = os.dup(2)
    streams = [handler.setStream(stream) for handler in handlers]
    os.ftruncate(stream.fileno(), 0)
    os.lseek(stream.fileno(), 0, os.SEEK_SET)
    os.dup2(stream.fileno(), 2)
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
    try:
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(printed):
            yield said
    finally:
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


def _content(folder):
    """The content of every file below, None for a folder."""
    found = {}
    for path in folder.rglob("*"):
        is_file = path.is_file() and not path.is_symlink()
        content = path.read_bytes() if is_file else None
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else content
    return found


def _make_data_and_models():
    rows = [{"question": f"How many is {i}?", "answer": f"just {i}"} for i in range(8)]
    save_small_world(rows)
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))


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
