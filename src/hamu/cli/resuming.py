"""A run that goes on does so by the settings that it began with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hamu.cli.config_files import read_config
from hamu.cli.options import PATHS, ResumeOptions
from hamu.cli.parser import Parser
from hamu.errors import HamuError
from hamu.unlearning.record.inputs import edited, read_inputs
from hamu.unlearning.run_files import CONFIG, INPUTS, READS

# what a run may be resumed with although it was begun with something else: none of it changes a result
_MAY_CHANGE = {
    "resume", "output_dir", "trust_remote_code", "shard", "pairing", "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size", "save_strategy", "save_steps", "save_total_limit", "report_to",
    "dataloader_num_workers",
}  # fmt: skip


def settings_to_resume(command: str, rest: list[str]) -> tuple[str, str] | None:
    """Name and content of the settings of the run that is to go on, None for a new run.

    Raises:
        HamuError: if there is no such run, or it is another command's.
    """
    asked = Parser((ResumeOptions,), prog=f"hamu {command}", add_help=False, allow_abbrev=False)
    asked.add_argument("--output_dir", "--output-dir", default=f"runs/{command}")
    found = asked.parse_known_args(rest)[0]
    if not found.resume:
        return None
    path = Path(found.output_dir) / CONFIG
    if not path.is_file():
        raise HamuError(
            f"there is no run to resume in {path.parent}: it has no {path.name}; start it without --resume"
        )
    for other, of_it in READS.items():
        if (
            other != command
            and (path.parent / INPUTS).is_file()
            and of_it in read_inputs(path.parent)
        ):
            raise HamuError(f"{path.parent} holds a run of hamu {other}; resume it by that")
    return str(path), read_config(path)


def check_resumed_settings(
    name: str, settings: dict[str, Any], given: dict[str, Any], files: argparse.Namespace
) -> None:
    """Check that a run goes on with its own settings.

    Args:
        name: of the file that they are in.
        settings: they themselves.
        given: flags of the command that goes on with it.
        files: the recipe and the config file that were named.

    Raises:
        HamuError: if something is not as it was and would change a result.
    """
    if files.recipe or files.config:
        raise HamuError(
            f"a run is resumed by its own settings, {name}; leave out --recipe and --config"
        )
    changed = sorted(
        edited(Path(name).parent, settings) - _MAY_CHANGE - PATHS
    )  # what is there is compared itself
    if changed:
        raise HamuError(
            f"{name} has another {changed[0]} than the run began with; put back what it was, or start a new run in "
            f"another --output_dir"
        )
    for key, value in given.items():
        if key in _MAY_CHANGE or (key in settings and settings[key] == value):
            continue
        if key in settings:
            raise HamuError(
                f"the run of {name} has {key} {settings[key]}; leave out --{key} {value}, or start a new run"
            )
        raise HamuError(
            f"the run of {name} was started without --{key}; leave out --{key} {value}, or start a new run"
        )
