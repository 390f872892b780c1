"""The record of a run: what was forgotten, how, and to what effect; its checks; model cards."""

from hamu.unlearning.record.inputs import (
    Inputs,
    check_same,
    saved_model_entry,
    set_entries,
    with_settings,
)
from hamu.unlearning.record.model_card import write_model_card
from hamu.unlearning.record.record import write_record
from hamu.unlearning.record.verify import TOLERANCE, Finding, Unavailable, verify

__all__ = [
    "TOLERANCE",
    "Finding",
    "Inputs",
    "Unavailable",
    "check_same",
    "saved_model_entry",
    "set_entries",
    "verify",
    "with_settings",
    "write_model_card",
    "write_record",
]
