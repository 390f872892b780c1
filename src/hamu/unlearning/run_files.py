"""The files that commands leave in an output folder, and how they are told from those of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The files of a run of unlearning; the last is written last, and tells that the run came to its end.
CONFIG, INPUTS, HARDNESS = "config.yaml", "inputs.json", "hardness.json"
STEPS, LAYERS, EVALUATION = "steps.jsonl", "layers.jsonl", "evaluation.json"
READABLE_RECORD, RECORD = "record.md", "record.json"
MODEL, MERGED = "model", "merged"  # folders
# By what it reads the run of a command that can be resumed is known, and that it has ended by the last file.
READS = {"train": "training set", "unlearn": "forget set"}
_LAST = {"train": EVALUATION, "unlearn": RECORD}
# What other commands write into a folder of their own, or beside a run's files.
REPORT, TRAJECTORIES, ANSWERS_PAGE, ANSWERS = (
    "report.html",
    "trajectories.png",
    "answers.html",
    "answers.jsonl",
)
ASSESSMENT, FRONTIER, SUMMARY = "assess.json", "frontier.png", "summary.json"
ATTACK, ATTACK_PICTURE, ATTACK_FOLDER = "attack.json", "attack.png", "attack"
COMPARISON, COMPARISON_PICTURE = "comparison.json", "comparison.png"
COMPARISON_TABLES = ("comparison.csv", "comparison.md", "comparison.tex")

# The folder of a step's checkpoint is called by this and the step; in it, what was written, and what the trainer and
# its callbacks remember.
CHECKPOINT, MANIFEST, TRAINER_STATE = "checkpoint-", "manifest.json", "trainer_state.json"
_OF_RUNS = (
    *(MODEL, MERGED, CONFIG, INPUTS, HARDNESS, STEPS, LAYERS, EVALUATION, RECORD, READABLE_RECORD),
    *(REPORT, ANSWERS_PAGE, ANSWERS, SUMMARY, TRAJECTORIES, ASSESSMENT, FRONTIER),
    *(ATTACK, ATTACK_PICTURE, ATTACK_FOLDER),
    "runs",  # of tensorboard, as transformers names it
    "tensorboard",
)
_OF_COMPARISONS = (COMPARISON, *COMPARISON_TABLES, COMPARISON_PICTURE)
_LEFT = (f".{CHECKPOINT}", *(f".{name}." for name in (*_OF_RUNS, *_OF_COMPARISONS)))
_Content = dict[str, Any]


def is_left(path: Path) -> bool:
    """Whether it is what an interrupted write leaves."""
    return path.name.startswith(_LEFT)


def is_of_a_run(path: Path) -> bool:
    """Whether a file or folder has a name that runs give, and, if it is called a checkpoint, is one of theirs."""
    if path.name.startswith(CHECKPOINT):
        return path.name.removeprefix(CHECKPOINT).isdecimal() and _is_manifest(
            _json(path / MANIFEST)
        )
    return path.name in _OF_RUNS or is_left(path)


def shows_a_run(path: Path) -> bool:
    """Whether a file has a form that a run alone gives it; others have files of these names too."""
    return path.name in _FORMS and _FORMS[path.name](_json(path))


def holds_a_run(folder: Path) -> bool:
    """Whether a run, or another command with a folder of its own, has left one."""
    checkpoints = (path for path in folder.glob(f"{CHECKPOINT}*") if is_of_a_run(path))
    return any(shows_a_run(folder / name) for name in _FORMS) or any(checkpoints)


def interrupted_command(folder: Path) -> str | None:
    """The command whose run in a folder was broken off and can go on; None if there is no such run."""
    inputs = _json(folder / INPUTS)
    found = next((name for name, reads in READS.items() if reads in inputs), None)
    if found is None or not (folder / CONFIG).is_file() or (folder / _LAST[found]).is_file():
        return None
    return found


def is_finished(folder: Path) -> bool:
    """Whether a run, or another command with a folder of its own, has come to its end in a folder."""
    alone = (EVALUATION, ASSESSMENT, ATTACK, SUMMARY)  # without inputs.json
    last = (RECORD,) if READS["unlearn"] in _json(folder / INPUTS) else alone
    return any(shows_a_run(folder / name) for name in last)


def holds_a_comparison(folder: Path) -> bool:
    """Likewise `hamu compare`, whose own file may be damaged: nothing but times is lost with it."""
    if not (folder / COMPARISON).is_file():
        return False
    found = _json(folder / COMPARISON)
    if isinstance(found.get("runs"), list) and isinstance(found.get("seconds"), dict):
        return True
    return any(holds_a_run(path.parent) for path in folder.glob(f"*/{CONFIG}"))


def _json(path: Path) -> _Content:
    """What a file holds, nothing where it is no mapping of JSON."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_manifest(found: _Content) -> bool:
    return bool(found) and all(
        isinstance(entry, dict) and "sha256" in entry for entry in found.values()
    )


def _is_inputs(found: _Content) -> bool:
    return any(name in found for name in READS.values())


def _is_evaluation(found: _Content) -> bool:
    """Of `hamu unlearn`, `hamu evaluate` or `hamu train`."""
    sides = found.keys() >= {"retain", "forget"} and all(
        isinstance(found[side], dict) for side in ("retain", "forget")
    )
    return (
        sides
        or found.keys() >= {"before", "after", "trajectory"}
        or found.keys() >= {"seconds", "train_loss"}
    )


_FORMS: dict[str, Callable[[_Content], bool]] = {
    INPUTS: _is_inputs,
    HARDNESS: lambda found: found.keys() >= {"measured_at", "kappa", "stop_threshold"},
    EVALUATION: _is_evaluation,
    RECORD: lambda found: found.get("format") == "hamu-unlearning-record",
    ASSESSMENT: lambda found: found.keys() >= {"hamu-q", "hamu-u", "verdict"},
    ATTACK: lambda found: found.get("format") == "hamu-attack",
    SUMMARY: lambda found: found.keys() >= {"task", "hardness", "methods"},
}
