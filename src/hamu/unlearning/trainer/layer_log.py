"""layers.jsonl: what every block did at the logged steps, for the picture of layers over steps, bounded in size.

The first line names the blocks: {"step": 0, "blocks": [...]}. Each other has the step, the number of that line of
steps.jsonl which it belongs to (from 0), cosθ and ‖Δw‖ of each block, null where they are not known.
"""

from __future__ import annotations

import math
from typing import Any

from hamu.core.distributed import is_main
from hamu.files import LAYERS
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer.trainer import UnlearnTrainer

_MOST_LINES = 512
_MOST_FIGURES = 400_000  # over all lines; each takes some eight bytes
_FEWEST_LINES = 16


class LayerLog:
    """Keeps every n-th line of those that steps.jsonl has, n doubling whenever there would be too many.

    Which lines stay follows from the number of lines alone, so that a run that was resumed has the same.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._number = 0
        self._every = 1
        self._blocks = 0
        self._lines: list[dict[str, Any]] = []

    def resume(self, step: int, logged: int) -> None:
        """Go on after a step.

        Args:
            step: the one that the checkpoint was written after.
            logged: lines that steps.jsonl has up to it.
        """
        self._folder.keep_lines(LAYERS, lambda line: logged > 0 and line["step"] <= step)
        self._number = logged

    def take(self, step: int, trainer: UnlearnTrainer) -> None:
        """Take the figures of a step that has just been logged, if its line is one of those that stay."""
        if not is_main():
            return
        if not self._blocks:
            self._blocks = len(trainer.pair.block_names)
            self._every = _stride(self._number, self._blocks)
            if not self._number:
                self._lines.append({"step": 0, "blocks": trainer.pair.block_names})
        if self._number % self._every == 0:
            figures = {name: _short(values) for name, values in trainer.layer_figures().items()}
            self._lines.append({"step": step, "number": self._number, **figures})
        self._number += 1

    def write(self) -> None:
        """Append what was taken; leave out what is too much."""
        for line in self._lines:
            self._folder.append_line(LAYERS, line)
        self._lines.clear()
        every = _stride(self._number, self._blocks)
        if every != self._every:
            self._every = every
            self._folder.keep_lines(LAYERS, lambda line: line.get("number", 0) % every == 0)


def _stride(lines: int, blocks: int) -> int:
    """The smallest power of two of which at most so many multiples are below a number of lines."""
    most = max(_FEWEST_LINES, min(_MOST_LINES, _MOST_FIGURES // max(1, 2 * blocks)))
    return 1 << max(0, math.ceil(math.log2(max(1, lines) / most)))


def _short(values: list[float] | None) -> list[float | None] | None:
    """Four digits are enough for a picture; what is not finite becomes null."""
    return (
        None
        if values is None
        else [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]
    )
