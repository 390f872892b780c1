"""What a run leaves for those who ask later: a record of what was forgotten, how, and to what effect; its checking."""

from hamu.unlearning.record.inputs import (
    Inputs,
    check_same,
    saved_model_entry,
    set_entries,
    with_settings,
)
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
]
