"""What a run leaves for those who ask later: a record of what was forgotten, how, and to what effect; its checking."""

from hamu.record.inputs import Inputs, check_same, saved_model_entry, set_entries, with_settings
from hamu.record.record import Asked, build, figures_of, write
from hamu.record.verify import TOLERANCE, Finding, Sources, Unavailable, verify

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
