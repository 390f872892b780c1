"""What a run leaves for those who ask later: a record of what was forgotten, how, and to what effect; its checking."""

from hamu.record.record import Asked, build, figures_of, saved_model_entry, write
from hamu.record.verify import TOLERANCE, Finding, Sources, Unavailable, verify

__all__ = [
    "TOLERANCE",
    "Asked",
    "Finding",
    "Sources",
    "Unavailable",
    "build",
    "figures_of",
    "saved_model_entry",
    "verify",
    "write",
]
