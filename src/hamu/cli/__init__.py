"""Command line: parse, call one job, print its result."""

import ctypes
import importlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from rich.console import Console

from hamu.errors import HamuError, Interrupted, first_line, handling, one_line, unknown

COMMANDS = {
    "demo": "train, unlearn and compare all methods on bundled data, in minutes",
    "train": "train the original model, or the retain model",
    "assess": "say before a run how hard it is, what it will cost, whether to start",
    "unlearn": "unlearn the forget set from a model",
    "compare": "unlearn by several methods and settings, and compare what comes out",
    "evaluate": "measure a model: losses, accuracy, membership inference",
    "attack": "fine-tune copies of a model: does what was forgotten come back?",
    "report": "make an HTML page of one run, or of several side by side",
    "verify": "check the record of a run against its files, its model and its data",
    "methods": "list the methods",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_PARALLEL = ("train", "unlearn")  # the commands that several processes may share
_USAGE = "usage: hamu COMMAND [--help] [--debug] [options]\n\ncommands:\n" + "\n".join(
    f"  {name:10} {text}" for name, text in COMMANDS.items()
)
_Run = Callable[[list[str], Console], int]


class Screen(Console):
    """The console of a command, which falls silent once its output cannot be written.

    Names of files are shown as they are, whatever brackets are in them. `failure` is the reason of
    its silence, None if its reader has left, as `head` does.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        self.failure: OSError | None = None

    def on_broken_pipe(self) -> None:
        """Leave it to `__exit__`, in place of ending the program, as rich does."""
        raise BrokenPipeError

    def __exit__(self, *error: Any) -> None:
        """Write the output, and fall silent if that fails."""
        try:
            super().__exit__(*error)
        except OSError as failure:
            self.failure = None if isinstance(failure, BrokenPipeError) else failure
            self.quiet = True
            nowhere = os.open(os.devnull, os.O_WRONLY)  # Python writes its buffer once more at exit
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code, see docs/options.md."""
    if argv is None:
        argv = sys.argv[1:]
        del sys.argv[2:]  # trackers send it along, and it may name whom to forget
    for stream in (sys.stdout, sys.stderr):  # escape characters that their encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command = argv[0] if argv else "--help"
    try:
        return _outcome(f"hamu {command}", argv[1:], partial(_run, command))
    finally:  # after the message: other processes of the run end this one as soon as they are gone
        if "torch" in sys.modules:
            from hamu.core.distributed import leave

            leave()


def run_experiments(argv: list[str], run: _Run) -> int:
    """Run a command of its own, with the same messages and exit codes; see `main`."""
    return _outcome("python -m experiments", argv, partial(_run_loaded, "experiments", run))


def _outcome(title: str, argv: list[str], run: Callable[[list[str], Screen], int]) -> int:
    """Run a command; the error in one line, and the exit code."""
    screen = Screen()
    try:
        code = run([word for word in argv if word != "--debug"], screen)
    except Exception as error:
        if "--debug" in argv:
            raise
        return _failed(f"{title}: {_reason(error)}", 2)
    except Interrupted as end:
        from hamu.core.distributed import is_main

        code = 128 + end.signal
        return _failed(f"{title}: {end}", code) if is_main() else code
    except KeyboardInterrupt:
        return _failed(f"{title}: interrupted", 130)
    if screen.failure is None:
        return code
    saved = "what the command writes into files is there"
    why = f"standard output cannot be written: {first_line(screen.failure)}; {saved}"
    return _failed(f"{title}: {why}", code or 2)


def _failed(text: str, code: int) -> int:
    """Print an error; where standard error is gone, the exit code alone tells."""
    with suppress(OSError):
        print(one_line(text), file=sys.stderr, flush=True)
    return code


def _reason(error: Exception) -> str:
    """An error in words; one of a library was not foreseen, so they name a way to its place."""
    if isinstance(error, HamuError):
        return str(error)
    if isinstance(error, OSError):  # a full disk, a folder without access, a file that vanished
        return first_line(error)
    import torch.distributed as dist

    from hamu.core.distributed import world_size

    of_network = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
    if world_size() > 1 and (of_network or "gloo" in str(error)):
        return (
            f"process {os.environ['RANK']} lost another process of this run, which is named below "
            f"as the root cause; --resume goes on from the last checkpoint, if there is one"
        )
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {first_line(error)}{notes} (--debug shows where)"


def _run(command: str, argv: list[str], screen: Screen) -> int:
    if command in ("--version", "-h", "--help"):
        version = f"hamu {importlib.import_module('hamu').__version__}"
        screen.print(version if command == "--version" else _USAGE, soft_wrap=True)
        return 0
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    if command == "methods":
        return _methods(argv, screen)
    load = partial(importlib.import_module, "hamu.cli.commands")
    return _run_loaded(command, lambda *given: load().run(command, *given), argv, screen)


def _run_loaded(command: str, run: _Run, argv: list[str], screen: Screen) -> int:
    if sys.platform == "win32":
        raise HamuError(
            "the commands need the signals of Linux or macOS; run them in WSL (the loop and "
            "UnlearnTrainer work on Windows too)"
        )
    keep_freed_memory()
    _quiet()
    from hamu.core.distributed import is_main, world_size

    if world_size() > 1 and command not in _PARALLEL:
        raise HamuError(f"{command} runs in one process; start it without torchrun")
    screen.quiet = not is_main()
    with handling(_at_once):
        return run(argv, screen)


def _at_once(number: int, frame: FrameType | None) -> None:
    """Leave, whatever is under way; nothing half written is ever taken for whole."""
    name = signal.Signals(number).name
    raise Interrupted(f"interrupted by {name}; what it had not saved is lost", number)


def _methods(argv: list[str], screen: Screen) -> int:
    from rich import box
    from rich.table import Table

    from hamu.core.methods import method_rows

    if argv and argv not in (["--help"], ["-h"]):
        raise HamuError(f"methods takes no options; got {' '.join(argv)}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("method", "lowers", "raises"):  # hamu.report, which has such a table, loads torch
        table.add_column(head, no_wrap=True)
    table.add_column("what it does, source")
    for row in method_rows():
        retain, forget = row.retain_objective or "-", row.forget_objective or "-"
        table.add_row(row.name, retain, forget, f"{row.summary} ({row.source})")
    lowered = "Each lowers its retain objective and raises its forget objective."
    screen.print(table, f"{lowered} Choose one with --method.")
    return 0


def keep_freed_memory() -> None:
    """Let glibc keep what a pass frees for the next one, unless the environment sets it otherwise.

    By default it returns large pieces to the kernel after every pass and faults them in again, page
    by page. Done for processes of the command line alone: it holds for all of a process.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the most that glibc accepts


def _quiet() -> None:
    """Keep other libraries' bars and notices off the screen; errors stay."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns when it is imported
    import datasets
    import transformers
    from PIL import Image

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("accelerate", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    shown: dict[str, Any]
    for shown in (
        {"message": ".*pin_memory.*"},
        {"message": "Initializing zero-element tensors"},  # the load that fails says more
        {"category": FutureWarning, "module": "transformers"},
        # damage is an error, the rest is repaired
        {"category": UserWarning, "module": "peft|PIL"},
    ):
        warnings.filterwarnings("ignore", **shown)
    # an image that may fill the memory is not read
    warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
