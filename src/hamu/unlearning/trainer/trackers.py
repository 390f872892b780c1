"""What trackers of experiments are given of a run: its settings and figures, nothing that names people, data or places.

The trackers are those of transformers' Trainer. As it drives them they also get paths, the model's config with the
names of its classes, and the data loaders; here they get what is in the tables of docs/live.md and no more.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from hamu.errors import HamuError

if TYPE_CHECKING:
    from hamu.unlearning.trainer.resumable import ResumableTrainer

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_UPLOADS = ("WANDB_LOG_MODEL", "WANDB_WATCH", "HF_MLFLOW_LOG_ARTIFACTS")
# what W&B would take along by itself; whoever wants it sets these variables to something else
_KEPT_BACK = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true"}


def named_trackers(asked: str | list[str] | None) -> list[str]:
    """The trackers that --report_to names, separated by commas.

    Raises:
        HamuError: if one is unknown or not installed, or is asked by its environment to upload the model.
    """
    words = asked.split(",") if isinstance(asked, str) else asked or []
    names = [name for name in words if name != "none"]
    for name in names:
        if name not in TRACKERS:
            raise HamuError(
                f"report_to {name!r} is unknown; name some of {', '.join(TRACKERS)}, or none"
            )
        if not getattr(integration_utils, f"is_{name}_available")():
            raise HamuError(
                f"report_to {name}: it is not installed; pip install {name}, or leave it out"
            )
    for variable in _UPLOADS if names else ():
        if os.environ.get(variable, "false").lower() not in ("false", "0", ""):
            raise HamuError(f"trackers are given figures, not models; unset {variable}")
    return names


class Tracker(TrainerCallback):
    """Stands between the Trainer and one tracker.

    Nothing is sent or written before the first step was taken; what was logged until then follows.

    Args:
        tracker: the callback of transformers.
        trainer: whose run it is.
        choices: settings that may be told although they are texts.
    """

    def __init__(
        self, tracker: TrainerCallback, trainer: ResumableTrainer, choices: Collection[str]
    ) -> None:
        self._tracker, self._trainer = tracker, trainer
        self._settings = Settings(trainer.args, choices)
        self._outline = _Outline(sum(p.numel() for p in trainer.model.parameters()))
        self._waiting: list[Callable[[], Any]] = []
        self._has_begun = False
        self._end: Callable[[], Any] | None = None
        self.is_kept_open = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the tracker is to begin, once a first step was taken."""
        self._waiting.append(lambda: self._begin(state, control))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Pass figures on to the tracker, once a first step was taken."""
        shown = {"logs": dict(logs), "model": self._outline}
        then = copy.copy(state)  # the step that it is now
        self._waiting.append(lambda: self._tracker.on_log(self._settings, then, control, **shown))
        self._has_begun = self._has_begun or self._trainer.has_begun
        if self._has_begun:
            for send in self._waiting:
                send()
            self._waiting.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the tracker finish, now or when it need not be kept open any more."""
        if self._has_begun:
            self._end = lambda: self._tracker.on_train_end(
                self._settings, state, control, model=self._outline
            )
        if not self.is_kept_open:
            self.end()

    def end(self) -> None:
        """Let the tracker finish if training has ended."""
        self.is_kept_open = False
        if self._end is not None:
            self._end()
            self._end = None

    def _begin(self, state: Any, control: Any) -> None:
        self._trainer.before_saving()  # an earlier run in the same folder gives way
        for variable, value in _KEPT_BACK.items():
            os.environ.setdefault(variable, value)
        if (
            isinstance(self._tracker, integration_utils.TensorBoardCallback)
            and self._tracker.logging_dir is None
        ):
            # by itself it would take a name with the host's in it
            self._tracker.logging_dir = str(Path(self._trainer.args.output_dir) / "tensorboard")
        self._tracker.on_train_begin(self._settings, state, control, model=self._outline)


class Settings:
    """The settings of a run as a tracker reads them: numbers, switches and some choices, no path and no token."""

    def __init__(self, args: TrainingArguments, choices: Collection[str]) -> None:
        self._args, self._choices = args, choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)

    def to_dict(self) -> dict[str, Any]:
        """The settings that a tracker may be told, by name."""
        shown = {}
        for name, value in self._args.to_dict().items():
            plain = value.value if isinstance(value, Enum) else value
            if plain is None or isinstance(plain, bool | int | float) or name in self._choices:
                shown[name] = plain
        return shown

    def to_json_string(self) -> str:
        """The settings of `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


class _Outline:
    """The model as a tracker is told of it: by its number of parameters."""

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters

    def num_parameters(self) -> int:
        return self._parameters


@contextmanager
def kept_open(trainer: ResumableTrainer) -> Iterator[None]:
    """Trackers finish when this ends, not with training: what is measured after it belongs to the run."""
    trackers = [one for one in trainer.callback_handler.callbacks if isinstance(one, Tracker)]
    for tracker in trackers:
        tracker.is_kept_open = True
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.end()


def stand_between(
    trainer: ResumableTrainer, own: Collection[TrainerCallback], choices: Collection[str]
) -> None:
    """Put a `Tracker` before each tracker of a trainer; callbacks that its user has made stay as they are."""
    kinds = tuple(integration_utils.INTEGRATION_TO_CALLBACK[name] for name in TRACKERS)
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if isinstance(callback, kinds) and callback not in own:
            callbacks[place] = Tracker(callback, trainer, choices)
