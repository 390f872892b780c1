"""What `hamu unlearn` prints of a run that has ended."""

from __future__ import annotations

import math
from typing import Any

from hamu.core.gram import SIDES
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.unlearning.goals import standing_line
from hamu.unlearning.trainer import UnlearnTrainer
from hamu.unlearning.trainer.measuring import set_figures
from hamu.unlearning.trainer.promise import describe

_HARDLY = 0.05  # a probability that is 5% lower or higher


def outcome(trainer: UnlearnTrainer) -> list[str]:
    """What happened, and what was saved of it, a line each."""
    return [
        f"steps: {trainer.steps_taken} taken, {trainer.steps_skipped} not taken; the run ended at step "
        f"{trainer.state.global_step} because {trainer.end.text}",
        *_divergence(trainer),
        *_warning(trainer),
        *_forgotten(trainer),
        *([] if trainer.promise is None else [describe(trainer.promise)]),
    ]


def _forgotten(trainer: UnlearnTrainer) -> list[str]:
    """Lines with the count of forgotten records, and the best state of a run by hand."""
    lines = [] if trainer.controller is not None else [_best(trainer)]
    if trainer.controller is not None and trainer.controller.goal_sentence not in trainer.end.text:
        lines.append(trainer.controller.goal_sentence)
    after = trainer.standings().get("after")
    if after is not None:
        text = standing_line(after.figures())
        lines.append(
            f"{text}, by the goal {trainer.goal_run.goal.kind}; whether that lasts: hamu attack"
        )
    return lines


def _divergence(trainer: UnlearnTrainer) -> list[str]:
    """A line if the model has become worse than guessing on what it was to retain."""
    guess = guessing_loss(trainer.predictions["retain"], trainer.model)
    before, after = (
        set_figures(one)["retain_loss"] for one in (trainer.start_predictions, trainer.predictions)
    )
    if not before <= guess < after:
        return []
    return [
        f"the model is of no use: its retain loss went from {before:.4f} to {after:.4g}, above the {guess:.2f} of "
        f"guessing; lower --learning_rate {trainer.args.learning_rate:g}, or end such a run by --max_retain_loss"
    ]


def guessing_loss(predictions: Predictions | TokenPredictions, model: Any) -> float:
    """The loss of a model that gives every class, or every token, the same probability."""
    if isinstance(predictions, Predictions):
        return math.log(predictions.logits.shape[1])
    return math.log(len(model.get_input_embeddings().weight))


def _warning(trainer: UnlearnTrainer) -> list[str]:
    """That a run has changed next to nothing, which nothing else says of one that has taken all its steps."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_forget_gain" in entry]
    if (
        trainer.end.kind != "all steps"
        or trainer.controller is not None
        or "forget" not in trainer.sides
    ):
        return []
    first, last = evaluations[0], evaluations[-1]
    if not all(
        abs(last[f"eval_{side}_loss"] - first[f"eval_{side}_loss"]) < _HARDLY for side in SIDES
    ):
        return []
    return [
        f"the model has hardly moved: the forget loss was {first['eval_forget_loss']:.4f} and is "
        f"{last['eval_forget_loss']:.4f}, at learning rate {trainer.args.learning_rate:g}; `hamu assess` suggests a "
        f"rate, and --auto finds one"
    ]


def _best(trainer: UnlearnTrainer) -> str:
    """Which evaluation of the run was best for both sides, and what of it was saved."""
    name = f"eval_{str(trainer.args.metric_for_best_model).removeprefix('eval_')}"
    found = [entry for entry in trainer.state.log_history if name in entry]
    if not found:
        return f"no evaluation measured {name.removeprefix('eval_')}"
    best = (max if trainer.args.greater_is_better else min)(found, key=lambda entry: entry[name])
    text = f"best {name.removeprefix('eval_')} {best[name]:+.4g} at step {best['step']}"
    folder = trainer.checkpoints.path(best["step"])
    saved = (
        trainer.state.best_global_step
        if trainer.args.load_best_model_at_end
        else trainer.state.global_step
    )
    if best["step"] == 0:
        return f"best {name.removeprefix('eval_')} at the start: no later evaluation was better"
    if best["step"] == saved:
        return f"{text}, which is the model saved"
    if folder.exists():
        return f"{text}, in {folder}"
    return f"{text}, which was not saved; --load_best_model_at_end with --save_strategy keeps such a state"
