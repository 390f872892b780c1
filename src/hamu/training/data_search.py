"""How far to go along what was done since the last good state, as the data say.

`LineSearch` sets the length of each step by the step's own batches. Here all that was done since the last good state
is one move, and its length is judged by the losses on the data, whenever these are due to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.training.goal import Standing

DOUBLINGS = 3  # of a move that pays
HALVINGS = 2  # of one that costs too much, before it is taken back
_PARTS = 8  # of the stretch between a length that pays and one that does not

Accepts = Callable[[Standing], bool]


@dataclass(frozen=True)
class TriedMove:
    """A length of the move, and how the model stands there.

    Attributes:
        length: 0 is the last good state, 1 where the steps ended.
        standing: as measured.
    """

    length: float
    standing: Standing


class DataSearch:
    """Moves parameters along the line through the last good state and the one that steps led to.

    Args:
        parameters: that are stepped on.
        measure: how the model stands, at a length of the move.
    """

    def __init__(self, parameters: Sequence[Tensor], measure: Callable[[float], Standing]) -> None:
        self._parameters, self._measure = list(parameters), measure
        self.good: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Make the parameters as they are now the good state."""
        if self.good:
            torch._foreach_copy_(self.good, self._parameters)
        else:
            self.good = [p.detach().clone() for p in self._parameters]

    def farther(self, start: Standing, reached: Standing, is_worth: Accepts, is_done: Accepts) -> TriedMove:
        """The move twice as long, and again, while that is worth it and brings more; the parameters are left there.

        Of the stretch up to the first length that is not, the part is tried that parabolas of the losses say is.

        Args:
            start: at the good state.
            reached: where the steps ended, which is good.
            is_worth: whether a longer move is to be kept.
            is_done: whether no longer one is needed.
        """
        best = TriedMove(1.0, reached)
        for _ in range(DOUBLINGS):
            if is_done(best.standing):
                break
            tried = self._try(2.0 * best.length, best.length)
            if not _is_better(tried.standing, best.standing, is_worth):
                return self._between(start, best, tried, is_worth)
            best = tried
        return best

    @torch.no_grad()
    def nearer(self, is_good: Accepts) -> TriedMove | None:
        """Half the move, or half of that, where that is good; else None. The parameters are there, or back."""
        length = 1.0
        for _ in range(HALVINGS):
            tried = self._try(0.5 * length, length)
            if is_good(tried.standing):
                return tried
            length = tried.length
        torch._foreach_copy_(self._parameters, self.good)
        return None

    def _between(self, start: Standing, best: TriedMove, beyond: TriedMove, is_worth: Accepts) -> TriedMove:
        """Try once between a good move and one, where the parameters are, that is not; leave them at the best."""
        here = beyond.length
        for part in range(_PARTS - 1, 0, -1):
            length = best.length + (beyond.length - best.length) * part / _PARTS
            if _is_better(_on_parabolas(length, start, best, beyond), best.standing, is_worth):
                tried = self._try(length, here)
                if _is_better(tried.standing, best.standing, is_worth):
                    return tried
                here = length
                break
        self._go(best.length, here)
        return best

    def _try(self, length: float, here: float) -> TriedMove:
        self._go(length, here)
        return TriedMove(length, self._measure(length))

    @torch.no_grad()
    def _go(self, length: float, here: float) -> None:
        torch._foreach_lerp_(self._parameters, self.good, 1.0 - length / here)


def _is_better(tried: Standing, best: Standing, is_worth: Accepts) -> bool:
    return is_worth(tried) and tried.forget_loss > best.forget_loss


def _on_parabolas(length: float, start: Standing, near: TriedMove, far: TriedMove) -> Standing:
    """What the parabolas through three measurements say of another length."""

    def at(zero: float, one: float, two: float) -> float:
        slope, other = (one - zero) / near.length, (two - zero) / far.length
        return zero + length * (slope + (other - slope) * (length - near.length) / (far.length - near.length))

    figures = zip(*(vars(s).values() for s in (start, near.standing, far.standing)), strict=True)
    return Standing(*(at(*three) for three in figures))
