"""Calls in processes of their own: how many at a time, how they end, and what is said of those that fail."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hamu
from hamu import HamuError, folder_lock
from hamu.errors import Interrupted
from hamu.unlearning.compare import Children, children
from hamu.unlearning.compare.children import Call
from hamu.unlearning.jobs.comparison import run_waiting
from hamu.unlearning.run_folder import RunFolder


def wait_until(holds):
    """Look again and again, for a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


@pytest.fixture
def shell(monkeypatch):
    """Calls run as shell scripts in place of `hamu`."""

    def start(argv, environment, said, lock):
        return subprocess.Popen(["sh", "-c", *argv], env=environment, stderr=said, pass_fds=(lock,))

    monkeypatch.setattr(children, "start", start)
    monkeypatch.setattr(children, "_POLL", 0.01)


@pytest.fixture
def lock(tmp_path):
    handle = folder_lock.lock(tmp_path)
    yield handle
    os.close(handle)


def reasons(calls, lock, jobs=1):
    found = Children(jobs, os.environ, lock).make(
        [Call(str(n), (script,)) for n, script in enumerate(calls)]
    )
    return {ended.name: ended.reason for ended in found}


def test_a_call_that_fails_says_why_in_one_line_and_the_others_go_on(shell, lock):
    assert reasons(
        [
            "echo warning >&2; echo 'hamu unlearn: it diverged: lower it' >&2; exit 2",
            "kill -KILL $$",
            "exit 3",
            "echo 'ImportError: no  such\tthing' >&2; exit 1",
            "echo 'a warning' >&2",
        ],
        lock,
    ) == {
        "0": "it diverged: lower it",
        "1": "killed by SIGKILL",
        "2": "it ended with exit code 3",
        "3": "ImportError: no such thing",
        "4": "",
    }  # fmt: skip


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_run_at_a_time_as_are_allowed_and_share_the_threads(
    shell, lock, tmp_path, monkeypatch, jobs
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = (
        f"cd {tmp_path}; touch $$.running; left=6000; until [ -e full ] || [ $(ls *.running | wc -l) -ge {jobs} ]; do "
        "[ $((left -= 1)) -gt 0 ] || exit 1; sleep 0.01; done; "
        "touch full; ls *.running | wc -l >> counts; rm $$.running; echo $OMP_NUM_THREADS >> threads"
    )
    assert set(reasons([script] * 6, lock, jobs).values()) == {""}
    assert max(map(int, (tmp_path / "counts").read_text().split())) <= jobs
    assert set((tmp_path / "threads").read_text().split()) == {str(7 // jobs)}


@pytest.mark.parametrize(("times", "reason"), [(1, "saved"), (2, "killed by SIGKILL")])
def test_asked_to_end_calls_save_and_asked_again_are_killed(shell, lock, tmp_path, times, reason):
    lasting = "touch ready; left=1200; while [ $((left -= 1)) -gt 0 ]; do sleep 0.05; done"
    stubborn = f"trap '' TERM; {lasting}"
    obedient = f"trap 'echo saved >&2; exit 143' TERM; {lasting}"
    script = f"cd {tmp_path}; {obedient if times == 1 else stubborn}"
    pool = Children(1, os.environ, lock)

    def ask():
        wait_until((tmp_path / "ready").exists)
        for _ in range(times):
            pool.ask_to_end(signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    ended = list(pool.make([Call("first", (script,)), Call("never", (script,))]))
    thread.join()
    assert [(one.name, one.reason, one.interrupted) for one in ended] == [
        ("first", reason, times == 1)
    ]
    assert pool.asked_by == signal.SIGINT


def test_nothing_is_left_running_when_the_caller_fails(shell, lock, tmp_path):
    made = Children(2, os.environ, lock).make(
        [Call("quick", ("true",)), Call("slow", (f"echo $$ > {tmp_path}/pid; exec sleep 60",))]
    )
    next(made)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_folder_is_locked_as_long_as_the_comparison_or_one_of_its_runs_lives(tmp_path):
    def is_locked():
        try:
            RunFolder(tmp_path, resume=True)
            return False
        except HamuError as error:
            return "another run, or a process that a run left behind, is using" in str(error)

    with RunFolder(tmp_path, resume=True) as folder:
        folder.prepare()
        run = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(folder.lock,)
        )
        assert is_locked()
    was_locked = is_locked()
    run.communicate(b"\n")
    assert was_locked
    assert not is_locked()


def test_signals_to_the_terminal_do_not_reach_the_runs(lock, tmp_path):
    with open(tmp_path / "said", "w+") as said:
        run = children.start(["--version"], os.environ, said, lock)
        try:
            assert os.getpgid(run.pid) != os.getpgid(0)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()


def test_a_file_of_the_current_folder_is_not_taken_for_a_library(tmp_path, monkeypatch):
    for name in ("inspect.py", "h2.py", "hamu.py"):
        (tmp_path / name).write_text("raise SystemExit('mine')\n")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(hamu.__file__).parents[1])}
    with open(tmp_path / "said", "w+") as said:
        code = children.start(["--version"], environment, said, None).wait()
        said.seek(0)
        assert (code, said.read()) == (0, "")


def test_a_signal_between_two_rounds_of_runs_ends_the_next_at_once():
    """One that came while the last run of a round was ending, and so kept nothing waiting there."""

    class Round:
        waiting = ("run",)

        def run(self, children):
            return iter(children.make([Call("run", ("true",))]))

    pool = Children(1, os.environ, None)
    pool.ask_to_end(signal.SIGTERM)
    with pytest.raises(
        Interrupted, match=r"^interrupted by SIGTERM; 1 runs are not finished; the same command"
    ):
        run_waiting(Round(), pool, Console(quiet=True), "reproduce")
