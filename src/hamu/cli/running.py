"""Running what waits, each run in a process of its own, until all have ended or a signal asks them to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from hamu.cli.interrupts import handling
from hamu.cli.progress import task_bar
from hamu.errors import Interrupted
from hamu.unlearning.compare import Children, Runs
from hamu.unlearning.compare.rows import Row


def run_waiting(runs: Runs, children: Children, console: Console, command: str) -> None:
    """Run what waits, a line for each that ends, under a bar with the command's name.

    Raises:
        Interrupted: by a signal, now or when other runs were made, once all runs under way have ended.
    """
    with ending(children), task_bar(console) as bar:
        for row in bar.track(runs.run(children), total=len(runs.waiting), description=command):
            console.print(_line(row), soft_wrap=True)
    if children.asked_by and runs.waiting:
        raise Interrupted(
            f"interrupted by {signal.Signals(children.asked_by).name}; {len(runs.waiting)} runs are not finished; the "
            f"same command goes on with them",
            children.asked_by,
        )


@contextmanager
def ending(children: Children) -> Iterator[None]:
    """Let a signal ask these to end, while they are at work."""

    def note(number: int, frame: FrameType | None) -> None:
        children.ask_to_end(number)

    with handling(note):
        yield


def _line(row: Row) -> str:
    if row["failed"]:
        return f"{row['run']} failed: {row['failed']}"
    return (
        f"{row['run']}: ΔL_f {row['forget_gain']:+.4g}, -ΔL_r {row['retain_gain']:+.4g}, {row['steps']} steps, "
        f"{row['seconds']:.0f} s"
    )
