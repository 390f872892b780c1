"""Kill runs at random moments and resume them: do they end where the uninterrupted run does, bit by bit?

    python benchmarks/kill_resume.py [--kills 100] [--each K] [--only WORD] [--seed 0]

A case is a task (digits, tiny text) with a method and an optimizer, a run by goal (`--auto`) or the training of an
original model (`hamu train`). Its uninterrupted run says how long it takes and where
it ends. Then it is started again, killed with SIGKILL after a random part of that time, resumed, killed once more, and
so on; a checkpoint is written after every step, so many kills fall into a save. Ends with code 1 if any run ended
elsewhere: in its weights, its figures or, where it has one, its step log.

Every run is a child forked from this process, which has loaded the libraries; the command is that of the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked child inherits no threads

import torch
from _report import print_report
from transformers import set_seed

from hamu.cli import main as hamu
from hamu.core.methods import method_classes

# more than there are of either: each pair of method and optimizer comes up in its turn
OPTIMIZERS = (
    ["--optim", "sgd"],
    ["--optim", "adamw_torch", "--learning_rate", "1e-3", "--lr_scheduler_type", "linear"],
    ["--optim", "adafactor", "--learning_rate", "1e-3"],
)
ROBUST = (["--trust_region"], ["--stopping", "any", "--stopping_patience", "3", "--stopping_window", "2"],
          ["--correct_steps"])  # fmt: skip


@dataclass
class Case:
    """A run by its command and settings."""

    name: str
    command: str
    settings: list[str]


DIGITS = ["--recipe", "digits"]
TEXT = ["--data", "miniature", "--max_length", "96"]
SAVED = ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2"]
ADAPTER = ["--lora", "--lora_rank", "2", "--lora_dropout", "0.1"]
NEW_TEXT_MODEL = [
    *TEXT,
    "--model",
    "tiny-llama",
    "--per_device_train_batch_size",
    "16",
    "--optim",
    "adamw_torch",
]


def originals(folder: Path) -> dict[str, list[str]]:
    """Train a small original model for each task; what `hamu unlearn` is given for it."""
    forgotten = ["--forget_rows", "0,1,2,3,4,5,6,7,8,9,10,11"]
    command(["train", *DIGITS, "--num_train_epochs", "1", "--output_dir", f"{folder}/digits"])
    command(["train", *NEW_TEXT_MODEL, "--max_steps", "12", "--output_dir", f"{folder}/text"])
    shared = [*SAVED, "--max_eval_samples", "64", "--eval_strategy", "steps", "--eval_steps", "3",
              "--check_steps", "3"]  # fmt: skip  # by default which steps are checked depends on time
    return {
        "digits": [*DIGITS, "--model", f"{folder}/digits/model", "--max_steps", "8", *shared],
        "text": [*TEXT, *forgotten, *ADAPTER, "--model", f"{folder}/text/model", "--per_device_train_batch_size", "8",
                 "--max_steps", "5", *shared],
    }  # fmt: skip


def cases(of: dict[str, list[str]]) -> list[Case]:
    """Every method on both tasks, with the optimizers in turn, and what only HAMU has; runs by goal; trainings."""
    found = []
    optimizers = itertools.cycle(OPTIMIZERS)
    share = ["--constraint_mode", "relative"]
    for (task, settings), method in itertools.product(of.items(), sorted(method_classes())):
        optimizer = next(optimizers)
        found.append(Case(f"{task} {method} {optimizer[1]}", "unlearn", [*settings, *share, "--method", method,
                                                                         *optimizer]))  # fmt: skip
    robust = itertools.cycle(ROBUST)
    for case in found:
        if "hamu" in case.name:
            case.settings += next(robust)
    # more than there is to reach: every step is taken, some of them back
    goal = ["--auto", "--target_forget_loss", "9", "--max_retain_increase", "0.02"]
    found.append(Case("digits auto", "unlearn", [*of["digits"], *goal]))
    found += [
        Case(f"digits train {o[1]}", "train", [*DIGITS, *SAVED, "--max_steps", "10", *o])
        for o in OPTIMIZERS
    ]
    found.append(
        Case("text train adamw_torch", "train", [*NEW_TEXT_MODEL, *SAVED, "--max_steps", "8"])
    )
    adapted = [
        *TEXT,
        *ADAPTER,
        *SAVED,
        "--model",
        of["text"][of["text"].index("--model") + 1],
        "--max_steps",
        "8",
    ]
    found.append(
        Case("text train adapter", "train", [*adapted, "--per_device_train_batch_size", "16"])
    )
    return found


def command(argv: list[str]) -> None:
    """One command to its end, in a child."""
    code = os.waitstatus_to_exitcode(os.waitpid(started(argv), 0)[1])
    if code:
        raise SystemExit(f"hamu {' '.join(argv)} ended with {code}")


def started(argv: list[str]) -> int:
    """One command in a child that this process can kill; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = hamu(argv)
    finally:
        os._exit(code)


def run_with_kills(
    case: Case, folder: Path, kills: int, seconds: float, draw: random.Random
) -> int:
    """Start, kill, resume until it is over; returns how often it was killed.

    The moments are random, but the first is no later than the first checkpoint: also a run that is
    over sooner than expected is killed once.
    """
    killed = 0
    while True:
        begun = (folder / "config.yaml").is_file()
        place = ["--output_dir", str(folder)]
        argv = [case.command, *(["--resume"] if begun else [*case.settings, "--overwrite"]), *place]
        child = started(argv)
        deadline = time.monotonic() + (draw.uniform(0, seconds) if killed < kills else 600)
        status = None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            if kills and not killed and any(folder.glob("checkpoint-*")):
                break
            time.sleep(0.005)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed += 1
            continue
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(
                f"{case.name}: {' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}"
            )
        return killed


def ends_alike(one: Path, other: Path) -> list[str]:
    """Names of the files that differ between two finished runs."""
    differing = []
    weights = [
        {p.name: p.read_bytes() for p in (run / "model").glob("*.safetensors")}
        for run in (one, other)
    ]
    if not weights[0] or weights[0] != weights[1]:
        differing.append("weights")
    if figures_of(one) != figures_of(other):
        differing.append("evaluation.json")
    for name in ("steps.jsonl", "layers.jsonl"):
        texts = [
            (run / name).read_text() if (run / name).is_file() else None for run in (one, other)
        ]
        if texts[0] != texts[1]:
            differing.append(name)
    return differing


def figures_of(run: Path) -> dict[str, object]:
    """Those of its evaluation that do not depend on the clock."""
    figures: dict[str, object] = json.loads((run / "evaluation.json").read_text())
    figures.pop("seconds", None)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--each", type=int, help="kills of one run; by default as many as spread over all cases"
    )
    parser.add_argument(
        "--only", default="", help="only cases with this in their name, such as train or auto"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(options.seed)
    draw = random.Random(options.seed)
    killed = different = runs = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = [case for case in cases(originals(folder)) if options.only in case.name]
        draw.shuffle(found)
        each = options.each or max(1, -(-options.kills // len(found)))
        seconds: dict[str, float] = {}
        while (
            killed < options.kills
        ):  # a run may come to its end before it was killed as often as it was to be
            case = found[runs % len(found)]
            whole, broken = folder / f"whole {case.name}", folder / f"broken {runs}"
            if case.name not in seconds:
                begin = time.monotonic()
                command([case.command, *case.settings, "--output_dir", str(whole)])
                seconds[case.name] = time.monotonic() - begin
            killed += run_with_kills(
                case, broken, min(each, options.kills - killed), seconds[case.name], draw
            )
            runs += 1
            differing = ends_alike(whole, broken)
            different += bool(differing)
            print(
                f"{case.name}: {'ends alike' if not differing else 'differs in ' + ', '.join(differing)}",
                flush=True,
            )
    print_report("kill_resume", {"kills": killed, "runs": runs, "ended_elsewhere": different})
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
