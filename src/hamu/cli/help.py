"""What --help prints."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import NoReturn

from transformers import TrainingArguments

from hamu.cli.config_files import recipes
from hamu.cli.options import NOT_TAKEN
from hamu.cli.screen import say

# TrainingArguments that matter here, shown by --help; the rest is behind --help-all.
SHOWN = {
    "num_train_epochs", "max_steps", "learning_rate", "optim", "lr_scheduler_type", "warmup_steps", "weight_decay",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_grad_norm",
    "seed", "bf16", "fp16", "use_cpu", "eval_strategy", "eval_steps", "logging_steps", "save_strategy", "save_steps",
    "load_best_model_at_end", "metric_for_best_model", "report_to", "channels_last",
    "gradient_checkpointing",
}  # fmt: skip

# what transformers says of them is about its own versions
_OWN_WORDS = {
    "gradient_checkpointing": "Compute activations again in the backward pass: less memory, about a third more time."
}


def print_help(command: str, parser: argparse.ArgumentParser, everything: bool) -> NoReturn:
    """Print the options of a command and leave.

    Args:
        command: its name.
        parser: has its options.
        everything: whether the less important training arguments are shown too.
    """
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - SHOWN - {"output_dir"}
    lines = [
        f"usage: {parser.prog} [--recipe NAME] [--config FILE.yaml] [--flag value ...]\n\n{parser.description}\n",
        "  --recipe NAME\n        Start from a bundled recipe: " + ", ".join(recipes()) + ".",
        "  --config FILE.yaml\n        Read settings from a file; flags win over it.",
    ]
    for action in parser._actions:
        flag = max(action.option_strings, key=len)
        hidden = action.dest in inherited and not everything
        if not (hidden or flag.startswith("--no_") or action.dest in NOT_TAKEN.get(command, ())):
            lines.append(described(action))
    if not everything:
        lines.append("\n--help-all shows the other training arguments too.")
    say("\n".join(lines))
    sys.exit(0)


def called(action: argparse.Action) -> str:
    """What the help calls an argument that is named without a flag."""
    return action.metavar if isinstance(action.metavar, str) else action.dest


def described(action: argparse.Action) -> str:
    """An option, its default, and below what it is."""
    name = f"--{action.dest}" if action.option_strings else called(action)
    value = (
        f" {action.metavar}" if action.option_strings and isinstance(action.metavar, str) else ""
    )
    shown = str(action.default).replace("\n", "\\n")
    default = "" if action.default in (None, argparse.SUPPRESS, False, []) else f" [{shown}]"
    return f"  {name}{value}{default}\n        {' '.join(_OWN_WORDS.get(action.dest, action.help or '').split())}"
