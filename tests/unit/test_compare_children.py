"""Calls in processes of their own: as many at a time as allowed, ended in order, with the reasons of failures."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hamu.errors import HamuError, Interrupted
from hamu.unlearning.compare import children
from hamu.unlearning.compare.children import Call, Children
from hamu.unlearning.jobs.comparison import run_job, run_waiting


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(children, "_CONTEXT", multiprocessing.get_context("fork"))


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def act(word, of):
    if word == "say":
        print("a warning", file=sys.stderr)
        raise HamuError(of[0])
    if word == "look":
        raise HamuError(os.environ[of[0]])
    if word == "end":
        sys.exit(int(of[0]))
    if word == "raise":
        error = ImportError("no  such\tthing")
        error.add_note("in the method own of theirs")
        raise error
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "together":
        return _together(Path(of[0]), int(of[1]))
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(of[0], "pid").write_text(f"{os.getpid()} {os.getpgid(0)}")
    time.sleep(60)
    return 0


def _together(folder, jobs):
    mine = folder / f"{os.getpid()}.running"
    mine.touch()
    wait_until(lambda: (folder / "full").exists() or len(list(folder.glob("*.running"))) >= jobs)
    (folder / "full").touch()
    with open(folder / "counts", "a") as counts:
        counts.write(f"{len(list(folder.glob('*.running')))} {os.environ['THREADS']}\n")
    mine.unlink()
    return 0


def reasons(calls, jobs=1):
    made = Children(jobs, os.environ, act).make(
        [Call(str(n), word, tuple(map(str, of))) for n, (word, *of) in enumerate(calls)]
    )
    return {ended.name: ended.reason for ended in made}


def test_a_call_that_fails_says_why_in_one_line_and_the_others_go_on(forked):
    assert reasons([
        ("say", "it diverged:\nlower it"), ("kill",), ("end", 3), ("raise",), ("end", 0),
    ]) == {"0": "it diverged: lower it", "1": "killed by SIGKILL", "2": "it ended with exit code 3",
           "3": "ImportError: no such thing, in the method own of theirs", "4": ""}  # fmt: skip


def test_the_time_of_a_run_leaves_out_its_start_unless_it_was_killed(forked, monkeypatch):
    clock, own = count(), os.getpid()
    tick = lambda: next(clock) * (100 if os.getpid() == own else 1)  # noqa: E731 a reading each
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=tick))
    calls = [Call("0", "say", ("why",)), Call("1", "kill", ())]
    found = {one.name: one.seconds for one in Children(2, os.environ, act).make(calls)}
    assert found["0"] == 1, "by its own clock, which it reads twice"
    assert found["1"] >= 100, "by that of the process that waits for it"


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_run_at_once_as_allowed_and_share_the_threads(forked, tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: os.environ.update(THREADS=str(n)))
    assert set(reasons([("together", tmp_path, jobs)] * 6, jobs).values()) == {""}
    lines = [line.split() for line in (tmp_path / "counts").read_text().splitlines()]
    assert max(int(count) for count, _ in lines) <= jobs
    assert {threads for _, threads in lines} == {str(7 // jobs)}


@pytest.mark.parametrize(
    ("word", "times", "reason"),
    [("sleep", 1, "interrupted by SIGTERM"), ("stubborn", 2, "killed by SIGKILL")],
)
def test_asked_to_end_calls_save_and_asked_again_are_killed(forked, tmp_path, word, times, reason):
    pool = Children(1, os.environ, act)

    def ask():
        process_in(tmp_path)
        for _ in range(times):
            pool.ask_to_end(signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=ask)
    thread.start()
    call = (word, (str(tmp_path),))
    [ended] = pool.make([Call("first", *call), Call("never", *call)])
    thread.join()
    assert (ended.name, ended.reason, ended.interrupted) == ("first", reason, times == 1)
    assert pool.asked_by == signal.SIGINT


def process_in(folder):
    """The process and its group, once it runs."""
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
    return map(int, (folder / "pid").read_text().split())


def test_nothing_runs_on_when_the_caller_fails_and_no_terminal_reaches_a_run(forked, tmp_path):
    calls = [Call("quick", "end", ("0",)), Call("slow", "sleep", (str(tmp_path),))]
    made = Children(2, os.environ, act).make(calls)
    next(made)
    process, group = process_in(tmp_path)
    made.close()
    assert group == process != os.getpgid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_run_ends_with_a_comparison_that_is_killed(forked, tmp_path):
    calls = [("sleep", tmp_path)]
    parent = multiprocessing.get_context("fork").Process(target=reasons, args=(calls,))
    parent.start()
    process, _ = process_in(tmp_path)
    parent.kill()
    parent.join()

    def is_over():
        state = Path(f"/proc/{process}/stat")
        return not state.exists() or state.read_text().split()[2] == "Z"

    wait_until(is_over)


def test_no_file_of_the_folder_is_a_library_and_a_script_without_a_main_guard_runs_once(
    tmp_path, monkeypatch
):
    for name in ("pickle.py", "inspect.py", "hamu.py", "script.py"):
        (tmp_path / name).write_text("raise SystemExit('mine')\n")
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    [ended] = Children(1, os.environ, run_job).make([Call("run", "verify", {"run": "nowhere"})])
    assert ended.reason.startswith("nowhere has no record.json")


@pytest.mark.parametrize("value", ["a" * 200_000, "b"])
def test_each_comparison_gives_its_runs_its_own_environment(value):
    pool = Children(1, {**os.environ, "OWN": value[:10]}, act)
    assert [one.reason for one in pool.make([Call("run", "look", ("OWN",))])] == [value[:10]]
    pool = Children(1, os.environ, act)
    [ended] = pool.make([Call("run", "say", (value,))])
    assert ended.reason == value[:10_000], "however long it is"


def test_a_signal_between_two_rounds_of_runs_ends_the_next_at_once():
    class Round:
        waiting = ("run",)

        def run(self, children):
            return iter(children.make([Call("run", "end", ("0",))]))

    pool = Children(1, os.environ, act)
    pool.ask_to_end(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"^interrupted by SIGTERM; not finished: 1; the same"):
        run_waiting(Round(), pool, Console(quiet=True), "reproduce")


def test_ctrl_c_is_held_back_from_a_server_that_starts(monkeypatch):
    masks = []
    look = lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # noqa: E731
    monkeypatch.setattr(children.resource_tracker, "ensure_running", look)
    with children._start_in({}):
        look()
    look()
    assert [signal.SIGINT in mask for mask in masks] == [False, True, False]
