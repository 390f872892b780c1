"""The log of a run: a line per step in steps.jsonl, and of its blocks in layers.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from hamu.files import HARDNESS, STEPS
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.layer_log import LayerLog
from hamu.unlearning.trainer.trainer import UnlearnTrainer


class StepLog(TrainerCallback):
    """Once a first step was taken: writes what the run was asked and reads, and a line per step, in two logs.

    Args:
        folder: of the run.
        settings: what the run was asked, for config.yaml.
        inputs: what it reads, for inputs.json.
        resume: whether it goes on with the run that is in the folder.
        hardness: of an assessment before the run, for hardness.json; None if there was none.

    Attributes:
        trainer: whose steps these are; to be set before the run begins.
    """

    trainer: UnlearnTrainer | None = None

    def __init__(
        self,
        folder: RunFolder,
        settings: Mapping[str, Any],
        inputs: Mapping[str, Any],
        resume: bool,
        hardness: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._settings, self._inputs, self._resume = folder, settings, inputs, resume
        self._hardness = hardness
        self._begun = False
        self._lines: list[dict[str, Any]] = []
        self._layers = LayerLog(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a run that is resumed, steps after the checkpoint will be taken once more."""
        if self._resume:
            self._folder.keep_lines(STEPS, lambda line: line["step"] <= state.global_step)
            self._layers.resume(state.global_step, self._folder.count_lines(STEPS))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once a step was taken, and no sooner, an earlier run may give way; a checkpoint may come next."""
        if self._has_begun():
            self.begin()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Append the figures of a step; figures that are not finite become null, which JSON can hold."""
        if "taken" in logs:
            finite = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in logs.items()
            }
            self._lines.append({"step": state.global_step, **finite})
            if self.trainer is not None:
                self._layers.take(state.global_step, self.trainer)
        if self._has_begun():
            self.begin()

    def begin(self) -> None:
        """Let an earlier run give way, and write what this one was asked and reads."""
        if not self._begun:
            if self._hardness is not None:
                self._folder.write_json(HARDNESS, self._hardness)
            self._folder.begin(self._settings, self._inputs)
            self._begun = True
        for line in self._lines:
            self._folder.append_line(STEPS, line)
        self._lines.clear()
        self._layers.write()

    def _has_begun(self) -> bool:
        return self._begun or (self.trainer is not None and self.trainer.steps_taken > 0)
