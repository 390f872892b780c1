"""`StepGuard`: measures the step of an optimizer, corrects or undoes it.

A method promises for g*. Momentum, adaptive rates and weight decay make another step of it, which
may promise less or nothing. The guard compares the weights before and after and adds to each block
that falls short the smallest change that restores the demand:

    gain_i = ±g_c,i·Δw_i       demanded: η q_i       correction: ±(η q_i - gain_i) g_c,i / ‖g_c,i‖²

with + for HAMU-Q (g_c = g_f) and - for HAMU-U (g_c = g_r). It costs a copy of the trainable
parameters, until the next step or `release`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hamu.core.gram import WIDENED, Side
from hamu.core.pair import PairedGradients
from hamu.core.pair_step import PairStep
from hamu.errors import HamuError

_ROUNDS = 12


@dataclass(frozen=True)
class StepTaken:
    """First-order changes by a step, of the losses before clipping.

    Attributes:
        retain_change: g_r·Δw, 0-dim; None if the step did not keep that gradient.
        forget_change: g_f·Δw, likewise.
        gain: change of the constrained, clipped loss in the promised direction, by block, [L]; None
            for methods without a constraint.
        demand: η q_i, [L]; None likewise.
        corrected: [L] bool, the blocks that fell short; None without correct_steps.
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
    """Measures the steps of an optimizer, and corrects those that fall short of the demand.

        guard = StepGuard(pair, optimizer)
        ...
        step = pair.combine(keep=guard.keep)
        with guard.around(step):
            optimizer.step()
        guard.taken.gain, guard.taken.demand

    Args:
        pair: the gradients that the optimizer steps on.
        optimizer: any; it stays unchanged.
        correct_steps: whether to correct steps; False only measures them.
        keep: further sides to measure, beside the constrained one.

    Attributes:
        keep: argument for `PairedGradients.combine`.
        taken: the last step.

    Raises:
        HamuError: if correct_steps lacks a method with a constraint, or an optimizer with all
            parameters.
    """

    taken: StepTaken

    def __init__(
        self,
        pair: PairedGradients,
        optimizer: torch.optim.Optimizer,
        *,
        correct_steps: bool = True,
        keep: tuple[str, ...] = (),
    ) -> None:
        constrained: Side | None = pair.method.constrained
        if correct_steps and constrained is None:
            raise HamuError(
                f"{pair.method.name} promises nothing; correct_steps needs hamu-q or hamu-u"
            )
        if correct_steps:
            check_steps_all(optimizer, pair)
        self._pair, self._optimizer = pair, optimizer
        self._corrects, self._constrained = correct_steps, constrained
        self.keep = tuple(dict.fromkeys((*keep, *([constrained] if constrained else []))))
        self._sign = 1.0 if constrained == "forget" else -1.0
        self._before: list[Tensor] = []
        self._blocks = torch.tensor(pair.block_of)

    @contextmanager
    def around(self, step: PairStep) -> Iterator[None]:
        """Wrap the optimizer's step; afterwards read `taken`, or call `undo` or `release`."""
        self.before(step)
        yield
        self.after()

    @torch.no_grad()
    def before(self, step: PairStep) -> None:
        """Copy the weights; call it just before the optimizer steps.

        Raises:
            HamuError: if the step did not keep the gradients that the guard needs.
        """
        if step.decision == "step" and not set(self.keep) <= step.kept.keys():
            raise HamuError(
                "the step has not kept what the guard needs; call "
                "pair.combine(keep=guard.keep) for each"
            )
        self._step, self._rates = step, self._rates_of_blocks()
        parameters = list[Tensor](self._pair.parameters)
        if self._before:  # reuses the memory of the last step
            torch._foreach_copy_(self._before, parameters)
        else:
            self._before = [p.clone() for p in parameters]

    @torch.no_grad()
    def after(self) -> StepTaken:
        """Measure, and correct if asked for; call it just after the optimizer's step."""
        step, constrained, demand, corrected, gain = self._step, self._constrained, None, None, None
        if constrained is not None and step.decision == "step":
            demand = self._demand(step)
            if self._corrects:
                corrected = self._correct(step, constrained, demand)
        along = {side: self._along(step, side) for side in self.keep if side in step.kept}
        squares = self._by_block(
            [_dot(p, p, b, b) for p, b in zip(self._pair.parameters, self._before, strict=True)]
        )
        if demand is not None and constrained is not None:
            gain = self._sign * along[constrained] * self._clip(step, constrained)
        retain, forget = (along[s].sum() if s in along else None for s in ("retain", "forget"))
        lengths = squares.clamp(min=0).sqrt()
        self.taken = StepTaken(retain, forget, gain, demand, corrected, lengths)
        return self.taken

    def release(self) -> None:
        """Free the weights and gradients of the last step, which `undo` needs."""
        self._before = []
        self._step.kept.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the weights of before the step; the optimizer's state stays."""
        torch._foreach_copy_(list[Tensor](self._pair.parameters), self._before)

    def _rates_of_blocks(self) -> Tensor:
        """Learning rate of each block, [L]; the highest of its parameters."""
        groups = self._optimizer.param_groups
        rate_of = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        rates = torch.tensor(
            [rate_of.get(id(p), 0.0) for p in self._pair.parameters], dtype=torch.float64
        )
        return self._zeros().scatter_reduce(0, self._blocks, rates, "amax", include_self=False)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._pair.block_names), dtype=torch.float64)

    def _demand(self, step: PairStep) -> Tensor:
        """η q_i on the host, [L], at most each block's reach."""
        status = step.weights.constraint
        assert status is not None
        gram = status.gram
        norms = gram.retain_norm if status.constrained == "retain" else gram.forget_norm
        return (status.fraction.clamp(max=1.0) * status.radius * norms).cpu() * self._rates

    @staticmethod
    def _clip(step: PairStep, side: str) -> Tensor:
        """Clipping factor on the host, 0-dim."""
        return step.clip[0 if side == "retain" else 1].cpu()

    def _along(self, step: PairStep, side: str) -> Tensor:
        """g_i·Δw_i of a side by block, [L] on the host, before clipping."""
        sums = [
            torch.zeros((), dtype=torch.float64, device=p.device)
            if g is None
            else _dot(p, g, b, None)
            for p, b, g in zip(self._pair.parameters, self._before, step.kept[side], strict=True)
        ]
        return self._by_block(sums) * step.unscale

    def _by_block(self, sums: list[Tensor]) -> Tensor:
        values = self._pair.layout.agree(torch.stack([s.to(sums[0].device) for s in sums])).cpu()
        return self._zeros().index_add_(0, self._blocks, values)

    def _correct(self, step: PairStep, side: Side, demand: Tensor) -> Tensor:
        """Add to each block what it lacks; repeated, as rounding swallows small changes."""
        pair, grads, clip = self._pair, step.kept[side], self._clip(step, side)
        none = torch.zeros((), dtype=torch.float64, device=pair.parameters[0].device)
        squares = self._by_block([none if g is None else _dot(g, g, None, None) for g in grads])
        squares *= (step.unscale * clip) ** 2  # of the clipped gradient
        slack = 1e-5 if all(p.dtype == torch.float64 for p in pair.parameters) else 2e-4
        corrected: Tensor | None = None
        push = 1.0  # grows, for corrections below half of the weights' last digit
        for _ in range(_ROUNDS):
            gain = self._sign * self._along(step, side) * clip
            short = (demand - gain).clamp(min=0) * (gain < demand * (1 - slack))
            corrected = short > 0 if corrected is None else corrected
            if not (short > 0).any():
                break
            factors = self._sign * push * short / squares.clamp(min=1e-300) * step.unscale * clip
            for p, block, g in zip(pair.parameters, pair.block_of, grads, strict=True):
                if g is not None and short[block] > 0:
                    p.add_(g.to(p.dtype), alpha=factors[block].item())
            push *= 2.0
        assert corrected is not None
        return corrected


def check_steps_all(optimizer: torch.optim.Optimizer, pair: PairedGradients) -> None:
    """Check that an optimizer has all parameters that take part.

    Raises:
        HamuError: if not.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(p) in stepped for p in pair.parameters):
        raise HamuError(
            "a trainable parameter is not in the optimizer; give it all, or freeze those that stay"
        )


def _dot(x: Tensor, y: Tensor, less_x: Tensor | None, less_y: Tensor | None) -> Tensor:
    """(x - less_x)·(y - less_y), 0-dim float64, in pieces."""
    flat = [None if t is None else t.reshape(-1) for t in (x, y, less_x, less_y)]
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in range(0, x.numel(), WIDENED):
        a, b, c, d = (None if t is None else t[start : start + WIDENED].double() for t in flat)
        assert a is not None
        assert b is not None
        total += torch.dot(a if c is None else a - c, b if d is None else b - d)
    return total
