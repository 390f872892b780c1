"""`StepGuard`: measures the step of an optimizer, corrects or undoes it.

A method promises for g*. Momentum, adaptive rates and weight decay make another step of it, which
may promise less or nothing. The guard compares the weights before and after and adds to each block
that falls short the smallest change that restores the demand:

    gain_i = ±g_c,i·Δw_i       demanded: η q_i       correction: ±(η q_i - gain_i) g_c,i / ‖g_c,i‖²

with + for HAMU-Q (g_c = g_f) and - for HAMU-U (g_c = g_r). It costs a copy of the trainable
parameters, until the next step or `release`.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hamu.core.gram import SIDES, WIDENED, Side
from hamu.core.pair import PairedGradients, PairStep
from hamu.errors import HamuError

_ROUNDS = 12
_WIDENED_ON_GPU = 1 << 24  # elements at a time, where launches cost more than memory


@dataclass(frozen=True)
class StepTaken:
    """First-order changes by a step, of the losses before clipping.

    Attributes:
        retain_change: g_r·Δw, 0-dim; None if the step did not keep that gradient.
        forget_change: g_f·Δw, likewise.
        gain: change of the constrained, clipped loss in the promised direction, by block, [L]; None
            for methods without a constraint.
        demand: η q_i, [L]; None likewise. Both are 0 of a step that was not taken.
        corrected: [L] bool, the blocks that fell short; None without correct_steps, or a step. A
            warning names one that still does: in half precision, small steps round to none.
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
        optimizer: any; it stays unchanged. A block is held to the largest rate of its tensors;
            nothing is demanded of one that the optimizer lacks.
        correct_steps: whether to correct steps; False only measures them.
        keep: further sides to measure, beside the constrained one.

    Attributes:
        keep: argument for `PairedGradients.combine`.
        taken: the last step.

    Raises:
        HamuError: if correct_steps lacks a method with a constraint, or the optimizer a trainable
            parameter; or if the model is sharded, or pairing is split.
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
        constrained = pair.method.constrained
        if not pair.layout.is_whole:
            raise HamuError(
                "a StepGuard needs whole gradients and weights in each process; leave it out, or "
                "sharding and split pairing"
            )
        if correct_steps and constrained is None:
            raise HamuError(
                f"{pair.method.name} promises nothing; correct_steps needs a method with a "
                f"constraint, such as hamu-q"
            )
        if correct_steps:
            check_steps_all(optimizer, pair)
        self._pair, self._optimizer = pair, optimizer
        self._corrects, self._constrained = correct_steps, constrained
        self.keep = tuple(dict.fromkeys((*keep, *([constrained] if constrained else []))))
        self._before: list[Tensor] = []
        # on the host, whatever torch's default device is
        self._blocks = torch.tensor(pair.block_of, device="cpu")
        self._zeros = torch.zeros(len(pair.block_names), dtype=torch.float64, device="cpu")

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
        groups = self._optimizer.param_groups
        rate_of = {p: float(group["lr"]) for group in groups for p in group["params"]}
        rates = self._zeros.new_tensor([rate_of.get(p, 0.0) for p in self._pair.parameters])
        self._step, self._rates = step, self._zeros.scatter_reduce(0, self._blocks, rates, "amax")
        parameters = list[Tensor](self._pair.parameters)
        kept = [(p.dtype, p.device) for p in self._before]
        if kept == [(p.dtype, p.device) for p in parameters]:  # reuses the memory of the last step
            torch._foreach_copy_(self._before, parameters)
        else:
            self._before = [p.clone() for p in parameters]

    @torch.no_grad()
    def after(self) -> StepTaken:
        """Measure, and correct if asked for; call it just after the optimizer's step."""
        self._check_begun()
        step, side, corrected = self._step, self._constrained, None
        demand = gain = None if side is None else self._zeros  # of a step that is not taken
        if side is not None and step.decision == "step":
            status = step.weights.constraint
            assert status is not None
            norms: Tensor = getattr(step.gram, f"{side}_norm")
            at_most = status.fraction.clamp(max=1.0) * status.radius * norms
            demand = at_most * self._rates
            scale = step.clip[SIDES.index(side)] * (1.0 if side == "forget" else -1.0)
            if self._corrects:
                corrected, (along, lengths) = self._correct(side, demand, scale)
        if corrected is None:
            along, lengths = self._measure()
        if side in along and step.decision == "step":
            gain = scale * along[side]
        retain, forget = (along[one].sum() if one in along else None for one in SIDES)
        self.taken = StepTaken(retain, forget, gain, demand, corrected, lengths)
        return self.taken

    def release(self) -> None:
        """Free the weights and gradients of the last step, which `undo` needs."""
        if self._before:
            self._step.kept.clear()
        self._before = []

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the weights of before the step; the optimizer's state stays."""
        self._check_begun()
        torch._foreach_copy_(list[Tensor](self._pair.parameters), self._before)

    def _check_begun(self) -> None:
        if not self._before:
            raise HamuError(
                "no step was begun, or it was released; wrap the optimizer's step in around(step), "
                "and release() it after undo()"
            )

    def _measure(self) -> tuple[dict[str, Tensor], Tensor]:
        """g_i·Δw_i of each kept side before clipping, and ‖Δw_i‖, by block, [L] on the host."""
        kept = {one: self._step.kept[one] for one in self.keep if one in self._step.kept}
        each: Any = zip(self._pair.parameters, self._before, *kept.values(), strict=True)
        moved = (_moved(p, before, grads) for p, before, *grads in each)
        device = self._pair.parameters[0].device
        sums = torch.stack([one.to(device) for one in moved])
        values = self._pair.layout.agree(sums).cpu()  # of all sides in one read
        by_block = self._zeros.new_zeros(len(self._zeros), values.shape[1])
        squares, *along = by_block.index_add(0, self._blocks, values).unbind(1)
        unscaled = (one * self._step.unscale for one in along)
        return dict(zip(kept, unscaled, strict=True)), squares.sqrt()

    def _correct(
        self, side: Side, demand: Tensor, scale: Tensor
    ) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
        """Add to each block what it lacks; repeated, as rounding swallows small changes.

        `scale` is that of the gain over the kept gradient's own. Returns the blocks that were
        corrected, and the last measurement.
        """
        pair, grads = self._pair, self._step.kept[side]
        squares = getattr(self._step.gram, f"{side}_sq")
        slack = 1e-5 if all(p.dtype == torch.float64 for p in pair.parameters) else 2e-4
        corrected = self._zeros.bool()
        push = 1.0  # grows, for corrections below half of the weights' last digit
        for round_ in range(_ROUNDS + 1):
            found = self._measure()
            gain = scale * found[0][side]
            short = (demand - gain) * (gain < demand * (1 - slack))
            if round_ == _ROUNDS or not (short > 0).any():
                break
            corrected |= short > 0
            factors = push * short / squares.clamp(min=1e-300) * scale * self._step.unscale
            for p, block, g in zip(pair.parameters, pair.block_of, grads, strict=True):
                if g is not None and short[block] > 0:
                    p.add_(g.to(p.dtype), alpha=factors[block].item())
            push *= 2.0
        if (missed := ~(gain >= demand * (1 - slack))).any():  # also where it is NaN
            first = int(missed.nonzero()[0])
            why = "its step is not finite; lower the learning rate"
            if gain[first].isfinite():
                lost = "so small a step is lost in the rounding of the weights"
                why = f"{lost}; keep them in float32"
            name = pair.block_names[first]
            warnings.warn(f"{name} still falls short of its demand: {why}", stacklevel=2)
        return corrected, found


def check_steps_all(optimizer: torch.optim.Optimizer, pair: PairedGradients) -> None:
    """Check that an optimizer has all parameters that take part; a HamuError if not."""
    if not {p for group in optimizer.param_groups for p in group["params"]} >= {*pair.parameters}:
        raise HamuError(
            "a trainable parameter is not in the optimizer; give it all, or freeze those that stay"
        )


def _moved(p: Tensor, before: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
    """‖Δw‖² of Δw = p - before, then g·Δw of each gradient: [1 + gradients] float64, in pieces."""
    totals = torch.zeros(1 + len(grads), dtype=torch.float64, device=p.device)
    most = WIDENED if p.device.type == "cpu" else _WIDENED_ON_GPU
    there = {number: g for number, g in enumerate(grads, 1) if g is not None}
    flat = (one.reshape(-1).split(most) for one in (p, before, *there.values()))
    for now, then, *along in zip(*flat, strict=True):
        moved = now.double() - then.double()
        totals[0] += moved.dot(moved)
        for number, grad in zip(there, along, strict=True):
            totals[number] += moved.dot(grad.double())
    return totals
