"""Why a run ended, in a word or two."""

from __future__ import annotations

import re
import textwrap

from hamu.training.trainer import ALL_DONE

_LONGEST = 24  # letters of a reason that is not among these
_WORDS = (
    (re.escape(ALL_DONE), "all steps"),
    ("the stopping criterion is met|the criterion says", "criterion"),
    ("the forget loss of a step, .* has reached the target", "target"),
    ("the forget loss of a step, .* is below", "no forgetting"),
    ("the retain loss of a step", "retain loss"),
    ("the constraint (.* )?cannot be met", "infeasible"),
    (r"\d+ steps in a row could not be taken", "skips"),
    ("no step is small enough", "no small step"),
    ("the goal is reached", "goal"),
    ("the budget is spent", "budget"),
)
FAILED, _INTERRUPTED = "failed", "interrupted"


def ended_by(reason: str) -> str:
    """The kind of end that a recorded reason is of; the beginning of a reason of no kind that is known."""
    for pattern, word in _WORDS:
        if re.match(pattern, reason):
            return word
    return textwrap.shorten(reason, _LONGEST, placeholder="…")


def failed_by(reason: str) -> str:
    """The same of a run that has left no record."""
    return _INTERRUPTED if reason.startswith(_INTERRUPTED) else FAILED
