"""What a run of unlearning has counted and found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hamu.unlearning.stop_reason import StopReason


@dataclass
class RunMemory:
    """What a run has counted and found so far.

    Attributes:
        taken: steps in which the weights were updated.
        skipped: steps that could not be taken, or that the trust region undid.
        skips_in_a_row: those since the last that was taken.
        start: figures of the first evaluation by name, to which changes are relative; empty before it.
        evaluated: the step after which the last evaluation was, -1 before the first.
        end: why the run ended before its last epoch, None if it did not.
    """

    taken: int = 0
    skipped: int = 0
    skips_in_a_row: int = 0
    start: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    end: StopReason | None = None

    def take(self) -> None:
        """Count a step that is taken."""
        self.taken += 1
        self.skips_in_a_row = 0

    def skip(self) -> None:
        """Count a step that is not taken."""
        self.skipped += 1
        self.skips_in_a_row += 1

    def undo(self) -> None:
        """Count a step that was counted as taken as one that was not: it was undone."""
        self.taken -= 1
        self.skipped += 1

    @property
    def diverged(self) -> bool:
        """Whether it was the retain loss that ended the run."""
        return self.end is not None and self.end.kind == "retain loss"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON holds it."""
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "start": self.start,
            "end": None if self.end is None else vars(self.end),
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.taken, self.skipped = state["taken"], state["skipped"]
        self.skips_in_a_row, self.start = state["skips_in_a_row"], state["start"]
        self.end = None if state["end"] is None else StopReason(**state["end"])
        self.evaluated = state["evaluated"]
