"""What happened in a run, as evaluation.json keeps it."""

from __future__ import annotations

from typing import Any

from hamu.unlearning.goals import Standing
from hamu.unlearning.trainer.trainer import UnlearnTrainer


def history(trainer: UnlearnTrainer) -> dict[str, Any]:
    """The evaluations of a run that has ended, its steps, what it promised and why it ended."""
    return {
        "trajectory": [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry],
        "steps_taken": trainer.steps_taken,
        "steps_skipped": trainer.steps_skipped,
        "steps_in_model": trainer.steps_in_model,
        "promise": trainer.promise,
        "controller": None if trainer.controller is None else trainer.controller.history,
        "goal": _goal(trainer),
        "ended": trainer.end.text,
        "ended_kind": trainer.end.kind,
    }


def _goal(trainer: UnlearnTrainer) -> dict[str, Any] | None:
    """Goal of the run with its standings before and after; None if nothing defines forgotten."""
    standings: dict[str, Standing] = trainer.standings()
    if "after" not in standings:
        return None
    goal, controller = trainer.goal_run.goal, trainer.controller
    return {
        "kind": goal.kind,
        "share": goal.share,
        "loss": goal.loss,
        "budget": None if controller is None else controller.budget,
        "reached": standings["after"].share >= goal.share
        if controller is None
        else controller.reached,
        "lasting": trainer.lookahead is not None,
    } | {name: standing.figures() for name, standing in standings.items()}
