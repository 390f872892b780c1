"""The step that an optimizer really takes: measured, corrected where it breaks the promise, undone on request.

A method promises for g*, the combined gradient. Momentum, adaptive rates and weight decay make of it another step,
which may promise less or nothing. The guard lets the optimizer step, looks at what it did to the weights, Δw, and adds
to each block that falls short the smallest change that restores the demand:

    gain_i = ±g_c,i·Δw_i       demanded: η q_i       correction: ±(η q_i - gain_i) g_c,i / ‖g_c,i‖²

with + for HAMU-Q (g_c = g_f) and - for HAMU-U (g_c = g_r). It costs a copy of the trainable parameters, until the next
step or `release`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hamu.core.gram import WIDENED, Side
from hamu.core.pair import PairedGradients
from hamu.core.pair_step import PairStep
from hamu.errors import HamuError

Guarantee = Literal["first_order", "exact"]
_ROUNDS = 12


@dataclass(frozen=True)
class StepTaken:
    """What a step did to the weights, to first order. Changes are of the losses as they are, not clipped.

    Attributes:
        retain_change: g_r·Δw, 0-dim; None where that gradient was not kept.
        forget_change: g_f·Δw, likewise.
        gain: first-order change of the constrained, clipped loss in the promised direction, by block, [L]; None for
            methods without a constraint.
        demand: what was demanded of it, η q_i, [L]; None likewise.
        corrected: [L] bool, the blocks in which the optimizer's own step fell short; None without guarantee="exact".
        lengths: ‖Δw_i‖ of each block, [L].
    """

    retain_change: Tensor | None
    forget_change: Tensor | None
    gain: Tensor | None
    demand: Tensor | None
    corrected: Tensor | None
    lengths: Tensor

    @property
    def length(self) -> Tensor:
        """‖Δw‖, 0-dim."""
        return self.lengths.square().sum().sqrt()


class StepGuard:
    """Watches the steps of an optimizer.

        guard = StepGuard(pair, optimizer, guarantee="exact")
        ...
        step = pair.combine(keep=guard.keep)
        with guard.around(step):
            optimizer.step()
        guard.taken.gain, guard.taken.demand

    Args:
        pair: whose gradients the optimizer steps on.
        optimizer: any; it is not changed.
        guarantee: "exact" corrects a step that falls short of the demand, "first_order" only measures.
        keep: sides whose first-order change is wanted; the constrained side is kept in any case.

    Attributes:
        keep: what to give to `PairedGradients.combine`.
        taken: the last step.

    Raises:
        HamuError: if the guarantee is unknown, or "exact" is asked for and there is no promise to keep, or a parameter
            is not in the optimizer.
    """

    taken: StepTaken

    def __init__(
        self,
        pair: PairedGradients,
        optimizer: torch.optim.Optimizer,
        *,
        guarantee: Guarantee = "exact",
        keep: tuple[str, ...] = (),
    ) -> None:
        check_guarantee(guarantee)
        constrained: Side | None = pair.method.constrained
        if guarantee == "exact" and constrained is None:
            raise HamuError(
                f'{pair.method.name} promises nothing; guarantee="exact" needs hamu-q or hamu-u'
            )
        self._pair = pair
        self._optimizer = optimizer
        self._exact = guarantee == "exact"
        self._constrained = constrained
        self.keep = tuple(dict.fromkeys((*keep, *([constrained] if constrained else []))))
        self._before: list[Tensor] = []
        if self._exact:
            check_steps_all(optimizer, pair)
        self._blocks = torch.tensor(pair.block_of)

    @contextmanager
    def around(self, step: PairStep) -> Iterator[None]:
        """Put the optimizer's step inside; afterwards `taken` says what it did, and `undo` or `release` may follow."""
        self.before(step)
        yield
        self.after()

    @torch.no_grad()
    def before(self, step: PairStep) -> None:
        """Call it just before the optimizer steps.

        Raises:
            HamuError: if the step did not keep the gradients that the guard needs.
        """
        if step.decision == "step" and not set(self.keep) <= step.kept.keys():
            raise HamuError(
                "the step has not kept what the guard needs; call pair.combine(keep=guard.keep) for each"
            )
        self._step = step
        self._rates = self._rates_of_blocks()
        parameters = list[Tensor](self._pair.parameters)
        if (
            self._before
        ):  # of the last step, which can no longer be undone now; a second copy is not needed
            torch._foreach_copy_(self._before, parameters)
        else:
            self._before = [p.clone() for p in parameters]

    @torch.no_grad()
    def after(self) -> StepTaken:
        """Call it just after; corrects the step if that was asked for. The weights before are kept until the next."""
        step, demand, corrected = self._step, None, None
        if self._constrained is not None and step.decision == "step":
            demand = self._demand(step)
        if self._exact and demand is not None:
            corrected = self._correct(step, demand)
        along = {side: self._along(step, side) for side in self.keep if side in step.kept}
        squares = self._by_block(
            [_dot(p, p, b, b) for p, b in zip(self._pair.parameters, self._before, strict=True)]
        )
        gain = None
        if demand is not None and self._constrained is not None:
            gain = self._sign * along[self._constrained] * self._clip(step, self._constrained)
        self.taken = StepTaken(
            along["retain"].sum() if "retain" in along else None,
            along["forget"].sum() if "forget" in along else None,
            gain=gain,
            demand=demand,
            corrected=corrected,
            lengths=squares.clamp(min=0).sqrt(),
        )
        return self.taken

    def release(self) -> None:
        """Let go of the weights and gradients of the last step; it can no longer be undone then."""
        self._before = []
        self._step.kept.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """Put the weights back as they were before the step; the optimizer's own state stays as it is."""
        torch._foreach_copy_(list[Tensor](self._pair.parameters), self._before)

    @torch.no_grad()
    def stretch(self, factor: float) -> StepTaken:
        """Make the step this many times as long, along the line that it took."""
        parameters = list[Tensor](self._pair.parameters)
        torch._foreach_lerp_(parameters, self._before, 1 - factor)
        taken = self.taken
        linear = ("retain_change", "forget_change", "gain", "demand", "lengths")
        longer: dict[str, Any] = {
            name: None if (value := getattr(taken, name)) is None else value * factor
            for name in linear
        }
        self.taken = replace(taken, **longer)
        return self.taken

    @property
    def _sign(self) -> float:
        return 1.0 if self._constrained == "forget" else -1.0

    def _rates_of_blocks(self) -> Tensor:
        """The learning rate of each block, [L]; where its parameters differ, the highest."""
        rate_of = {
            id(p): float(group["lr"])
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        rates = torch.tensor(
            [rate_of.get(id(p), 0.0) for p in self._pair.parameters], dtype=torch.float64
        )
        return torch.zeros(len(self._pair.block_names), dtype=torch.float64).scatter_reduce(
            0, self._blocks, rates, "amax", include_self=False
        )

    def _demand(self, step: PairStep) -> Tensor:
        """η q_i on the host, [L], as far as each block can reach."""
        constraint = step.weights.constraint
        assert constraint is not None
        norms = (
            constraint.gram.retain_norm
            if constraint.constrained == "retain"
            else constraint.gram.forget_norm
        )
        return (constraint.fraction.clamp(max=1.0) * constraint.radius * norms).cpu() * self._rates

    @staticmethod
    def _clip(step: PairStep, side: str) -> Tensor:
        """0-dim: clipping's factor, on the host."""
        return step.clip[0 if side == "retain" else 1].cpu()

    def _along(self, step: PairStep, side: str) -> Tensor:
        """g_i·Δw_i of a side by block, [L] on the host, of the loss as it is."""
        sums = [
            torch.zeros((), dtype=torch.float64, device=p.device)
            if g is None
            else _dot(p, g, b, None)
            for p, b, g in zip(self._pair.parameters, self._before, step.kept[side], strict=True)
        ]
        return self._by_block(sums) * step.unscale

    def _by_block(self, sums: list[Tensor]) -> Tensor:
        values = self._pair.layout.agree(torch.stack([s.to(sums[0].device) for s in sums])).cpu()
        return torch.zeros(len(self._pair.block_names), dtype=torch.float64).index_add_(
            0, self._blocks, values
        )

    def _correct(self, step: PairStep, demand: Tensor) -> Tensor:
        """Add to each block what it lacks; several times, since the weights' own rounding swallows small changes."""
        side = self._constrained
        assert side is not None
        grads = step.kept[side]
        clip = self._clip(step, side)
        none = torch.zeros((), dtype=torch.float64, device=self._pair.parameters[0].device)
        squares = self._by_block([none if g is None else _dot(g, g, None, None) for g in grads])
        squares *= (step.unscale * clip) ** 2  # of the clipped gradient
        slack = 1e-5 if all(p.dtype == torch.float64 for p in self._pair.parameters) else 2e-4
        first: Tensor | None = None
        push = 1.0  # grows, for corrections that are below half of the weights' last digit
        for _ in range(_ROUNDS):
            gain = self._sign * self._along(step, side) * clip
            short = (demand - gain).clamp(min=0) * (gain < demand * (1 - slack))
            first = short > 0 if first is None else first
            if not (short > 0).any():
                break
            factors = self._sign * push * short / squares.clamp(min=1e-300) * step.unscale * clip
            for p, block, g in zip(self._pair.parameters, self._pair.block_of, grads, strict=True):
                if g is not None and short[block] > 0:
                    p.add_(g.to(p.dtype), alpha=factors[block].item())
            push *= 2.0
        assert first is not None
        return first


def check_guarantee(guarantee: str) -> None:
    """Check the name of a guarantee.

    Raises:
        HamuError: if it is none.
    """
    if guarantee not in get_args(Guarantee):
        raise HamuError(f"guarantee {guarantee!r} is unknown; choose first_order or exact")


def check_steps_all(optimizer: torch.optim.Optimizer, pair: PairedGradients) -> None:
    """Check that an optimizer steps on all that takes part.

    Raises:
        HamuError: if it does not.
    """
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(p) in known for p in pair.parameters):
        raise HamuError(
            "a trainable parameter is not in the optimizer; give it all, or freeze those that stay"
        )


def _dot(x: Tensor, y: Tensor, less_x: Tensor | None, less_y: Tensor | None) -> Tensor:
    """(x - less_x)·(y - less_y), 0-dim float64, a piece at a time."""
    flat = [None if t is None else t.reshape(-1) for t in (x, y, less_x, less_y)]
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, x.numel(), WIDENED):
        a, b, c, d = (None if t is None else t[start : start + WIDENED].double() for t in flat)
        assert a is not None
        assert b is not None
        total += torch.dot(a if c is None else a - c, b if d is None else b - d)
    return total
