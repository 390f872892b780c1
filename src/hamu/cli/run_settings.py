"""All settings of a run: as its record holds them, and as they tell two runs apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hamu.cli.help import SHOWN
from hamu.cli.options import OF_AN_ADAPTER, DataOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.unlearning.record.inputs import recorded
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.config import own_options


def recorded_settings(
    data: DataOptions, run: RunOptions, args: UnlearnConfig, given: Iterable[str]
) -> dict[str, Any]:
    """The settings of a run in the form that its record holds."""
    names = {*own_options(type(args)), *SHOWN}
    own = {**vars(data), **vars(run), **{name: getattr(args, name) for name in names}}
    if not run.lora:
        own |= dict.fromkeys(OF_AN_ADAPTER)  # they had no effect
    return recorded(own, {name: getattr(args, name) for name in given if name not in own})


def every_option(config: Path) -> dict[str, Any]:
    """The value of every option of `hamu unlearn` by a config.yaml, given or not: what makes two runs the same.

    Raises:
        HamuError: as `parse`.
    """
    parsed = parse("unlearn", "", ["--config", str(config)], DataOptions, RunOptions, UnlearnConfig)
    args = parsed.of(UnlearnConfig)
    of_training = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    return {**vars(parsed.of(DataOptions)), **vars(parsed.of(RunOptions)), **of_training}
