"""The record of a run: what was forgotten, how, and to what effect; its checks; the card of a saved model."""

from hamu.unlearning.record.inputs import (
    Inputs,
    check_same,
    saved_model_entry,
    set_entries,
    with_settings,
)
from hamu.unlearning.record.model_card import write_model_card
from hamu.unlearning.record.record import Asked, build, figures_of, write
from hamu.unlearning.record.verify import TOLERANCE, Finding, Sources, Unavailable, verify

__all__ = [
    "TOLERANCE",
    "Asked",
    "Finding",
    "Inputs",
    "Sources",
    "Unavailable",
    "build",
    "check_same",
    "figures_of",
    "saved_model_entry",
    "set_entries",
    "verify",
    "with_settings",
    "write",
    "write_model_card",
]
