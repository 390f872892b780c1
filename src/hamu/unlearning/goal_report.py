"""Counts of forgotten records, as evaluation.json holds them and as a reader sees them.

In:  the predictions of a model, and those that its goal compares with.
Out: a mapping of counts, quantiles and the worst ten records, and sentences about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hamu.data import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation.predictions import Predictions, TokenPredictions
from hamu.unlearning.goals import (
    Goal,
    Kind,
    Reference,
    Standing,
    default_kind,
    standing_line,
    whole_classes,
)

Found = Mapping[str, Predictions | TokenPredictions]
_MEANINGS = {
    "unseen": "their losses are distributed as those of records never trained on, as far as chance (5 %) lets that "
    "be told",
    "retrained": "each has at least the loss that it has under the retain model, to 0.1 in log-odds",
    "erased": "each is taken for another class than its own",
    "loss": "each has at least this loss",
}


_COMPARED = {
    ("unseen", "original model"): ", compared with the original model's losses on the test data",
    (
        "unseen",
        "this model",
    ): ", compared with its own losses on the test data (--original_model: with the original's)",
    ("retrained", "retain model"): ", compared with the retain model's losses on them",
}


@dataclass(frozen=True)
class GoalSettings:
    """The goal that an evaluation measures.

    Attributes:
        kind: see `Goal`.
        share: of the records that must be forgotten.
        loss: of kind "loss".
    """

    kind: Kind
    share: float = 0.95
    loss: float | None = None

    def goal(self, original: Found | None, retain_model: Found | None) -> Goal:
        """The goal, compared with the original model's predictions of "test", or the retain model's of "forget"."""
        reference = None
        if self.kind == "unseen" and original is not None:
            reference = Reference.of(original["test"])
        if self.kind == "retrained" and retain_model is not None:
            reference = Reference.of(retain_model["forget"])
        return Goal(self.kind, self.share, self.loss, reference)

    def report(
        self, predictions: Found, *, original: Found | None, retain_model: Found | None
    ) -> dict[str, Any]:
        """Standing of a model, in the shape of `UnlearnTrainer.history`, with one standing.

        Args:
            predictions: of the model, by set.
            original: of the original model, "test" at least; None to compare with the model's own.
            retain_model: of the retain model; None without one.
        """
        goal = self.goal(original or predictions, retain_model)
        standing = goal.standing(predictions["forget"])
        own = "original model" if original is not None else "this model"
        return {
            "kind": goal.kind,
            "share": goal.share,
            "loss": goal.loss,
            "budget": None,
            "reached": is_reached(standing, goal.share),
            "lasting": None,
            "reference": {"unseen": own, "retrained": "retain model"}.get(goal.kind),
            "after": standing.figures(),
        }


def is_reached(standing: Standing, share: float) -> bool:
    """True if enough records are forgotten."""
    return standing.share >= share


def goal_settings(
    problem: UnlearningData[Any],
    goal: str | None,
    loss: float | None,
    share: float,
    *,
    has_retain_model: bool,
) -> GoalSettings:
    """The goal of an evaluation: the one named, or the default.

    Args:
        problem: the sets.
        goal, loss, share: --goal, --target_forget_loss and --target_share.
        has_retain_model: whether there is a retain model.

    Raises:
        HamuError: if nothing tells what forgotten means, or the goal lacks what it compares with.
    """
    has_test, is_text = problem.test is not None, not hasattr(problem.forget, "labels")
    kind: Any = goal or default_kind(
        has_test=has_test,
        has_retain_model=has_retain_model,
        loss=loss,
        whole_classes=whole_classes(problem.retain, problem.forget),
    )
    missing = (kind == "unseen" and not has_test) or (kind == "retrained" and not has_retain_model)
    if missing:
        Goal(kind, share, loss)  # the error that names what to give
    if kind == "erased" and is_text:
        raise HamuError(
            "the goal erased is for classifiers; of texts choose unseen, retrained or a loss"
        )
    return GoalSettings(kind, share, loss)


def goal_name(goal: Mapping[str, Any]) -> str:
    """The name of a goal: "unseen", or "a loss of 2"."""
    return f"a loss of {goal['loss']:g}" if goal["kind"] == "loss" else str(goal["kind"])


def meaning(goal: Mapping[str, Any]) -> str:
    """The condition that the forgotten records meet."""
    return _MEANINGS[goal["kind"]]


def forgotten_words(goal: Mapping[str, Any], role: str = "after") -> str:
    """The count in a few words: "19 of 20 records are forgotten by the goal unseen"."""
    standing = goal[role]
    are = "is" if standing["forgotten"] == 1 else "are"
    return f"{standing['forgotten']:,} of {standing['records']:,} records {are} forgotten by the goal {goal_name(goal)}"


def has_share(goal: Mapping[str, Any]) -> bool:
    """True if the records counted as forgotten after the run are as many as the goal asks for."""
    after = goal["after"]
    return bool(after["forgotten"] >= goal["share"] * after["records"])


def goal_lines(goal: Mapping[str, Any]) -> list[str]:
    """Sentences for the screen: the count, the quantiles of the losses, the records that are furthest away."""
    after, of = goal["after"], goal["reference"] and _COMPARED[goal["kind"], goal["reference"]]
    reached = "reached" if goal["reached"] else "not reached"
    lines = [
        f"{standing_line(after)}, by the goal {goal_name(goal)}{of or ''}; {goal['share']:.0%} wanted: {reached}",
        quantiles_line(after),
    ]
    if after["worst"]:
        worst = ", ".join(f"{one['loss']:.3g} of {one['target']:.3g}" for one in after["worst"])
        lines.append(f"furthest from being forgotten (loss of what is needed): {worst}")
    return lines


def quantiles_line(standing: Mapping[str, Any]) -> str:
    """The quantiles of the records' losses."""
    names = {"min": "lowest", "q25": "25 %", "median": "median", "q75": "75 %", "max": "highest"}
    found = ", ".join(
        f"{names[name]} {value:.3g}" for name, value in standing["loss_quantiles"].items()
    )
    return f"losses of the forget records: {found}"
