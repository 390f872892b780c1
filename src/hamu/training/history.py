"""What happened in a run, as evaluation.json keeps it."""

from __future__ import annotations

from typing import Any

from hamu.training.trainer import UnlearnTrainer


def history(trainer: UnlearnTrainer) -> dict[str, Any]:
    """The evaluations of a run that has ended, its steps, what it promised and why it ended."""
    return {
        "trajectory": [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry],
        "steps_taken": trainer.steps_taken,
        "steps_skipped": trainer.steps_skipped,
        "steps_in_model": trainer.steps_in_model,
        "promise": trainer.promise,
        "steering": None if trainer.steering is None else trainer.steering.history,
        "ended": trainer.end.text,
        "ended_kind": trainer.end.kind,
    }
