"""What a record proves and what it does not, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamu.unlearning.goal_report import forgotten_words, meaning


def statement(record: Mapping[str, Any]) -> list[str]:
    """Sentences that fit what this run did and measured.

    Args:
        record: all else of the record.
    """
    after = record["figures"]["after"]
    return [
        f"The model after was made from the model before by {_updates(record)} of the method {record['method']}, on "
        f"the forget and the retain set whose digests stand here.",
        *_cut(record),
        *_forgotten(record["goal"]),
        "This is approximate unlearning. It is no certificate that the forget set was removed: nothing here proves "
        "that its influence on the weights is gone, or that the model could have come about without it.",
        "The figures are those of these sets and of this run. Their intervals say what other records from the same "
        "sources would have given, not what another seed, another attack or other questions would.",
        _attack(after["membership_inference"]),
        _comparison(after["against_retain_model"]),
        "A promise that was kept says that the losses of a step's own batches changed as demanded, and no more.",
        "Nothing is said about copies: of the data, of the model before, of its checkpoints, of other models that were "
        "made from it, or of what they have answered.",
        "The digests let whoever has the weights and the data check that they are meant. The record is not signed: "
        "that it is unchanged is known only to those who kept its own SHA-256 elsewhere.",
    ]


def _updates(record: Mapping[str, Any]) -> str:
    count = record["steps"]["in_model"]
    found = f"{count} gradient update{'s' * (count != 1)}"
    goal = record["goal"]
    if goal is None or goal["budget"] is None:
        return found
    return f"{found} (demand, learning rate and the state that was kept followed from measurements on the data)"


def _forgotten(goal: Mapping[str, Any] | None) -> list[str]:
    """The count of records, and what it is a count of."""
    if goal is None:
        return [
            "Nothing told when a record counts as forgotten, so that it is not known how many are."
        ]
    before = goal["before"]["forgotten"]
    return [
        f"By their losses, {forgotten_words(goal)}: {meaning(goal)}. Before, {before:,} were.",
        "Whether that lasts was not tested: fine-tuning, quantization or other questions may bring back what a loss "
        "does not show.",
    ]


def _cut(record: Mapping[str, Any]) -> list[str]:
    """Records whose ends the model was not given."""
    forget = record["forget_set"]
    if not forget["cut"]:
        return []
    return [
        f"{forget['cut']} of the {forget['records']} records to be forgotten are longer than what the model was given; "
        f"their ends were neither unlearned nor measured."
    ]


def _attack(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return (
            "No membership inference was measured, so that nothing is known about whether the forget set can be told "
            "from data that were never trained on."
        )
    return (
        "Membership inference is one kind of attack, from the losses on the test and the forget set. That it does not "
        "succeed does not mean that none would; a value below 0.5 shows a forget set that stands out too."
    )


def _comparison(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return (
            "There was no model that had been retrained without the forget set, so that nothing is known about how far "
            "the result is from retraining."
        )
    return (
        "The retain model is one that is said to have been retrained without the forget set; its digest stands here, "
        "how it was trained does not. To be near its figures is not to be the same model."
    )
