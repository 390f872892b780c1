"""The pair Gram: the three numbers per block on which every method decides.

`PairGram` has ‖g_r,i‖², ‖g_f,i‖² and g_r,i·g_f,i for each block i, in float64, and what follows from them. They are
measured by `gram_meter.GramMeter`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from hamu.errors import HamuError

Side = Literal["retain", "forget"]
SIDES = ("retain", "forget")  # in the order in which everything of both is listed
WIDENED = 1 << 20  # elements that are widened to float64 at a time where there is no scratch memory


@dataclass(frozen=True)
class PairGram:
    """Squared norms and dot product of the retain and forget gradients, block by block.

    Attributes:
        retain_sq: ‖g_r,i‖², shape [L], float64.
        forget_sq: ‖g_f,i‖², shape [L], float64.
        dot: g_r,i·g_f,i, shape [L], float64; its sum is the hardness κ (paper, Theorem 4.1).
        eps: machine epsilon of the arithmetic that will combine the gradients (float32's for half
            precisions). Methods use it to tell an angle from rounding noise.
    """

    retain_sq: Tensor
    forget_sq: Tensor
    dot: Tensor
    eps: float = torch.finfo(torch.float32).eps

    @cached_property
    def retain_norm(self) -> Tensor:
        """‖g_r,i‖, shape [L]."""
        return self.retain_sq.sqrt()

    @cached_property
    def forget_norm(self) -> Tensor:
        """‖g_f,i‖, shape [L]."""
        return self.forget_sq.sqrt()

    @cached_property
    def cos(self) -> Tensor:
        """cosθ_i in [-1, 1], shape [L]; 0 where either gradient vanishes."""
        norms = self.retain_norm * self.forget_norm
        return (self.dot / norms).masked_fill(norms == 0, 0.0).clamp(-1.0, 1.0)

    @cached_property
    def sin(self) -> Tensor:
        """sinθ_i in [0, 1], shape [L]; (1-c)(1+c) keeps the digits that 1-c² would lose."""
        return ((1.0 - self.cos) * (1.0 + self.cos)).sqrt()

    @cached_property
    def collinear(self) -> Tensor:
        """Blocks whose sinθ is too small to tell from rounding noise, [L] bool."""
        return self.sin < math.sqrt(8 * self.eps)

    def total(self) -> PairGram:
        """The Gram of the whole model as a single block, shape [1]."""
        return PairGram(
            self.retain_sq.sum(0, True),
            self.forget_sq.sum(0, True),
            self.dot.sum(0, True),
            self.eps,
        )

    def scaled(self, retain: Tensor | float, forget: Tensor | float) -> PairGram:
        """The Gram of the gradients after multiplying each side by a factor."""
        return PairGram(
            self.retain_sq * (retain * retain),
            self.forget_sq * (forget * forget),
            self.dot * (retain * forget),
            self.eps,
        )

    def changes(self, retain: Tensor, forget: Tensor) -> tuple[Tensor, Tensor]:
        """First-order changes of both objectives by the step Δw = -η g*, where g*_i = a_i g_r,i + b_i g_f,i.

        Args:
            retain: the weights a_i, [L].
            forget: the weights b_i, [L].

        Returns:
            g_r·Δw/η and g_f·Δw/η over all blocks, 0-dim.
        """
        return (
            -(retain * self.retain_sq + forget * self.dot).sum(),
            -(retain * self.dot + forget * self.forget_sq).sum(),
        )

    def clip_factors(self, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """The factor that clips each side to a global norm: min(1, c/(norm + 1e-6)), torch's convention.

        Args:
            max_norm: the largest global norm c of either side, or None for no clipping.

        Returns:
            Two 0-dim float64 tensors, for the retain and the forget side.
        """
        if max_norm is None:
            one = self.dot.new_ones(())
            return one, one
        retain, forget = torch.stack([self.retain_sq, self.forget_sq]).sum(1).sqrt()
        return (max_norm / (retain + 1e-6)).clamp(max=1.0), (max_norm / (forget + 1e-6)).clamp(
            max=1.0
        )

    def is_finite(self) -> Tensor:
        """0-dim bool: whether every gradient value that went in was finite."""
        return torch.isfinite((self.retain_sq + self.forget_sq + self.dot).sum())


def check_max_norm(max_grad_norm: float | None) -> None:
    """Check the norm that gradients are to be clipped to; see `PairGram.clip_factors`.

    Raises:
        HamuError: if it is not positive.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise HamuError(f"max_grad_norm {max_grad_norm} must be positive, or None for no clipping")


def combine_dtype(parameter: Tensor) -> torch.dtype:
    """The precision in which a parameter's gradients are combined: its own, but at least float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
