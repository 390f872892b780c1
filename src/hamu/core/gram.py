"""Blocks of parameters, and the pair Gram: the three numbers per block that a method weighs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hamu.errors import HamuError, unknown

Side = Literal["retain", "forget"]
SIDES: tuple[Side, Side] = ("retain", "forget")
Blocks = Literal["tensor", "module", "model"] | Callable[[str], Hashable]
WIDENED = 1 << 20  # elements widened to float64 at a time where there is no scratch memory


@dataclass(frozen=True)
class PairGram:
    """Squared norms and dot product of the retain and forget gradients, block by block.

    Attributes:
        retain_sq: ‖g_r,i‖², [L], float64.
        forget_sq: ‖g_f,i‖², [L], float64.
        dot: g_r,i·g_f,i, [L], float64; its sum is the hardness κ (paper, Theorem 4.1).
        eps: machine epsilon of the arithmetic that will combine the gradients (float32's for half
            precisions). Methods use it to tell an angle from rounding noise.
        losses: [2], retain and forget loss of the step, where the caller has given them.
        memory: [M], what a method with `Method.first_memory` returned with its last step.
    """

    retain_sq: Tensor
    forget_sq: Tensor
    dot: Tensor
    eps: float = torch.finfo(torch.float32).eps
    losses: Tensor | None = None
    memory: Tensor | None = None

    @cached_property
    def retain_norm(self) -> Tensor:
        """‖g_r,i‖, [L]."""
        return self.retain_sq.sqrt()

    @cached_property
    def forget_norm(self) -> Tensor:
        """‖g_f,i‖, [L]."""
        return self.forget_sq.sqrt()

    @cached_property
    def cos(self) -> Tensor:
        """cosθ_i in [-1, 1], [L]; 0 where either gradient vanishes."""
        norms = self.retain_norm * self.forget_norm
        return (self.dot / norms).masked_fill(norms == 0, 0.0).clamp(-1.0, 1.0)

    @cached_property
    def sin(self) -> Tensor:
        """sinθ_i in [0, 1], [L]; (1-c)(1+c) keeps the digits that 1-c² would lose."""
        return ((1.0 - self.cos) * (1.0 + self.cos)).sqrt()

    @cached_property
    def collinear(self) -> Tensor:
        """Blocks whose sinθ is too small to tell from rounding noise, [L] bool."""
        return self.sin < math.sqrt(8 * self.eps)

    def sums(self) -> dict[str, Tensor]:
        """The three sums by name."""
        return {name: getattr(self, name) for name in ("retain_sq", "forget_sq", "dot")}

    def like(self, sums: Mapping[str, Tensor]) -> PairGram:
        """Gram with other `sums`."""
        r, f, dot = (sums[name] for name in self.sums())
        return replace(self, retain_sq=r, forget_sq=f, dot=dot)

    def total(self) -> PairGram:
        """Gram of the whole model as a single block, [1]."""
        return self.like({name: each.sum(0, True) for name, each in self.sums().items()})

    def scaled(self, retain: Tensor | float, forget: Tensor | float) -> PairGram:
        """Gram of the gradients after multiplying each side by a factor."""
        r, f = self.retain_sq * (retain * retain), self.forget_sq * (forget * forget)
        return replace(self, retain_sq=r, forget_sq=f, dot=self.dot * (retain * forget))

    def changes(self, retain: Tensor, forget: Tensor) -> tuple[Tensor, Tensor]:
        """First-order changes g_r·Δw/η and g_f·Δw/η of both losses by Δw = -η g*, 0-dim.

        Args:
            retain, forget: the weights a_i and b_i of g*_i = a_i g_r,i + b_i g_f,i, [L].
        """
        return (
            -(retain * self.retain_sq + forget * self.dot).sum(),
            -(retain * self.dot + forget * self.forget_sq).sum(),
        )

    def clip_factors(self, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Clipping factor of each side, min(1, c/(norm + 1e-6)), torch's convention, 0-dim.

        Args:
            max_norm: the largest global norm c of either side, or None for no clipping.
        """
        if max_norm is None:
            one = self.dot.new_ones(())
            return one, one
        norms = torch.stack([self.retain_sq, self.forget_sq]).sum(1).sqrt()
        retain, forget = (max_norm / (norms + 1e-6)).clamp(max=1.0).unbind()
        return retain, forget

    def is_finite(self) -> Tensor:
        """True if every gradient value is finite, 0-dim bool."""
        return torch.isfinite((self.retain_sq + self.forget_sq + self.dot).sum())


def check_max_norm(max_grad_norm: float | None) -> None:
    """Check that the clipping norm of `PairGram.clip_factors` is positive, or None."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise HamuError(f"max_grad_norm {max_grad_norm} must be positive, or None for no clipping")


def combine_dtype(parameter: Tensor) -> torch.dtype:
    """Precision for combining a parameter's gradients: its own, at least float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters by name, without the prefixes of torch.compile, DataParallel and
    DistributedDataParallel; a HamuError if there are none.
    """
    model = getattr(model, "_orig_mod", model)
    is_wrapped = isinstance(model, nn.DataParallel | DistributedDataParallel)
    inner = model.get_submodule("module") if is_wrapped else model
    named = ((name.replace("_orig_mod.", ""), p) for name, p in inner.named_parameters())
    found = [(name, p) for name, p in named if p.requires_grad]
    if not found:
        raise HamuError(
            "the model has no trainable parameter; set requires_grad on those that may change"
        )
    return found


def group_blocks(names: list[str], blocks: Blocks) -> tuple[list[str], list[int]]:
    """Names of the blocks and the block number of each parameter; for `blocks` see the pair."""
    known: dict[str, Callable[[str], Hashable]] = {
        "tensor": lambda name: name,
        "module": lambda name: name.rpartition(".")[0],
        "model": lambda name: "model",
    }
    key_of = blocks if callable(blocks) else known.get(str(blocks))
    if key_of is None:
        raise unknown("blocks", blocks, [*known, "a function of the name"])
    keys = [key_of(name) for name in names]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [str(key) for key in numbers], [numbers[key] for key in keys]
